"""Executors: threads, processes and a cluster evaluate the rows; the result is one process's."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flops import LikelihoodRatio
from flops.blackbox import FailureError, OnFailure, Tuner
from tests.support.paid import D, N, Paid


def make(path: Path, name: str, executor: Executor | None, **options) -> tuple[Tuner, Paid]:
    service = Paid(str(path / f"{name}-ledger.db"))
    given = {"queries": 6, "learning_rate": 0.1, "part": 16, "on_failure": "raise"} | options
    tuner = Tuner(
        torch.zeros(D),
        service,
        points=N,
        journal=path / f"{name}.db",
        executor=executor,
        estimator=LikelihoodRatio(0.1),
        **given,
    )
    return tuner, service


@contextmanager
def cluster():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as workers,
        distributed.Client(workers) as client,
    ):
        yield client.get_executor()


EXECUTORS = {
    "threads": lambda: ThreadPoolExecutor(3),
    "processes": lambda: ProcessPoolExecutor(2, multiprocessing.get_context("spawn")),
    "dask": cluster,
}


@pytest.mark.filterwarnings("ignore")  # of the cluster's own connections
@pytest.mark.parametrize("name", EXECUTORS)
def test_any_executor_makes_the_same_run(name, tmp_path) -> None:
    alone, paid = make(tmp_path, "alone", None)
    list(alone.run(3))
    with EXECUTORS[name]() as executor:
        tuner, service = make(tmp_path, name, executor)
        list(tuner.run(3))
    assert torch.equal(tuner.parameters, alone.parameters)
    assert not torch.equal(tuner.parameters, torch.zeros(D))
    assert service.rows == paid.rows == tuner.spent == 3 * 7 * N
    if name == "processes":
        assert service.processes >= 1
        assert service.processes != 0
    tuner.close()
    alone.close()


def test_a_pool_that_is_closed_is_a_failure_that_says_so(tmp_path) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    tuner, _ = make(tmp_path, "closed", executor, on_failure=OnFailure(0, wait=0.0))
    with pytest.raises(FailureError, match="cannot schedule new futures after shutdown"):
        tuner.step()
    tuner.close()
