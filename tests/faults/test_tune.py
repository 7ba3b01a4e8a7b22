"""Whatever breaks: no answer is lost, none is paid for twice, and the prompts come out the same.

Real processes: `flops tune`, `flops serve`, and a proxy between them that spoils answers.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flops.serve.client import ServiceClient
from flops.serve.local import LocalService
from flops.serve.store import AnswerStore, StoreError
from tests.support.serving import Server, faulty, until
from tests.support.tuning import (
    LEVELS,
    ROWS,
    apart,
    charged,
    command,
    finish,
    paid,
    prompts,
    run,
    start,
)

MANY = "lr shaped-lr ops-spsa cma-es"
KILLS = int(os.environ.get("FLOPS_KILLS", "30"))  # of the slow proof


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def unbroken(server, tmp_path_factory) -> dict[str, bytes]:
    """Prompts of a run to which nothing happened."""
    folder, before = tmp_path_factory.mktemp("unbroken"), charged(server.ledger)
    run(folder, "--url", server.url)
    assert paid(folder) == charged(server.ledger) - before == ROWS
    return prompts(folder)


@pytest.fixture(scope="module")
def unbroken_many(tmp_path_factory) -> tuple[dict[str, bytes], int]:
    """Of several methods, with a service of its own, and the rows that it took."""
    folder = tmp_path_factory.mktemp("many")
    run(folder, methods=MANY, epochs=3)
    assert len(prompts(folder)) == 4
    assert paid(folder) == charged(folder / "service-0" / "ledger.sqlite")
    return prompts(folder), paid(folder)


def gone(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.slow
def test_the_tuner_is_killed(server, unbroken, tmp_path) -> None:
    chance, before = random.Random(1), charged(server.ledger)
    arguments = command(tmp_path, "--url", server.url)
    for share in (0.15, 0.5):
        process = start(arguments)
        enough = before + int(ROWS * share)
        until(lambda: charged(server.ledger) >= enough or process.poll() is not None, 120)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.communicate()
        assert not prompts(tmp_path), "it was too fast to be killed"
    finish(start(arguments))
    assert prompts(tmp_path) == unbroken
    assert paid(tmp_path) == charged(server.ledger) - before == ROWS


def test_a_service_of_ones_own_ends_with_a_tuner_that_is_killed(tmp_path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    code = (
        "import sys, time, pathlib; from flops.serve.local import LocalService\n"
        "with LocalService(pathlib.Path(sys.argv[1])) as service:\n"
        "    print(service.process, flush=True); time.sleep(600)"
    )
    arguments = [sys.executable, "-c", code, str(ledger)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        service = int(holder.stdout.readline())
        assert not gone(service)
        holder.kill()
    try:
        until(lambda: gone(service))
    finally:
        if not gone(service):
            os.kill(service, signal.SIGKILL)
    with pytest.raises(StoreError, match="another model"):  # and not "in use"
        AnswerStore(ledger, "x")


@pytest.mark.slow
def test_a_service_of_ones_own_is_started_again_when_it_dies(tmp_path) -> None:
    with LocalService(tmp_path / "ledger.sqlite") as service, ServiceClient(service.url) as client:
        digest, first = client.info()["digest"], service.process
        os.kill(first, signal.SIGKILL)
        assert client.info()["digest"] == digest  # it waits
        assert service.restarts == 1
        second = service.process
        assert second != first
    assert gone(second)


@pytest.mark.slow
def test_the_network_spoils_answers(server, unbroken, tmp_path) -> None:
    spoilt(server, unbroken, tmp_path, seed=3, share=0.25)


def spoilt(server: Server, unbroken: dict[str, bytes], folder: Path, seed: int, share: float):
    before = charged(server.ledger)
    with faulty(server.port, seed, share) as (url, done):
        run(folder, "--url", url, "--timeout", "2")
        did = done()
    assert sum(did.values()) - did["none"] >= 5
    assert prompts(folder) == unbroken
    assert paid(folder) == charged(server.ledger) - before == ROWS


@pytest.mark.slow
def test_the_server_is_killed(server, unbroken, tmp_path) -> None:
    killed(server, unbroken, tmp_path, [0.3])


def killed(server: Server, unbroken: dict[str, bytes], folder: Path, shares: list[float]) -> None:
    before = charged(server.ledger)
    process = start(command(folder, "--url", server.url))
    for share in shares:
        enough = before + int(ROWS * share)
        until(lambda: charged(server.ledger) >= enough or process.poll() is not None, 120)
        server.kill(signal.SIGKILL)
        assert process.poll() is None, "it was too fast"
        server.start()
    finish(process)
    assert prompts(folder) == unbroken
    assert paid(folder) == charged(server.ledger) - before == ROWS


@pytest.mark.slow
def test_the_tuner_is_killed_twenty_times_with_a_service_of_its_own(
    unbroken_many, tmp_path
) -> None:
    expected, rows = unbroken_many
    ledger = tmp_path / "service-0" / "ledger.sqlite"
    chance, arguments = random.Random(2), command(tmp_path, methods=MANY, epochs=3)
    kills = 0
    while kills < 20:
        process = start(arguments)
        if kills % 4 == 3:  # any moment, also before it has asked anything
            time.sleep(chance.uniform(0, 8))
        else:
            enough = charged(ledger) + chance.randint(1, rows // 20)
            until(lambda: charged(ledger) >= enough or process.poll() is not None, 120)
            time.sleep(chance.uniform(0, 0.05))
        assert process.poll() is None, f"it ended after {kills} kills: {process.communicate()[0]}"
        process.kill()
        process.communicate()
        kills += 1
    finish(start(arguments))
    assert prompts(tmp_path) == expected
    assert paid(tmp_path) == charged(ledger) == rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_network_spoils_many_answers(seed, server, unbroken, tmp_path) -> None:
    spoilt(server, unbroken, tmp_path, seed, share=0.45)


@pytest.mark.slow
def test_the_server_is_killed_again_and_again(server, unbroken, tmp_path) -> None:
    killed(server, unbroken, tmp_path, [0.1, 0.3, 0.5, 0.7])


@pytest.mark.slow
def test_everything_at_once(server, unbroken, tmp_path) -> None:
    chance, before = random.Random(4), charged(server.ledger)
    with faulty(server.port, 5, 0.3) as (url, _):
        arguments = command(tmp_path, "--url", url, "--timeout", "2")
        for share in (0.1, 0.3, 0.5, 0.7):
            process = start(arguments)
            enough = before + int(ROWS * share)
            until(lambda: charged(server.ledger) >= enough or process.poll() is not None, 120)
            time.sleep(chance.uniform(0, 0.5))
            server.kill(signal.SIGKILL)
            process.kill()
            process.communicate()
            server.start()
        finish(start(arguments))
    assert prompts(tmp_path) == unbroken
    assert paid(tmp_path) == charged(server.ledger) - before == ROWS


def moved(
    folder: Path, ledger: Path, kills: int, seed: int, *options: str, methods: str, workers: bool
) -> int:
    """Kill a run again and again; go on each time as on another machine. Returns its rows."""
    chance, before = random.Random(seed), charged(ledger)

    def go_on(turn: int) -> subprocess.Popen[str]:
        more = ["--workers", str(1 + turn % 2)] if workers else []
        arguments = command(folder, *options, *more, methods=methods, epochs=3)
        return start(arguments, threads=1 + turn % 3, level=LEVELS[turn % len(LEVELS)])

    each = 1900 * len(methods.split()) // (kills + 3)  # rows of a run, by kill
    for kill in range(kills):
        process = go_on(kill)
        enough, moment = charged(ledger) + chance.randint(1, each), math.inf
        if kill % 4 == 3:  # any moment, also before it has asked anything
            moment = time.monotonic() + chance.uniform(0, 10)
        until(
            lambda: (
                time.monotonic() > moment or charged(ledger) >= enough or process.poll() is not None
            ),
            240,
        )
        time.sleep(chance.uniform(0, 0.05))
        assert process.poll() is None, f"it ended after {kill} kills: {process.communicate()[0]}"
        process.kill()
        process.communicate()
    finish(go_on(kills), 600)
    rows = charged(ledger) - before
    assert paid(folder) == rows
    return rows


@pytest.mark.slow
@pytest.mark.bits
def test_a_run_is_killed_and_goes_on_as_on_other_machines(server, tmp_path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "moved"
    run(whole, "--url", server.url, methods="shaped-lr", epochs=3)
    options = ("--url", server.url)
    rows = moved(folder, server.ledger, 2, 1, *options, methods="shaped-lr", workers=False)
    assert rows == paid(whole)
    (difference,) = apart(folder, whole).values()
    assert difference < 1e-2  # a step of Adam is 0.1; rounding made 4e-4 of it


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("own", [False, True], ids=["one service", "service moves too"])
def test_a_run_is_killed_thirty_times_and_goes_on_as_on_other_machines(
    own, server, tmp_path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "moved"
    options = () if own else ("--url", server.url)
    run(whole, *options, methods=MANY, epochs=3)
    ledger = folder / "service-0" / "ledger.sqlite" if own else server.ledger
    rows = moved(folder, ledger, KILLS, 6, *options, methods=MANY, workers=not own)
    assert rows == paid(whole)
    differences = apart(folder, whole)
    print(f"{KILLS} kills, {rows} rows, differences of prompts: {differences}")
    assert len(differences) == len(MANY.split())
    assert max(differences.values()) < 1e-2
