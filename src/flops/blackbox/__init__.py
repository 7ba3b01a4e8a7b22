"""Black-box optimization: tune parameters of a function that can only be evaluated."""

from flops.blackbox.failures import FailureError, OnFailure
from flops.blackbox.objective import Candidates, Objective
from flops.blackbox.outputs import Outputs
from flops.blackbox.tuner import Tuner

__all__ = ["Candidates", "FailureError", "Objective", "OnFailure", "Outputs", "Tuner"]
