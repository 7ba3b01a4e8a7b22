"""Bindings: noise sites and prefixes of one group in one structure of the forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

from flops.passes.local_vjp import LocalTarget
from flops.passes.replay import Prefix
from flops.passes.structure import Use


class Binding(ABC):
    """Noise sites of a group, and the prefixes of its queries and local VJPs.

    Attributes:
        prefixes: Prefixes of queries and local VJPs; the queries' first.
        local: Targets of the local VJPs, in the order in which they end; none by default.
        local_prefix: Prefix of the local VJPs; None without any.
        local_span: First and last time of the pass of the local VJPs; None without any.
        noise_size: Noise values on the outputs of a row.
    """

    prefixes: tuple[Prefix, ...] = ()
    local: tuple[LocalTarget, ...] = ()
    local_prefix: Prefix | None = None
    local_span: tuple[int, int] | None = None
    noise_size: int = 0

    @cached_property
    def needed(self) -> frozenset[int]:
        """Calls whose clean outputs must be recorded."""
        return frozenset().union(*(prefix.needed for prefix in self.prefixes))

    @cached_property
    def local_needed(self) -> frozenset[int]:
        """Calls whose clean outputs the local VJPs replay."""
        return frozenset() if self.local_prefix is None else self.local_prefix.needed

    @cached_property
    def replayed_share(self) -> float:
        """Share of a forward pass that queries replay instead of running."""
        return self.prefixes[0].share if self.prefixes else 0.0

    @abstractmethod
    def covers(self, use: Use) -> bool:
        """Whether the estimate contains the effect of this use of a parameter."""
