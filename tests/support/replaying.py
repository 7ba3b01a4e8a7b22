"""Models with skips and state, in groups with and without reuse."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flops import ES, SPSA, LikelihoodRatio


class UNet(nn.Module):
    """Skip connections from the early group to the late one."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(4, 4), nn.Linear(4, 3)
        self.middle = nn.Linear(3, 3)
        self.up2, self.up1 = nn.Linear(6, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.down1(x))
        second = torch.tanh(self.down2(first))
        up = self.up2(torch.cat([torch.tanh(self.middle(second)), second], 1))
        return self.up1(torch.cat([torch.tanh(up), first], 1))


class Notes(nn.Module):
    """Leaves something in an attribute for a later module to read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.note = torch.tanh(y)
        return x + y


class Reader(nn.Module):
    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.__dict__["notes"] = notes  # not a child

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.notes.note)


def stateful() -> nn.Module:
    notes = Notes()
    return nn.Sequential(notes, nn.Linear(4, 4), Reader(notes))


def stack() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 2)
    )


ESTIMATORS = {
    "block": LikelihoodRatio(),
    "leaf": LikelihoodRatio(targets="leaf"),
    "es": ES(),
    "spsa": SPSA(),
    "spsa shared": SPSA(shared=True),
}
