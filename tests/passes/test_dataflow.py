"""What a replay needs follows from the data flow of one pass, hidden or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from flops import ForwardGradient, Group, LikelihoodRatio
from flops.passes.batch import Batch
from flops.passes.replay import Prefix
from flops.passes.trace import inspect
from tests.conftest import flat, gradients, squared
from tests.support.replaying import UNet, stack, stateful


def prefixes(
    model: nn.Module, names: list[str], loss_fn: Callable[..., Tensor] = squared
) -> dict[str, Prefix]:
    """What the queries on the output of each module replay."""
    x, y = torch.randn(3, 4).double(), torch.randn(3, 2).double()
    groups = [Group(name, LikelihoodRatio(), 2, name=name) for name in names]
    model.double()
    for name, module in model.named_modules():
        if name and not any(n == name or n.startswith(name) or name.startswith(n) for n in names):
            module.requires_grad_(False)
    fg = ForwardGradient(model, loss_fn, groups)
    with fg.session(x, y) as session:
        found = zip(names, session.layout.bindings, strict=True)
        return {name: binding.prefixes[0] for name, binding in found}


def needed(model: nn.Module, prefix: Prefix) -> set[str]:
    return {call.name for call in prefix.replayed if call.number in prefix.needed}


def test_only_what_is_read_later_is_recorded() -> None:
    model = UNet()
    found = prefixes(model, ["down2", "middle", "up2", "up1"])
    assert needed(model, found["middle"]) == {"down1", "down2", "middle"}  # both skips
    assert needed(model, found["up2"]) == {"down1", "up2"}
    assert needed(model, found["up1"]) == {"up1"}


def test_a_chain_needs_its_last_output_alone() -> None:
    model = stack()
    found = prefixes(model, ["2", "5"])
    assert needed(model, found["2"]) == {"2"}
    assert {call.name for call in found["5"].replayed} == {"0", "1", "2", "3", "4", "5"}
    assert needed(model, found["5"]) == {"5"}


def test_a_constant_of_the_loss_hides_nothing() -> None:
    weights = torch.tensor([1.0, 2.0]).double()  # nobody knows it before the pass

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets).square() * weights).sum(1)

    model = stack()
    assert needed(model, prefixes(model, ["2", "5"], loss)["5"]) == {"5"}


def test_a_module_that_leaves_something_behind_runs_again_and_the_others_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *stateful())
    model[1].requires_grad_(False)
    found = prefixes(model, ["2"])["2"]
    assert {call.name for call in found.replayed} == {"0", "1.linear", "2"}


class Numpy(nn.Module):
    """Computes outside of torch, from what it is given and what it was told to look at."""

    def __init__(self, also: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__["also"] = also

    def forward(self, x: Tensor) -> Tensor:
        out = x.detach().numpy() ** 2
        if self.also is not None:
            out = out * self.also.seen.detach().numpy()
        self.seen = x
        return torch.from_numpy(out)


class InNumpy(nn.Module):
    """Leaves its result in an attribute, as an array."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.array = torch.tanh(y).detach().numpy()
        return x + y


class ReadsArray(nn.Module):
    def __init__(self, source: InNumpy) -> None:
        super().__init__()
        self.__dict__["source"] = source

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(self.source.array)


class Number(nn.Module):
    """Leaves a Python number behind."""

    def forward(self, x: Tensor) -> Tensor:
        self.numbers = [float(row.sum()) for row in x]
        return x


class ReadsNumber(nn.Module):
    def __init__(self, source: Number) -> None:
        super().__init__()
        self.__dict__["source"] = source

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor(self.source.numbers, dtype=x.dtype).unsqueeze(1)


class Counts(nn.Module):
    """Counts its calls since the root last reset it: no data flows at all."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.counts.calls = 0
        x = self.b(torch.tanh(self.a(self.counts(x))))
        return self.c(torch.tanh(x) * (1 + self.counts.calls))


class Chooses(nn.Module):
    """Reads an output for some data only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rare = self.a(x)
        y = self.b(x)
        rows = [row + r if float(row[0]) > 100 else row for row, r in zip(y, rare, strict=True)]
        return self.c(torch.stack(rows))


