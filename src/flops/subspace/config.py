"""Options of shaped noise."""

from __future__ import annotations

from dataclasses import dataclass, fields

RELIABLE = 0.2  # expected cosine from which a group is stepped, where nothing is set


@dataclass(frozen=True)
class Shaping:
    """Options of shaped noise; those that are None adapt to the data.

    Args:
        explore: Share of isotropic queries, which explore outside the learned directions; with 1,
            the basis only serves as prior.
        decay: Decay of the second moments per step.
        unbiased: Add the isotropic queries' leave-one-out residuals, so that the estimate has the
            mean of isotropic noise for any directions; noisier.
        mask: Name of the model's input that is 0 at padding, shape (B, T).
        warm: Isotropic steps before the first directions are measured; None for 1 if outputs are
            learned from, else 4.
        outputs: Learn from all outputs that the loss reads, where it is a differentiable function
            of the model's outputs, not from the losses alone.
        withhold: Least reliability of a group, the expected cosine of a point's estimate to its
            gradient. Below, and below 2.5 times as much while the batch's gradient is smaller than
            its noise, ``.grad`` is left as it is, so that torch's optimizers skip the parameters:
            steps along noise do harm, under Adam most of all, whose steps do not shrink with the
            gradient. The group's queries still teach it where the gradient lives. 0 always writes.
            For noise on activations where outputs are learned from; an unbiased estimate, and one
            from losses alone, which learns slowly, is always written.
    """

    explore: float | None = None
    decay: float | None = None
    unbiased: bool = False
    mask: str = "attention_mask"
    warm: int | None = None
    outputs: bool = True
    withhold: float = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        if self.explore is not None and not 0 < self.explore <= 1:
            raise ValueError(f"explore must lie in (0, 1], not {self.explore}")
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), not {self.decay}")
        if self.warm is not None and self.warm < 0:
            raise ValueError(f"warm must lie in [0, inf), not {self.warm}")
        if not 0 <= self.withhold < 1:
            raise ValueError(f"withhold must lie in [0, 1), not {self.withhold}")

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)]
        plain = [f"{f.name}={f.default!r}" for f in fields(self)]
        return f"Shaping({', '.join(a for a, b in zip(given, plain, strict=True) if a != b)})"
