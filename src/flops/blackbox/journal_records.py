"""What a journal records of a round: its candidates, requests and responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Response:
    """What an objective returned, and what it cost.

    Attributes:
        columns: Loss and other columns of each row, float32 of shape (Q, k).
        cost: Other counts than the rows, such as encoded texts.
    """

    columns: Tensor
    cost: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """The bytes of a request and their idempotency key."""

    key: str
    body: bytes


@dataclass(frozen=True)
class Signature:
    """Structure of candidates, which does not depend on rounding.

    Attributes:
        kind: Kind of the candidates.
        points: Points of their rows.
    """

    kind: str
    points: tuple[int, ...]

    def __str__(self) -> str:
        return f"'{self.kind}' of {len(self.points):,} rows"


@dataclass(frozen=True, eq=False)
class Round:
    """Record of one ask/tell round.

    Attributes:
        signature: Of its candidates; None if they were never sent.
        decisions: Name and value of the decisions before it.
        requests: By part, of those without values; they may have been sent.
        responses: By part.
        damaged: Parts whose values or request fail their checksum.
        paid: Damaged parts that had been evaluated.
        kept: Columns of single rows of parts without a response, by row.
    """

    signature: Signature | None
    decisions: list[tuple[str, Any]]
    requests: dict[int, list[Request]]
    responses: dict[int, Response]
    damaged: dict[int, str]
    paid: set[int]
    kept: dict[int, Tensor] = field(default_factory=dict)
