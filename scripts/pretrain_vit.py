"""Pretrain the bundled tiny vision transformer on Fashion-MNIST, by ordinary backpropagation.

The start model of the vision task: forward-only fine-tuning needs pretrained weights, and these are
small enough to ship with the package.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from flops.tasks.classification import accuracy, logits
from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_SIZE, IMAGE_STD, Splits
from flops.tasks.data.fashion_mnist import FASHION_MNIST_FOLDER, fashion_mnist

ASSET = Path(__file__).resolve().parents[1] / "src" / "flops" / "tasks" / "assets" / "tiny-vit"
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"]
CLASSES += ["Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
SHIFT = 1  # pixels; the border of two is empty, so a cyclic shift loses nothing

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: image-classification
datasets:
- fashion_mnist
---

# tiny-vit

A vision transformer (`ViTForImageClassification`) of {parameters:,} parameters in float32, for
trying forward-only fine-tuning on a CPU. It is a starting point for experiments and tests, not a
good classifier of garments.

- Input: one channel, 32x32; 28x28 images are padded by two pixels of 0 on each side. Pixels in
  [0, 1] are normalised as (pixel - {mean}) / {std}, see `preprocessor_config.json`.
- Model: patches of 8x8, so 16 patches and a class token; 6 layers, 64 channels, 4 heads, 256
  channels inside the MLP, no dropout.
- Output: the ten classes of Fashion-MNIST.

## Training

Backpropagation on {train:,} training images of Fashion-MNIST, with {validation:,} other training
images held out for validation. Epochs: {epochs}, of AdamW with batches of {batch}; the learning
rate warms up to {learning_rate:g} and falls as a cosine; weight decay {weight_decay:g}. The images
are shifted at random, by at most {shift} pixel, and mirrored. The last epoch's weights are used.

```
{command}
```

The same command on the same machine with the same versions gives the same weights, bit for bit.
Made with torch {torch} and transformers {transformers}, on one CPU thread.

## Accuracy

| images | accuracy |
|---|---|
| validation ({validation:,}) | {validation_accuracy} |
| test ({test:,}, evaluated after training, not used for any choice) | {test_accuracy} |

## Data

[Fashion-MNIST](https://github.com/zalandoresearch/fashion-mnist), Copyright (c) 2017 Zalando SE,
MIT licence. H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST: a Novel Image Dataset for Benchmarking
Machine Learning Algorithms, 2017, arXiv:1708.07747. No image of it is part of this model's files.
"""


