"""Descend a staircase: an objective whose derivative is 0 everywhere.

    python examples/staircase.py [--steps 60] [--output docs/figures/staircase.png]

The objective is rounded to whole steps, so autograd finds nothing, and neither do small finite
differences. Noise of the size of the steps sees the slope behind them. The tuner only ever asks for
values; the picture has its path. Needs the extra plots.
"""

import argparse

import numpy as np
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure

from flops import LikelihoodRatio
from flops.blackbox import Tuner

START = np.array([-1.5, 1.5])


def objective(parameters, points=None):
    """Rows of (x, y) to one loss each: a curved valley in steps of one half."""
    x, y = parameters[..., 0], parameters[..., 1]
    return np.floor(2 * ((1 - x) ** 2 + 2 * (y - x * x) ** 2)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="docs/figures/staircase.png")
    options = parser.parse_args()
    tuner = Tuner(
        START,
        objective,
        queries=24,
        estimator=LikelihoodRatio(sigma=0.3, baseline="antithetic"),
        learning_rate=0.1,
        seed=0,
    )
    path = [START]
    for _ in tuner.run(options.steps):
        path.append(tuner.parameters.numpy().copy())
    first, last = objective(path[0]), objective(path[-1])
    print(f"from {first:.1f} to {last:.1f} in {options.steps} steps, {tuner.asked} evaluations")
    x, y = np.meshgrid(np.linspace(-2, 2, 400), np.linspace(-1.2, 2.8, 400))
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    levels = [0, 0.5, 1, 2, 4, 8, 16, 32, 64]
    norm = BoundaryNorm(levels, 256)  # all steps equally visible
    values = objective(np.stack([x, y], -1))
    filled = axis.pcolormesh(x, y, values, norm=norm, cmap="Blues")
    axis.plot(*np.array(path).T, ".-", color="tab:orange", linewidth=1.5, markersize=4)
    axis.annotate("start", START, (-8, -14), textcoords="offset points")
    axis.plot(1, 1, "x", color="k")
    axis.annotate("minimum", (1, 1), (8, -4), textcoords="offset points")
    axis.set(xlabel="x", ylabel="y", title="An objective in steps, and the tuner's path")
    figure.colorbar(filled, label="value")
    figure.savefig(options.output, dpi=120)
    print(options.output)


if __name__ == "__main__":
    main()