def between(source: nn.Module, reader: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), source, nn.Linear(4, 4), reader, nn.Linear(4, 2))


def numpy_chain() -> nn.Module:
    first = Numpy()
    return between(first, Numpy(first))


def arrays() -> nn.Module:
    source = InNumpy()
    source.requires_grad_(False)
    return between(source, ReadsArray(source))


def numbers() -> nn.Module:
    source = Number()
    return between(source, ReadsNumber(source))


HIDDEN: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "numpy": (numpy_chain, ["2", "4"]),
    "arrays in attributes": (arrays, ["2", "4"]),
    "numbers in attributes": (numbers, ["2", "4"]),
    "a counter": (Counted, ["b", "c"]),
    "choices": (Chooses, ["b", "c"]),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_data_flow_changes_no_gradient(name: str) -> None:
    make, targets = HIDDEN[name]
    found = {}
    for reuse in (False, True):
        torch.manual_seed(0)
        model = make().double().requires_grad_(False)
        for target in targets:
            model.get_submodule(target).requires_grad_(True)
        x, y = torch.randn(4, 4).double(), torch.randn(4, 2).double()
        groups = [Group(target, LikelihoodRatio(), 6, name=target) for target in targets]
        fg = ForwardGradient(model, squared, groups, reuse=reuse)
        fg.estimate(x, y)
        model.zero_grad()
        fg.estimate(x + 200 * (name == "choices"), y)  # now the other branch
        found[reuse] = flat(gradients(model))
    torch.testing.assert_close(found[True], found[False], rtol=1e-7, atol=1e-9)


def test_all_outputs_are_recorded_where_values_decide_what_is_read() -> None:
    model = Chooses()
    found = prefixes(model, ["b", "c"])
    assert needed(model, found["b"]) == {"a", "b"}


@pytest.mark.parametrize("make", [numpy_chain, arrays, numbers])
def test_the_random_state_and_the_model_are_left_alone(make: Callable[[], nn.Module]) -> None:
    model = make().double().requires_grad_(False)
    model[4].requires_grad_(True)
    x, y = torch.randn(3, 4).double(), torch.randn(3, 2).double()
    before, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    ForwardGradient(model, squared, [Group("4", LikelihoodRatio(), 2)]).inspect(x, y)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not any("forward" in m.__dict__ for m in model.modules())


class Watched(nn.Linear):
    """Counts how many inputs of its kind are in memory."""

    def __init__(self, made: list[StorageWeakRef], counts: list[int]) -> None:
        super().__init__(4, 4)
        self.made, self.counts = made, counts

    def forward(self, x: Tensor) -> Tensor:
        self.counts.append(sum(not ref.expired() for ref in self.made))
        self.made.append(StorageWeakRef(x.untyped_storage()))  # of the one before, maybe a copy
        return super().forward(x)


@torch.no_grad()
def test_outputs_are_freed_while_the_pass_is_traced() -> None:
    made: list[StorageWeakRef] = []
    counts: list[int] = []
    model = nn.Sequential(*(Watched(made, counts) for _ in range(7)), nn.Linear(4, 2))
    batch = Batch(torch.randn(3, 4), torch.randn(3, 2), squared)
    inspect(model, dict(model.named_modules()), batch, {})
    assert len(counts) == 2 * 7
    assert max(counts) <= 1


class Overwrites(nn.Module):
    """Modifies the output of its first module after it has returned."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.last, self.in_place = nn.Linear(4, 4), nn.Linear(4, 2), in_place

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden.mul_(2) if self.in_place else hidden * 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_outputs_modified_later_are_noticed(in_place: bool) -> None:
    model = Overwrites(in_place).double()
    fg = ForwardGradient(
        model, squared, [Group(name, LikelihoodRatio()) for name in ("first", "last")]
    )
    with fg.session(torch.randn(3, 4).double(), torch.randn(3, 2).double()) as session:
        calls = {call.name: call for call in session.layout.structure.calls}
    assert calls["first"].mutated == in_place
    assert not calls["last"].mutated
