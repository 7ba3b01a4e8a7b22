"""Options of shaped noise, and how they follow the data where they are left open."""

from __future__ import annotations

from dataclasses import dataclass

KEEP = 0.98  # of the second moments from step to step
FALL = 0.7  # of the explained variance that may go before the moments are doubted


@dataclass(frozen=True)
class Shaping:
    """Options of shaped noise; None is adapted from the data.

    Args:
        explore: Share of isotropic queries, which see what the known directions miss; 1 asks in
            no other way, and what was learned only serves as prior.
        decay: What the second moments keep from step to step.
        unbiased: Add the isotropic queries' leave-one-out residuals, so that the mean is that of
            isotropic noise whatever the directions; noisier.
        mask: Name of the model's input that is 0 where a sequence is padded, shape (B, T).
        warm: Isotropic steps before the first directions are measured.
    """

    explore: float | None = None
    decay: float | None = None
    unbiased: bool = False
    mask: str = "attention_mask"
    warm: int = 4

    def __post_init__(self) -> None:
        """Check the options."""
        if self.explore is not None and not 0 < self.explore <= 1:
            raise ValueError(f"explore must lie in (0, 1], not {self.explore}")
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), not {self.decay}")
        if self.warm < 0:
            raise ValueError(f"warm must lie in [0, inf), not {self.warm}")

    def share(self, explained: float) -> float:
        """Share of isotropic queries: it falls as the explained variance is confirmed."""
        if self.explore is not None:
            return self.explore
        return 0.1 + 0.6 * (1 - min(1.0, max(0.0, explained)))

    def keep(self, now: float, spread: float, running: float, best: float) -> tuple[float, float]:
        """What the moments keep, and the best explained variance from now on.

        Less when the explained variance drops beyond its sampling error, for the task has moved.
        Less also as it comes to a new best: the noise of a step's outer products falls with the
        energy that is missed, and inverse variance leaves the older, noisier steps less weight.

        Args:
            now: Captured energy of this step.
            spread: Its standard error.
            running: Its running average, this step included.
            best: The best running average so far.
        """
        if self.decay is not None:
            return self.decay, best
        doubt = min(1.0, max(0.0, now + 4 * spread) / (FALL * best)) if best > 0 else 1.0
        progress = min(1.0, max(1e-6, 1 - running) / max(1e-6, 1 - best))
        return KEEP * doubt * progress**2, max(best, running) if doubt == 1 else running
