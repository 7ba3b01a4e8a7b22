"""The model of a text task: what of it is trained, and how it is saved."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flops.optional import require
from flops.storage.disk import filling
from flops.tasks.models.language import Language, load_language

CONFIG = "config.json"
ADAPTER = "adapter_config.json"


class TextModel:
    """A language model of which everything, the last layers, or LoRA adapters are trained.

    Args:
        name: Model, as `load_language` reads it.
        classes: Names of the classes of a classification head; None for label words and
            completions.
        lora: Rank of LoRA adapters on all linear modules of the layers; None for none.
        alpha: Scale of the adapters times the rank; None is twice the rank.
        last: Number of layers to train, the last ones; None for all, with the embeddings.
        seed: Seed of new weights.

    Attributes:
        model: The model, which is called and trained. Adapters are inside of its layers.

    Raises:
        ImportError: transformers or peft is not installed.
        OSError: The model is not there.
        ValueError: It has too few layers, or no linear modules.
    """

    def __init__(
        self,
        name: str,
        classes: Sequence[str] | None,
        *,
        lora: int | None = None,
        alpha: float | None = None,
        last: int | None = None,
        seed: int = 0,
    ) -> None:
        if lora is not None:
            require("peft", "llm")  # before a large model is loaded
        count = None if classes is None else len(classes)
        self.language: Language = load_language(name, classes=count, seed=seed)
        model: Any = self.language.model
        self.pad = _pad_token(self.language)
        model.config.pad_token_id = self.pad
        if classes is not None:
            model.config.id2label = dict(enumerate(classes))
            model.config.label2id = {label: number for number, label in enumerate(classes)}
        layers = _layers(model)
        if last is not None and last > len(layers):
            raise ValueError(f"train_last is {last}, and '{name}' has {len(layers)} layers")
        self._adapted: Any = None
        if lora is not None:
            self._adapted = _with_adapters(model, layers, lora, alpha, last, seed)
            self._adapted.peft_config["default"].base_model_name_or_path = name
        elif last is None:
            model.requires_grad_(True)
        else:
            _train_last(model, layers, last)
        head = _head(model)
        if classes is not None and head is not None and self._adapted is None:
            head.requires_grad_(True)  # an adapted model has its own trainable copy
        self.model: Any = model.eval()
        self.takes = inspect.signature(type(model).forward).parameters

    def inputs(self, padded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of the inputs that the model takes: some have no positions."""
        return {name: value for name, value in padded.items() if name in self.takes}

    def save(self, folder: Path) -> None:
        """Write a PEFT adapter, or a model, with the tokenizer."""
        logging: Any = require("transformers.utils.logging")
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        last = CONFIG if self._adapted is None else ADAPTER
        try:
            with filling(folder, last=last) as scratch:
                if self._adapted is None:
                    self.model.save_pretrained(scratch)
                else:  # else it would look up the base model on the hub
                    self._adapted.save_pretrained(scratch, save_embedding_layers=False)
                self.language.tokenizer.save_pretrained(scratch)
        finally:
            if bars:
                logging.enable_progress_bar()


def _pad_token(language: Language) -> int:
    tokenizer = language.tokenizer
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def _layers(model: Any) -> list[tuple[str, nn.Module]]:
    """The layers of a transformer by name."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return [(f"{name}.{number}", layer) for number, layer in enumerate(module)]
    raise ValueError(f"a {type(model).__name__} has no list of {count} layers")


def _train_last(model: nn.Module, layers: Sequence[tuple[str, nn.Module]], last: int) -> None:
    """Train the last layers, and the modules after them but the output of words."""
    model.requires_grad_(False)
    stack = layers[0][0].rpartition(".")[0]
    parent = model.get_submodule(stack.rpartition(".")[0]) if "." in stack else model
    for _, layer in layers[-last:]:
        layer.requires_grad_(True)
    after = False
    for name, child in parent.named_children():
        if after:
            child.requires_grad_(True)
        after = after or name == stack.rpartition(".")[2]


def _head(model: Any) -> nn.Module | None:
    """The classification head, if there is one."""
    for name in ("score", "classifier"):
        found = getattr(model, name, None)
        if isinstance(found, nn.Module):
            return found
    return None


def _with_adapters(
    model: Any,
    layers: Sequence[tuple[str, nn.Module]],
    rank: int,
    alpha: float | None,
    last: int | None,
    seed: int,
) -> Any:
    """Put LoRA adapters into the layers, in place; returns the wrapper that saves them."""
    peft = require("peft", "llm")
    chosen = layers if last is None else layers[-last:]
    conv1d = require("transformers.pytorch_utils", "llm").Conv1D  # GPT-2's, with W^T stored
    found = {
        f"{prefix}.{name}": module
        for prefix, layer in chosen
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear | conv1d)
    }
    if not found:
        raise ValueError("the layers of the model have no linear modules for LoRA")
    head = type(model).__name__.endswith("ForSequenceClassification")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=list(found),
        fan_in_fan_out=any(isinstance(module, conv1d) for module in found.values()),
        lora_dropout=0.0,  # the forward pass must not be random
        bias="none",
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return peft.get_peft_model(model, config)
