"""Vision transformers to fine-tune: the bundled one, or any of transformers by hub id or path."""

from __future__ import annotations

import importlib.resources
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from flops.optional import require
from flops.storage.plain import parse_object
from flops.tasks.data.images import BUNDLED_FORMAT
from flops.tasks.data.pixels import ImageFormat
from flops.tasks.models.untrusted import check_no_kernels, explain

# Sizes of the paper's two models; the rest is transformers' defaults (224 pixels, patches of 16).
PRESETS: dict[str, dict[str, int]] = {
    "vit-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "vit-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
Head = Literal["fresh", "kept"]
_ALLOWED = (
    f"'bundled', {', '.join(repr(f'random:{name}') for name in PRESETS)}, the path of a folder with"
    " config.json and model.safetensors (as save_pretrained writes it), or a Hugging Face id, "
    "owner/name"
)


@dataclass(frozen=True)
class Parts:
    """The pieces of a vision transformer, in the order of the forward pass."""

    embeddings: nn.Module
    layers: list[nn.Module]
    norm: nn.Module
    head: nn.Module


def bundled_vit(classes: int = 10, *, seed: int = 0, pretrained_head: bool = False) -> Any:
    """Load the bundled vision transformer, in evaluation mode, with a fresh classification head.

    Six layers of 64 channels, 17 tokens (a class token and 16 patches of 8x8 pixels), 306,000
    parameters in float32, pretrained on Fashion-MNIST. The global random state is left untouched.

    Args:
        classes: Number of outputs of the head.
        seed: Draws the fresh head: weights from N(0, 0.02^2), biases zero.
        pretrained_head: Keep the Fashion-MNIST head instead; `classes` must then be 10.

    Raises:
        ImportError: transformers is not installed.
        ValueError: `classes` is not positive, or does not fit the pretrained head.
    """
    if classes < 1 or (pretrained_head and classes != 10):
        raise ValueError(f"classes must be >= 1, and 10 to keep the pretrained head, got {classes}")
    transformers = require("transformers")
    asset = importlib.resources.files("flops.tasks") / "assets" / "tiny-vit"
    logging = transformers.utils.logging
    # devices=[]: it runs on the CPU, and saving CUDA's random state would initialise CUDA
    with ExitStack() as stack, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        folder = stack.enter_context(importlib.resources.as_file(asset))
        if logging.is_progress_bar_enabled():  # the file has one megabyte
            stack.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        model = transformers.ViTForImageClassification.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="sdpa",
        )  # in evaluation mode
        if not pretrained_head:
            generator = torch.Generator().manual_seed(seed)
            head = nn.Linear(model.config.hidden_size, classes, dtype=torch.float32)
            nn.init.normal_(head.weight, std=0.02, generator=generator)
            nn.init.zeros_(head.bias)
            model.classifier, model.num_labels = head.eval(), classes
            model.config.id2label = {
                i: f"LABEL_{i}" for i in range(classes)
            }  # not the names of garments
            model.config.label2id = {name: i for i, name in model.config.id2label.items()}
    return model


