"""Query allocators: distribute a budget of queries over the points of a batch."""

from flops.allocators.base import Allocator, Learner, Signal, Traces
from flops.allocators.bernoulli import Bernoulli
from flops.allocators.equal import Equal
from flops.allocators.fixed import Fixed
from flops.allocators.gaussian import Gaussian
from flops.allocators.neyman import Neyman

__all__ = [
    "Allocator",
    "Bernoulli",
    "Equal",
    "Fixed",
    "Gaussian",
    "Learner",
    "Neyman",
    "Signal",
    "Traces",
]
