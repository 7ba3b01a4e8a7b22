"""How many rows go through the model at once, by the memory that is free.

More rows than a few hundred are no faster on a CPU, so that is the most. For large models the rest
of the memory decides: a pass keeps a few of a model's largest outputs at a time, and the noise.
The room is looked at once, for a resumed run must cut its rows as the first did.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import torch
from torch import nn

from flops.passes.structure import FOLDED, MORE, Leaf, Structure

MOST = 256
SHARE = 0.25  # of the free memory
UNKNOWN = 1 << 33  # free memory where the system does not say, as on Windows: 8 GiB
LARGEST = 3  # outputs that count, twice each: a module's input and output live at the same time


def rows_for(room: int, structure: Structure, noise: int) -> int:
    """Rows of a chunk, a power of two.

    Args:
        room: Bytes that a chunk may take.
        structure: Of the forward pass.
        noise: Noise values of a row.
    """
    sizes = sorted(
        (sum(_bytes(leaf) for _, leaf in call.tensors) for call in structure.calls), reverse=True
    )
    row = 2 * sum(sizes[:LARGEST]) + 3 * 4 * noise  # drawn, with its sign, and added
    fits = max(2, room // max(row, 1))
    return min(MOST, 1 << (int(fits).bit_length() - 1))


def free_room(model: nn.Module) -> int:
    """A share of the memory that is free where the model is, a power of two."""
    first = next(model.parameters(), None)
    free = _free_on_cpu()
    if first is not None and first.device.type == "cuda":
        free = torch.cuda.mem_get_info(first.device)[0]
    return 1 << (max(1, int(SHARE * free)).bit_length() - 1)


def _bytes(leaf: Leaf) -> int:
    rows = MORE if leaf.axis == FOLDED else 1
    row = prod(leaf.row_shape if leaf.axis != FOLDED else leaf.shape) // rows
    return int(row) * leaf.dtype.itemsize


def _free_on_cpu() -> int:
    """What the system could give to this process without swapping."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable")]
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        found += [int(limit) - used] if limit != "max" else []
    except (OSError, ValueError):
        pass  # another system, or no limit of its own
    if not found and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", ()):  # not on Windows
        found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(1, min(found, default=UNKNOWN))
