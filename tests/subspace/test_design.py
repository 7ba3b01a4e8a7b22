"""The design of a step: which direction each draw measures, and what becomes of the derivatives."""

from __future__ import annotations

import pytest
import torch

from flops.subspace.design import needed, real_directions
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
