"""Device selection."""

from __future__ import annotations

import torch

from flops.errors import FlopsError


def find_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU if available.

    Raises:
        FlopsError: If there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # check that the device works
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise FlopsError(f"device must be auto, cpu or cuda, not '{name}' ({reason})") from error
    return device
