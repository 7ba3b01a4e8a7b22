"""Pretrain the bundled tiny CLIP on Fashion-MNIST with made-up captions, by backpropagation.

The frozen model for prompt tuning: pretrained, fast, and small enough to ship with the package.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from clip_captions import TEMPLATES, caption_tokens, captions, draw_captions, new_tokenizer, shades
from pretrain_vit import augment, positive, schedule
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

from flops.tasks.data.digits import IMAGE_MEAN, IMAGE_STD, Split, Splits
from flops.tasks.data.fashion import CLASSES
from flops.tasks.data.fashion_mnist import FASHION_MNIST_FOLDER, fashion_mnist

ASSET = Path(__file__).resolve().parents[1] / "src" / "flops" / "tasks" / "assets" / "tiny-clip"
SHOTS = 16  # per class, the first of train and validation: they ship with the package, unseen here
IMAGE_SIZE, POSITIONS = 28, 48

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: zero-shot-image-classification
datasets:
- fashion_mnist
---

# tiny-clip

A `CLIPModel` of {parameters:,} parameters in float32, for trying prompt tuning on a CPU. It is a
starting point for experiments and tests: it knows ten kinds of garment and the {words} words of
its captions, and nothing else.

- Images: one channel, 28x28. Pixels in [0, 1] are normalised as (pixel - {mean}) / {std}, see
  `preprocessor_config.json`. Patches of 7x7, so 16 patches and a class token; 3 layers, 64
  channels, 4 heads, 128 channels inside the MLP.
- Texts: at most {positions} tokens, of the {vocabulary} of a byte-level BPE in lower case; 2 layers
  of the same sizes.
- Both end in a space of 64 dimensions; the learned scale of the logits is {scale:.1f}.

## Training

Contrastively, by backpropagation, on {train:,} training images of Fashion-MNIST, with
{validation:,} others held out for validation. The {shots} images that ship with the package to
tune prompts on and to validate them are in neither. At each visit an image gets a random caption
from a template, a name of its class or a synonym, and half of the time its shade (dark, grey or
light). A caption of the batch is a positive for an image if it has the same class and no other
shade, and the targets are uniform over the positives. Epochs: {epochs}, of AdamW with batches of
{batch}; the learning rate warms up to {learning_rate:g} and falls as a cosine; weight decay
{weight_decay:g}. The images are shifted at random, by at most one pixel, and mirrored. The last
epoch's weights are used.

```
{command}
```

The same command on the same machine with the same versions gives the same weights, bit for bit.
Made with torch {torch} and transformers {transformers}, on one CPU thread.

## Accuracy

Zero-shot, with "a photo of a {{}}." and the names
{classes}.

| images | accuracy |
|---|---|
| validation ({validation:,}) | {validation_accuracy} |
| test ({test:,}, evaluated after training, not used for any choice) | {test_accuracy} |

## Data

[Fashion-MNIST](https://github.com/zalandoresearch/fashion-mnist), Copyright (c) 2017 Zalando SE,
MIT licence. H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST: a Novel Image Dataset for Benchmarking
Machine Learning Algorithms, 2017, arXiv:1708.07747. No image of it is part of this model's files.
"""


def command_line() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nWrites config.json, model.safetensors, preprocessor_config.json, "
        "the tokenizer's\nfiles and README.md, the files of a Hugging Face model.",
        epilog="examples:\n"
        "  python scripts/pretrain_clip.py\n"
        "      remake the bundled model (about 4 minutes on one core)\n"
        "  python scripts/pretrain_clip.py --epochs 1 --limit 2000 --skip-test --out /tmp/clip\n"
        "      see it run, in seconds, without touching the bundled model or the test set",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    debian = "the default is where the Debian package dataset-fashion-mnist puts them (%(default)s)"
    data = f"folder with the four idx .gz files of Fashion-MNIST; {debian}"
    add("--data", type=Path, default=FASHION_MNIST_FOLDER, metavar="FOLDER", help=data)
    out = "output folder (default: the assets of the package, which are replaced)"
    add("--out", type=Path, default=ASSET, metavar="FOLDER", help=out)
    add("--epochs", type=positive, default=8, help="passes over the training set (%(default)s)")
    add("--batch", type=positive, default=128, help="images per step (%(default)s)")
    add("--learning-rate", type=float, default=2e-3, help="peak learning rate (%(default)s)")
    add("--weight-decay", type=float, default=0.05, help="weight decay of AdamW (%(default)s)")
    add("--seed", type=int, default=0, help="seed of weights, order and captions (%(default)s)")
    add("--limit", type=positive, metavar="N", help="use N images of each split, for quick runs")
    trial = "do not evaluate on the test set; choose settings by validation accuracy"
    add("--skip-test", action="store_true", help=trial)
    return parser


def new_model(tokenizer: PreTrainedTokenizerFast) -> CLIPModel:
    """Return the untrained model, initialised from torch's global generator."""
    width = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": POSITIONS,
        "num_hidden_layers": 2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    image = {"image_size": IMAGE_SIZE, "patch_size": 7, "num_channels": 1, "num_hidden_layers": 3}
    configs = {"text_config": width | text, "vision_config": width | image}
    return CLIPModel(CLIPConfig(**configs, projection_dim=64))


