"""Automatic groups: names and members for common models."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from flops import SPSA, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.subspace.config import RELIABLE
from tests.conftest import squared
from tests.support.zoo import clip_model, gpt2, llama, vit_model, zero_shot


def groups_of(model: nn.Module) -> dict[str, list[str]]:
    """Members by group; of groups without modules, the parameters' names."""
    names = {p: n for n, p in model.named_parameters()}
    return {
        group.name: list(group.modules) or [names[p] for p in group.parameters]
        for group in ForwardGradient(model, squared).groups
    }


def test_vit() -> None:
    layers = [f"vit.layers.{i}" for i in range(7)]
    assert groups_of(vit_model(layers=7)) == {
        "blocks-1": ["vit.embeddings", *layers[:5]],
        "blocks-2": layers[5:],
        "vit.layernorm": ["vit.layernorm"],
        "classifier": ["classifier"],
    }


def test_llama() -> None:
    expected = {
        "blocks-1": ["model.embed_tokens", "model.layers.0"],
        "blocks-2": ["model.layers.1"],
        "model.norm": ["model.norm"],
        "lm_head": ["lm_head"],
    }
    assert groups_of(llama().model) == expected
    assert groups_of(llama(tied=True).model) == expected


def test_gpt2() -> None:
    assert groups_of(gpt2().model) == {
        "blocks-1": ["transformer.wte", "transformer.wpe", "transformer.h.0"],
        "blocks-2": ["transformer.h.1"],
        "transformer.ln_f": ["transformer.ln_f"],
        "lm_head": ["lm_head"],
    }


VISION = {
    "vision_model.encoder.layers.before": [
        "vision_model.embeddings",
        "vision_model.pre_layrnorm",
    ],
    "vision_model.encoder.layers.blocks-1": ["vision_model.encoder.layers.0"],
    "vision_model.encoder.layers.blocks-2": ["vision_model.encoder.layers.1"],
    "vision_model.post_layernorm": ["vision_model.post_layernorm"],
}
TEXT = {
    "text_model.encoder.layers.before": ["text_model.embeddings"],
    "text_model.encoder.layers.blocks-1": ["text_model.encoder.layers.0"],
    "text_model.encoder.layers.blocks-2": ["text_model.encoder.layers.1"],
    "text_model.final_layer_norm": ["text_model.final_layer_norm"],
}


def test_clip_has_groups_for_each_tower() -> None:
    projections = {n: [n] for n in ("visual_projection", "text_projection")}
    assert groups_of(clip_model()) == {**TEXT, **VISION, **projections, "loose": ["logit_scale"]}


def test_frozen_parts_are_in_no_group() -> None:
    blocks = {n.removeprefix("vision_model.encoder.layers."): m for n, m in VISION.items()}
    assert groups_of(zero_shot().model) == {
        **blocks,
        "visual_projection": ["visual_projection"],
        "loose": ["logit_scale"],
    }


def test_mlp() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    assert groups_of(model) == {"blocks-1": ["0", "2"], "blocks-2": ["4"]}


def test_single_module() -> None:
    assert groups_of(nn.Linear(3, 2)) == {"blocks-1": [""]}
    assert groups_of(nn.Sequential(nn.Linear(3, 2))) == {"blocks-1": ["0"]}
    assert groups_of(nn.MultiheadAttention(4, 2)) == {"blocks-1": [""]}


class Plain(nn.Module):
    """Different children and a bare scale, nothing repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.conv, self.head = nn.Conv1d(1, 2, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.conv(x.unsqueeze(1)).flatten(1))


def test_children_of_a_root_with_a_bare_parameter() -> None:
    assert groups_of(Plain()) == {
        "blocks-1": ["conv"],
        "blocks-2": ["head"],
        "loose": ["scale"],
    }


class Picture(nn.Module):
    """A transformer for images as people write it: bare parameters in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(2, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, 4))
        self.pos = nn.Parameter(torch.randn(1, 4, 4))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.patch(x)], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def test_bare_parameters_in_the_root_are_loose() -> None:
    model = Picture().eval()
    assert groups_of(model) == {
        "before": ["patch"],
        "blocks-1": ["blocks.0", "blocks.1"],
        "blocks-2": ["blocks.2"],
        "norm": ["norm"],
        "head": ["head"],
        "loose": ["cls", "pos"],
    }
    fg = ForwardGradient(model, squared)
    kinds = {group.name: group.estimator for group in fg.groups}
    assert kinds["loose"] == SPSA(shared=True)
    shaped = LikelihoodRatio("auto", "stage", shaping=Shaping(withhold=RELIABLE))
    assert kinds["before"] == replace(shaped, targets="block")
    assert all(k == shaped for n, k in kinds.items() if n not in ("before", "loose"))
    fg.estimate(torch.randn(5, 3, 2), torch.randn(5, 2))
    assert all(p.grad is not None for p in model.parameters())


def test_queries_of_a_late_bare_parameter_replay_what_comes_before() -> None:
    case = zero_shot()
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_(name == "logit_scale")
    groups = [Group(parameters=[case.model.logit_scale], estimator=SPSA(shared=True), queries=20)]
    report = ForwardGradient(case.model, case.loss_fn, groups).estimate(case.inputs, case.targets)
    assert report.queries == 60
    assert report.forward_equivalents.queries < 0.05 * 60
