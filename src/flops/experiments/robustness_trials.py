"""One trial of the study of robustness: a model on all test images under one kind of noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops.errors import FlopsError
from flops.experiments.attacks import Classifier, fgsm, i_fgsm, mi_fgsm
from flops.experiments.cells import Result
from flops.experiments.corruptions import gaussian, poisson, uniform
from flops.experiments.robustness_runs import FinishedRun, open_run
from flops.tasks.classification.metrics import logits
from flops.tasks.data.pixels import ImageFormat
from flops.training.device import find_device

Kind = Literal["clean", "gaussian", "uniform", "poisson", "fgsm", "i-fgsm", "mi-fgsm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ATTACKS: tuple[Kind, ...] = ("fgsm", "i-fgsm", "mi-fgsm")
ROWS = 64  # images per pass; bounds memory, and affects results only by rounding


@dataclass(frozen=True)
class Trial:
    """The settings of a cell.

    Attributes:
        method: Method of the model, for the name of the file.
        weights: Digest of the model and of its data's settings.
        kind: Kind of noise or attack.
        strength: Standard deviation, half width, count of white; bound in 1/255 for attacks.
        steps: Iterations of an attack.
        noise_seed: Seed of natural noise.
        limit: Largest number of test points; None for all.
        seed: Seed of the model.
    """

    method: str
    weights: str
    kind: Kind
    strength: float = 0.0
    steps: int = 1
    noise_seed: int = 0
    limit: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Strengths:
    """Strengths of noise and attacks; a trial holds only those of its kind.

    Attributes:
        gaussian: Standard deviation, of pixels in [0, 1].
        uniform: Half width.
        poisson: Mean count of a white pixel.
        bound: Bound of the attacks in the table, in 1/255.
        bounds: Bounds of the attacks in the figure.
        steps: Iterations of I-FGSM and MI-FGSM.
        noise_seed: Seed of natural noise.

    Raises:
        FlopsError: If a value is invalid.
    """

    gaussian: float = 0.1
    uniform: float = 0.1
    poisson: float = 100.0
    bound: float = 8.0
    bounds: tuple[float, ...] = ()
    steps: int = 5
    noise_seed: int = 0

    def __post_init__(self) -> None:
        """Validate."""
        for name in ("gaussian", "uniform", "poisson"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise FlopsError(f"--{name} must be greater than 0, not {value:g}")
        for value in (self.bound, *self.bounds):
            if not 0 < value <= 255:
                raise FlopsError(
                    f"bounds are in 1/255 of the pixels' range, such as 8: greater than 0 and at "
                    f"most 255, not {value:g}"
                )
        if self.steps < 1 or not 0 <= self.noise_seed < 2**63:
            raise FlopsError(
                "--steps must be at least 1, --noise-seed at least 0 and less than 2**63, not "
                f"{self.steps} and {self.noise_seed}"
            )

    @property
    def all_bounds(self) -> list[float]:
        """Bounds of the figure and of the table, in ascending order."""
        return sorted({self.bound, *self.bounds})

    def of(self, kind: Kind) -> float:
        """The strength in the table."""
        known = {"clean": 0.0, "gaussian": self.gaussian, "uniform": self.uniform}
        return {**known, "poisson": self.poisson}.get(kind, self.bound)

    def trials(self, run: FinishedRun, limit: int | None) -> list[Trial]:
        """All trials of a model: the columns of the table, then the other bounds."""
        pairs = [(kind, self.of(kind)) for kind in KINDS]
        pairs += [(k, b) for b in self.all_bounds for k in ATTACKS if b != self.bound]
        return [
            Trial(
                run.method,
                run.digest,
                kind,
                strength,
                self.steps if kind in ("i-fgsm", "mi-fgsm") else 1,
                self.noise_seed if kind in ("gaussian", "uniform", "poisson") else 0,
                limit,
                run.seed,
            )
            for kind, strength in pairs
        ]


def of_pixels(model: nn.Module, format: ImageFormat) -> Classifier:
    """The classifier as a function of pixels in [0, 1], including the normalisation."""

    def classify(pixels: Tensor) -> Tensor:
        mean, std = (pixels.new_tensor(v)[:, None, None] for v in (format.mean, format.std))
        return logits(model((pixels - mean) / std))

    return classify


def changed(
    trial: Trial, model: Classifier, pixels: Tensor, labels: Tensor, rows: Tensor
) -> Tensor:
    """The images under the trial's noise."""
    bound, strength, seed = trial.strength / 255, trial.strength, trial.noise_seed
    match trial.kind:
        case "gaussian":
            return gaussian(pixels, rows, strength, seed)
        case "uniform":
            return uniform(pixels, rows, strength, seed)
        case "poisson":
            return poisson(pixels, rows, strength, seed)
        case "fgsm":
            return fgsm(model, pixels, labels, bound)
        case "i-fgsm":
            return i_fgsm(model, pixels, labels, bound, trial.steps)
        case "mi-fgsm":
            return mi_fgsm(model, pixels, labels, bound, trial.steps)
    return pixels


def measure(trial: Trial, run: FinishedRun) -> Result:
    """Accuracy and mean loss of a run's model on the test split.

    Returns:
        points, correct, accuracy, loss; and unmoved, the number of unchanged images. An attack
        leaves an image unchanged if the gradient is 0 in float32, which is not robustness.

    Raises:
        FlopsError: If model or data cannot be read, or the test split is empty.
    """
    device = find_device(run.config.device)
    model, format, data = open_run(run, trial.limit)
    classify, split = of_pixels(model.to(device), format), data.test
    if not len(split):
        raise FlopsError(f"'{run.config.data}' has no test points")
    correct, unmoved, loss = 0, 0, 0.0
    for rows in torch.arange(len(split)).split(ROWS):
        images, labels = split.batch(rows)
        pixels, labels = format.restore(images).to(device), labels.to(device)
        noisy = changed(trial, classify, pixels, labels, rows)
        with torch.inference_mode():
            found = classify(noisy)
            correct += int((found.argmax(-1) == labels).sum())
            loss += float(F.cross_entropy(found, labels, reduction="none").double().sum())
            unmoved += int((noisy == pixels).flatten(1).all(1).sum())
    return {
        "points": len(split),
        "correct": correct,
        "accuracy": correct / len(split),
        "loss": loss / len(split),
        "unmoved": unmoved,
    }
