"""Fine-tuning of language models on texts: the task of `flops finetune --task text`."""

from flops.tasks.text.config import TextConfig
from flops.tasks.text.task import Text

__all__ = ["Text", "TextConfig"]
