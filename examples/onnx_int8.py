"""Adapt an int8 model in ONNX Runtime to images that it is bad at, with forward passes only.

The bundled ViT, trained on garments, is exported and its products are quantised to int8, weights
and activations. Then the camera changes: images are faint, in uneven light. In front of the session
comes a small adapter, a 3x3 filter and a 4x4 map of light, 25 numbers that start as the identity.
Behind it comes the linear head of the ViT. Both are learned from 160 images by noise through the
session, which has no backward pass and no parameters. Beside it, backpropagation through the float
original with the same adapter, head, data and steps, and with the head alone.

    python examples/onnx_int8.py [--seeds 3] [--steps 200] [--rates 0.01 0.03 0.1]
    python examples/onnx_int8.py --validation # the choice of learning rates only
    python examples/onnx_int8.py --sigmas     # cosine to the float model's gradient, by sigma

Learning rates are chosen on the validation split with a seed of their own; the test split is used
once per seed. Needs the extras vision and onnx.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.integrations.onnxruntime import OnnxModule
from flops.tasks.classification import bundled_vit
from flops.tasks.data.fashion import fashion_shots

BATCH, QUERIES, CHOICE = 32, 20, 100  # CHOICE: the seed that chooses learning rates
SIDE, KERNEL, MAP = 32, 3, 4
CONTRAST, LIGHT = 0.25, 0.5
PRODUCTS = ["Conv", "Gemm", "MatMul"]  # what is quantised
SIGMAS = (1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)


class Features(nn.Module):
    """The class token of the frozen ViT."""

    def __init__(self):
        super().__init__()
        self.vit = bundled_vit().vit.eval().requires_grad_(False)

    def forward(self, pixels):
        return self.vit(pixels).last_hidden_state[:, 0]


class Coefficients(nn.Module):
    """The adapter's numbers, for every row: noise goes here."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(KERNEL**2 + MAP**2))
        self.value.data[KERNEL**2 // 2] = 1  # leaves images as they are

    def forward(self, pixels):
        return self.value.expand(len(pixels), -1)


class Adapter(nn.Module):
    """Filters each image and adds a map of light."""

    def __init__(self):
        super().__init__()
        self.coefficients = Coefficients()

    def forward(self, pixels):
        filters, light = self.coefficients(pixels).split([KERNEL**2, MAP**2], 1)
        patches = F.unfold(pixels, KERNEL, padding=KERNEL // 2)
        filtered = torch.einsum("bk,bkp->bp", filters, patches).view_as(pixels)
        light = light.view(-1, 1, MAP, MAP)
        return filtered + F.interpolate(light, size=SIDE, mode="bilinear", align_corners=False)


class Adapted(nn.Module):
    """Adapter, frozen model, head."""

    def __init__(self, frozen):
        super().__init__()
        self.adapter, self.frozen = Adapter(), frozen
        self.head = bundled_vit(pretrained_head=True).classifier

    def forward(self, pixels):
        return self.head(self.frozen(self.adapter(pixels)))


def images(split):
    """Normalised as in pretraining, (N, 1, 32, 32)."""
    return F.pad(split.pixels.unsqueeze(1), (2, 2, 2, 2)).float().div(255).sub(0.5).div(0.5)


class Garments(CalibrationDataReader):
    """What the ranges of the activations are taken from."""

    def __init__(self):
        self.parts = iter(images(fashion_shots(shift=False).train).split(32))

    def get_next(self):
        part = next(self.parts, None)
        return None if part is None else {"pixels": part.numpy()}


def export(model, folder):
    """Paths of the float and the int8 model."""
    exported, prepared, int8 = (str(Path(folder) / f"{n}.onnx") for n in ("float", "pre", "int8"))
    logging.getLogger().setLevel(logging.ERROR)  # it names every weight that stays in float
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing; the newer exporter needs onnxscript
        torch.onnx.export(
            model,
            (torch.zeros(2, 1, SIDE, SIDE),),
            exported,
            input_names=["pixels"],
            output_names=["features"],
            dynamic_axes={"pixels": {0: "batch"}, "features": {0: "batch"}},
            dynamo=False,
        )
        quant_pre_process(exported, prepared, skip_symbolic_shape=True)
        quantize_static(prepared, int8, Garments(), per_channel=True, op_types_to_quantize=PRODUCTS)
    return exported, int8


def faint(split):
    """Images that the model is bad at, and their labels."""
    return CONTRAST * images(split) + torch.linspace(-LIGHT, LIGHT, SIDE), split.labels


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


@torch.inference_mode()
def accuracy(model, data):
    pixels, labels = data
    return 100 * (model(pixels).argmax(1) == labels).float().mean().item()


def forward_gradient(model, seed, sigma="auto"):
    """Noise on the adapter's numbers and on the logits."""
    noise = LikelihoodRatio(sigma, "stage", shaping=Shaping())
    groups = [
        Group("adapter.coefficients", noise, QUERIES, name="adapter"),
        Group("head", LikelihoodRatio("auto", shaping=Shaping()), QUERIES),
    ]
    return ForwardGradient(model, loss_fn, groups, seed=seed)


def train(frozen, data, steps, rate, seed, how):
    """The adapted model after some steps: `how` is "forward", "backward" or "head"."""
    model = Adapted(frozen)
    model.adapter.requires_grad_(how != "head")
    fg = forward_gradient(model, seed) if how == "forward" else None
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    order, (pixels, labels) = torch.Generator().manual_seed(seed), data
    for _ in range(steps):
        rows = torch.randperm(len(labels), generator=order)[:BATCH]
        optimizer.zero_grad()
        if fg is not None:
            fg.estimate(pixels[rows], labels[rows], index=rows)
        else:
            loss_fn(model(pixels[rows]), labels[rows]).mean().backward()
        optimizer.step()
        decay.step()
    return model


def compare(models, data, options):
    """One table: each arm with its learning rate, accuracies in float and int8, and differences."""
    train_data, validation, test = data
    before = images(fashion_shots(shift=False).validation), validation[1]
    for name, split in (("before the change", before), ("not adapted", validation)):
        frozen = [accuracy(Adapted(models[kind]), split) for kind in ("float", "int8")]
        print(f"{name}: validation accuracy float {frozen[0]:.1f}, int8 {frozen[1]:.1f}")
    found = {}
    arms = {
        "head alone, backpropagation, float": ("float", "head"),
        "adapter and head, backpropagation, float": ("float", "backward"),
        "adapter and head, forward passes, int8": ("int8", "forward"),
    }
    for arm, (kind, how) in arms.items():
        begin = time.perf_counter()

        def run(rate, seed, kind=kind, how=how):
            return train(models[kind], train_data, options.steps, rate, seed, how)

        rate = options.rates[0]
        if len(options.rates) > 1 or options.validation:
            tried = {rate: accuracy(run(rate, CHOICE), validation) for rate in options.rates}
            rate = max(tried, key=tried.get)
            shown = ", ".join(f"{value:.1f} at {key}" for key, value in tried.items())
            print(f"{arm}: validation accuracy {shown}", flush=True)
        if options.validation:
            continue
        trained = [run(rate, seed) for seed in range(options.seeds)]
        rows = {}
        for box in ("float", "int8"):
            for model in trained:
                model.frozen = models[box]
            rows[box] = [accuracy(model, test) for model in trained]
        seconds = time.perf_counter() - begin
        found[arm] = rows[kind]
        shown = ", ".join(f"{box} {_mean(values)}" for box, values in rows.items())
        print(f"{arm}: learning rate {rate}, test accuracy {shown}, {seconds:.0f} s", flush=True)
    if options.validation:
        return
    _, backward, forward = found.values()
    gaps = [a - b for a, b in zip(forward, backward, strict=True)]
    each = ", ".join(f"{gap:+.1f}" for gap in gaps)
    print(f"forward in int8 minus backpropagation in float: {_mean(gaps)} (by seed: {each})")


def sigmas(models, data, seeds):
    """Cosine of the adapter's gradient to the float model's, by sigma, after four steps."""
    (pixels, labels), rows = data[0], torch.arange(BATCH)
    for sigma in ("auto", *SIGMAS):
        cosines, chosen = [], []
        for seed in range(seeds):
            model = Adapted(models["float"])
            at = rows + BATCH * seed
            loss_fn(model(pixels[at]), labels[at]).mean().backward()
            exact = model.adapter.coefficients.value.grad
            model.frozen = models["int8"]
            fg = forward_gradient(model, seed, sigma)
            for _ in range(4):
                model.zero_grad()
                fg.estimate(pixels[at], labels[at], index=at)
            found = model.adapter.coefficients.value.grad
            cosines.append(F.cosine_similarity(found, exact, 0).item())
            chosen.append(fg.memory["adapter"].get("sigma", (sigma,))[0])
        shown = f" (chose {', '.join(f'{s:.2g}' for s in chosen)})" if sigma == "auto" else ""
        print(f"sigma {sigma}: cosine {_mean(cosines, 3)}{shown}", flush=True)


def _mean(values, digits=1):
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.01, 0.03, 0.1])
    parser.add_argument("--validation", action="store_true", help="leave the test split alone")
    parser.add_argument("--sigmas", action="store_true", help="sweep sigma instead of training")
    options = parser.parse_args()
    original, splits = Features(), fashion_shots(shift=False)
    data = [faint(s) for s in (splits.train, splits.validation, splits.test)]
    with tempfile.TemporaryDirectory() as folder:
        _, int8 = export(original, folder)
        models = {"float": original, "int8": OnnxModule(int8)}
        print(models["int8"], f"parameters: {len(list(models['int8'].parameters()))}")
        if options.sigmas:
            sigmas(models, data, options.seeds)
        else:
            compare(models, data, options)


if __name__ == "__main__":
    main()
