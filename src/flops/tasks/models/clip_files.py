"""Load a CLIP and its tokenizer from the package, a folder or the Hugging Face hub."""

from __future__ import annotations

import importlib.resources
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from flops.errors import FlopsError
from flops.optional import require
from flops.tasks.data.pixels import ImageFormat
from flops.tasks.models.vit import _format, _preprocessor

BUNDLED = "tiny-clip"
# Explicit matrix products, one for each sequence and head, so that the bits of a result do not
# depend on the rest of the batch. No slower than fused attention here.
ATTENTION = "eager"


class ClipError(FlopsError, ValueError):
    """A model, class texts, images or prompts do not fit together."""


def load_clip(model: str) -> tuple[Any, Any, ImageFormat]:
    """Return a `CLIPModel` in float32, its tokenizer and its image format.

    Args:
        model: "tiny-clip", the path of a folder, or a Hugging Face id.

    Raises:
        ImportError: transformers is not installed.
        OSError: There is no such model, or the hub cannot be reached.
        ClipError: It is not a CLIP, or has no tokenizer.
    """
    with ExitStack() as stack:
        source = model
        if model == BUNDLED:
            asset = importlib.resources.files("flops.tasks") / "assets" / BUNDLED
            source = str(stack.enter_context(importlib.resources.as_file(asset)))
        found, tokenizer = _load(source)
        try:
            format = _format(found.config.vision_config, _preprocessor(source))
        except Exception as error:  # any JSON value
            raise ClipError(
                f"the preprocessor_config.json of {model} cannot be used ({_reason(error)}): "
                "save it again, or remove it to use the defaults"
            ) from error
        return found, tokenizer, format


def _reason(error: Exception) -> str:
    """The first line of an error message, or the name of the error."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _load(source: str) -> tuple[Any, Any]:
    """Load quietly, without touching the random state; failures say what to do."""
    transformers, path = require("transformers"), Path(source).expanduser()
    allowed = (
        f"{BUNDLED!r}, the path of a folder with a CLIPModel and its tokenizer (as save_pretrained "
        "writes them), or a Hugging Face id, owner/name"
    )
    local = path.is_dir()
    if (local and not (path / "config.json").is_file()) or (not local and "/" not in source):
        raise FileNotFoundError(f"no model in {source!r}: give {allowed}")
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # missing weights are checked below
    if local:
        source = str(path)
        logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
            if config.model_type != "clip":
                raise ClipError(
                    f"{source} holds a {config.model_type} model, not a CLIP: give {allowed}"
                )
            model, report = transformers.CLIPModel.from_pretrained(
                source,
                dtype=torch.float32,
                trust_remote_code=False,  # a folder's Python is never run
                use_safetensors=True,  # the other format is pickle, which can run code
                attn_implementation=ATTENTION,
                output_loading_info=True,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise OSError(f"no CLIP in {source!r} ({_reason(error)}): give {allowed}") from error
    except (ClipError, ImportError):
        raise
    except Exception as error:  # parsers of damaged files raise anything
        raise ClipError(
            f"{source} does not load as a CLIP ({_reason(error)}): give {allowed}"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    if lost := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        names = ", ".join(lost[:3])
        raise ClipError(f"the weights of {source} do not fit its configuration, such as {names}")
    return model, tokenizer
