"""A tuner on a cluster that loses a worker, killed at any moment, and with rows that fail."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flops import LikelihoodRatio
from flops.blackbox import OnFailure, Tuner
from tests.support.paid import A, D, N, Paid, losses
from tests.support.tuner_process import run

ROOT = Path(__file__).parents[2]
KILLS = 30


def tuned(path: Path, name: str, executor=None) -> tuple[Tuner, Paid]:
    """20 steps of 500 rows: 10,000."""
    service = Paid(str(path / f"{name}-ledger.db"), 0.0 if executor is None else 0.02)
    tuner = Tuner(
        torch.zeros(D),
        service,
        points=N,
        journal=path / f"{name}.db",
        executor=executor,
        on_failure="raise",
        estimator=LikelihoodRatio(0.1),
        queries=24,
        learning_rate=0.1,
        part=20,
    )
    return tuner, service


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the cluster, about the worker it has lost
def test_a_worker_of_a_cluster_is_killed_and_no_row_is_lost_or_paid_for_twice(tmp_path) -> None:
    distributed = pytest.importorskip("distributed")
    alone, paid = tuned(tmp_path, "alone")
    list(alone.run(20))
    assert alone.spent == paid.rows == 10_000
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        workers = client.run(os.getpid)
        assert len(workers) == 2
        victim = next(iter(workers.values()))
        tuner, service = tuned(tmp_path, "cluster", client.get_executor())

        def kill() -> None:
            while service.rows < 3_000:
                time.sleep(0.01)
            os.kill(victim, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        list(tuner.run(20))
        killer.join()
        assert victim not in client.run(os.getpid).values()
    assert service.rows == tuner.spent == 10_000
    assert service.processes >= 2
    print(f"{service.calls} calls for {10_000 // 20} keys, {service.processes} processes")
    assert torch.equal(tuner.parameters, alone.parameters)
    tuner.close()
    alone.close()


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("kind", ["lr", "shaped"])
def test_a_tuner_is_killed_thirty_times_and_ends_with_the_same_bits(kind, tmp_path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    expected, paid = run(whole, kind)
    expected.close()
    service, chance, kills = Paid(str(tmp_path / f"{kind}-ledger.db")), random.Random(3), 0
    command = [sys.executable, "-m", "tests.support.tuner_process", str(tmp_path), kind]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    each = paid.rows // (KILLS + 2)
    while kills < KILLS:
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        if kills % 5 == 4:  # any moment, also before it has asked anything
            time.sleep(chance.uniform(0, 5))
        else:
            enough = service.rows + chance.randint(1, each)
            while service.rows < enough and process.poll() is None:
                time.sleep(0.002)
        assert process.poll() is None, f"it ended after {kills} kills"
        process.kill()
        process.wait()
        kills += 1
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert torch.equal(torch.load(tmp_path / f"{kind}.pt"), expected.parameters)
    assert service.rows == paid.rows
    print(f"{KILLS} kills, {service.rows} rows paid for, {service.calls} calls")


def ends(seed: int, share: float) -> tuple[float, int]:
    """Mean loss after 6,000 paid rows, a share of which fails at random, and rows left out."""
    source = torch.Generator().manual_seed(seed)

    def objective(parameters: Tensor, points: Tensor) -> Tensor:
        found = losses(parameters, points)
        return torch.where(torch.rand(len(found), generator=source) < share, torch.nan, found)

    tuner = Tuner(
        torch.zeros(D),
        objective,
        points=N,
        budget=6_000,
        estimator=LikelihoodRatio(0.1),
        queries=9,
        batch=10,
        learning_rate=0.05,
        on_failure=OnFailure(retries=0, share=0.6),
        seed=seed,
    )
    list(tuner.run())
    assert tuner.spent <= 6_000
    everywhere = tuner.parameters.expand(N, -1)
    least = float(losses(A.mean(0).expand(N, -1), torch.arange(N)).mean())
    return float(losses(everywhere, torch.arange(N)).mean()) - least, len(tuner.failures)


def test_a_fifth_of_the_rows_may_fail() -> None:
    """At equal paid rows the end is within the spread of runs without failures."""
    steady = [ends(seed, 0.0)[0] for seed in range(6)]
    broken, lost = zip(*(ends(seed, 0.2) for seed in range(6)), strict=True)
    assert min(lost) > 900
    spread = statistics.stdev(steady)
    print(f"above the least: {statistics.mean(steady):.4f} ± {spread:.4f} without failures,")
    print(f"{statistics.mean(broken):.4f} ± {statistics.stdev(broken):.4f} with {sum(lost)} lost")
    assert statistics.mean(broken) < statistics.mean(steady) + 2 * spread
    assert statistics.mean(steady) < 0.1