def without_shots(split: Split, limit: int | None) -> Split:
    """Drop the first images of each class, which `make_shots.py` selects."""
    kept = torch.ones(len(split), dtype=torch.bool)
    for label in range(len(CLASSES)):
        kept[torch.nonzero(split.labels == label).squeeze(1)[:SHOTS]] = False
    return split.take(torch.nonzero(kept).squeeze(1)[:limit])


def crop(images: Tensor) -> Tensor:
    """Crop the border that `fashion_mnist` adds."""
    return images[:, :, 2:-2, 2:-2]


def train(
    model: CLIPModel,
    tokenizer: PreTrainedTokenizerFast,
    data: Splits,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Train in place, and print the validation accuracy after every epoch.

    The loss is CLIP's, the mean of the cross-entropies over rows and over columns of the logits,
    with targets uniform over all matching captions of an image: with ten classes, a batch has many.
    """
    generator = torch.Generator().manual_seed(arguments.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), arguments.learning_rate, weight_decay=arguments.weight_decay
    )
    steps = arguments.epochs * math.ceil(len(data.train) / arguments.batch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    tokens, shade_of = caption_tokens(tokenizer), shades(data.train.images)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("pretraining", total=steps)
        for epoch in range(1, arguments.epochs + 1):
            model.train()
            total = 0.0
            order = torch.randperm(len(data.train), generator=generator)
            for rows in order.split(arguments.batch):
                points = data.train.take(rows)
                texts, fits = draw_captions(tokens, points.labels, shade_of[rows], generator)
                images = crop(augment(points.images, generator))
                outputs = model(input_ids=texts, pixel_values=images)
                targets = fits.float()  # (image, caption)
                loss = 0.5 * (
                    F.cross_entropy(outputs.logits_per_image, targets / targets.sum(1, True))
                    + F.cross_entropy(outputs.logits_per_text, targets.T / targets.T.sum(1, True))
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                with torch.no_grad():
                    model.logit_scale.clamp_(max=math.log(100))  # as CLIP does
                total += loss.item() * len(rows)
                progress.advance(task)
            model.eval()
            console.print(
                f"epoch {epoch}/{arguments.epochs}: loss {total / len(data.train):.3f}, "
                f"validation accuracy {accuracy(model, tokenizer, data.validation):.2%}"
            )


@torch.no_grad()
def accuracy(model: CLIPModel, tokenizer: PreTrainedTokenizerFast, split: Split) -> float:
    """Return the zero-shot accuracy with the first template and the class names."""
    texts = [TEMPLATES[0].format(name) for name in CLASSES]
    tokens = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    right = 0
    for images, labels in zip(split.images.split(500), split.labels.split(500), strict=True):
        found = model(input_ids=tokens, pixel_values=crop(images)).logits_per_image.argmax(1)
        right += int((found == labels).sum())
    return right / len(split)


def write(
    model: CLIPModel,
    tokenizer: PreTrainedTokenizerFast,
    data: Splits,
    arguments: argparse.Namespace,
) -> tuple[str, str]:
    """Evaluate, write model, preprocessing and card; return (validation, test)."""
    measured = [data.validation] if arguments.skip_test else [data.validation, data.test]
    accuracies = [f"{accuracy(model, tokenizer, split):.2%}" for split in measured]
    validation_accuracy, test_accuracy = [*accuracies, "not measured"][:2]
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    (arguments.out / "model.safetensors").chmod(
        0o644
    )  # safetensors makes it readable by its owner only
    preprocessor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "resample": 2,  # bilinear
        "do_center_crop": False,
        "do_convert_rgb": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [IMAGE_MEAN],
        "image_std": [IMAGE_STD],
    }
    text = json.dumps(preprocessor, indent=2) + "\n"
    (arguments.out / "preprocessor_config.json").write_text(text, encoding="utf-8")

    # no folders in the card: they would be those of its author
    command = "python scripts/pretrain_clip.py"
    for name in ("epochs", "batch", "learning_rate", "weight_decay", "seed", "limit"):
        value = getattr(arguments, name)
        if value != command_line().get_default(name):
            command += f" --{name.replace('_', '-')} {value}"
    card = CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        words=len({w for t in itertools.chain(*captions()) for w in t.strip(".").split()}),
        mean=IMAGE_MEAN,
        std=IMAGE_STD,
        positions=POSITIONS,
        vocabulary=len(tokenizer),
        scale=model.logit_scale.exp().item(),
        train=len(data.train),
        validation=len(data.validation),
        test=len(data.test),
        shots=2 * SHOTS * len(CLASSES),
        classes=", ".join(CLASSES),
        command=command + " --skip-test" * arguments.skip_test,
        torch=torch.__version__,
        transformers=transformers.__version__,
        validation_accuracy=validation_accuracy,
        test_accuracy=test_accuracy,
        **vars(arguments),
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
    unseen = (without_shots(split, arguments.limit) for split in (data.train, data.validation))
    data = Splits(*unseen, data.test.take(slice(arguments.limit)))
    if not all(len(split) for split in (data.train, data.validation, data.test)):
        parser.exit(2, f"{parser.prog}: {arguments.data} has too few images\n")
    started = time.perf_counter()
    tokenizer = new_tokenizer(POSITIONS)
    model = new_model(tokenizer)
    train(model, tokenizer, data, arguments, console)
    validation, test = write(model, tokenizer, data, arguments)
    minutes = (time.perf_counter() - started) / 60
    console.print(f"validation {validation}, test {test}, {minutes:.1f} min, in {arguments.out}")


if __name__ == "__main__":
    main()
