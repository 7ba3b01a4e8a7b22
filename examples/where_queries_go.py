"""Show where an allocator spends its queries: on the digits that are hard to learn from.

    python examples/where_queries_go.py [--steps 60] [--output docs/figures/where-queries-go.png]

The bundled ViT is trained on the digits by backpropagation for some steps, so that some points are
easy. Then the Gaussian allocator of the paper distributes 20 queries per point over a batch of 64:
the picture has the points with the most and with the fewest queries, and all counts by loss. Needs
the extras vision and plots.
"""

import argparse

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.allocators import Gaussian
from flops.tasks.classification import bundled_vit, digits

BATCH, QUERIES, LEARN, SHOWN = 64, 20, 12, 6


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs.logits, targets, reduction="none")


def trained(data, steps):
    """The bundled ViT after some steps of backpropagation."""
    model = bundled_vit(classes=10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(data.train), (BATCH,), generator=order)
        optimizer.zero_grad()
        loss_fn(model(data.train.images[rows]), data.train.labels[rows]).mean().backward()
        optimizer.step()
    return model


def allocated(model, data):
    """Clean losses and counts of one batch, after the allocator has learned from some."""
    layers = list(model.vit.layers)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in layers[-2:]:
        layer.requires_grad_(True)
    group = Group(layers[-2:], LikelihoodRatio(), QUERIES, name="last layers")
    fg = ForwardGradient(model, loss_fn, group, allocator=Gaussian(), seed=0)
    rows = torch.arange(BATCH)
    for _ in range(LEARN):
        model.zero_grad()
        report = fg.estimate(data.train.images[rows], data.train.labels[rows], index=rows)
    with torch.no_grad():
        losses = loss_fn(model(data.train.images[rows]), data.train.labels[rows])
    return losses, report.counts["last layers"]


def draw(data, losses, counts, path):
    order = counts.argsort()
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    rows = (("most queries", order.flip(0)[:SHOWN]), ("fewest queries", order[:SHOWN]))
    grid = left.subplots(2, SHOWN)
    for line, (name, points) in zip(grid, rows, strict=True):
        line[0].set_title(name, loc="left", fontsize=10)
        for axis, point in zip(line, points.tolist(), strict=True):
            axis.imshow(data.train.images[point, 0].numpy(), cmap="gray_r")
            axis.set_xlabel(f"{int(counts[point])}", fontsize=10)
            axis.set(xticks=[], yticks=[])
    axis = right.subplots()
    axis.scatter(losses.numpy(), counts.numpy(), s=16)
    axis.axhline(QUERIES, color="0.6", linewidth=1)
    axis.annotate("equal counts", (1, QUERIES), (-4, 4), ("axes fraction", "data"),
                  textcoords="offset points", ha="right")  # fmt: skip
    axis.set(xlabel="loss of the point", ylabel="queries", title=f"all {BATCH} points")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="docs/figures/where-queries-go.png")
    options = parser.parse_args()
    data = digits()
    losses, counts = allocated(trained(data, options.steps), data)
    hard = losses >= losses.median()
    print(
        f"{int(counts.sum())} queries for {BATCH} points, {int(counts.min())} to "
        f"{int(counts.max())} each; the half with the higher loss gets "
        f"{float(counts[hard].sum() / counts.sum()):.0%}"
    )
    draw(data, losses, counts, options.output)
    print(options.output)


if __name__ == "__main__":
    main()
