"""Prompts from numbers, the objectives that ask about them, and the shots they are tuned on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from flops import LikelihoodRatio
from flops.blackbox.jacobian_memory import RecycledLikelihoodRatio
from flops.blackbox.objective import Candidates
from flops.blackbox.tuner import Tuner
from flops.errors import FlopsError
from flops.tasks.data.few_shot import FewShots, few_shots
from flops.tasks.models.clip import PromptedClip
from flops.tasks.prompts.backpropagation import Backpropagation
from flops.tasks.prompts.prompt import (
    LocalObjective,
    PromptSpace,
    ServiceObjective,
    outputs_of,
    prompts_of,
    upload,
)
from flops.tasks.tuning.methods import Recipe, stepper
from tests.support.serving import Server


def space(**options) -> PromptSpace:
    given = {"text_tokens": 3, "image_tokens": 2, "text_dimensions": 5, "image_dimensions": 7}
    return PromptSpace(64, 64, **(given | options))


@pytest.fixture(scope="module")
def model() -> PromptedClip:
    return PromptedClip.load()


@pytest.fixture(scope="module")
def shots() -> FewShots:
    return few_shots(shots=2, limit=30)


@pytest.fixture(scope="module")
def local(model, shots) -> LocalObjective:
    return LocalObjective(model, model.prepare(shots.pixels), shots.labels, space())


def test_shapes_of_numbers_and_prompts() -> None:
    many = space()
    assert many.parts == {"text": (3, 5), "image": (2, 7)}
    assert many.size == len(many.start()) == 29
    text, image = many.prompts(torch.randn(4, 29))
    assert (text.shape, image.shape) == ((4, 3, 64), (4, 2, 64))
    one = space(single=True)
    assert one.parts == {"text": (1, 5), "image": (1, 7)}
    assert one.size == 12
    text, image = one.prompts(torch.randn(4, 12))
    assert (text.shape, image.shape) == ((4, 3, 64), (4, 2, 64))
    assert float((text[:, 0] - text[:, 1]).norm()) > 0.1  # W makes each of them another
    for none, kept in (("text_tokens", "image"), ("image_tokens", "text")):
        half = space(**{none: 0})
        assert list(half.parts) == [kept]
        shapes = [part.shape[1] for part in half.prompts(torch.randn(4, half.size))]
        assert shapes == [half.text_tokens, half.image_tokens]
    nothing = space(text_tokens=0, image_tokens=0)
    assert (nothing.size, nothing.parts, nothing.projections) == (0, {}, {})
    assert [p.shape for p in nothing.prompts(torch.zeros(4, 0))] == [(4, 0, 64), (4, 0, 64)]


def test_the_papers_sizes() -> None:
    paper = PromptSpace(512, 768)
    assert paper.parts == {"text": (12, 500), "image": (10, 500)}
    assert PromptSpace(512, 768, single=True).size == 1000


def test_prompts_are_numbers_times_a_frozen_projection_of_the_right_scale() -> None:
    large = space(text_dimensions=200, image_dimensions=300)
    z = torch.randn(50, large.size)
    text, image = large.prompts(z)
    torch.testing.assert_close(
        text[7, 1], z[7, 200:400] @ large.projections["text"], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        image[7, 1], z[7, -300:] @ large.projections["image"], rtol=1e-5, atol=1e-6
    )
    assert float(text.std()) == pytest.approx(0.02, rel=0.1)
    assert float(image.std()) == pytest.approx(0.3, rel=0.1)
    assert float(large.start().std()) == pytest.approx(0.3, rel=0.1)
    again, other = space(seed=0), space(seed=1)
    assert torch.equal(again.start(), space().start())
    assert torch.equal(again.projections["text"], space().projections["text"])
    assert not torch.equal(again.start(), other.start())
    assert not torch.equal(again.projections["text"], other.projections["text"])
    assert not torch.equal(again.projections["text"][:, :7], again.projections["image"][:5, :7])


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(FlopsError, match="must not be negative"):
        space(text_tokens=-1)
    with pytest.raises(FlopsError, match="at least 1"):
        space(image_dimensions=0)


def test_one_vector_for_all_rows_is_one_prompt() -> None:
    start = space().start()
    text, image, of = prompts_of(space(), start.expand(6, -1))
    assert (len(text), len(image), of.tolist()) == (1, 1, [0] * 6)
    apart = prompts_of(space(), start.repeat(6, 1))
    assert (len(apart[0]), apart[2].tolist()) == (6, list(range(6)))
    torch.testing.assert_close(apart[0][3], text[0])
    assert len(prompts_of(space(), start.unsqueeze(0))[0]) == 1


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("prompt")) as running:
        yield running


def test_a_service_says_what_the_model_says(server, local, shots) -> None:
    source = torch.Generator().manual_seed(1)
    with server.client() as client:
        stored = upload(client, shots.pixels, client.info()["limits"])
        asked = ServiceObjective(client, stored, shots.labels, space())
        start = space().start()
        apart = start + 0.3 * torch.randn(20, len(start), generator=source)
        points = torch.randperm(len(shots.labels), generator=source)[:20]
        for number, (rows, kind) in enumerate(
            ((apart, "query"), (start.expand(20, -1), "clean"), (apart, "embed"))
        ):
            candidates = Candidates(rows, points, kind)
            found = asked.evaluate(candidates, f"prompt-{number}")
            truth = local.evaluate(candidates, "")
            shape = (20, 12) if kind == "embed" else (20, 2)
            assert found.columns.shape == truth.columns.shape == shape
            torch.testing.assert_close(found.columns, truth.columns, rtol=1e-4, atol=1e-4)
            texts = 10 if kind == "clean" else 200
            assert found.cost["texts"] == truth.cost["texts"] == texts
            assert found.cost["images"] == truth.cost["images"] == 20
            assert found.cost["replays"] == 0
        again = asked.evaluate(candidates, "prompt-2")
        assert again.cost["replays"] == 1
        assert torch.equal(again.columns, found.columns)
        nothing = space(text_tokens=0, image_tokens=0)
        manual = ServiceObjective(client, asked.points, shots.labels, nothing)
        candidates = Candidates(nothing.start().expand(20, -1), points, "test")
        found = manual.evaluate(candidates, "manual")
        bare = LocalObjective(local.model, local.images, local.labels, nothing)
        torch.testing.assert_close(
            found.columns, bare.evaluate(candidates, "").columns, rtol=1e-4, atol=1e-4
        )


def test_columns_are_cross_entropy_and_hits(local) -> None:
    points = torch.arange(50)
    theta = space().start().expand(50, -1)
    logits = local.logits(theta, points)
    found = local.evaluate(Candidates(theta, points, "embed"), "").columns
    expected = -F.log_softmax(logits, 1)[points, local.labels[points]]
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-4, atol=1e-5)
    hits = (logits.argmax(1) == local.labels[points]).float()
    assert torch.equal(found[:, 1], hits)
    assert 0 < float(hits.mean()) < 1
    torch.testing.assert_close(found[:, 2:], logits, rtol=1e-4, atol=1e-4)


def test_logits_are_shown_to_whoever_reads_them_and_make_the_loss(local) -> None:
    points = torch.arange(50)
    theta = space().start().expand(50, -1)
    shown = replace(local, shown=True)
    for kind, width in (("query", 12), ("clean", 12), ("validation", 2), ("test", 2)):
        assert local.evaluate(Candidates(theta, points, kind), "").columns.shape == (50, 2)
        assert shown.evaluate(Candidates(theta, points, kind), "").columns.shape == (50, width)
    answer = shown.evaluate(Candidates(theta, points), "").columns
    outputs = outputs_of(local.labels)
    view = outputs.view(answer, points)
    read = view.clean
    torch.testing.assert_close(read.mean(1), torch.zeros(50), rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.loss(read, points), answer[:, 0], rtol=1e-4, atol=1e-5)
    expected = answer[:, 2:].softmax(1) - F.one_hot(local.labels[points], 10)
    torch.testing.assert_close(view.residuals, expected, rtol=1e-3, atol=1e-5)


def test_backpropagation_steps_along_the_gradient(local) -> None:
    start = space().start()
    method = Backpropagation(start, 20, local, Recipe("bp", 0.1, batch=20))
    assert method.step_cost() == 0
    assert list(method.stepping()) == []
    theta = start.clone().requires_grad_()
    text, image = space().prompts(theta.unsqueeze(0))
    features = local.model.image_features(local.images[:20], image.expand(20, -1, -1))
    words = local.model.text_features(text)[0]
    logits = local.model.model.logit_scale.exp() * features @ words.T
    F.cross_entropy(logits, local.labels[:20]).backward()
    assert theta.grad is not None
    assert float(theta.grad.norm()) > 1e-3
    torch.testing.assert_close(method.theta.grad, theta.grad, rtol=1e-3, atol=1e-5)
    moved = method.parameters - start  # Adam's first step is the step size in every coordinate
    torch.testing.assert_close(moved, -0.1 * theta.grad.sign(), rtol=1e-2, atol=1e-3)
    assert method.local.model.model.logit_scale.grad is None


def test_methods_are_configurations_of_the_tuner() -> None:
    start, parts = space().start(), space().parts

    def made(name: str):
        outputs = outputs_of(torch.zeros(20, dtype=torch.long))
        return stepper(Recipe(name, 0.1, 0.05, 8, 4, 3), start, 20, parts, outputs=outputs)

    assert made("manual") is None
    kinds = {
        "lr": ("gaussian", "Equal", False),
        "ops-lr": ("gaussian", "Gaussian", False),
        "shaped-lr": ("gaussian", "Gaussian", True),
        "spsa": ("rademacher", "Equal", False),
        "ops-spsa": ("rademacher", "Gaussian", False),
    }
    for name, (noise, allocator, shaped) in kinds.items():
        tuner = made(name)
        assert isinstance(tuner, Tuner)
        options = tuner.group.estimator
        assert isinstance(options, RecycledLikelihoodRatio) == shaped
        assert isinstance(options, LikelihoodRatio)  # SPSA on an identity is one with pairs
        assert options.noise == noise
        assert (options.baseline == "antithetic") == ("spsa" in name)
        assert type(tuner.allocator).__name__ == allocator
        assert (options.shaping is not None) == shaped
        assert (options.sigma, tuner.seed, tuner.batch) == (0.05, 3, 4)
        assert tuner.optimizer.defaults["lr"] == 0.1
        assert tuner.step_cost() == 4 + 4 * 8
    with pytest.raises(FlopsError, match="bp needs the model itself"):
        made("bp")


def test_embedded_shots() -> None:
    whole = few_shots()
    sizes = [len(p) for p in (whole.points.train, whole.points.validation, whole.points.test)]
    assert sizes == [160, 160, 1000]
    assert len(whole.pixels) == len(whole.labels) == 1320
    few = few_shots(shots=3, limit=40)
    assert [len(p) for p in (few.points.train, few.points.test)] == [30, 40]
    assert torch.bincount(few.labels[few.points.train]).tolist() == [3] * 10
    assert torch.bincount(few.labels[few.points.validation]).tolist() == [16] * 10
    places = torch.cat([few.points.train, few.points.validation, few.points.test])
    assert places.tolist() == list(range(len(few.labels)))
    for wrong in (0, 17):
        with pytest.raises(FlopsError, match=f"at most 16 shots per class, not {wrong}"):
            few_shots(shots=wrong)


def test_shots_of_a_folder_of_images(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    values = {"boot": 30, "coat": 120, "shirt": 210}
    for split, count in (("train", 6), ("validation", 5), ("test", 4)):
        for name, value in values.items():
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                image.new("L", (12, 12), value + i).save(folder / f"{i}.png")
    found = few_shots(str(tmp_path), shots=3, channels=1, size=8)
    assert found.classes == ("boot", "coat", "shirt")
    points = found.points
    assert [len(p) for p in (points.train, points.validation, points.test)] == [9, 9, 12]
    assert found.labels[points.train].tolist() == [0, 1, 2] * 3
    assert found.pixels.dtype == torch.uint8
    assert found.pixels.shape == (30, 8, 8, 1)
    level = found.pixels.float().mean((1, 2, 3))
    expected = torch.tensor([30.0, 120.0, 210.0])[found.labels]
    assert bool(((level - expected >= -1) & (level - expected <= 7)).all())
    again = few_shots(str(tmp_path), shots=3, channels=1, size=8)
    assert torch.equal(found.pixels, again.pixels)
    other = few_shots(str(tmp_path), shots=3, channels=1, size=8, seed=1)
    assert not torch.equal(found.pixels, other.pixels)
    assert len(few_shots(str(tmp_path), shots=3, channels=1, size=8, limit=5).points.test) == 5
    colour = few_shots(str(tmp_path), shots=1, channels=3, size=10)
    assert colour.pixels.shape == (18, 10, 10, 3)
    with pytest.raises(FlopsError):
        few_shots(str(tmp_path / "nowhere"), shots=3)


def test_points_that_do_not_fit_one_upload_are_asked_set_by_set(server, local, shots) -> None:
    limits = {"upload_bytes": 4096 + 784 * 80, "points": 100_000}
    with server.client() as client:
        stored = upload(client, shots.pixels, limits)
        assert (len(stored.names), stored.size) == (3, 80)
        asked = ServiceObjective(client, stored, shots.labels, space())
        rows = space().start() + 0.1 * torch.randn(6, space().size)
        candidates = Candidates(rows, torch.tensor([3, 150, 200, 79, 80, 4]))
        found, truth = asked.evaluate(candidates, "sets"), local.evaluate(candidates, "")
        torch.testing.assert_close(found.columns, truth.columns, rtol=1e-4, atol=1e-4)
        assert found.cost == {"texts": 60, "images": 6, "replays": 0}
        assert asked.evaluate(candidates, "sets").cost["replays"] == 3
    with pytest.raises(FlopsError, match="less than one image"):
        upload(client, shots.pixels, limits | {"upload_bytes": 4100})
