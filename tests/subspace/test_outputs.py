"""Shaped noise that sees the outputs: second moments, mean Jacobian, and derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.subspace.mean_jacobian import MeanJacobian
from tests.conftest import exact, flat, gradients
from tests.statistical.helpers import assert_mean


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Reads(nn.Module):
    """A perturbed vector, and logits that read it."""

    def __init__(self, size: int, classes: int, bend: float = 0.0) -> None:
        super().__init__()
        self.target = nn.Linear(5, size)
        self.reads = nn.Parameter(torch.randn(size, classes) / size**0.5, requires_grad=False)
        self.bend = bend

    def forward(self, x: Tensor) -> Tensor:
        h = self.target(x)
        return (h + self.bend * h * x.mean(1, keepdim=True).sign()) @ self.reads


def problem(size: int = 12, classes: int = 4, bend: float = 0.0) -> tuple[Reads, Tensor, Tensor]:
    torch.manual_seed(1)
    return (
        Reads(size, classes, bend).double(),
        torch.randn(16, 5).double(),
        torch.randint(0, classes, (16,)),
    )


def engine(model: Reads, queries: int, sigma: float = 1e-6, **options: Any) -> ForwardGradient:
    estimator = LikelihoodRatio(sigma, shaping=Shaping(**options))
    return ForwardGradient(model, entropy, Group(model.target, estimator, queries, name="site"))


def step(fg: ForwardGradient, x: Tensor, y: Tensor) -> Tensor:
    fg.model.zero_grad()
    fg.estimate(x, y)
    return flat(gradients(fg.model))


def test_the_moment_is_that_of_gradients_with_other_residuals() -> None:
    """Sum over points of n^2 / e J^T R J, e the energy of J under R, for any noise."""
    model, x, y = problem()
    n, found = 5, []
    with torch.no_grad():
        unit = F.normalize(model(x).softmax(1) - F.one_hot(y, 4), dim=1)
    moment = unit.T @ unit / len(x)
    truth = model.reads @ moment @ model.reads.T
    fg = engine(model, n, warm=10)
    for _ in range(400):
        fg.memory["site"] = {}  # every step is a first one
        step(fg, x, y)
        (kept,) = fg.memory["site"]["moments"]
        # Weights are by the energy that was seen, which is noisy: compare directions.
        found.append(kept["channels"]["matrix"] / kept["channels"]["matrix"].trace())
    mean = torch.stack(found).mean(0)
    cosine = float((mean * truth).sum() / (mean.norm() * truth.norm()))
    assert cosine > 0.99
    (_, vectors), (true, known) = torch.linalg.eigh(mean), torch.linalg.eigh(truth)
    assert true[-4] < 1e-12 * true[-1]  # rank 3: residuals sum to zero
    assert float((vectors[:, -3:].T @ known[:, -3:]).square().sum()) > 2.97


def test_a_site_may_be_narrower_than_the_outputs() -> None:
    model, x, y = problem(size=3, classes=7)
    fg = engine(model, 4)
    truth = flat(exact(model, entropy, x, y))
    for _ in range(4):
        found = step(fg, x, y)
    assert float((found - truth).norm() / truth.norm()) < 1e-3


def test_derivatives_have_no_curvature_of_the_loss() -> None:
    """The model is linear, so that sigma may be as large as one likes; losses alone are bent."""
    model, x, y = problem(size=6)
    truth = flat(exact(model, entropy, x, y))
    errors = {}
    for outputs in (True, False):
        fg = engine(model, 8, sigma=10.0, outputs=outputs)
        errors[outputs] = min(
            float((step(fg, x, y) - truth).norm() / truth.norm()) for _ in range(30)
        )
    assert errors[True] < 1e-6
    assert errors[False] > 0.1


def test_what_points_have_in_common_predicts_their_gradients() -> None:
    """The Jacobian is the same for all points: soon one query a point is enough."""
    model, x, y = problem(size=40, classes=3)
    truth = flat(exact(model, entropy, x, y))
    fg, blind = engine(model, 2), engine(model, 2, outputs=False)
    for _ in range(25):
        found = step(fg, x, y)
        other = step(blind, x, y)
    assert float((found - truth).norm() / truth.norm()) < 0.02
    assert float((other - truth).norm() / truth.norm()) > 0.2
    report = fg.estimate(x, y)
    assert report.shaping["site"].predicted == 1.0
    kept = fg.memory["site"]["mean_jacobian"]
    torch.testing.assert_close(kept["values"], model.reads.T.detach(), rtol=0, atol=0.02)
    assert kept["measured"] is None  # nobody measured the same direction


def test_points_that_differ_are_noise_to_the_mean() -> None:
    """Half of the points have 1.5 times, the others half of the Jacobian."""
    model, x, y = problem(size=12, classes=3, bend=0.5)
    fg = engine(model, 8)
    for _ in range(60):
        step(fg, x, y)
    signs = 1 + 0.5 * x.mean(1).sign()
    mean = (signs.mean() * model.reads.T).detach()
    kept = fg.memory["site"]["mean_jacobian"]
    assert float((kept["values"] - mean).norm() / mean.norm()) < 0.15
    own = float(signs.var() / signs.square().mean())
    assert kept["measured"] == pytest.approx(own, rel=0.2)


def test_the_estimate_is_unbiased_if_asked() -> None:
    model, x, y = problem(size=6, classes=3)
    truth = flat(exact(model, entropy, x, y))
    fg = engine(model, 6, unbiased=True)
    for _ in range(3):
        step(fg, x, y)
    memory, samples = fg.memory["site"], []
    assert "mean_jacobian" in memory
    for seed in range(300):
        fg.memory["site"], fg.seed = dict(memory), seed
        samples.append(step(fg, x, y))
    assert_mean(torch.stack(samples), truth)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_loss_that_detaches_outputs_is_learned_from_losses(share: float) -> None:
    """Its derivative by autograd is not that of the loss."""
    model, x, y = problem()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        mixed = share * outputs + (1 - share) * outputs.detach()
        return entropy(mixed, targets)

    both = []
    for outputs in (True, False):
        torch.manual_seed(0)
        estimator = LikelihoodRatio(1e-6, shaping=Shaping(outputs=outputs, warm=4))
        fg = ForwardGradient(model, loss, Group(model.target, estimator, 6, name="site"))
        both.append([step(fg, x, y) for _ in range(3)])
    for found, other in zip(*both, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-9)


def test_a_wide_site_keeps_few_rows() -> None:
    """Fewer rows than points fit: the mean is finite, and what is kept is bounded."""
    size = 150_000  # 14 rows of a site are kept, of 16 points
    model, x, y = problem(size=8, classes=2)
    model.target = nn.Linear(5, size).double()
    model.reads = nn.Parameter(torch.randn(size, 2).double() / size**0.5, requires_grad=False)
    fg = engine(model, 2)
    for _ in range(2):
        assert bool(step(fg, x, y).isfinite().all())
    kept = fg.memory["site"]["mean_jacobian"]
    assert bool(kept["values"].isfinite().all())
    assert kept["z"].numel() <= max(1 << 21, 2 * size)


@pytest.mark.parametrize("size", [7, 2049])
def test_what_is_kept_is_bounded(size: int) -> None:
    """Two points and two queries: 40 steps are no 160 rows, and nothing underflows."""
    model, x, y = problem(size=8, classes=2)
    model.target = nn.Linear(5, size).double()
    model.reads = nn.Parameter(torch.randn(size, 2).double() / size**0.5, requires_grad=False)
    fg = engine(model, 2)
    for _ in range(80 if size < 2048 else 40):
        found = step(fg, x[:2], y[:2])
    assert bool(found.isfinite().all())
    kept = fg.memory["site"]["mean_jacobian"]
    if size > 2048:
        assert 0 < len(kept["z"]) < 125
        assert float(kept["count"].min()) > 1e-3
    else:
        assert len(kept["z"]) == 0
        assert kept["gram"].shape == (size, size)


def test_other_classes_start_again() -> None:
    mean = MeanJacobian.from_memory(None, "words", 3, space())
    assert mean.values.shape == (3, 7)
    kept = dict(vars(mean)) | {"measured": 0.7}
    assert MeanJacobian.from_memory(kept, "words", 3, space()).measured == 0.7
    assert MeanJacobian.from_memory(kept, "others", 3, space()).measured is None
    assert MeanJacobian.from_memory(kept, "words", 2, space()).values.shape == (2, 7)


def space() -> Any:
    from flops.subspace.basis import Grid, Space

    return Space([Grid(0, 1, 7)], 1, "gaussian", torch.float64, 1e-3, ["a"], (0, 0, 0), [0, 1])


def test_a_resumed_run_is_the_unbroken_one() -> None:
    model, x, y = problem()
    fg = engine(model, 4)
    for _ in range(4):
        step(fg, x, y)
    other = engine(model, 4)
    other.load_state_dict(fg.state_dict())
    for _ in range(3):
        assert torch.equal(step(fg, x, y), step(other, x, y))


def test_the_report_says_how_many_points_had_a_prediction() -> None:
    model, x, y = problem()
    seeing, blind = engine(model, 6), engine(model, 6, outputs=False, warm=1)
    shares: dict[str, list[float]] = {"seeing": [], "blind": []}
    for _ in range(3):
        for name, fg in (("seeing", seeing), ("blind", blind)):
            shares[name].append(fg.estimate(x, y).shaping["site"].predicted)
    assert shares["blind"] == [0, 0, 0]
    assert shares["seeing"][0] == 0  # nothing is known before the first step
    assert shares["seeing"][2] > 0
