"""The mean Jacobian of a step, against dense matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flops.passes.ranks import Replicas
from flops.subspace import mean_jacobian
from flops.subspace.mean_jacobian import MeanJacobian
from flops.subspace.measurements import Design
from tests.support.shaped_cases import FEATURES, SIZE, Case, case

AGE = 0.8  # weight of a row of the step before
OWN, RATE = 0.1, 0.2  # share of energy that points do not have in common, and its update
MOST_OWN = 0.95  # its upper bound in normal equations
LEAST, MOST = 1e-3, 1e3  # noise over prior variance
KINDS = pytest.mark.parametrize("masked", [False, True])
PREDICTED = pytest.mark.parametrize("predicted", [False, True])


def rows(of: Case) -> tuple[Tensor, Tensor, Tensor, int]:
    """Noise, derivatives and number of points of all rows; and how many of them are isotropic."""
    zs, ys, counts = [], [], []
    measured = of.measurements.measured
    for i, u in enumerate(of.directions):
        points = torch.nonzero(measured[:, i]).flatten()
        if len(points):
            zs.append(u)
            ys.append((of.jacobians[points] @ u).mean(0))
            counts.append(len(points))
    if of.measurements.predicted is not None:
        for j, u in enumerate(of.measurements.predicted):
            if u.any():
                zs.append(u)
                ys.append(of.jacobians[j] @ u)
                counts.append(1)
    fixed = len(zs)
    for j in sorted(range(SIZE), key=lambda j: int(of.design.iso[j])):
        for z in of.isotropic(j) * of.mask[j]:
            zs.append(z)
            ys.append(of.jacobians[j] @ z)
            counts.append(1)
    return torch.stack(zs), torch.stack(ys), torch.tensor(counts).double(), len(zs) - fixed


def own_share(of: Case) -> float | None:
    """Variance of the points' derivatives over their mean square, where several measured one."""
    spread = whole = 0.0
    for i, u in enumerate(of.directions):
        points = torch.nonzero(of.measurements.measured[:, i]).flatten()
        if len(points) > 1:
            found = of.jacobians[points] @ u
            spread += float(found.var(0).sum())
            whole += float(found.square().mean(0).sum())
    return min(1.0, max(0.0, spread / whole)) if whole else None


def updated(of: Case, before: MeanJacobian) -> Tensor:
    """M + Lambda Z^T (Z Lambda Z^T + N)^-1 (Y - Z M^T), with half of Lambda flat."""
    z, y, count, isotropic = rows(of)
    new = len(z)
    z, y = torch.cat([z, before.z]), torch.cat([y, before.y])
    count = torch.cat([count, AGE * before.count])
    u = of.directions
    eye = torch.eye(16).double()
    prior = (u.T * of.known.energy) @ u + of.known.rest * (eye - u.T @ u)
    prior = (prior + eye / 16) / 2
    kernel, residual = z @ prior @ z.T, y - z @ before.values.T
    seen = slice(new - isotropic, new)
    whole, left = (float(x[seen].square().sum()) for x in (y, residual))
    share = shared_share(of, before)
    own = min(OWN * whole, left / 2) if share is None else share * whole
    ratio = min(MOST, max(LEAST, own / max(left - own, LEAST * whole)))
    system = kernel + torch.diag(ratio * kernel.diagonal() / count)
    return before.values + (prior @ z.T @ torch.linalg.solve(system, residual)).T


def by_normal_equations(
    of: Case, before: MeanJacobian, flat: float = 0.1
) -> tuple[Tensor, Tensor, Tensor]:
    """(Z^T W Z + own / (1 - own) Lambda^-1)^-1 Z^T W Y, with a part of Lambda flat; both sums."""
    z, y, count, isotropic = rows(of)
    u, eye = of.directions, torch.eye(16).double()
    prior = (u.T * of.known.energy) @ u + of.known.rest * (eye - u.T @ u)
    prior = (1 - flat) * prior + flat * eye / 16
    weight = torch.diag(count / (z @ prior @ z.T).diagonal())
    gram = AGE * before.gram + z.T @ weight @ z
    moment = AGE * before.moment + z.T @ weight @ y
    own = shared_share(of, before)
    if own is None:
        seen = slice(len(z) - isotropic, len(z))
        left = (y - z @ before.values.T)[seen].square().sum() / y[seen].square().sum()
        own = min(OWN, float(left) / 2)
    own = min(MOST_OWN, max(LEAST, own))
    system = gram + own / (1 - own) * torch.linalg.inv(prior)
    return torch.linalg.solve(system, moment).T, gram, moment


def shared_share(of: Case, before: MeanJacobian) -> float | None:
    """Running average of `own_share`; None if it was never seen."""
    share = own_share(of)
    if share is None or before.measured is None:
        return before.measured if share is None else share
    return (1 - RATE) * before.measured + RATE * share


