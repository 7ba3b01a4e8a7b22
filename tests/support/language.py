"""The bundled language model, small texts for it, and a Trainer on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainingArguments

import flops
from flops.integrations.transformers import ForwardTrainer

FOLDER = Path(flops.__file__).parent / "tasks/assets/tiny-llama"
PAD = 0


def language_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def texts(count: int = 12, seed: int = 0) -> list[dict[str, list[int]]]:
    """Token sequences of several lengths; the first two tokens are a prompt without labels."""
    source = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 8, (), generator=source))
        ids = torch.randint(4, 79, (length,), generator=source).tolist()
        found.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return found


def collate(items: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Padded on the right to the longest of the batch."""
    size = max(len(item["input_ids"]) for item in items)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([i[name] + [value] * (size - len(i[name])) for i in items])

    ids = padded("input_ids", PAD)
    mask = padded("labels", -1) != -1
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": padded("labels", -100)}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 3,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


def trainer(model: nn.Module, args: TrainingArguments, **options: Any) -> ForwardTrainer:
    defaults: dict[str, Any] = {
        "train_dataset": texts(),
        "data_collator": collate,
        "method": "shaped-lr",
        "queries": 4,
    }
    if "groups" in options or "estimator" in options:
        defaults.pop("method")
    if "groups" in options:
        defaults.pop("queries")
    return ForwardTrainer(model, args, **{**defaults, **options})


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two models are equal bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def moved(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    """Names of the parameters that differ."""
    return {name for name in a if not torch.equal(a[name], b[name])}