def positive(text: str) -> int:
    """Parse a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def command_line() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nWrites config.json, model.safetensors, preprocessor_config.json "
        "and README.md,\nthe files of a Hugging Face model.",
        epilog="examples:\n"
        "  python scripts/pretrain_vit.py\n"
        "      remake the bundled model (5 to 10 minutes on one core)\n"
        "  python scripts/pretrain_vit.py --epochs 1 --limit 2000 --skip-test --out /tmp/vit\n"
        "      see it run, in seconds, without touching the bundled model or the test set",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    debian = "the default is where the Debian package dataset-fashion-mnist puts them (%(default)s)"
    data = f"folder with the four idx .gz files of Fashion-MNIST; {debian}"
    add("--data", type=Path, default=FASHION_MNIST_FOLDER, metavar="FOLDER", help=data)
    out = "output folder (default: the assets of the package, which are replaced)"
    add("--out", type=Path, default=ASSET, metavar="FOLDER", help=out)
    add("--epochs", type=positive, default=12, help="passes over the training set (%(default)s)")
    add("--batch", type=positive, default=128, help="images per step (%(default)s)")
    add("--learning-rate", type=float, default=2e-3, help="peak learning rate (%(default)s)")
    add("--weight-decay", type=float, default=0.05, help="weight decay of AdamW (%(default)s)")
    add("--seed", type=int, default=0, help="seed of weights, order and augmentation (%(default)s)")
    add("--limit", type=positive, metavar="N", help="use N images of each split, for quick runs")
    trial = "do not evaluate on the test set; choose settings by validation accuracy"
    add("--skip-test", action="store_true", help=trial)
    return parser


def new_model() -> ViTForImageClassification:
    """Return the untrained model, initialised from torch's global generator."""
    config = ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=8,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,  # about 1/sqrt(hidden_size); with the usual 0.02 training is slow
        id2label=dict(enumerate(CLASSES)),
        label2id={name: i for i, name in enumerate(CLASSES)},
        attn_implementation="sdpa",
    )
    return ViTForImageClassification(config)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to SHIFT pixels in both directions, and mirror half of them."""
    n, side = len(images), images.shape[-1]
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2, n, 1), generator=generator)
    mirrored = torch.rand(n, 1, generator=generator) < 0.5
    pixel = torch.arange(side)
    rows = (pixel - down) % side  # (n, side)
    columns = (torch.where(mirrored, side - 1 - pixel, pixel) - right) % side  # (n, side)
    point = torch.arange(n)[:, None, None]
    return images[point, 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def schedule(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear over 5 % of the steps, then a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(
    model: ViTForImageClassification,
    data: Splits,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Train in place, and print the validation accuracy after every epoch."""
    generator = torch.Generator().manual_seed(arguments.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), arguments.learning_rate, weight_decay=arguments.weight_decay
    )
    steps = arguments.epochs * math.ceil(len(data.train) / arguments.batch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("pretraining", total=steps)
        for epoch in range(1, arguments.epochs + 1):
            model.train()
            total = 0.0
            order = torch.randperm(len(data.train), generator=generator)
            for rows in order.split(arguments.batch):
                points = data.train.take(rows)
                outputs = model(augment(points.images, generator))
                loss = F.cross_entropy(logits(outputs), points.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                total += loss.item() * len(points)
                progress.advance(task)
            score = accuracy(model, data.validation)
            console.print(
                f"epoch {epoch}/{arguments.epochs}: loss {total / len(data.train):.3f}, "
                f"validation accuracy {score:.2%}"
            )
    model.eval()


def write(
    model: ViTForImageClassification, data: Splits, arguments: argparse.Namespace
) -> tuple[str, str]:
    """Evaluate, write model, preprocessing and card; return (validation, test)."""
    validation_accuracy = f"{accuracy(model, data.validation):.2%}"
    test_accuracy = "not measured"
    if not arguments.skip_test:
        test_accuracy = f"{accuracy(model, data.test):.2%}"

    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(arguments.out)
    (arguments.out / "model.safetensors").chmod(
        0o644
    )  # safetensors makes it readable by its owner only
    preprocessor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "resample": 2,  # bilinear
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [IMAGE_MEAN],
        "image_std": [IMAGE_STD],
    }
    text = json.dumps(preprocessor, indent=2) + "\n"
    (arguments.out / "preprocessor_config.json").write_text(text, encoding="utf-8")

    # no folders in the card: they would be those of its author
    command = "python scripts/pretrain_vit.py"
    for name in ("epochs", "batch", "learning_rate", "weight_decay", "seed", "limit"):
        value = getattr(arguments, name)
        if value != command_line().get_default(name):
            command += f" --{name.replace('_', '-')} {value}"
    card = CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        mean=IMAGE_MEAN,
        std=IMAGE_STD,
        train=len(data.train),
        validation=len(data.validation),
        test=len(data.test),
        epochs=arguments.epochs,
        batch=arguments.batch,
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        shift=SHIFT,
        command=command + " --skip-test" * arguments.skip_test,
        torch=torch.__version__,
        transformers=transformers.__version__,
        validation_accuracy=validation_accuracy,
        test_accuracy=test_accuracy,
    )
    (arguments.out / "README.md").write_text(card, encoding="utf-8")
    return validation_accuracy, test_accuracy


def main() -> None:
    """Run the command line."""
    parser = command_line()
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    # One thread: the order of summation is fixed, so runs are bitwise reproducible.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    try:
        data = fashion_mnist(arguments.data)
        arguments.out.mkdir(parents=True, exist_ok=True)  # fail early, not after training
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if arguments.limit is not None:
        first = slice(arguments.limit)
        data = Splits(*(s.take(first) for s in (data.train, data.validation, data.test)))
    if not all(len(split) for split in (data.train, data.validation, data.test)):
        parser.exit(2, f"{parser.prog}: {arguments.data} has too few images: need 12 and a test\n")
    started = time.perf_counter()
    model = new_model()
    train(model, data, arguments, console)
    validation, test = write(model, data, arguments)
    minutes = (time.perf_counter() - started) / 60
    console.print(f"validation {validation}, test {test}, {minutes:.1f} min, in {arguments.out}")


if __name__ == "__main__":
    main()
