"""Logits in whatever a model returns, and accuracy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flops.tasks.classification import accuracy, logits
from flops.tasks.data.digits import Split


class Answers(nn.Module):
    """Predicts class `image[0]` and returns the logits in one of several wrappings."""

    def __init__(self, wrap=lambda logits: logits):
        super().__init__()
        self.wrap, self.sizes = wrap, []
        self.inner = nn.Dropout(0.9)

    def forward(self, images):
        assert torch.is_inference_mode_enabled()
        self.sizes.append(len(images))
        return self.wrap(self.inner(nn.functional.one_hot(images[:, 0].long(), 4).float()))


def model_output(logits):
    from transformers.modeling_outputs import ImageClassifierOutput

    return ImageClassifierOutput(logits=logits)


WRAPPINGS = {
    "tensor": lambda logits: logits,
    "tuple": lambda logits: (logits,),
    "tuple with loss": lambda logits: (torch.tensor(1.0), logits),
    "tuple with losses": lambda logits: (torch.ones(len(logits)), logits),
    "object": lambda logits: SimpleNamespace(logits=logits),
    "ModelOutput": model_output,
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_logits_are_found_in_every_wrapping(wrap):
    expected = torch.arange(6.0).view(2, 3)
    assert logits(wrap(expected)) is expected


@pytest.mark.parametrize("outputs", [None, 3.0, (), (torch.ones(2),), SimpleNamespace(logits=1)])
def test_missing_logits_are_explained(outputs):
    with pytest.raises(TypeError, match=f"no logits in a {type(outputs).__name__}.*must return"):
        logits(outputs)


SEVEN = Split(
    images=torch.tensor([0.0, 1, 2, 3, 0, 1, 2]).unsqueeze(1),
    labels=torch.tensor([0, 1, 2, 3, 1, 2, 3]),  # the first four are as predicted
)


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
@pytest.mark.parametrize(("batch", "sizes"), [(3, [3, 3, 1]), (7, [7]), (256, [7])])
def test_accuracy_counts_every_point_once(wrap, batch, sizes):
    model = Answers(wrap)
    assert accuracy(model, SEVEN, batch) == 4 / 7
    assert model.sizes == sizes


def test_accuracy_restores_training_flags_also_after_an_error():
    model = nn.Sequential(Answers(), nn.Dropout(0.9))  # dropout would spoil the answers
    model[1].eval()
    flags = [module.training for module in model.modules()]
    assert accuracy(model, SEVEN) == 4 / 7
    assert [module.training for module in model.modules()] == flags
    model[0].wrap = lambda logits: "nonsense"
    with pytest.raises(TypeError):
        accuracy(model[0], SEVEN)
    assert [module.training for module in model.modules()] == flags


def test_accuracy_refuses_what_it_cannot_measure():
    with pytest.raises(ValueError, match="got 0 and"):
        accuracy(Answers(), SEVEN.take(slice(0)))
    with pytest.raises(ValueError, match="batch=0"):
        accuracy(Answers(), SEVEN, 0)
