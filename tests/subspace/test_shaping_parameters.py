"""Shaped noise on parameters: prompts and adapters are found, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flops import ES, SPSA, ForwardGradient, Group, LikelihoodRatio, Shaping
from flops.allocators import Fixed
from flops.errors import CoverageError, PrecisionWarning
from flops.estimators import shaped_parameters
from flops.subspace.basis import Grid
from tests.conftest import cosine, exact, flat, gradients, squared
from tests.statistical.helpers import assert_mean

KINDS = {"es": (ES, 1e-7), "spsa": (SPSA, 1e-5)}
kinds = pytest.mark.parametrize("kind", KINDS)


class Prompted(nn.Module):
    """A frozen model that reads three combinations of a prompt of 24 values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3).requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(24))
        self.register_buffer("reads", torch.randn(24, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x) + self.prompt @ self.reads / 5)


def planted(size: int = 6) -> tuple[Prompted, Tensor, Tensor]:
    return Prompted().double(), torch.randn(size, 4).double(), torch.randn(size, 3).double()


def shaped(kind: str, **options) -> ES | SPSA:
    cls, sigma = KINDS[kind]
    return cls(sigma, shaping=Shaping(**options))


def engine(model: nn.Module, estimator, draws: int = 8, **options) -> ForwardGradient:
    parameters = [p for p in model.parameters() if p.requires_grad]
    group = Group(
        parameters=parameters, estimator=estimator, queries=draws * estimator.unit, name="prompt"
    )
    return ForwardGradient(model, squared, [group], **options)


def step(fg: ForwardGradient, x: Tensor, y: Tensor) -> Tensor:
    fg.model.zero_grad()
    fg.estimate(x, y)
    return flat(gradients(fg.model))


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


@kinds
def test_a_planted_subspace_is_found(kind: str) -> None:
    """Three directions in 24: with half as many draws nothing is left to chance."""
    model, x, y = planted(16)
    truth = flat(exact(model, squared, x, y))
    fg = engine(model, shaped(kind), 12)
    errors = [relative(step(fg, x, y), truth) for _ in range(120)]
    assert min(errors[:4]) > 0.1  # isotropic: far off
    assert max(errors[-5:]) < 1e-5
    assert fg.memory["prompt"]["explained_variance"] > 0.99


def test_shaped_beats_isotropic_at_equal_queries() -> None:
    model, x, y = planted()
    truth = flat(exact(model, squared, x, y))
    plain, ours = engine(model, ES(1e-7), 8), engine(model, shaped("es"), 8)
    isotropic = [cosine(step(plain, x, y), truth) for _ in range(15)]
    found = [cosine(step(ours, x, y), truth) for _ in range(40)][-15:]
    assert sum(isotropic) / 15 < 0.75
    assert sum(found) / 15 > 0.85


def misled(model: Prompted, x: Tensor, y: Tensor, kind: str) -> dict:
    """Memory of another model, whose prompt is read in other directions."""
    other = copy.deepcopy(model)
    other.reads.copy_(torch.randn(24, 3))
    fg = engine(other, shaped(kind))
    for _ in range(12):
        step(fg, x, y)
    return fg.memory["prompt"]


@kinds
@pytest.mark.parametrize("unbiased", [True, False])
def test_unbiased_has_the_mean_of_the_gradient_whatever_it_remembers(
    kind: str, unbiased: bool
) -> None:
    model, x, y = planted()
    memory = misled(model, x, y, kind)
    truth = flat(exact(model, squared, x, y))
    fg = engine(model, shaped(kind, unbiased=unbiased, explore=0.5))
    samples = []
    for _ in range(60):
        fg.memory["prompt"] = copy.deepcopy(memory)
        samples.append(step(fg, x, y))
    if unbiased:
        assert_mean(torch.stack(samples), truth, relative=0.2)
    else:  # the memory is wrong enough to tell
        with pytest.raises(AssertionError, match="standard errors off"):
            assert_mean(torch.stack(samples), truth, relative=0.2)


