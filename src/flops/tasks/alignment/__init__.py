"""Alignment of a frozen image encoder with a frozen language model: the task of `flops align`."""

from flops.tasks.alignment.config import AlignConfig
from flops.tasks.alignment.task import Alignment

__all__ = ["AlignConfig", "Alignment"]
