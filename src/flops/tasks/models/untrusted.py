"""Untrusted models: their files are data and are never run as code.

Every call that loads one passes `trust_remote_code=False` and reads weights from safetensors (or
GGUF) files, since the older format is pickle, which can run code. That leaves attention kernels,
which a configuration may name for transformers to download and run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_no_kernels(config: Any) -> None:
    """Refuse a configuration that names an attention kernel on the hub.

    Args:
        config: As read by transformers.

    Raises:
        ValueError: It, or a part of it, names one.
    """
    for name, value in list(vars(config).items()):
        if name.endswith("_implementation_internal") and "/" in str(value):
            raise ValueError(
                f"its config.json names the hub kernel {value!r}, which is code, and code of a "
                f"model is never run: remove {name.removesuffix('_internal').strip('_')}"
            )
        if hasattr(value, "model_type"):  # a part, such as the image encoder of CLIP
            check_no_kernels(value)


def check_all_weights_loaded(report: Mapping[str, Any], unused: tuple[str, ...] = ()) -> None:
    """Refuse a model with weights that were not in its files, and so are random.

    Args:
        report: Loading info of transformers.
        unused: Prefixes of weights that are not needed.

    Raises:
        ValueError: Weights are missing or have another shape.
    """
    lost = sorted(name for name in report["missing_keys"] if not name.startswith(unused))
    if lost := [*lost, *map(str, report["mismatched_keys"])]:
        raise ValueError(f"its weights do not fit its configuration, such as {', '.join(lost[:3])}")


def explain(error: BaseException) -> str:
    """One line about the problem with a model's files and what to do about it."""
    text = str(error)
    if "trust_remote_code" in text or "custom code" in text:
        return (
            "it needs its own Python code (`auto_map` in a configuration), and code of a model is "
            "never run: use one whose architecture is part of transformers"
        )
    if "safetensors" in text and "no file named" in text:
        return (
            "there are no weights in the safetensors format, and pickled ones (.bin, .pt) are not "
            "read, since they can run code: convert them with save_pretrained"
        )
    if isinstance(error, RecursionError):
        return "a JSON file in it is nested too deeply"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, OSError | ValueError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