class Several(nn.Module):
    """A layer with a frozen bias, a norm, and a matrix that is used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.last.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(torch.tanh(self.norm(self.first(x)))))


class Tokens(nn.Module):
    """Words with padding, and a table of positions without a batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 2, padding_idx=0), nn.Embedding(3, 2)
        self.last = nn.Linear(2, 3).requires_grad_(False)
        nn.init.normal_(self.words.weight)

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places(torch.arange(3).unsqueeze(0))
        return self.last(torch.tanh(self.words(ids) + places).prod(1))


class Attending(nn.Module):
    """A prompt of tokens x channels in front of the inputs; projections that never run."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(1, 2, 4))
        self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)
        self.attention.in_proj_weight.requires_grad_(False)
        self.last = nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.prompt.expand(len(x), -1, -1), x.unsqueeze(1)], 1)
        return self.last(self.attention(h, h, h, need_weights=False)[0].mean(1))


def convolution() -> nn.Module:
    last = nn.Linear(8, 3).requires_grad_(False)
    image, layer = nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 3, padding=1)
    return nn.Sequential(image, layer, nn.Tanh(), nn.Flatten(), last)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "several": Several,
    "tokens": Tokens,
    "attending": Attending,
    "convolution": convolution,
}


def case(name: str, size: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randn(size, 4).double()
    if name == "tokens":
        x = torch.tensor([[1, 2, 0], [3, 2, 4], [1, 0, 0]])[:size]
    return MODELS[name]().double(), x, torch.randn(size, 3).double()


@pytest.mark.parametrize(("kind", "together"), [("es", True), ("spsa", False)])
@pytest.mark.parametrize("name", MODELS)
def test_as_many_directions_as_values_give_the_gradient(
    name: str, together: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every coordinate is asked, so whatever was learned, the estimate is exact."""
    monkeypatch.setattr(shaped_parameters, "FLAT", 512 if together else 0)
    model, x, y = case(name)
    truth = exact(model, squared, x, y)
    fg = engine(model, shaped(kind, explore=0.1), 60)
    for _ in range(4):
        assert relative(step(fg, x, y), flat(truth)) > 0.02
    step(fg, x, y)
    found = gradients(model)
    assert found.keys() == truth.keys()  # frozen ones have none
    for key in truth:
        torch.testing.assert_close(found[key], truth[key], rtol=1e-5, atol=1e-5)
    if name == "tokens":
        assert not found["words.weight"][[0, 5, 6]].any()  # padding, and what nobody reads


def test_padding_has_no_noise() -> None:
    model, _, y = case("tokens")
    model.places.requires_grad_(False)
    ids, seen = torch.zeros(3, 3, dtype=torch.long), []

    def recorded(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs)
        return squared(outputs, targets)

    fg = ForwardGradient(model, recorded, [Group(model.words, shaped("es"), queries=8)])
    with pytest.warns(PrecisionWarning, match="does not depend on this group"):
        fg.estimate(ids, y)
    every = torch.cat(seen)
    torch.testing.assert_close(every, every[:1].expand_as(every), rtol=1e-12, atol=1e-12)


def test_grids_of_single_parameters_and_of_few_values() -> None:
    model, x, y = case("attending")
    fg = engine(model, shaped("es"))
    fg.estimate(x, y)
    (layout,) = fg._layouts._known.values()
    entries = shaped_parameters._side_by_side(layout.bindings[0])
    assert shaped_parameters._grids(entries) == [Grid(0, 1, 24)]
    assert shaped_parameters._grids(entries, flat=23) == [Grid(0, 2, 4), Grid(8, 4, 4)]
    assert shaped_parameters._grids(entries[:1]) == [Grid(0, 2, 4)]


class Dropping(Fixed):
    """Counts may be zero."""

    min_queries = 0


