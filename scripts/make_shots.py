"""Select the images of Fashion-MNIST that ship with the package, for prompt tuning."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_STD, Split
from flops.tasks.data.fashion_mnist import FASHION_MNIST_FOLDER, fashion_mnist

ASSET = Path(__file__).resolve().parents[1] / "src" / "flops" / "tasks" / "assets" / "fashion"
CLASSES = 10
SHOTS = {"train": 16, "validation": 16, "test": 100}  # images per class

CARD = """\
# fashion

{total:,} images of Fashion-MNIST, 28x28 bytes each, as published: `shots.npz` holds `train` and
`validation` ({train} and {validation} per class, from the training set) and `test` ({test} per
class, from the test set), each (N, 28, 28). Row i is of class i % 10. `scripts/make_shots.py`
selected them: the first of each class in the splits of `flops.tasks.data.fashion_mnist`, whose
order is random and fixed for the training set. `flops.tasks.data.fashion.fashion_shots` reads them.

[Fashion-MNIST](https://github.com/zalandoresearch/fashion-mnist): H. Xiao, K. Rasul, R. Vollgraf:
Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017,
arXiv:1708.07747. Its licence, which applies to these images:

The MIT License (MIT)

Copyright (c) 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or
substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES
OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def command_line() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(description=f"{__doc__} Writes shots.npz and README.md.")
    data = "folder with the four idx .gz files of Fashion-MNIST (%(default)s)"
    add = parser.add_argument
    add("--data", type=Path, default=FASHION_MNIST_FOLDER, metavar="FOLDER", help=data)
    out = "output folder (default: the assets of the package, which are replaced)"
    add("--out", type=Path, default=ASSET, metavar="FOLDER", help=out)
    return parser


def first_of_each(labels: Tensor, shots: int) -> Tensor:
    """Return the rows of the first `shots` points of each class; classes alternate."""
    rows = [torch.nonzero(labels == label).squeeze(1)[:shots] for label in range(CLASSES)]
    if short := [label for label, found in enumerate(rows) if len(found) < shots]:
        raise ValueError(f"need {shots} images of each class, there are fewer of classes {short}")
    return torch.stack(rows, dim=1).flatten()  # (shots * CLASSES,)


def original_pixels(images: Tensor) -> Tensor:
    """Undo the padding and the normalisation of `fashion_mnist`, exactly."""
    pixels = images[:, 0, 2:-2, 2:-2] * IMAGE_STD + IMAGE_MEAN
    return (pixels * 255).round().to(torch.uint8)  # (N, 28, 28)


def main() -> None:
    """Run the command line."""
    parser = command_line()
    arguments = parser.parse_args()
    try:
        data = fashion_mnist(arguments.data)
        arrays = {}
        for name, shots in SHOTS.items():
            split: Split = getattr(data, name)
            rows = first_of_each(split.labels, shots)
            arrays[name] = original_pixels(split.images[rows]).numpy()
        arguments.out.mkdir(parents=True, exist_ok=True)
        file = arguments.out / "shots.npz"
        np.savez_compressed(file, **arrays)
        total = sum(len(array) for array in arrays.values())
        card = CARD.format(total=total, **SHOTS)
        (arguments.out / "README.md").write_text(card, encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    print(f"{total:,} images, {file.stat().st_size:,} bytes, in {arguments.out}")


if __name__ == "__main__":
    main()
