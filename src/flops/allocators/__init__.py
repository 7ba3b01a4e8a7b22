"""Query allocators: given a budget, how many queries each point of the batch gets."""

from flops.allocators.base import Allocator, Signal
from flops.allocators.equal import Equal
from flops.allocators.fixed import Fixed

__all__ = ["Allocator", "Equal", "Fixed", "Signal"]