def test_a_single_point_and_a_point_without_queries() -> None:
    model, x, y = case("several", 1)
    fg = engine(model, shaped("spsa", explore=0.1), 60)
    for _ in range(5):
        found = step(fg, x, y)
    torch.testing.assert_close(found, flat(exact(model, squared, x, y)), rtol=1e-5, atol=1e-6)
    model, x, y = case("several", 2)
    fg = engine(model, shaped("es", explore=0.1), allocator=Dropping([60, 0]))
    for _ in range(5):
        found = step(fg, x, y)
    alone = flat(exact(model, squared, x[:1], y[:1]))
    torch.testing.assert_close(found, alone / 2, rtol=1e-5, atol=1e-5)


@kinds
@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.bits
def test_chunk_size_does_not_matter(kind: str, chunk: int) -> None:
    model, x, y = planted()
    whole, cut = (engine(model, shaped(kind), chunk=c) for c in (None, chunk))
    for _ in range(6):
        a, b = step(whole, x, y), step(cut, x, y)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@kinds
def test_a_scale_is_a_factor_of_the_gradient(kind: str) -> None:
    """Of isotropic steps, and of shaped ones."""
    model, x, y = planted()
    whole, part = (engine(model, shaped(kind)) for _ in range(2))
    for _ in range(6):
        found = step(whole, x, y)
        model.zero_grad()
        part.estimate(x, y, scale=0.25)
        torch.testing.assert_close(flat(gradients(model)), found / 4)


@kinds
@pytest.mark.bits
def test_a_resumed_run_is_bit_identical(kind: str) -> None:
    model, x, y = planted()
    fg = engine(model, shaped(kind), seed=3)
    for _ in range(6):
        step(fg, x, y)
    again = engine(model, shaped(kind), seed=5)
    again.load_state_dict(copy.deepcopy(fg.state_dict()))
    for _ in range(3):
        assert torch.equal(step(fg, x, y), step(again, x, y))


@kinds
def test_parameters_come_back_also_after_an_error(kind: str) -> None:
    model, x, y = case("several")
    before, tensors = copy.deepcopy(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    fg = engine(model, shaped(kind))
    for _ in range(5):
        fg.estimate(x, y)
    kept, clean, calls = copy.deepcopy(fg.memory), squared(model(x), y).detach(), 0

    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        losses = squared(outputs, targets)
        if len(losses) != 3 or not torch.allclose(losses, clean, rtol=1e-12):
            raise RuntimeError("a query fails")
        return losses

    fg.loss_fn = fails
    with pytest.raises(RuntimeError, match="a query fails"):
        fg.estimate(x, y)
    assert calls > 1
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert [p.data_ptr() for p in model.parameters()] == tensors
    assert str(fg.memory) == str(kept)


@pytest.mark.parametrize("cls", [ES, SPSA])
def test_shared_draws_are_refused(cls: type) -> None:
    with pytest.raises(ValueError, match=r"per-point draws: use shared=False"):
        cls(shared=True, shaping=Shaping())


def test_shaping_without_a_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match='use baseline="clean" or "antithetic"'):
        ES(baseline="none", shaping=Shaping())


def test_large_vectors_are_refused() -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 13_108), nn.Linear(13_108, 3)), *planted()[1:]
    model[1].requires_grad_(False)
    with pytest.raises(CoverageError, match=r"65,540 values .* 65,536 .* LikelihoodRatio with sh"):
        engine(model, shaped("es")).estimate(x.float(), y.float())
    assert model[0].weight.grad is None
    fits = [Group(model[0], LikelihoodRatio(), queries=2)]
    ForwardGradient(model, squared, fits).estimate(x.float(), y.float())


@pytest.mark.parametrize(
    ("shape", "positions"),
    [((), 1), ((9,), 1), ((8, 16), 8), ((1, 8, 16), 8), ((3, 4, 16), 12), ((16, 8, 3, 3), 16)],
)
def test_a_parameter_is_cut_into_positions_and_channels(
    shape: tuple[int, ...], positions: int
) -> None:
    assert shaped_parameters._positions(torch.Size(shape)) == positions
