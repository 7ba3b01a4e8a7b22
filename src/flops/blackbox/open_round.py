"""A round in progress: which of its rows have values, and which are still to be evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flops.blackbox.journal_records import Request, Response, Round, Signature
from flops.blackbox.objective import Candidates


@dataclass
class Call:
    """Rows to evaluate in one call.

    Attributes:
        place: Their part; -1 - row for a single row.
        rows: Positions in the round, shape (R,).
        key: Idempotency key.
        attempt: Failed attempts so far.
        pause: Seconds to wait before it.
        requests: The rows, serialized.
        stored: Whether an earlier process has serialized them.
    """

    place: int
    rows: Tensor
    key: str
    attempt: int = 0
    pause: float = 0.0
    requests: Sequence[Request] = ()
    stored: bool = False


@dataclass
class OpenRound:
    """Values of a round as they arrive.

    Args:
        number: Number of the round in the journal.
        candidates: All rows.
        part: Rows per part.
        recorded: What the journal has of it.

    Attributes:
        found: Responses by part.
        kept: Columns of single rows of the other parts.
        failed: Rows that are left out, and why.
    """

    number: int
    candidates: Candidates
    part: int
    recorded: Round
    found: dict[int, Response] = field(init=False)
    kept: dict[int, Tensor] = field(init=False)
    failed: dict[int, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Begin with what is recorded."""
        self.found = dict(self.recorded.responses)
        kept = self.recorded.kept
        self.kept = {row: c for row, c in kept.items() if row // self.part not in self.found}

    @property
    def signature(self) -> Signature:
        """Structure of the candidates."""
        return Signature(self.candidates.kind, tuple(self.candidates.points.tolist()))

    @property
    def parts(self) -> int:
        """Number of parts."""
        return -(-len(self.candidates) // self.part)

    def rows_of(self, place: int) -> Tensor:
        """Rows of a part."""
        return torch.arange(place * self.part, min((place + 1) * self.part, len(self.candidates)))

    @property
    def known(self) -> int:
        """Rows with values."""
        return sum(len(r.columns) for r in self.found.values()) + len(self.kept)

    @property
    def done(self) -> bool:
        """Whether every row has a value or failed."""
        return self.known + len(self.failed) == len(self.candidates)

    def missing(self) -> Tensor:
        """Rows that have no value and have not failed."""
        open_ = torch.ones(len(self.candidates), dtype=torch.bool)
        for place in self.found:
            open_[self.rows_of(place)] = False
        open_[[*self.kept, *self.failed]] = False
        return torch.nonzero(open_).flatten()

    def calls(self, key: str) -> list[Call]:
        """Calls for all missing rows: whole parts, or row by row where some have arrived."""
        found = []
        for place in range(self.parts):
            if place in self.found:
                continue
            rows = [r for r in self.rows_of(place).tolist() if r not in self.kept]
            if len(rows) == len(self.rows_of(place)):
                found.append(Call(place, torch.tensor(rows), f"{key}-{place}"))
            else:
                found += [self.single(r, key) for r in rows]
        return found

    def single(self, row: int, key: str, again: int = 0) -> Call:
        """A call for one row; ``again`` counts its evaluations under other keys."""
        place, offset = divmod(row, self.part)
        name = f"{key}-{place}.{offset}" + (f":{again}" if again else "")
        return Call(-1 - row, torch.tensor([row]), name, again)

    def rest(self) -> tuple[dict[int, Response], dict[int, int], dict[int, tuple[int, str]]]:
        """Responses of the parts without one, NaN in rows that failed; rows counted; failures."""
        widths = [r.columns.size(1) for r in self.found.values()]
        width = [*widths, *(len(c) for c in self.kept.values()), 1][0]
        responses, counted = {}, {}
        for place in range(self.parts):
            if place not in self.found:
                rows = self.rows_of(place)
                columns = torch.full((len(rows), width), torch.nan)
                for at, row in enumerate(rows.tolist()):
                    if row in self.kept:
                        columns[at] = self.kept[row]
                responses[place] = Response(columns)
                counted[place] = sum(1 for row in rows.tolist() if row in self.kept)
        points = self.candidates.points
        lost = {row: (int(points[row]), why) for row, why in self.failed.items()}
        return responses, counted, lost

    def columns(self) -> Tensor:
        """Columns of all rows, after the last part has a response."""
        return torch.cat([self.found[place].columns for place in range(self.parts)])


def mismatch(opened: OpenRound, error: Callable[[str, str], Exception]) -> Exception | None:
    """Why the record is not of these candidates; None if it is."""
    there, here = opened.recorded.signature, opened.signature
    if there is not None and there != here:
        where = "" if len(here.points) != len(there.points) else " (of other points)"
        return error(str(there), f"{here}{where}")
    recorded = opened.recorded
    most = max([0, *recorded.responses, *recorded.requests, *recorded.damaged])
    if most >= opened.parts:
        return error(f"of {most + 1} parts or more", f"of {opened.parts}")
    for place, response in recorded.responses.items():
        rows = len(opened.rows_of(place))
        if len(response.columns) != rows:
            return error(
                f"evaluated with {len(response.columns)} rows in part {place}", f"of {rows} there"
            )
    return None
