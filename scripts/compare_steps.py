"""Compare the time of a step with that of another revision, in turn.

    python scripts/compare_steps.py c916974 --turns 30

Each revision runs in a process of its own on the same inputs; a turn is one step of each, and the
order changes from turn to turn. Six layers of ViT-small's width, batch 32, 8 queries, three groups.
Prints the median of the ratios (here over there) and half their interquartile range.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
WARM = 10  # likelihood ratio measures Jacobians in the first eight steps
KINDS = ("block", "leaf", "stage", "shaped", "shaped, Gaussian", "spsa", "shared", "mezo")

WORKER = """
import sys, time, warnings
import torch, transformers
import flops
from flops import ForwardGradient, Group, LikelihoodRatio, Shaping, SPSA
try:
    from flops.presets import mezo
except ImportError:
    from flops import mezo
from flops.allocators import Gaussian
warnings.simplefilter("ignore")
kind = sys.argv[1]
torch.manual_seed(0)
config = transformers.ViTConfig(
    hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536,
    image_size=32, patch_size=8, num_channels=1, num_labels=10,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
model = transformers.ViTForImageClassification(config).eval()
x, y = torch.randn(32, 1, 32, 32), torch.arange(32) % 10

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs.logits, targets, reduction="none")

if kind == "mezo":
    groups = mezo(model)
else:
    model.requires_grad_(False)
    model.vit.layers.requires_grad_(True)
    shaped = kind.startswith("shaped")
    estimator = {
        "spsa": SPSA(),
        "shared": SPSA(shared=True),
    }.get(kind) or LikelihoodRatio(
        targets="stage" if shaped else kind, shaping=Shaping() if shaped else None)
    layers = list(model.vit.layers)
    groups = [Group(layers[i:i + 2], estimator, 8, name=str(i)) for i in range(0, 6, 2)]
allocator = Gaussian() if "Gaussian" in kind else None
fg = ForwardGradient(model, loss, groups, allocator=allocator, chunk=256)
print(flops.__file__, flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    fg.estimate(x, y)
    print(time.perf_counter() - start, flush=True)
    model.zero_grad()
"""


class Worker:
    """A process that takes steps with the sources of one checkout."""

    def __init__(self, checkout: Path, kind: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=environment,
        )
        if checkout.resolve() not in Path(self._read()).resolve().parents:
            raise RuntimeError(f"the worker does not run the sources of {checkout}")

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended; its error is above")
        return line.strip()

    def step(self) -> float:
        """Seconds of one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(there: Path, kind: str, turns: int) -> tuple[float, float, float]:
    """Median ratio, half its interquartile range, and the median seconds of a step here."""
    workers = [Worker(ROOT, kind), Worker(there, kind)]
    try:
        for worker in workers * WARM:
            worker.step()
        seconds = np.empty((turns, 2))
        for turn in range(turns):
            for place in (0, 1) if turn % 2 else (1, 0):
                seconds[turn, place] = workers[place].step()
    finally:
        for worker in workers:
            worker.close()
    low, middle, high = np.quantile(seconds[:, 0] / seconds[:, 1], (0.25, 0.5, 0.75))
    return float(middle), float(high - low) / 2, float(np.median(seconds[:, 0]))


def main() -> None:
    """Compare all kinds of steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="commit, tag or branch to compare with")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run(
            [*git, "add", "--quiet", "--detach", str(there), options.revision], check=True
        )
        try:
            for kind in options.kinds:
                ratio, spread, seconds = compare(there, kind, options.turns)
                print(f"{kind:18} {ratio:.3f} +- {spread:.3f}  ({seconds:.3f} s)", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(there)], check=True)


if __name__ == "__main__":
    main()
