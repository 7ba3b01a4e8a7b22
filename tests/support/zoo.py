"""Small real architectures in double precision, each with a batch and a loss per point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from flops import Shared
from tests.conftest import squared


@dataclass
class Case:
    """A model, its batch and loss, and the names of targets that together cover it."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss_fn: Callable[[Any, Any], Tensor]
    blocks: list[str]
    size: int

    def losses(self) -> Tensor:
        inputs = self.inputs
        if isinstance(inputs, dict):
            plain = {k: v.tensor if isinstance(v, Shared) else v for k, v in inputs.items()}
            return self.loss_fn(self.model(**plain), self.targets)
        return self.loss_fn(self.model(inputs), self.targets)

    def exact(self) -> dict[str, Tensor]:
        """Backpropagated gradients; zero for what the loss does not read."""
        self.model.zero_grad()
        self.losses().mean().backward()
        found = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in self.model.named_parameters()
            if p.requires_grad
        }
        self.model.zero_grad()
        return found


def classes(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits, targets, reduction="none")


def vit_model(layers: int = 2, hidden: int = 4, size: int = 4, mlp: int = 6) -> nn.Module:
    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=mlp,
        image_size=size,
        patch_size=2,
        num_channels=1,
        num_labels=3,
        initializer_range=0.5,
    )
    return ViTForImageClassification(config).double().eval()


def vit() -> Case:
    model = vit_model()
    blocks = ["vit.embeddings", "vit.layers.0", "vit.layers.1", "vit.layernorm", "classifier"]
    return Case(
        model, torch.randn(3, 1, 4, 4).double(), torch.tensor([0, 1, 2]), classes, blocks, 3
    )


def clip_model() -> nn.Module:
    tower = {
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 3,
    }
    text = {**tower, "vocab_size": 11, "max_position_embeddings": 5, "eos_token_id": 10}
    text |= {"bos_token_id": 0, "pad_token_id": 1}
    vision = {**tower, "image_size": 4, "patch_size": 2, "num_channels": 1}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=3)
    model = CLIPModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
    return model


CLIP_TEXT = ["embeddings", "encoder.layers.0", "encoder.layers.1", "final_layer_norm"]
CLIP_VISION = ["embeddings", "pre_layrnorm", "encoder.layers.0", "encoder.layers.1"]
CLIP_VISION += ["post_layernorm"]


def clip() -> Case:
    """Pairs of image and text: the loss of a pair does not read logit_scale."""
    model = clip_model()
    ids = torch.tensor([[0, 3, 4, 10], [0, 5, 10, 1], [0, 6, 7, 10]])
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(3, 1, 4, 4).double(),
        "attention_mask": (ids != 1).long(),
    }

    def loss(outputs: Any, _: Any) -> Tensor:
        return 1 - F.cosine_similarity(outputs.image_embeds, outputs.text_embeds)

    blocks = ["text_projection", "visual_projection", *(f"text_model.{n}" for n in CLIP_TEXT)]
    blocks += [f"vision_model.{name}" for name in CLIP_VISION]
    return Case(model, inputs, None, loss, blocks, 3)


def zero_shot(prompts: int = 3) -> Case:
    """Classes by prompts that all points share; the text tower is frozen."""
    model = clip_model()
    model.text_model.requires_grad_(False)
    model.text_projection.requires_grad_(False)
    ids = torch.tensor([[0, 3, 4, 10], [0, 5, 8, 10], [0, 6, 7, 10], [0, 9, 2, 10]])[:prompts]
    inputs = {"input_ids": Shared(ids), "pixel_values": torch.randn(3, 1, 4, 4).double()}

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.logits_per_image, targets, reduction="none")

    blocks = ["visual_projection", *(f"vision_model.{name}" for name in CLIP_VISION)]
    return Case(model, inputs, torch.tensor([0, 1, 1]), loss, blocks, 3)


def tokens(outputs: Any, targets: Tensor) -> Tensor:
    """Mean loss over the next tokens of each sequence; padding is -100."""
    logits, labels = outputs.logits[:, :-1], targets[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return losses.sum(1) / (labels != -100).sum(1)


def llama(tied: bool = False) -> Case:
    config = LlamaConfig(
        vocab_size=9,
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
        tie_word_embeddings=tied,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for name, module in list(model.named_modules()):
        if name.endswith("norm"):  # Llama's own norms compute in single precision
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, nn.RMSNorm(4, eps=module.variance_epsilon))
    model = model.double().eval()
    ids = torch.tensor([[0, 0, 3, 4], [0, 5, 6, 7], [8, 3, 5, 4]])  # padded on the left
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "use_cache": False}
    blocks = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    unseen = (ids == 0) | (ids.roll(1, 1) == 0)  # padding predicts nothing
    return Case(model, inputs, ids.masked_fill(unseen, -100), tokens, blocks, 3)


def gpt2() -> Case:
    config = GPT2Config(
        vocab_size=9,
        n_positions=6,
        n_embd=4,
        n_layer=2,
        n_head=2,
        n_inner=6,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = GPT2LMHeadModel(config).double().eval()
    ids = torch.tensor([[3, 4, 5, 6], [5, 6, 7, 3], [8, 3, 5, 4]])
    blocks = ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1"]
    blocks += ["transformer.ln_f", "lm_head"]
    return Case(model, {"input_ids": ids, "use_cache": False}, ids, tokens, blocks, 3)


def encoder() -> Case:
    """torch's own layers, which take a fused path in eval mode if they are let."""
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.Linear(2, 4), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(12, 2)
    )
    blocks = ["0", "1.layers.0", "1.layers.1", "3"]
    x, y = torch.randn(3, 3, 2).double(), torch.randn(3, 2).double()
    return Case(model.double().eval(), x, y, squared, blocks, 3)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


def cnn() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        Residual(4),
        Residual(4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    x, y = torch.randn(3, 1, 4, 4).double(), torch.tensor([0, 1, 2])
    return Case(model.double(), x, y, classes, ["0", "1", "3", "4", "6"], 3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def lstm() -> Case:
    model = nn.Sequential(nn.Linear(2, 3), Recurrent(), nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.randn(3, 4, 2).double(), torch.randn(3, 2).double()
    return Case(model.double(), x, y, squared, ["0", "1", "3"], 3)


CASES: dict[str, Callable[[], Case]] = {
    "vit": vit,
    "clip": clip,
    "zero-shot": zero_shot,
    "zero-shot, other number": lambda: zero_shot(4),
    "llama": llama,
    "llama tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "encoder": encoder,
    "cnn": cnn,
    "lstm": lstm,
}
