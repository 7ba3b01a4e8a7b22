"""The design of a step: which direction each draw measures, and what becomes of the derivatives."""

from __future__ import annotations

import pytest
import torch

from flops.subspace.basis import needed, real_directions
from flops.subspace.measurements import Design
from tests.support.shaped_cases import DRAWS, ISO, SIZE, case

both = pytest.mark.parametrize("masked", [False, True])


@both
def test_coordinates_are_those_of_the_gradient(masked: bool) -> None:
    """Every shaped draw measures one direction of its point, and all are real ones."""
    found = case(masked)
    shaped = torch.tensor(DRAWS) - torch.tensor(ISO)
    assert found.measurements.measured.sum(1).tolist() == shaped.tolist()
    truth = found.gradients @ found.directions.T * found.measurements.measured
    torch.testing.assert_close(found.measurements.c, truth)
    assert found.measurements.features is not None
    by_feature = found.jacobians @ found.directions.T * found.measurements.measured.unsqueeze(1)
    torch.testing.assert_close(found.measurements.features.c, by_feature.transpose(1, 2))
    real = real_directions(found.space, found.known)
    assert bool((real | ~found.measurements.measured).all())


@both
def test_isotropic_draws_come_first_and_have_their_own_length(masked: bool) -> None:
    found = case(masked)
    length = (sum(DRAWS) - sum(ISO)) / SIZE
    for j, (n, first) in enumerate(zip(DRAWS, ISO, strict=True)):
        z = found.design.rows(torch.full((n,), j), torch.arange(n))
        torch.testing.assert_close(z[:first], found.isotropic(j))
        norms = z[first:].square().sum(1)
        torch.testing.assert_close(norms, torch.full_like(norms, length))
        derivatives = torch.ones(n).double()
        scaled = found.design.scaled(torch.full((n,), j), torch.arange(n), derivatives)
        assert scaled[:first].tolist() == [1.0] * first
        assert scaled[first:].tolist() == pytest.approx([length**-0.5] * (n - first))
        w = found.measurements.w[j, :n]
        unit = torch.cat([z[:first], z[first:] / length**0.5])
        torch.testing.assert_close(w, unit @ found.gradients[j])
        assert not found.measurements.w[j, n:].any()


def test_directions_are_measured_in_the_order_of_their_energy() -> None:
    found = case()
    expected = torch.arange(found.known.size) < (torch.tensor(DRAWS) - torch.tensor(ISO))[:, None]
    assert torch.equal(found.measurements.measured, expected)
    assert torch.equal(found.measurements.prior, found.known.energy.unsqueeze(0))


def test_energy_of_padding_lies_in_the_real_positions() -> None:
    """Of each site: the prior of a point has the same energy, whatever its length."""
    found = case(masked=True)
    lengths, prior = (3, 2, 1, 3), found.design.prior
    real = real_directions(found.space, found.known)
    for j, length in enumerate(lengths):
        for i in range(found.known.size):
            share = float(found.known.energy[i])
            if int(found.known.site[i]) == 0:
                inside = int(found.known.row[i]) < length
                assert bool(real[j, i]) == inside
                share *= 3 / length if inside else 0.0
            assert float(prior[j, i]) == pytest.approx(share, rel=1e-12)
        # Those with the most energy are measured, up to the chance of ties.
        chosen = found.measurements.measured[j]
        assert float(prior[j][chosen].min()) >= 0.998 * float(prior[j][~chosen].max())


