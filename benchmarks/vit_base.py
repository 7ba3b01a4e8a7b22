"""One training step of a full-size ViT-base: time and peak memory, compared with backpropagation.

Random weights, 224 pixels, a batch of 2, 2 queries, the paper's groups and sigmas. Every method
runs in a separate process; memory is the peak of the process over that with the model loaded and
one forward pass done: gradients, activations and noise of the step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

METHODS = ("bp", "mezo", "n-spsa", "lr", "ops-lr", "shaped-lr")
BATCH, QUERIES = 2, 2

CHILD = """
import json, sys, time, warnings
import torch, torch.nn.functional as F
from flops.training.methods import Method, engine
from flops.tasks.models.vit import load_model
from flops.tasks.classification.config import PRESETS
from flops.tasks.classification.metrics import logits
from flops.training.loop import peak_memory
warnings.simplefilter("ignore")
name, batch, queries = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
preset = PRESETS["vit-base"]
model, form = load_model("random:vit-base", 10)
x, y = torch.randn(batch, form.channels, form.size, form.size), torch.arange(batch) % 10
with torch.inference_mode():
    model(x)
peak = lambda: peak_memory() / 2**20
before = peak()
method = Method(name, queries, preset["sigma"], stages=preset["stages"])
loss_fn = lambda out, y: F.cross_entropy(logits(out), y, reduction="none")
fg = engine(model, loss_fn, method)
optimizer = torch.optim.Adam(model.parameters(), preset["learning_rate"])
started = time.perf_counter()
report = fg.estimate(x, y)
seconds, after = time.perf_counter() - started, peak()
optimizer.step()
print(json.dumps({
    "seconds": seconds,
    "forward equivalents": float(report.forward_equivalents),
    "queries": report.queries,
    "loaded, MB": before,
    "step adds, MB": after - before,
    "with Adam, MB": peak(),
}))
"""


def run() -> dict[str, Any]:
    """One process per method."""
    found = {}
    for name in METHODS:
        command = [sys.executable, "-c", CHILD, name, str(BATCH), str(QUERIES)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found
