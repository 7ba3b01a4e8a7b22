"""LOZO: antithetic low-rank noise on every matrix, in a subspace that stays for some steps.

Chen et al., "Enhancing zeroth-order fine-tuning for language models with low-rank structures", 2025
(arXiv 2410.07698). For every matrix X of shape (m, n), with Gaussian U of shape (m, r) drawn in
each step and V of shape (n, r) drawn every nu steps, all of them perturbed at once,

    c = (l(X + epsilon U V^T) - l(X - epsilon U V^T)) / (2 epsilon),    g = c U V^T / r.

Over U and V its mean is the gradient (E[<G, U V^T> U V^T] = r G); over U alone it is G V V^T / r,
so that nu steps descend in one subspace. Vectors have plain Gaussian noise z and g = c z, as in
MeZO, and so have matrices of a single row or column. Convolutions are matrices by their first axis.

The authors' program leaves out the 1/r, which is a part of the learning rate of matrices. Both
factors follow from the seed and the number of the step: nothing is remembered, and a resumed run
goes on in the same subspace. `flops.optim.ZerothOrderSGD` makes the update in place; its momentum
sums the last steps as they were, without LOZO-M's projection to a new subspace.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flops.estimators.spsa import SPSA
from flops.perturb.draws import Noise
from flops.perturb.low_rank import LowRank
from flops.perturb.random import SharedKind
from flops.subspace.config import Shaping

QUERIES = 2


@dataclass(frozen=True)
class LOZO(SPSA):
    """SPSA with low-rank draws that the batch shares; `Group(model, LOZO(), queries=2)`.

    More queries average several draws, each with factors of its own.

    Args:
        sigma: Noise scale (the authors' epsilon): a matrix moves by sigma U V^T, whose entries have
            the standard deviation sigma sqrt(rank).
        rank: r, columns of U and V.
        interval: nu, steps for which V stays.
    """

    shared: bool = field(default=True, init=False, repr=False)
    noise: SharedKind = field(default="gaussian", init=False, repr=False)
    shaping: Shaping | None = field(default=None, init=False, repr=False)
    rank: int = 2
    interval: int = 50

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.rank < 1 or self.interval < 1:
            raise ValueError(
                f"rank and interval must be at least 1, not {self.rank} and {self.interval}"
            )

    @property
    def shared_noise(self) -> Noise:
        """Low-rank noise."""
        return LowRank(self.rank, self.interval)
