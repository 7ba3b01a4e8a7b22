"""Models of strangers: their files are data, and never run as code.

Every call that loads one says `trust_remote_code=False`, and takes weights from safetensors (or
GGUF) files, since the older format is pickle, which can run code. What is left are attention
kernels, which a configuration may name for transformers to download and run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_kernels(config: Any) -> None:
    """Refuse a configuration that names code on the hub for its attention.

    Args:
        config: As transformers read it.

    Raises:
        ValueError: It, or a part of it, does.
    """
    for name, value in list(vars(config).items()):
        if name.endswith("_implementation_internal") and "/" in str(value):
            raise ValueError(
                f"its config.json asks for the kernel {value!r} of the hub, which is code, and no "
                f"code of a model is ever run: remove {name.removesuffix('_internal').strip('_')}"
            )
        if hasattr(value, "model_type"):  # a part, as that of CLIP for images
            refuse_kernels(value)


def refuse_lost_weights(report: Mapping[str, Any], unused: tuple[str, ...] = ()) -> None:
    """Refuse a model some of whose weights were not in its files, and are random now.

    Args:
        report: What transformers says of loading.
        unused: How the names of weights begin that are not needed.

    Raises:
        ValueError: Weights are missing, or have another shape.
    """
    lost = sorted(name for name in report["missing_keys"] if not name.startswith(unused))
    if lost := [*lost, *map(str, report["mismatched_keys"])]:
        raise ValueError(f"its weights do not fit its configuration, such as {', '.join(lost[:3])}")


def why(error: BaseException) -> str:
    """What was wrong with a model's files, in a line, with advice that can be followed."""
    text = str(error)
    if "trust_remote_code" in text or "custom code" in text:
        return (
            "it wants to run Python code of its own (`auto_map` in a configuration), and no code of"
            " a model is ever run: take one whose architecture is part of transformers"
        )
    if "safetensors" in text and "no file named" in text:
        return (
            "there are no weights in the safetensors format, and those in pickle's (.bin, .pt) are "
            "not read, since they can run code: convert them with save_pretrained"
        )
    if isinstance(error, RecursionError):
        return "a JSON file in it is nested too deeply"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, OSError | ValueError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
