"""Tune a function behind HTTP; every evaluation is paid for once.

First `python examples/own_objective_server.py`, then `python examples/own_objective.py`. Stop it
at any time and start it again: it resumes.
"""

import json
import sys
import time
import urllib.request

import torch

from flops import SPSA
from flops.allocators import Neyman
from flops.blackbox import Candidates, Tuner
from flops.blackbox.evaluator import Evaluator
from flops.blackbox.journal import Journal, Response

URL = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8765"
FILE = sys.argv[2] if sys.argv[2:] else "runs/own_objective.sqlite"
DAYS, STEPS = 12, 40


class House:
    """The objective: maps rows of parameters and points to losses, with retries."""

    def evaluate(self, candidates: Candidates, key: str) -> Response:
        rows = {"parameters": candidates.parameters.tolist(), "points": candidates.points.tolist()}
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        for attempt in range(8):
            request = urllib.request.Request(URL, json.dumps(rows).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return Response(torch.tensor(json.load(response)["losses"]))
            except (OSError, ValueError) as error:  # the key makes a retry free
                problem = error
                time.sleep(0.05 * 2**attempt)
        raise ConnectionError(f"{URL} does not answer: {problem}")


start = torch.tensor([1.0, 1.5, 0.0, -1.0])  # warm, also at night, and from five o'clock on
settings = {"steps": STEPS, "start": start.tolist(), "estimator": "SPSA 0.3", "seed": 0}
evaluator = Evaluator(House(), Journal(FILE, settings), part=64, concurrency=4)
tuner = Tuner(
    start,
    points=DAYS,
    estimator=SPSA(0.3),
    queries=8,
    allocator=Neyman(),
    batch=6,
    learning_rate=0.1,
)
tuner.decide = evaluator.decide  # counts are decided once, and recorded


def mean_cost() -> float:
    days = torch.arange(DAYS)
    return float(evaluator.evaluate(Candidates(tuner.parameters.expand(DAYS, -1), days)).mean())


print(f"at the start a day costs {mean_cost():.2f}")
while tuner.steps < STEPS:
    tuner.tell(evaluator.evaluate(tuner.ask()))
    if tuner.steps % 10 == 0 and not tuner.waiting:
        print(f"step {tuner.steps}: {mean_cost():.2f} after {evaluator.rows:,} rows")
print(f"the controller is {[round(value, 2) for value in tuner.parameters.tolist()]}")