def load_model(
    model: str = "bundled", classes: int = 10, *, seed: int = 0, head: Head = "fresh"
) -> tuple[nn.Module, ImageFormat]:
    """Load a vision transformer with a fresh head, in evaluation mode, on the CPU, in float32.

    Args:
        model: "bundled"; "random:vit-base" or "random:vit-large", with random weights; the path of
            a folder that `save_pretrained` wrote; or a Hugging Face id such as
            "google/vit-base-patch16-224-in21k".
        classes: Number of outputs of the head.
        seed: Draws the fresh head, weights from N(0, 0.02^2) and biases zero, and any random
            weights. The global random state is left untouched.
        head: "kept" keeps the model's own head, to continue with a model trained on these classes.

    Returns:
        The model and its image format: size and channels from its configuration, normalisation
        from its preprocessor's, or mean and std 0.5 if it has none.

    Raises:
        ImportError: transformers is not installed.
        OSError: The model is not there, or the hub cannot be reached.
        ValueError: It is not a vision transformer with a classification head, its weights do not
            fit its configuration, `classes` is not positive, or a kept head is missing or has
            another number of classes.
    """
    if classes < 1:
        raise ValueError(f"classes must be >= 1, got {classes}")
    keep = head == "kept"
    if model == "bundled":
        if keep and classes != 10:
            raise _other_head(model, 10, classes)
        return bundled_vit(classes, seed=seed, pretrained_head=keep), BUNDLED_FORMAT
    if model.startswith("random:"):
        if keep:
            raise ValueError(f"{model} has random weights and no head to keep: use a fresh one")
        made = random_vit(model.removeprefix("random:"), classes, seed=seed)
        return made, _format(made.config, {})
    with _loading(model) as (transformers, source):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        check_no_kernels(config)
        found, report = transformers.AutoModelForImageClassification.from_pretrained(
            source,
            config=config,
            trust_remote_code=False,
            use_safetensors=True,  # the other format is pickle, which can run code
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    parts(found)  # raises for other models
    lost = sorted(key for key in report["missing_keys"] if not key.startswith("classifier."))
    if lost or report["mismatched_keys"]:
        names = ", ".join([*lost, *map(str, report["mismatched_keys"])][:3])
        raise ValueError(f"the weights of {model} do not fit its configuration, such as {names}")
    if not keep:
        _replace_head(found, classes, seed)
    elif any(key.startswith("classifier.") for key in report["missing_keys"]):
        raise ValueError(f"{model} has no classification head to keep: use a fresh one")
    elif found.config.num_labels != classes:
        raise _other_head(model, found.config.num_labels, classes)
    return found.eval(), _format(found.config, _preprocessor(model))


def image_format(model: str = "bundled") -> ImageFormat:
    """Return the image format of a model, without loading its weights.

    Raises:
        ImportError: transformers is not installed.
        OSError: The model is not there, or the hub cannot be reached.
        ValueError: Its images are not square, or have neither one nor three channels.
    """
    if model == "bundled":
        return BUNDLED_FORMAT
    if model.startswith("random:"):
        return _format(_random_config(model.removeprefix("random:")), {})
    with _loading(model) as (transformers, source):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        check_no_kernels(config)
    # CLIP-like models have two parts, one for images.
    return _format(getattr(config, "vision_config", config), _preprocessor(model))


def random_vit(preset: str = "vit-base", classes: int = 10, *, seed: int = 0) -> Any:
    """Make a vision transformer of one of the paper's sizes with random weights, for benchmarks.

    Args:
        preset: "vit-base" (86 million parameters) or "vit-large" (303 million), 224 pixels.
        classes: Number of outputs of the head.
        seed: Draws all weights. The global random state is left untouched.

    Raises:
        ImportError: transformers is not installed.
        ValueError: There is no such preset.
    """
    transformers, config = require("transformers"), _random_config(preset)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = transformers.ViTForImageClassification(config)
        _replace_head(model, classes, seed)
    return model.float().eval()


def parts(model: nn.Module) -> Parts:
    """Return the pieces of a vision transformer of transformers: ViT, DeiT, DINOv2 and the like.

    Raises:
        ValueError: Embeddings, layers, last norm or head are not where those models have them.
    """
    inner = getattr(model, str(getattr(model, "base_model_prefix", "")) or "vit", None)
    encoder = getattr(inner, "encoder", None)
    places = [(inner, "layers"), (encoder, "layer"), (encoder, "layers")]
    stacks = [getattr(owner, name, None) for owner, name in places]
    layers = next((stack for stack in stacks if isinstance(stack, nn.ModuleList)), None)
    embeddings: Any = getattr(inner, "embeddings", None)
    norm: Any = getattr(inner, "layernorm", None)
    head: Any = getattr(model, "classifier", None)
    pieces = {"embeddings": embeddings, "layers": layers, "layernorm": norm, "classifier": head}
    missing = [name for name, piece in pieces.items() if not isinstance(piece, nn.Module)]
    if missing or not layers:
        raise ValueError(
            f"a {type(model).__name__} is not a vision transformer of transformers: no "
            f"{', '.join(missing) or 'layers'}. Models with vit.embeddings, vit.layers (or "
            "vit.encoder.layer), vit.layernorm and classifier work; for others, give groups of "
            "modules to ForwardGradient"
        )
    return Parts(embeddings, list(layers), norm, head)


def _other_head(model: str, has: int, classes: int) -> ValueError:
    return ValueError(
        f"the head of {model} has {has} classes, the data {classes}: use a fresh head"
    )


def _random_config(preset: str) -> Any:
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r} of random weights; there are {', '.join(PRESETS)}")
    config = require("transformers").ViTConfig(
        **PRESETS[preset], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    config._attn_implementation = "sdpa"
    return config


def _replace_head(model: Any, classes: int, seed: int) -> None:
    width = getattr(model.classifier, "in_features", model.config.hidden_size)
    # skip_init: the layer's initialisation would advance the global random state
    head = nn.utils.skip_init(nn.Linear, width, classes, device="cpu", dtype=torch.float32)
    nn.init.normal_(head.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
    nn.init.zeros_(head.bias)
    model.classifier, model.num_labels = head.eval(), classes
    model.config.id2label = {
        i: f"LABEL_{i}" for i in range(classes)
    }  # not the names of the old classes
    model.config.label2id = {name: i for i, name in model.config.id2label.items()}


@contextmanager
def _loading(model: str) -> Iterator[tuple[Any, str]]:
    """Load quietly, without touching the random state; failures say what to do."""
    transformers, path = require("transformers"), Path(model).expanduser()
    if not path.is_dir() and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model):
        raise FileNotFoundError(f"no model {model!r}: give {_ALLOWED}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"no model in {path}, since there is no config.json: give {_ALLOWED}"
        )
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # a missing head is expected; other missing weights are checked
    if path.is_dir():
        logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield transformers, str(path) if path.is_dir() else model
    except ImportError:
        raise
    except OSError as error:
        where = f"in {path}" if path.is_dir() else f"{model!r} on the Hugging Face hub"
        raise OSError(f"no model {where} ({explain(error)}). Give {_ALLOWED}") from error
    except Exception as error:  # for broken files, transformers raises anything
        text = f"{model} does not load as an image classifier ({explain(error)})"
        raise ValueError(text) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _preprocessor(model: str) -> dict[str, Any]:
    """Return the preprocessor's configuration; empty if there is none."""
    path = Path(model).expanduser()
    if path.is_dir():
        file = path / "preprocessor_config.json"
        try:
            return parse_object(file.read_bytes()) if file.is_file() else {}
        except ValueError as error:
            text = f"{file} cannot be used ({error}): write it again, or remove it"
            raise ValueError(text) from error
    mixin = require("transformers.image_processing_base").ImageProcessingMixin
    try:
        return dict(mixin.get_image_processor_dict(model)[0])
    except OSError:  # the model was loaded, so the hub is reachable
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the preprocessor of {model} cannot be used ({explain(error)})"
        ) from error


