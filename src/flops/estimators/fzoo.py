"""FZOO: one-sided signs, and a step that the standard deviation of the losses normalises.

Dang et al., "FZOO: fast zeroth-order optimizer for fine-tuning large language models towards
Adam-scale speed", 2025 (arXiv 2506.09034). With N sign vectors u_i on all parameters, shared by the
batch, losses l_i = l(theta + epsilon u_i) and the clean loss l_0,

    g = (1/N) sum_i (l_i - l_0) / s u_i,    s^2 = (1/(N-1)) sum_i (l_i - mean l)^2.

This is what is written to ``.grad``, so SGD with learning rate eta takes FZOO's step. It has no
unit: s is close to epsilon |grad l|, so g estimates the direction grad l / |grad l| whatever the
scale of the loss (normalised SGD), and is no unbiased estimate of the gradient. The learning rate
is therefore a length: |g| is about sqrt(d / N) for d parameters.

The paper divides by epsilon as well; the authors' program does not, and their learning rates (1e-5
for a language model) are meant so. It also divides by N in s^2 where the paper has N - 1: its steps
are sqrt(N / (N - 1)) as long. The paper runs its N passes as one batch by way of the signs; here
they run one after the other, each charged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flops.estimators.parameter_noise import Baseline, ParameterNoise
from flops.perturb.random import SharedKind
from flops.subspace.config import Shaping

QUERIES = 8


@dataclass(frozen=True)
class FZOO(ParameterNoise):
    """g = mean over draws of (l(theta + sigma u) - l(theta)) u / s; N queries and a clean pass.

    `Group(model, FZOO(), queries=8)` is the authors'. Where all N losses are equal, s = 0 and the
    gradient is zero. Gradients of micro-batches are each normalised by themselves: their sum is not
    that of the whole batch.

    Args:
        sigma: Noise scale (the authors' epsilon).
    """

    shared: bool = field(default=True, init=False, repr=False)
    noise: SharedKind = field(default="rademacher", init=False, repr=False)
    shaping: Shaping | None = field(default=None, init=False, repr=False)

    @property
    def used_baseline(self) -> Baseline:
        """The clean loss."""
        return "clean"

    @property
    def minimum_queries(self) -> int:
        """One loss has no standard deviation."""
        return 2

    def scale(self, losses: Tensor) -> float:
        """For (l_i - l_0) / s in the place of (l_i - l_0) / sigma."""
        deviation = float(losses.double().std()) if len(losses) > 1 else 0.0
        return self.sigma / deviation if deviation > 0 else 0.0
