"""Optimizers at the memory of inference."""

from flops.optim.hooks import StepHooks, step_as_gradients_appear
from flops.optim.zeroth_order_sgd import ZerothOrderSGD

__all__ = ["StepHooks", "ZerothOrderSGD", "step_as_gradients_appear"]