def _format(config: Any, preprocessor: dict[str, Any]) -> ImageFormat:
    """Return the image format; the size is the model's, which its position embeddings need."""
    try:
        return _image_format(config, preprocessor)
    except (TypeError, AttributeError, OverflowError, ArithmeticError) as error:
        raise ValueError(
            "the model's config.json or preprocessor_config.json has no usable image_size, "
            f"num_channels, rescale_factor, image_mean or image_std ({explain(error)})"
        ) from error


def _image_format(config: Any, preprocessor: dict[str, Any]) -> ImageFormat:
    size, channels = getattr(config, "image_size", None), int(getattr(config, "num_channels", 3))
    sides = {size} if isinstance(size, int) else set(size or ())
    if len(sides) != 1:
        raise ValueError(f"need a model of square images, got image_size={size}")
    scale = 255 * preprocessor.get("rescale_factor", 1 / 255)
    scale = 255.0 if not preprocessor.get("do_rescale", True) else scale
    scale = 1.0 if math.isclose(scale, 1) else scale
    mean, std = preprocessor.get("image_mean", 0.5), preprocessor.get("image_std", 0.5)
    if not preprocessor.get("do_normalize", True):
        mean, std = 0.0, 1.0
    # (scale * pixel - mean) / std, for pixels in [0, 1]
    fitted = (tuple(v / scale for v in _per_channel(value, channels)) for value in (mean, std))
    return ImageFormat(sides.pop(), channels, *fitted)


def _per_channel(value: float | Sequence[float], channels: int) -> list[float]:
    values = [value] if isinstance(value, int | float) else list(value)
    return values[:1] * channels if len(set(values)) == 1 else values
