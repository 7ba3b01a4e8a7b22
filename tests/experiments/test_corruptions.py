"""Natural noise: its moments, and that it is the same for everybody."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flops.errors import FlopsError
from flops.experiments.corruptions import gaussian, poisson, uniform

KINDS: dict[str, tuple[Callable[..., Tensor], float]] = {
    "gaussian": (gaussian, 0.1),
    "uniform": (uniform, 0.1),
    "poisson": (poisson, 100.0),
}
ROWS = torch.arange(40)


@pytest.mark.parametrize(
    ("kind", "std"),
    [("gaussian", 0.1), ("uniform", 0.1 / math.sqrt(3)), ("poisson", math.sqrt(0.5 / 100))],
)
def test_mean_and_variance(kind: str, std: float) -> None:
    corrupt, strength = KINDS[kind]
    grey = torch.full((40, 1, 50, 50), 0.5)  # so far from both ends that nothing is clipped
    noise = (corrupt(grey, ROWS, strength) - grey).double()
    assert abs(noise.mean()) < 5 * std / math.sqrt(noise.numel())
    assert float(noise.std()) == pytest.approx(std, rel=0.01)


def test_poisson_noise_follows_the_light() -> None:
    for level in (0.1, 0.3, 0.6):
        noisy = poisson(torch.full((40, 1, 50, 50), level), ROWS, 50.0).double()
        assert float(noisy.mean()) == pytest.approx(level, rel=0.01)
        assert float(noisy.var()) == pytest.approx(level / 50, rel=0.03)
        assert torch.allclose(noisy * 50, (noisy * 50).round(), atol=1e-4)  # counts
    assert poisson(torch.zeros(3, 1, 8, 8), ROWS[:3], 50.0).max() == 0


def test_uniform_noise_has_an_end() -> None:
    noise = uniform(torch.full((40, 1, 50, 50), 0.5), ROWS, 0.2) - 0.5
    assert 0.199 < noise.abs().max() <= 0.2 + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_noise_belongs_to_the_image_alone(kind: str) -> None:
    corrupt, strength = KINDS[kind]
    pixels = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before, state = pixels.clone(), torch.get_rng_state()
    found = corrupt(pixels, ROWS, strength)
    torch.rand(3)  # a different state of the global generator changes nothing
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    parts = [corrupt(pixels[rows], rows, strength) for rows in order.split(7)]
    torch.set_rng_state(state)
    assert torch.equal(torch.cat(parts), found[order])
    corrupt(pixels, ROWS, strength)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(pixels, before)
    assert found.min() >= 0
    assert found.max() <= 1
    assert not torch.equal(found, corrupt(pixels, ROWS, strength, seed=1))
    assert not torch.equal(found, corrupt(pixels, ROWS + 1, strength))


def test_kinds_draw_apart() -> None:
    grey = torch.full((1, 1, 64, 64), 0.5)
    noise = [(KINDS[k][0](grey, ROWS[:1], KINDS[k][1]) - grey).flatten() for k in KINDS]
    assert abs(float(torch.corrcoef(torch.stack(noise)[:2])[0, 1])) < 0.1


def test_what_noise_refuses() -> None:
    pixels = torch.rand(2, 1, 4, 4)
    with pytest.raises(FlopsError, match="deviation of Gaussian noise must be 0 or more, not -1"):
        gaussian(pixels, ROWS[:2], -1)
    with pytest.raises(FlopsError, match=r"half width .* not nan"):
        uniform(pixels, ROWS[:2], math.nan)
    with pytest.raises(FlopsError, match="scale of Poisson noise must be greater than 0, not 0"):
        poisson(pixels, ROWS[:2], 0)
    with pytest.raises(FlopsError, match="2 images need as many rows, not 3"):
        gaussian(pixels, ROWS[:3], 0.1)
