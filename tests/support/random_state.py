"""The state of all global random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def global_random_state() -> tuple[Any, ...]:
    _, words, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), words.tobytes(), rest
