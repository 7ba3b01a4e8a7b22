"""Work that stops before it needs other processes: all groups get there before any goes on."""

from __future__ import annotations

from flops.engine.meetings import Work, completed, together


def worker(name: str, stops: int, seen: list[str]) -> Work[str]:
    for i in range(stops):
        seen.append(f"{name}{i}")
        yield
    seen.append(f"{name} ends")
    return name.upper()


def test_alone_it_runs_through() -> None:
    seen: list[str] = []
    assert completed(worker("a", 2, seen)) == "A"
    assert seen == ["a0", "a1", "a ends"]


def test_together_all_get_to_a_stop_before_any_goes_on() -> None:
    seen: list[str] = []
    found = together([worker("a", 2, seen), worker("b", 1, seen), worker("c", 0, seen)])
    assert found == ["A", "B", "C"]
    assert seen == ["a0", "b0", "c ends", "a1", "b ends", "a ends"]
