"""Shaped noise: the subspace is found, the fit is exact in it, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flops import ForwardGradient, Group, LikelihoodRatio, diagnose
from flops.allocators import Gaussian
from flops.engine.meetings import Work, at_once, completed
from flops.subspace.basis import leading
from flops.subspace.config import Shaping
from flops.subspace.measurements import Asked, ask
from flops.subspace.moments import DENSE, Change, Factor, Grid, Moments
from flops.subspace.posterior import posterior
from tests.conftest import cosine, exact, flat, gradients, squared
from tests.statistical.helpers import assert_mean


class Planted(nn.Module):
    """A site of 12 channels of which the loss reads three combinations."""

    def __init__(self, tokens: int = 1) -> None:
        super().__init__()
        self.target = nn.Linear(4, 12)
        self.register_buffer("reads", torch.randn(12, 3))
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        out = self.target(x) @ self.reads  # (B, [T,] 3)
        return out if self.tokens == 1 else out[:, 0]  # as with a classification token


def planted(tokens: int = 1) -> tuple[Planted, Tensor, Tensor]:
    x = torch.randn(6, 4) if tokens == 1 else torch.randn(6, tokens, 4)
    return Planted(tokens).double(), x.double(), torch.randn(6, 3).double()


def engine(model: nn.Module, queries: int, shaping: Shaping | None = None, **options):
    estimator = LikelihoodRatio(1e-7, shaping=shaping or Shaping())
    groups = [Group(model.target, estimator, queries=queries, name="site")]
    return ForwardGradient(model, squared, groups, **options)


def step(fg: ForwardGradient, x: Tensor, y: Tensor) -> Tensor:
    fg.model.zero_grad()
    fg.estimate(x, y)
    return flat(gradients(fg.model))


def known(channels: Tensor, **more: object) -> dict[str, object]:
    """Memory of a flat site of which these channel moments are known."""
    none = channels[:, :0]
    factor = {"matrix": channels, "vectors": none, "values": none[0], "trace": 0.0}
    one = {
        "matrix": torch.ones(1, 1).double(),
        "vectors": none[:1],
        "values": none[0],
        "trace": 0.0,
    }
    moments = [{"positions": one, "channels": factor}]
    return {"moments": moments, "shaped_steps": 10, "positions": [1], **more}


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_planted_subspace_is_found_and_the_estimate_becomes_exact(tokens: int) -> None:
    """Rank 3, found from the queries alone; then three shaped queries are all it takes."""
    model, x, y = planted(tokens)
    fg = engine(model, 8)
    truth = flat(exact(model, squared, x, y))
    errors = [float((step(fg, x, y) - truth).norm() / truth.norm()) for _ in range(150)]
    memory = fg.memory["site"]
    assert errors[0] > 0.1  # isotropic: far off
    assert max(errors[-5:]) < 1e-5  # curvature of the loss at sigma = 1e-7
    assert memory["captured"] > 0.999
    fg.model.zero_grad()
    report = fg.estimate(x, y, exact=True)
    assert report.shaping["site"].explore < 0.3  # one of four draws, rounded up
    assert report.shaping["site"].sites[0].captured > 0.999
    assert report.shaping["site"].sites[0].site == "target"
    assert report.cosine["site"] > 0.9999


def test_in_the_right_subspace_the_estimate_is_exact() -> None:
    """Three unknowns and three shaped queries per point: nothing is left to chance."""
    model, x, y = planted()
    fg = engine(model, 4)
    fg.memory["site"] = known(model.reads @ model.reads.T, captured=1.0)
    truth = flat(exact(model, squared, x, y))
    assert float((step(fg, x, y) - truth).norm() / truth.norm()) < 1e-5


def test_with_pairs_it_is_exact_to_rounding() -> None:
    """Pairs cancel the curvature, so that sigma may be large and rounding small."""
    model, x, y = planted()
    estimator = LikelihoodRatio(1e-3, baseline="antithetic", shaping=Shaping())
    fg = ForwardGradient(model, squared, [Group(model.target, estimator, 8, name="site")])
    fg.memory["site"] = known(model.reads @ model.reads.T, captured=1.0)
    truth = flat(exact(model, squared, x, y))
    assert float((step(fg, x, y) - truth).norm() / truth.norm()) < 1e-12


def test_a_learned_subspace_converges_towards_rounding() -> None:
    model, x, y = planted()
    estimator = LikelihoodRatio(1e-3, baseline="antithetic", shaping=Shaping())
    fg = ForwardGradient(model, squared, [Group(model.target, estimator, 16, name="site")])
    truth = flat(exact(model, squared, x, y))
    errors = [float((step(fg, x, y) - truth).norm() / truth.norm()) for _ in range(220)]
    assert errors[0] > 0.1
    assert max(errors[-5:]) < 1e-7


def test_captured_energy_is_the_true_one() -> None:
    model, x, y = planted()
    fg = engine(model, 8, Shaping(explore=0.5))
    # A wrong subspace, the first four channels: what share of the gradient do they hold?
    wrong = torch.diag(torch.tensor([1.0] * 4 + [0.0] * 8)).double()
    gradient = (2 * (model(x) - y) @ model.reads.T).detach()
    share = float(gradient[:, :4].square().sum() / gradient.square().sum())
    seen = []
    for seed in range(150):
        fg.seed = seed
        fg.memory["site"] = known(wrong)
        step(fg, x, y)
        seen.append(float(fg.memory["site"]["captured"]))
    assert sum(seen) / len(seen) == pytest.approx(share, abs=0.05)


def test_captured_energy_of_a_learned_subspace_is_the_true_one() -> None:
    """Running estimate against the projection of the exact gradient on what was asked."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 10)).double()
    x, y = torch.randn(16, 6).double(), torch.randn(16, 10).double()
    estimator = LikelihoodRatio(1e-7, shaping=Shaping())
    groups = [
        Group(model[0], estimator, queries=8, name="site"),
        Group(model[2], LikelihoodRatio(), queries=2),
    ]
    fg = ForwardGradient(model, squared, groups)
    for _ in range(40):
        fg.model.zero_grad()
        report = fg.estimate(x, y)
    hidden = model[0](x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(squared(model[2](model[1](hidden)), y).sum(), hidden)
    grids = [Grid(0, 1, 40)]
    memory = fg.memory["site"]
    directions = leading(grids, [Moments.from_memory(memory["moments"][0], torch.float64)], 8)
    c = directions.coordinates(gradient)[:, : round(report.shaping["site"].k)]
    true = float(c.square().sum() / gradient.square().sum())
    assert 0.3 < true < 0.98
    assert memory["captured"] == pytest.approx(true, abs=0.1)


@pytest.mark.parametrize("chunk", [2, 7, 1000])
@pytest.mark.bits
def test_chunk_size_does_not_matter(chunk: int) -> None:
    model, x, y = planted(3)
    whole, cut = engine(model, 6), engine(model, 6, chunk=chunk)
    for _ in range(8):
        a, b = step(whole, x, y), step(cut, x, y)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.bits
def test_resumed_run_is_bit_identical() -> None:
    model, x, y = planted(3)
    fg = engine(model, 6)
    for _ in range(6):
        step(fg, x, y)
    again = engine(model, 6, seed=5)
    again.load_state_dict(copy.deepcopy(fg.state_dict()))
    for _ in range(3):
        assert torch.equal(step(fg, x, y), step(again, x, y))


def test_the_unbiased_option_has_the_mean_of_isotropic_noise() -> None:
    """Even with a subspace that holds little of the gradient."""
    model, x, y = planted()
    truth = flat(exact(model, squared, x, y))
    wrong = torch.diag(torch.tensor([1.0] * 4 + [0.0] * 8)).double()
    samples: dict[bool, list[Tensor]] = {True: [], False: []}
    for unbiased, found in samples.items():
        fg = engine(model, 12, Shaping(explore=0.5, unbiased=unbiased))
        for _ in range(200):
            fg.memory["site"] = known(wrong, captured=0.3)
            found.append(step(fg, x, y))
    assert_mean(torch.stack(samples[True]), truth)
    with pytest.raises(AssertionError):
        assert_mean(torch.stack(samples[False]), truth)


def test_posterior_and_leave_one_out_by_brute_force() -> None:
    size, k = 7, 3
    z, r = torch.randn(1, size, k).double(), torch.randn(1, size).double()
    prior, noise = torch.tensor([0.5, 0.3, 0.1]).double(), torch.tensor([0.2]).double()
    fit = posterior((z * prior) @ z.transpose(1, 2), r, noise, torch.ones(1, size).bool())

    def solve(rows: list[int]) -> Tensor:
        a = z[0, rows]
        precision = torch.diag(1 / prior) + a.T @ a / noise
        return torch.linalg.inv(precision) @ a.T @ r[0, rows] / noise

    def lifted(weights: Tensor) -> Tensor:
        return prior * (weights @ z[0])

    torch.testing.assert_close(lifted(fit.alpha[0]), solve(list(range(size))))
    without = [solve([j for j in range(size) if j != i]) for i in range(size)]
    for i, rest in enumerate(without):
        torch.testing.assert_close(fit.held_out[0, i], r[0, i] - z[0, i] @ rest)
    torch.testing.assert_close(lifted(fit.without[0]), torch.stack(without).mean(0))


def test_padding_changes_nothing() -> None:
    z, r = torch.randn(1, 4, 6).double(), torch.randn(1, 4).double()
    kernel, noise = z @ z.transpose(1, 2), torch.tensor([0.1]).double()
    plain = posterior(kernel, r, noise, torch.ones(1, 4).bool())
    real = torch.arange(6).unsqueeze(0) < 4
    wide = torch.randn(1, 6, 6).double()
    wide[:, :4, :4] = kernel
    padded = posterior(wide, torch.cat([r, torch.zeros(1, 2).double()], 1), noise, real)
    for name in ("alpha", "held_out", "without"):
        torch.testing.assert_close(getattr(padded, name)[:, :4], getattr(plain, name))
        assert not getattr(padded, name)[:, 4:].any()


def random_moments(grids: list[Grid]) -> list[Moments]:
    found = []
    for g in grids:
        both = []
        for n in (g.positions, g.channels):
            m = torch.randn(n, n).double()
            both.append(Factor(m @ m.T, torch.zeros(n, 0), torch.zeros(0), 0.0))
        found.append(Moments(*both))
    return found


@pytest.mark.parametrize("channels_first", [True, False])
def test_lift_and_coordinates_are_adjoint(channels_first: bool) -> None:
    grids = [Grid(0, 3, 4, channels_first), Grid(12, 1, 5, False)]
    directions = leading(grids, random_moments(grids), 6)
    assert directions.size == 17
    c, z = torch.randn(2, directions.size).double(), torch.randn(2, 17).double()
    torch.testing.assert_close(directions.coordinates(directions.lift(c)), c)  # orthonormal
    left, right = (directions.lift(c) * z).sum(1), (c * directions.coordinates(z)).sum(1)
    torch.testing.assert_close(left, right)
    torch.testing.assert_close(
        directions.rows(torch.arange(17)), directions.lift(torch.eye(17).double())
    )
    assert float(directions.energy.sum()) == pytest.approx(1)
    assert directions.energy.tolist() == sorted(directions.energy.tolist(), reverse=True)


def test_a_sketch_finds_what_a_matrix_finds() -> None:
    """An axis above 2,048: leading eigenpairs and trace of a drifting low-rank moment."""
    size = DENSE + 100
    basis = torch.linalg.qr(torch.randn(size, 4, dtype=torch.float64)).Q
    scale = torch.tensor([8.0, 4.0, 2.0, 1.0]).double()
    sketch, none = Factor.empty(size, torch.float64), torch.zeros(size, 0).double()
    assert sketch.matrix is None
    dense = torch.zeros(size, size).double()
    for number in range(6):
        rows = torch.randn(40, 4).double() * scale.sqrt() @ basis.T
        noisy = rows + 0.02 * torch.randn(40, size).double()
        change = Change(noisy, noisy[:5], 0.01, none, none[0])
        sketch = sketch.updated(0.9, change, number)
        dense = 0.9 * dense + change.times(torch.eye(size).double())
    vectors, values, rest = sketch.eigenpairs()
    true = torch.linalg.eigvalsh(dense).flip(0)
    torch.testing.assert_close(values[:4], true[:4], rtol=1e-3, atol=0)
    assert float((vectors[:, :4].T @ basis).square().sum()) == pytest.approx(4, abs=0.1)
    left_out = (dense.trace() - values.sum()) / (size - len(values))
    assert rest == pytest.approx(max(0.0, float(left_out)), rel=1e-6, abs=1e-9)


def test_a_large_site_learns_from_its_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit lowered, so that one problem can be learned both ways."""
    model = nn.Sequential(nn.Linear(3, 60), nn.Linear(60, 2, bias=False)).double()
    x, y = torch.randn(12, 3).double(), torch.randn(12, 2).double()
    truth = exact(model, squared, x, y)["0.weight"]
    late = []
    for dense in (2048, 20):
        monkeypatch.setattr("flops.subspace.moments.DENSE", dense)
        monkeypatch.setattr("flops.subspace.moments.SKETCH", 16)
        groups = [
            Group(model[0], LikelihoodRatio(1e-6, shaping=Shaping()), queries=8, name="site"),
            Group(model[1], LikelihoodRatio(), queries=2),
        ]
        fg = ForwardGradient(model, squared, groups)
        found = []
        for _ in range(60):
            model.zero_grad()
            fg.estimate(x, y)
            found.append(cosine(model[0].weight.grad, truth))
        assert (fg.memory["site"]["moments"][0]["channels"]["matrix"] is None) == (dense == 20)
        assert sum(found[:4]) / 4 < 0.8
        late.append(sum(found[-5:]) / 5)
    assert min(late) > 0.98


def test_shaped_beats_isotropic_where_the_gradient_is_narrow() -> None:
    model, x, y = planted(5)
    truth = flat(exact(model, squared, x, y))
    shaped = engine(model, 8)
    plain = ForwardGradient(model, squared, [Group(model.target, LikelihoodRatio(1e-7), queries=8)])
    a = [cosine(step(shaped, x, y), truth) for _ in range(40)][-10:]
    b = [cosine(step(plain, x, y), truth) for _ in range(10)]
    assert sum(a) / 10 > 0.96
    assert sum(b) / 10 < 0.9


def test_convolutional_and_several_sites_run() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x))).mean((2, 3))

    model = Net().double()
    x, y = torch.randn(4, 1, 4, 4).double(), torch.randn(4, 2).double()
    estimator = LikelihoodRatio(1e-6, shaping=Shaping())
    fg = ForwardGradient(model, squared, [Group([model.a, model.b], estimator, queries=12)])
    truth = flat(exact(model, squared, x, y))
    found = [cosine(step(fg, x, y), truth) for _ in range(30)]
    assert sum(found[-5:]) > sum(found[:4]) * 5 / 4
    assert sum(found[-5:]) / 5 > 0.8


def test_exploration_falls_as_the_captured_energy_rises() -> None:
    shares = [Shaping().share(captured) for captured in (0.0, 0.3, 0.6, 0.9, 1.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.2 < shares[0]
    assert Shaping(explore=0.4).share(0.9) == 0.4


def test_moments_are_doubted_when_the_captured_energy_drops() -> None:
    same, best = Shaping().keep(0.8, 0.0, 0.8, 0.8)
    assert (same, best) == (Shaping().keep(0.7, 0.0, 0.79, 0.8)[0], 0.8)
    less, best = Shaping().keep(0.2, 0.01, 0.74, 0.8)
    assert less < 0.5 * same
    assert best == 0.74  # the old best was of another task
    assert Shaping().keep(0.2, 0.1, 0.74, 0.8)[0] == same  # no more than sampling error
    assert Shaping(decay=0.9).keep(0.2, 0.0, 0.74, 0.8)[0] == 0.9


def test_older_steps_count_less_as_the_captured_energy_rises() -> None:
    same, _ = Shaping().keep(0.5, 0.0, 0.5, 0.5)
    slow, _ = Shaping().keep(0.6, 0.0, 0.51, 0.5)
    fast, best = Shaping().keep(0.9, 0.0, 0.54, 0.5)
    assert fast < slow < same
    assert best == 0.54
    assert Shaping().keep(0.5, 0.0, 0.5, 0.54)[0] == same  # going down again forgets nothing


@pytest.mark.parametrize(("batch", "queries", "least"), [(4, 8, 0.7), (8, 4, 0.7), (32, 3, 0.6)])
def test_small_batches_and_few_queries_learn_too(batch: int, queries: int, least: float) -> None:
    """Sampling noise of the captured energy must not be taken for a task that has moved."""
    torch.manual_seed(2)
    model = Planted(6).double()
    fg = engine(model, queries)
    found = []
    for _ in range(200):
        x, y = torch.randn(batch, 6, 4).double(), torch.randn(batch, 3).double()
        model.zero_grad()
        found.append(fg.estimate(x, y, exact=True).cosine["site"])
    assert sum(found[-40:]) / 40 > least


@pytest.mark.parametrize("options", [{"explore": 0.0}, {"explore": 1.5}, {"decay": 1.0}])
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        Shaping(**options)


class Padded(nn.Module):
    """Mean over the real tokens of a nonlinear reading of each; lengths vary."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(3, 10)
        self.register_buffer("reads", torch.randn(10, 2))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        read = torch.tanh(self.target(x) @ self.reads) * attention_mask.unsqueeze(2)
        return read.sum(1) / attention_mask.sum(1, keepdim=True)


def padded_batch(longest: int, size: int = 8) -> dict[str, Tensor]:
    lengths = torch.randint(2, longest + 1, (size,))
    lengths[0] = longest
    mask = (torch.arange(longest) < lengths.unsqueeze(1)).double()
    return {"x": torch.randn(size, longest, 3).double(), "attention_mask": mask}


def sequence_engine(model: nn.Module, queries: int = 24, **options) -> ForwardGradient:
    estimator = LikelihoodRatio(1e-7, shaping=Shaping(**options))
    return ForwardGradient(model, squared, [Group(model.target, estimator, queries, name="site")])


def test_sequences_of_varying_length_learn_their_channels() -> None:
    """Two channel directions times the real positions: 24 queries know all of up to 9 tokens."""
    model = Padded().double()
    fg = sequence_engine(model)
    found = []
    for number in range(40):
        batch, y = padded_batch(5 + number % 5), torch.randn(8, 2).double()
        fg.model.zero_grad()
        found.append(fg.estimate(batch, y, exact=True).cosine["site"])
    moments = fg.memory["site"]["moments"][0]
    assert moments["positions"] is None
    values = torch.linalg.eigvalsh(moments["channels"]["matrix"]).flip(0)
    assert float(values[:2].sum() / values.sum()) > 0.99
    assert sum(found[-10:]) / 10 > 0.98
    assert sum(found[:4]) / 4 < 0.93


@pytest.mark.parametrize("longest", [6, 64])
def test_padding_is_never_asked(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(*given: Any) -> Work[Asked]:
        asked.append(completed(ask(*given)))
        return at_once(asked[-1])

    monkeypatch.setattr("flops.subspace.step.ask", spy)
    fg = sequence_engine(Padded().double())
    for _ in range(6):
        batch = padded_batch(longest)
        fg.estimate(batch, torch.randn(8, 2).double())
    last = asked[-1]
    positions = last.known.row[torch.nonzero(last.measured)[:, 1]]
    real = batch["attention_mask"].bool()[torch.nonzero(last.measured)[:, 0], positions]
    assert len(real) >= 8 * 8
    assert bool(real.all())
    assert not batch["attention_mask"].bool().all()


def test_without_a_mask_a_change_of_length_drops_the_positions() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(3, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.target(x)).mean(1)

    model = Net().double()
    fg = sequence_engine(model, 8)
    y = torch.randn(4, 6).double()
    for length in (5, 5, 5, 5, 5, 5):
        fg.estimate(torch.randn(4, length, 3).double(), y)
    before = fg.memory["site"]["moments"][0]
    assert before["positions"]["matrix"].shape == (5, 5)
    fg.estimate(torch.randn(4, 7, 3).double(), y)
    after = fg.memory["site"]["moments"][0]
    assert after["positions"] is None
    assert after["channels"]["matrix"].shape == (6, 6)
    fg.estimate(torch.randn(4, 5, 3).double(), y)  # and it stays so
    assert fg.memory["site"]["moments"][0]["positions"] is None


@pytest.mark.parametrize("targets", ["leaf", "block", "stage"])
def test_every_kind_of_target_gains(targets: str) -> None:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(5, 8), *blocks, nn.Linear(8, 2)).double()
    for module in (model[0], model[3]):
        module.requires_grad_(False)
    x, y = torch.randn(16, 5).double(), torch.randn(16, 2).double()
    means = []
    for shaping in (Shaping(), None):
        estimator = LikelihoodRatio(1e-6, targets, shaping=shaping)
        fg = ForwardGradient(model, squared, [Group(blocks, estimator, 6, name="blocks")])
        late = []
        for _ in range(40):
            model.zero_grad()
            report = fg.estimate(x, y, exact=True)
            late.append(report.cosine["blocks"])
        means.append(sum(late[-10:]) / 10)
        if shaping is not None:
            sites = report.shaping["blocks"].sites
            assert len(sites) == {"leaf": 2, "block": 2, "stage": 1}[targets]
            assert sum(s.k for s in sites) == pytest.approx(report.shaping["blocks"].k)
            assert all(0.5 < s.captured <= 1 for s in sites)
    assert means[0] > means[1] + 0.02
    assert means[0] > 0.97


def test_more_queries_than_directions_leave_nothing_to_chance() -> None:
    model, x, y = planted()
    fg = engine(model, 40)
    truth = flat(exact(model, squared, x, y))
    for _ in range(6):
        found = step(fg, x, y)
    assert float((found - truth).norm() / truth.norm()) < 1e-5


def test_very_many_queries_of_a_point_stay_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many are fitted; the others are averaged all the same."""
    model, x, y = planted()
    truth = flat(exact(model, squared, x, y))
    every = engine(model, 60)
    first = step(every, x, y)
    moments = every.memory["site"]["moments"][0]["channels"]["matrix"]
    monkeypatch.setattr("flops.subspace.measurements.FITTED", 16)
    fg = engine(model, 60)
    torch.testing.assert_close(step(fg, x, y), first)  # an isotropic step
    torch.testing.assert_close(fg.memory["site"]["moments"][0]["channels"]["matrix"], moments)
    for _ in range(5):
        last = step(fg, x, y)
    assert float((last - truth).norm() / truth.norm()) < 1e-5


def test_diagnose_shows_shaped_sites() -> None:
    model, x, y = planted()
    estimator = LikelihoodRatio(1e-6, shaping=Shaping())
    groups = [Group(model.target, estimator, queries=8, name="site")]
    found = diagnose(model, squared, x, y, groups=groups, repeats=3, sigmas=())
    (row,) = found.shaping
    assert (row.group, row.site) == ("site", "target")
    assert row.captured > 0.9
    assert row.cosine > 0.98
    assert found.to_dict()["shaping"][0]["k"] == row.k
    # From an engine in its isotropic steps: nothing is known yet.
    fg = ForwardGradient(model, squared, groups)
    fg.estimate(x, y)
    (early,) = diagnose(
        model, squared, x, y, groups=groups, repeats=3, sigmas=(), state=fg.state_dict()
    ).shaping
    assert early.k == 0
    assert early.cosine < row.cosine


@pytest.mark.parametrize("queries", [2, 3])
def test_few_queries_are_shaped_too(queries: int) -> None:
    model, x, y = planted()
    fg = engine(model, queries)
    for _ in range(8):
        fg.model.zero_grad()
        report = fg.estimate(x, y)
    assert report.shaping["site"].k >= 1


def test_no_more_directions_are_asked_than_a_sketch_has() -> None:
    model = nn.Sequential(nn.Linear(2, DENSE + 1), nn.Linear(DENSE + 1, 1)).double()
    model[1].requires_grad_(False)
    estimator = LikelihoodRatio(1e-6, shaping=Shaping(explore=0.1))
    fg = ForwardGradient(model, squared, [Group(model[0], estimator, 200, name="site")])
    x, y = torch.randn(2, 2).double(), torch.randn(2, 1).double()
    for _ in range(5):
        report = fg.estimate(x, y)
    assert report.shaping["site"].k <= 128


@pytest.mark.parametrize("dimensions", [1, 2])
def test_images_of_varying_size_learn_their_channels(dimensions: int) -> None:
    kind = nn.Conv1d if dimensions == 1 else nn.Conv2d

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = kind(1, 5, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.target(x)).flatten(2).mean(2)

    fg = sequence_engine(Net().double(), 8)
    for side in (4, 4, 4, 4, 4, 6, 4, 5):
        fg.estimate(torch.randn(3, 1, *[side] * dimensions).double(), torch.randn(3, 5).double())
    moments = fg.memory["site"]["moments"][0]
    assert moments["positions"] is None
    assert moments["channels"]["matrix"].shape == (5, 5)


def test_a_varying_number_of_sites_starts_anew() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros_like(x[:, 0])
            for t in range(x.size(1)):
                h = torch.tanh(self.target(h + x[:, t]))
            return h

    fg = sequence_engine(Recurrent().double(), 8)
    for length in (2, 2, 2, 2, 2, 3, 3, 2):
        report = fg.estimate(torch.randn(3, length, 4).double(), torch.randn(3, 4).double())
        assert len(report.shaping["site"].sites) == length


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
def test_a_loss_that_is_dead_for_a_while_changes_nothing() -> None:
    class Dead(Planted):
        alive = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.alive

    model = Dead().double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    fg = engine(model, 8)
    model.alive = 0.0
    fg.estimate(x, y)  # from the start
    model.alive = 1.0
    for _ in range(10):
        fg.estimate(x, y)
    before = copy.deepcopy(fg.memory["site"])
    model.alive = 0.0
    for _ in range(10):
        fg.estimate(x, y)
    after = fg.memory["site"]
    assert after["captured"] == pytest.approx(before["captured"])
    a, b = (m["moments"][0]["channels"]["matrix"] for m in (before, after))
    torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore::flops.errors.PrecisionWarning")
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_scale_of_the_loss_does_not_matter(scale: float) -> None:
    """In float32: what counts as rounding goes by the loss."""
    torch.manual_seed(0)
    model = Planted(5)
    x, y = torch.randn(6, 5, 4), torch.randn(6, 3)
    estimator = LikelihoodRatio(1e-2, shaping=Shaping())
    groups = [Group(model.target, estimator, queries=8, name="site")]
    fg = ForwardGradient(model, lambda out, y: scale * squared(out, y), groups)
    found = [fg.estimate(x, y, exact=True).cosine["site"] for _ in range(20)]
    assert sum(found[-5:]) / 5 > 0.9


def test_one_dead_point_does_not_stop_the_search_for_a_ridge() -> None:
    torch.manual_seed(0)
    model = Planted(5)
    x, y = torch.randn(6, 5, 4), torch.randn(6, 3)
    weight = torch.tensor([0.0, 1, 1, 1, 1, 1])
    fg = ForwardGradient(
        model,
        lambda out, y: squared(out, y[:, :3]) * y[:, 3],
        [Group(model.target, LikelihoodRatio(1e-2, shaping=Shaping()), 8, name="site")],
    )
    for _ in range(20):
        fg.estimate(x, torch.cat([y, weight.unsqueeze(1)], 1))
    assert fg.memory["site"]["ridge"] != 1.0


def test_with_a_pilot_the_report_is_of_the_later_queries() -> None:
    model, x, y = planted()
    estimator = LikelihoodRatio(1e-7, shaping=Shaping())
    groups = [Group(model.target, estimator, queries=10, name="site")]
    fg = ForwardGradient(model, squared, groups, allocator=Gaussian(pilot=2))
    for _ in range(8):
        report = fg.estimate(x, y)
    assert report.shaping["site"].k > 2


@pytest.mark.parametrize(
    "options",
    [
        {"baseline": "none", "shaping": Shaping()},
        {"noise": "orthogonal", "shaping": Shaping(unbiased=True)},
    ],
)
def test_combinations_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="shaping"):
        LikelihoodRatio(**options)


def test_a_state_of_another_precision_is_converted() -> None:
    model, x, y = planted(3)
    fg = engine(model, 6)
    for _ in range(6):
        step(fg, x, y)
    single = copy.deepcopy(model).float()
    estimator = LikelihoodRatio(1e-3, shaping=Shaping())
    other = ForwardGradient(single, squared, [Group(single.target, estimator, 6, name="site")])
    other.load_state_dict(fg.state_dict())
    other.estimate(x.float(), y.float())
    assert other.memory["site"]["moments"][0]["channels"]["matrix"].dtype == torch.float32


def test_the_prior_alone_helps_isotropic_queries() -> None:
    model, x, y = planted(5)
    truth = flat(exact(model, squared, x, y))
    prior = engine(model, 8, Shaping(explore=1.0))
    plain = ForwardGradient(model, squared, [Group(model.target, LikelihoodRatio(1e-7), queries=8)])
    a = [cosine(step(prior, x, y), truth) for _ in range(60)][-10:]
    b = [cosine(step(plain, x, y), truth) for _ in range(10)]
    assert prior.memory["site"]["captured"] == 0
    assert sum(a) / 10 > sum(b) / 10 + 0.05