@both
def test_a_predicted_gradient_is_measured_outside_of_the_other_directions(masked: bool) -> None:
    found = case(masked, predicted=True)
    u, measured = found.measurements.predicted, found.measurements.measured
    assert u is not None
    used = u.any(1)
    assert bool(used.any())
    shaped = torch.tensor(DRAWS) - torch.tensor(ISO)
    assert measured.sum(1).tolist() == (shaped - used.long()).tolist()
    torch.testing.assert_close(u.square().sum(1), used.double())
    inside = u @ found.directions.T * measured
    torch.testing.assert_close(inside, torch.zeros_like(inside), atol=1e-12, rtol=0)
    assert found.measurements.a is not None
    torch.testing.assert_close(found.measurements.a, (u * found.gradients).sum(1))
    assert found.measurements.features is not None
    by_feature = (found.jacobians @ u.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(found.measurements.features.a, by_feature)


def test_enough_directions_for_the_shortest_sequence() -> None:
    found = case(masked=True)
    assert needed(found.space, torch.tensor([4, 5])) == 5 * 3 + 3  # a third of the first site
    plain = case()
    assert needed(plain.space, torch.tensor([4, 5])) == 5
    assert real_directions(plain.space, plain.known).shape == (1, plain.known.size)


@both
def test_what_a_prediction_is_expected_to_hold(masked: bool) -> None:
    """0.9 of its part outside of the other directions; its own length does not matter."""
    found = case(masked)
    guess = found.gradients.flip(0) * found.mask
    shaped = torch.tensor(DRAWS) - torch.tensor(ISO)
    known, iso, draws = found.known, torch.tensor(ISO), torch.tensor(DRAWS)
    design = Design(found.space, known, iso, draws, (guess, 0.9))
    order = [design._order[j, : int(n) - 1].tolist() for j, n in enumerate(shaped)]
    parts, used = [], []
    for j, chosen in enumerate(order):
        u = found.directions[chosen]
        left = guess[j] - guess[j] @ u.T @ u
        parts.append(float(left.square().sum() / guess[j].square().sum()))
        last = int(design._order[j, int(shaped[j]) - 1])
        used.append(0.9 * parts[-1] > float(design.prior.expand(SIZE, -1)[j, last]))
    assert design.expected == pytest.approx(0.9 * sum(parts) / SIZE)
    assert design.predicted is not None
    assert design.predicted.any(1).tolist() == used
    for share, kept in ((0.9, used), (0.0, [False] * SIZE), (1e-3, None)):
        small = Design(found.space, known, iso, draws, (1e-6 * guess, share))
        assert small.expected == pytest.approx(share * sum(parts) / SIZE)
        assert small.predicted is not None
        if kept is not None:
            assert small.predicted.any(1).tolist() == kept


def test_a_point_without_a_prediction_measures_its_directions() -> None:
    found = case()
    guess = found.gradients.clone()
    guess[1] = 0
    draws, iso = torch.tensor(DRAWS), torch.tensor(ISO)
    design = Design(found.space, found.known, iso, draws, (guess, 1.0))
    assert 0 < design.expected < 0.75  # three of four
    assert design.predicted is not None
    assert not design.predicted[1].any()
    assert int(design.measured[1].sum()) == DRAWS[1] - ISO[1]
    assert bool(torch.isfinite(design.predicted).all())


def test_a_prediction_inside_of_what_is_measured_is_of_no_use() -> None:
    found = case()
    inside = found.directions[0].expand(SIZE, -1)
    draws, iso = torch.tensor(DRAWS), torch.tensor(ISO)
    design = Design(found.space, found.known, iso, draws, (inside, 1.0))
    assert design.predicted is not None
    assert not design.predicted.any()
    assert design.expected == pytest.approx(0, abs=1e-12)
    assert design.measured.sum(1).tolist() == (draws - iso).tolist()
    # Without shaped draws there is nothing to take its place.
    alone = Design(found.space, found.known, draws, draws, (found.gradients, 1.0))
    assert alone.predicted is None
    assert not alone.measured.any()


def test_draws_that_failed_are_left_out_of_the_features_too() -> None:
    """What is left of the outputs' derivatives is still that of the losses', draw by draw."""
    found = case(predicted=True)
    design, view = found.design, found.view
    points = torch.repeat_interleave(torch.arange(SIZE), torch.tensor(DRAWS))
    number = torch.cat([torch.arange(n) for n in DRAWS])
    z = design.rows(points, number)
    features = (found.jacobians[points] @ z.unsqueeze(2)).squeeze(2)
    along = (z * found.gradients[points]).sum(1)
    lost = torch.zeros(len(points), dtype=torch.bool)
    lost[[0, 4, 8, 13, len(points) - 1]] = True
    along[lost], features[lost] = torch.nan, torch.nan
    seen = (design.scaled(points, number, features), view)
    some = design.measurements(points, design.scaled(points, number, along), seen)
    assert some.features is not None
    assert int(some.draws.sum()) == len(points) - 5
    for name in ("w", "c", "a"):
        own, every = getattr(some, name), getattr(some.features, name)
        weights = view.residuals if name == "a" else view.residuals.unsqueeze(1)
        if name == "w":  # the others are read only where they are isotropic
            first = torch.arange(own.size(1)) < some.iso.unsqueeze(1)
            own, every = own * first, every * first.unsqueeze(2)
        torch.testing.assert_close((every * weights).sum(-1), own)
        assert bool(own.any())


def test_another_machines_choice_of_predictions_is_kept() -> None:
    found = case(predicted=True)
    assert found.design.predicted is not None
    guess = (found.gradients, 0.9)
    asked: list[str] = []

    def decide(name: str, used: torch.Tensor) -> torch.Tensor:
        asked.append(name)
        assert used.tolist() == [1] * SIZE
        return torch.tensor([0, 1, 0, 1])

    design = Design(found.space, found.known, torch.tensor(ISO), torch.tensor(DRAWS), guess, decide)
    assert asked == ["predicted"]
    assert design.predicted is not None
    assert design.predicted.square().sum(1).tolist() == pytest.approx([0, 1, 0, 1])
    shaped = torch.tensor(DRAWS) - torch.tensor(ISO)
    assert design.measured.sum(1).tolist() == (shaped - torch.tensor([0, 1, 0, 1])).tolist()


def test_rounding_of_a_derivative_is_that_of_an_output_over_sigma() -> None:
    found = case()
    assert found.measurements.features is not None
    rounding = found.view.resolution / found.space.sigma
    assert found.measurements.features.resolution == rounding