def first(of: Case) -> MeanJacobian:
    return MeanJacobian.empty("features", FEATURES, of.space)


def wide(of: Case) -> MeanJacobian:
    """As at a site of too many dimensions for normal equations."""
    none = first(of)
    return replace(none, gram=none.gram[:0, :0], moment=none.moment[:0])


@KINDS
@PREDICTED
def test_two_steps_against_dense_matrices(masked: bool, predicted: bool) -> None:
    """The second from the mean, the rows and the share of the first."""
    of = case(masked, predicted)
    assert of.measurements.features is not None
    before = wide(of)
    assert before.common == pytest.approx(1 - OWN)
    for _ in range(2):
        after = before.updated(of.measurements, of.measurements.features)
        torch.testing.assert_close(after.values, updated(of, before), rtol=1e-7, atol=1e-9)
        share = own_share(of)
        assert share is not None
        assert after.measured == pytest.approx(share)
        assert after.common == pytest.approx(1 - share)
        z, y, count, _ = rows(of)
        torch.testing.assert_close(after.z, torch.cat([z, before.z]))
        torch.testing.assert_close(after.y, torch.cat([y, before.y]))
        torch.testing.assert_close(after.count, torch.cat([count, AGE * before.count]))
        before = after


@KINDS
@PREDICTED
def test_two_steps_against_normal_equations(masked: bool, predicted: bool) -> None:
    """Sums over all rows of both steps; no row is kept."""
    of = case(masked, predicted)
    assert of.measurements.features is not None
    before = first(of)
    assert before.gram.shape == (16, 16)
    for _ in range(2):
        after = before.updated(of.measurements, of.measurements.features)
        values, gram, moment = by_normal_equations(of, before)
        torch.testing.assert_close(after.gram, gram)
        torch.testing.assert_close(after.moment, moment)
        torch.testing.assert_close(after.values, values, rtol=1e-7, atol=1e-9)
        assert after.measured == pytest.approx(own_share(of))
        assert not len(after.z)
        before = after


@pytest.mark.parametrize("kept", [None, 0.3, 0.99])
def test_normal_equations_where_no_direction_is_shared(kept: float | None) -> None:
    """All draws are isotropic: the share is assumed, or half of what M leaves if that is less."""
    of = case(iso=(7, 5, 6, 8))
    assert of.measurements.features is not None
    before = replace(first(of), measured=kept)
    for _ in range(2):
        after = before.updated(of.measurements, of.measurements.features)
        assert after.measured == kept
        values, _, _ = by_normal_equations(of, before)
        torch.testing.assert_close(after.values, values, rtol=1e-7, atol=1e-9)
        before = after


def test_few_rows_last_longer_than_many() -> None:
    """.8 of the sums of before count, if there is a row per dimension; else more, at most .9."""
    of = case()
    for each in (1, 2, 5):
        draws = torch.full((SIZE,), each)
        design = Design(of.space, of.known, draws, draws)
        points = torch.arange(SIZE).repeat_interleave(each)
        values = torch.zeros(len(points)).double()
        outputs = values.unsqueeze(1).expand(-1, FEATURES)
        step = design.measurements(points, values, (outputs, of.view))
        assert step.features is not None
        before = replace(first(of), moment=torch.ones(16, FEATURES).double())
        after = before.updated(step, step.features)
        age = min(0.9, AGE ** min(1.0, 4 * each / 16))
        torch.testing.assert_close(after.moment, age * before.moment)


def test_the_basis_of_the_prior_may_be_given() -> None:
    """Learned from the same rows, it weighs them and is half of the prior."""
    of = case()
    assert of.measurements.features is not None
    other = replace(of.known, energy=of.known.energy.flip(0))
    features = of.measurements.features
    after = first(of).updated(of.measurements, features, known=other)
    # The measured directions stay those of the measurements.
    values, _, _ = by_normal_equations(replace(of, known=other), first(of), flat=0.5)
    torch.testing.assert_close(after.values, values, rtol=1e-7, atol=1e-9)
    assert float((after.values - first(of).updated(of.measurements, features).values).norm()) > 0.01


