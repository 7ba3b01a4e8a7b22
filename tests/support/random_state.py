"""The state of all global random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def global_random_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
