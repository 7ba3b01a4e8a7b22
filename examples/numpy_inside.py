"""Train both sides of a step in numpy, which has no backward pass.

    python examples/numpy_inside.py [--epochs 4] [--output docs/figures/numpy-inside.png]

Digits, a linear layer, a tanh that numpy computes, a linear layer. Backpropagation stops at numpy
and trains the last layer alone; forward passes train both. The picture has the validation accuracy
of both by step. Needs the extras vision and plots.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

from flops import ForwardGradient
from flops.tasks.classification import digits

HIDDEN, BATCH = 64, 64


class NumpyTanh(nn.Module):
    """Numbers in, numbers out."""

    def forward(self, x):
        return torch.from_numpy(np.tanh(x.detach().numpy()))


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def train(data, epochs, forward):
    """Steps, and the validation accuracy in % after each."""
    torch.manual_seed(0)
    pixels = data.train.images[0].numel()
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, HIDDEN), NumpyTanh(), nn.Linear(HIDDEN, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    fg = ForwardGradient(model, loss_fn, seed=0)
    order = torch.Generator().manual_seed(0)
    steps, scores = [0], [accuracy(model, data.validation)]
    for _ in range(epochs):
        for rows in torch.randperm(len(data.train), generator=order).split(BATCH):
            images, labels = data.train.images[rows], data.train.labels[rows]
            optimizer.zero_grad()
            if forward:
                fg.estimate(images, labels, index=rows)
            else:
                loss_fn(model(images), labels).mean().backward()
            optimizer.step()
            steps.append(steps[-1] + 1)
            scores.append(accuracy(model, data.validation))
    return steps, scores


@torch.no_grad()
def accuracy(model, split):
    return 100 * (model(split.images).argmax(1) == split.labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", default="docs/figures/numpy-inside.png")
    options = parser.parse_args()
    data = digits()
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for name, forward, style, below in (
        ("forward passes: both layers", True, "-", 16),
        ("backpropagation: stops at numpy", False, "--", 72),
    ):
        steps, scores = train(data, options.epochs, forward)
        print(f"{name}: validation accuracy {scores[-1]:.1f} %")
        axis.plot(steps, scores, style, linewidth=2)
        axis.annotate(
            name, (steps[-1], scores[-1]), (0, -below), textcoords="offset points", ha="right"
        )
    axis.axhline(10, color="0.6", linewidth=1)
    axis.annotate("chance", (steps[-1], 10), (0, 4), textcoords="offset points", ha="right")
    axis.set(xlabel="step (batches of 64)", ylabel="validation accuracy, %", ylim=(0, 100))
    axis.set_title("A network with numpy inside")
    axis.grid(alpha=0.3)
    figure.savefig(options.output, dpi=120)
    print(options.output)


if __name__ == "__main__":
    main()
