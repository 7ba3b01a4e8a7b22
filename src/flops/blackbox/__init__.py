"""Black boxes: tune parameters of something that only answers questions."""

from flops.blackbox.objective import Objective, Question
from flops.blackbox.outputs import Outputs
from flops.blackbox.tuner import Tuner

__all__ = ["Objective", "Outputs", "Question", "Tuner"]
