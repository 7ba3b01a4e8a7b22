"""Image classification: the task of `flops finetune`."""

from flops.tasks.classification.config import FinetuneConfig
from flops.tasks.classification.metrics import accuracy, logits
from flops.tasks.classification.task import Classification
from flops.tasks.data.digits import digits
from flops.tasks.models.vit import bundled_vit

__all__ = ["Classification", "FinetuneConfig", "accuracy", "bundled_vit", "digits", "logits"]
