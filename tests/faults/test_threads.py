"""Threads that share a model, steps inside steps, and what both leave behind."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from flops import FlopsError, ForwardGradient
from tests.conftest import gradients, squared
from tests.support.during import data, during, model, run_in_thread

pytestmark = pytest.mark.usefixtures("handlers_stay")


def tied(net: nn.Sequential) -> nn.Sequential:
    other = model()
    other[0].weight = net[0].weight
    return other


@pytest.mark.parametrize(
    ("shares", "names"),
    [
        (lambda net: net, r"\['model', '0', '1', '2'\]"),
        (lambda net: nn.Sequential(net[0], nn.Linear(5, 2)), r"\['0'\]"),
        (tied, "parameters"),
    ],
)
def test_a_second_thread_on_one_model_is_refused(
    shares: Callable[[nn.Sequential], nn.Module], names: str
) -> None:
    net, (x, y) = model(), data()
    second = ForwardGradient(shares(net), squared)
    found: list[BaseException] = []
    fg = ForwardGradient(
        net, during(lambda: found.extend(run_in_thread(lambda: second.estimate(x, y))))
    )
    fg.estimate(x, y)
    assert (fg.steps, second.steps) == (1, 0)
    assert len(found) == 1
    with pytest.raises(FlopsError, match=f"'MainThread' is running a step.*{names}"):
        raise found[0]
    second.estimate(x, y)


def test_two_models_in_two_threads() -> None:
    engines = [ForwardGradient(model(), squared) for _ in range(2)]
    twins = copy.deepcopy(engines)
    x, y = data()

    def work(fg: ForwardGradient) -> None:
        for _ in range(20):
            fg.estimate(x, y)

    threads = [threading.Thread(target=work, args=(fg,)) for fg in engines]
    enabled = torch.backends.mha.get_fastpath_enabled()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.mha.get_fastpath_enabled() == enabled
    for fg, twin in zip(engines, twins, strict=True):
        work(twin)
        for name, gradient in gradients(fg.model).items():
            assert torch.equal(gradient, gradients(twin.model)[name])


def test_the_switch_of_attention_is_back_after_the_last_thread() -> None:
    net, (x, y) = model(), data()
    inside, outside = threading.Event(), threading.Event()

    def waits() -> None:
        inside.set()
        assert outside.wait(30)

    enabled = torch.backends.mha.get_fastpath_enabled()
    late = ForwardGradient(model(), during(waits))
    thread = threading.Thread(target=late.estimate, args=(x, y))

    def start() -> None:
        thread.start()
        assert inside.wait(30)

    ForwardGradient(net, during(start)).estimate(x, y)
    assert not torch.backends.mha.get_fastpath_enabled()  # the other one needs it off
    outside.set()
    thread.join()
    assert torch.backends.mha.get_fastpath_enabled() == enabled


def test_a_step_inside_a_pass_over_the_same_model_is_refused() -> None:
    net, (x, y) = model(), data()
    inner = ForwardGradient(net, squared)
    fg = ForwardGradient(net, during(lambda: inner.estimate(x, y), at=1))
    with pytest.raises(FlopsError, match="during a pass of another estimate"):
        fg.estimate(x, y)
    assert (fg.steps, inner.steps) == (0, 0)
    assert not gradients(net)
    inner.estimate(x, y)


def test_models_are_neither_kept_nor_marked() -> None:
    net, (x, y) = model(), data()
    keys = [set(module.__dict__) for module in net.modules()]
    fg = ForwardGradient(net, squared)
    fg.estimate(x, y)
    assert keys == [set(module.__dict__) for module in net.modules()]
    copy.deepcopy(fg).estimate(x, y)
    pickle.loads(pickle.dumps(net))
    gone = weakref.ref(net)
    del net, fg
    gc.collect()
    assert gone() is None