def test_the_share_of_points_is_a_running_average() -> None:
    of = case()
    assert of.measurements.features is not None
    share = own_share(of)
    assert share is not None
    old = replace(wide(of), measured=0.7)
    after = old.updated(of.measurements, of.measurements.features)
    assert after.measured == pytest.approx((1 - RATE) * 0.7 + RATE * share)
    torch.testing.assert_close(after.values, updated(of, old), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kept", [None, 0.3])
def test_where_no_direction_is_shared_the_share_is_assumed(kept: float | None) -> None:
    """All draws are isotropic."""
    of = case(iso=(7, 5, 6, 8))
    assert of.measurements.features is not None
    before = replace(wide(of), measured=kept)
    after = before.updated(of.measurements, of.measurements.features)
    assert after.measured == kept
    torch.testing.assert_close(after.values, updated(of, before), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("iso", [(3, 2, 4, 3), (7, 5, 6, 8)])
def test_points_that_agree_have_nothing_of_their_own(iso: tuple[int, ...]) -> None:
    """The noise has a lower bound, and one step finds the Jacobian where it looked."""
    of = case(iso=iso)
    assert of.measurements.features is not None
    common = of.jacobians[:1].expand(SIZE, -1, -1)
    features = replace(
        of.measurements.features,
        c=(common @ of.directions.T).transpose(1, 2) * of.measurements.measured.unsqueeze(2),
        w=torch.stack(
            [
                torch.cat([of.isotropic(j), torch.zeros(8 - len(of.isotropic(j)), 16)])
                @ common[j].T
                for j in range(SIZE)
            ]
        ),
    )
    if iso == (7, 5, 6, 8):  # nobody measured the same direction; enough rows for both ways
        after = first(of)
        for _ in range(30):
            after = after.updated(of.measurements, features)
        assert after.measured is None
        assert float((after.values - common[0]).norm() / common[0].norm()) < 0.01
        return
    after = wide(of).updated(of.measurements, features)
    assert after.measured == pytest.approx(0, abs=1e-12)
    for _ in range(30):
        after = after.updated(of.measurements, features)
    torch.testing.assert_close(after.values, common[0], rtol=1e-3, atol=1e-3)


def test_old_rows_make_room_and_are_forgotten() -> None:
    of = case()
    assert of.measurements.features is not None
    before = replace(
        wide(of),
        z=torch.ones(3, 16).double(),
        y=torch.ones(3, FEATURES).double(),
        count=torch.tensor([1.0, LEAST / AGE * 1.01, LEAST / AGE * 0.99]).double(),
    )
    after = before.updated(of.measurements, of.measurements.features)
    assert len(after.z) == len(rows(of)[0]) + 2
    assert after.count[-2:].tolist() == pytest.approx([AGE, LEAST * 1.01])


@pytest.mark.parametrize(
    ("dimensions", "most"),
    [(10, 1024), (953, 1024), (1000, 1000), (2000, 707), (20_000, 104), (1 << 20, 2), (1 << 22, 2)],
)
def test_the_room_for_rows(dimensions: int, most: int) -> None:
    """1,024 rows, products of 10^9 in all, and 2^21 values."""
    space = replace(case().space, grids=(replace(case().space.grids[0], channels=dimensions),))
    space = replace(space, grids=(replace(space.grids[0], positions=1),))
    assert mean_jacobian._room(space) == most


@pytest.mark.parametrize(("size", "each"), [(300, 3), (500, 2), (1000, 1), (1100, 1)])
def test_all_points_have_rows_as_many_as_there_is_room_for(size: int, each: int) -> None:
    """1,024 in all, but one of each point at least."""
    of = case()
    space, draws = replace(of.space, ids=list(range(size))), torch.full((size,), 3)
    design = Design(space, of.known, draws, draws)
    points = torch.arange(size).repeat_interleave(3)
    values = torch.arange(3.0 * size).double()
    outputs = values.unsqueeze(1).expand(-1, FEATURES)
    view = replace(of.view, roots=torch.ones(1, FEATURES).double())
    step = design.measurements(points, values, (outputs, view))
    assert step.features is not None
    replicas = Replicas(size)
    shared = mean_jacobian._Directions.of(step, step.features, replicas)
    rows, isotropic = mean_jacobian._rows(step, step.features, shared, replicas)
    z, y, count = rows
    assert len(z) == len(y) == len(count) == isotropic == min(size * each, 1024)
    kept = values.view(size, 3)[:, :each].flatten()[:1024]
    assert torch.equal(y[:, 0].sort().values, kept)
    assert len(wide(of).updated(step, step.features).z) == min(size * each, 1024)


def test_a_state_of_other_features_is_dropped() -> None:
    of = case()
    assert of.measurements.features is not None
    kept = dict(vars(first(of).updated(of.measurements, of.measurements.features)))
    same = MeanJacobian.from_memory(kept, "features", FEATURES, of.space)
    assert dict(vars(same)).keys() == kept.keys()
    assert torch.equal(same.values, kept["values"])
    assert same.measured == kept["measured"]
    older = {name: value for name, value in kept.items() if name not in ("gram", "moment")}
    for other in (
        MeanJacobian.from_memory(None, "features", FEATURES, of.space),
        MeanJacobian.from_memory(kept, "others", FEATURES, of.space),
        MeanJacobian.from_memory(kept, "features", FEATURES + 1, of.space),
        MeanJacobian.from_memory(older, "features", FEATURES, of.space),
    ):
        assert not other.values.any()
        assert other.values.size(1) == 16
        assert len(other.z) == len(other.y) == len(other.count) == 0
        assert other.measured is None
