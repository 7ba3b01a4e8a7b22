"""Black boxes: tune parameters of something that only answers questions."""

from flops.blackbox.objective import Objective, Question
from flops.blackbox.tuner import Tuner

__all__ = ["Objective", "Question", "Tuner"]
