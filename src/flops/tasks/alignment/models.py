"""The two frozen models of an alignment: visual encoders and causal language models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flops.integrations.llama_cpp import LlamaCppModule
from flops.tasks.alignment.adapter import LanguageReader
from flops.tasks.alignment.language import PrefixLanguage
from flops.tasks.data.pixels import ImageFormat
from flops.tasks.models.language import (
    Language,
    load_gguf,
    load_language,
    loading,
    smollm2_file,
)
from flops.tasks.models.untrusted import check_all_weights_loaded, check_no_kernels
from flops.tasks.models.vit import bundled_vit, image_format

__all__ = [
    "Encoder",
    "Language",
    "load_encoder",
    "load_gguf",
    "load_language",
    "reader",
    "smollm2_file",
]

_ENCODERS = "'bundled', the path of a folder with config.json and weights, or a Hugging Face id"


@dataclass(frozen=True)
class Encoder:
    """A frozen image encoder: input format, and a function from images to features (B, width)."""

    model: nn.Module
    format: ImageFormat
    features: Callable[[Tensor], Tensor]


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
    with loading(name, _ENCODERS, "visual encoder") as (transformers, source):
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


def reader(language: Language, prefix: Tensor, rows: int) -> LanguageReader:
    """The language model after a prefix, in the engine that it was loaded in.

    Args:
        language: The language model.
        prefix: Tokens before the visual ones, (P,); may be empty.
        rows: Rows per pass of llama.cpp.
    """
    model = language.model
    if isinstance(model, LlamaCppModule):
        return LlamaCppModule(model.path, prefix=prefix, rows=rows)
    return PrefixLanguage(model, prefix)
