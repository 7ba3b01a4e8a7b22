"""Training around an int8 session of the bundled ViT, and sigma in front of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops import JVP, SPSA, Exact, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.errors import BackwardError
from flops.integrations.onnxruntime import OnnxModule
from flops.tasks.data.fashion import fashion_shots
from tests.conftest import cosine, flat, gradients
from tests.support.onnx_models import Counting, Logits, exported, images, quantised

SHOTS = fashion_shots(shift=False)
STEPS, BATCH = 12, 32


def faint(pixels: Tensor) -> Tensor:
    return 0.2 * pixels + 0.3


@pytest.fixture(scope="module")
def original() -> Logits:
    return Logits()


@pytest.fixture(scope="module")
def path(original: Logits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(original, tmp_path_factory.mktemp("onnx") / "vit.onnx")


@pytest.fixture(scope="module")
def int8(path: Path) -> OnnxModule:
    return OnnxModule(quantised(path))


class Contrast(nn.Module):
    """Gain and offset of every row."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.value.expand(len(pixels), -1)


class Adapted(nn.Module):
    """Contrast before the frozen model, a linear head behind it."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.contrast, self.frozen, self.head = Contrast(), frozen, nn.Linear(10, 10)
        nn.init.eye_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        gain, offset = self.contrast(pixels).view(-1, 2, 1, 1, 1).unbind(1)
        return self.head(self.frozen(gain * pixels + offset))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def groups(sigma: float | str = "auto", queries: int = 8) -> list[Group]:
    noise = LikelihoodRatio(sigma, baseline="antithetic")  # type: ignore[arg-type]
    head = LikelihoodRatio("auto", shaping=Shaping())
    return [Group("contrast", noise, queries), Group("head", head, queries)]


@torch.inference_mode()
def accuracy(model: nn.Module) -> float:
    found = model(faint(images(SHOTS.validation))).argmax(1)
    return float((found == SHOTS.validation.labels).float().mean())


def test_the_float_export_equals_torch(original: Logits, path: Path) -> None:
    x = images(SHOTS.test)[:20]
    torch.testing.assert_close(OnnxModule(path)(x), original(x), rtol=1e-4, atol=1e-4)


def test_the_int8_session_is_close_and_a_staircase(original: Logits, int8: OnnxModule) -> None:
    x = images(SHOTS.test)[:50]
    exact, found = original(x), int8(x)
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.2
    assert float((found.argmax(1) == exact.argmax(1)).float().mean()) > 0.9
    near = x + 1e-4
    assert float((int8(near) - found).norm()) > 20 * float((original(near) - exact).norm())


def test_a_fixed_batch_of_the_vit(original: Logits, tmp_path: Path) -> None:
    module = OnnxModule(exported(original, tmp_path / "eight.onnx", batch=8))
    x = images(SHOTS.test)[:11]
    assert module.batch == 8
    torch.testing.assert_close(module(x), original(x), rtol=1e-4, atol=1e-4)


def test_dynamic_quantisation_runs_row_by_row(path: Path) -> None:
    """Its scales are those of a batch: a row would depend on the rows beside it."""
    file, x = quantised(path, dynamic=True), images(SHOTS.test)[:6]
    module = OnnxModule(file)
    assert module.batch == OnnxModule(file.read_bytes()).batch == 1
    assert OnnxModule(module.session).batch == 1
    assert torch.equal(module(x)[:2], module(x[:2]))
    together = OnnxModule(file, batch=6)
    assert not torch.equal(together(x)[:2], module(x[:2]))


def test_training_in_front_of_int8_raises_accuracy(int8: OnnxModule) -> None:
    model = Adapted(int8)
    fg = ForwardGradient(model, loss, groups(), seed=0)
    optimizer = torch.optim.Adam(model.contrast.parameters(), 0.3)
    before, x, y = accuracy(model), faint(images(SHOTS.train)), SHOTS.train.labels
    for step in range(STEPS):
        rows = torch.arange(BATCH) + BATCH * (step % 5)
        optimizer.zero_grad()
        fg.estimate(x[rows], y[rows], index=rows)
        optimizer.step()
    assert float(model.contrast.value.detach()[0]) > 2  # the contrast that was taken away is 5
    assert accuracy(model) > before + 0.2


def test_chunks_do_not_matter(int8: OnnxModule) -> None:
    x, y, found = faint(images(SHOTS.train))[:6], SHOTS.train.labels[:6], []
    for chunk in (37, 1000):
        model = Adapted(int8)
        ForwardGradient(model, loss, groups(), seed=0, chunk=chunk).estimate(x, y)
        found.append(flat(gradients(model)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_the_head_does_not_run_the_session_again(path: Path) -> None:
    """Queries behind the session replay its clean outputs."""
    session = Counting(str(path))
    x, y, model = (
        faint(images(SHOTS.train))[:6],
        SHOTS.train.labels[:6],
        Adapted(OnnxModule(session)),
    )
    model.contrast.requires_grad_(False)
    fg = ForwardGradient(model, loss, groups()[1], seed=0)
    fg.estimate(x, y)
    session.rows.clear()
    fg.estimate(x, y)
    assert session.rows == [6]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, of forward mode
def test_backpropagation_through_it_says_why_not(int8: OnnxModule) -> None:
    x, y = faint(images(SHOTS.train))[:4], SHOTS.train.labels[:4]
    assert not list(int8.parameters())
    for estimator in (Exact(), JVP()):
        model = Adapted(int8)
        fg = ForwardGradient(model, loss, Group(model, estimator, 2))
        with pytest.raises(BackwardError, match=r"train that with flops\.ForwardGradient"):
            fg.estimate(x, y)
        assert not gradients(model)
    with pytest.raises(BackwardError):
        ForwardGradient(Adapted(int8), loss, groups(), seed=0).estimate(x, y, exact=True)
    model = Adapted(int8)
    ForwardGradient(model, loss, Group(model, SPSA(0.1), 4)).estimate(x, y)
    assert len(gradients(model)) == 3


@pytest.mark.slow
def test_automatic_sigma_is_near_the_best_of_a_sweep(original: Logits, int8: OnnxModule) -> None:
    """By the cosine to the exact gradient of the float model."""
    x, y = faint(images(SHOTS.train))[:BATCH], SHOTS.train.labels[:BATCH]
    float_model = Shifted(original)
    loss(float_model(x), y).mean().backward()
    exact = flat(gradients(float_model))

    def mean_cosine(sigma: float | str) -> float:
        total = 0.0
        for seed in range(2):
            model = Shifted(int8)
            noise = LikelihoodRatio(sigma, shaping=Shaping())  # type: ignore[arg-type]
            fg = ForwardGradient(model, loss, Group("shift", noise, 20), seed=seed)
            for _ in range(2):
                model.zero_grad()
                fg.estimate(x, y)
            total += cosine(flat(gradients(model)), exact) / 2
        return total

    found = mean_cosine("auto")
    swept = {sigma: mean_cosine(sigma) for sigma in (1e-3, 0.03, 0.1, 0.3)}
    assert found > 0.95 * max(swept.values()), (found, swept)
    assert swept[1e-3] < 0.5 * found  # the default of float models


class Shifted(nn.Module):
    """An 8x8 map of light, added to every image before the frozen model."""

    def __init__(self, frozen: nn.Module) -> None:
        super().__init__()
        self.shift, self.frozen = Light(), frozen

    def forward(self, pixels: Tensor) -> Tensor:
        light = self.shift(pixels).view(-1, 1, 8, 8)
        return self.frozen(pixels + F.interpolate(light, size=32, mode="bilinear"))


class Light(nn.Module):
    """The map, for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(64))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.value.expand(len(pixels), -1)
