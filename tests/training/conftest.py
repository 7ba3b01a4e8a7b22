"""A run that others are compared with, and one that was broken off."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flops.training.loop import train
from tests.support.resuming import Stop, Stopper, small


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    train(small(output=str(folder)))
    return folder


@pytest.fixture(scope="session")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run after seven steps; checkpoints are of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "broken off"
    with pytest.raises(Stop):
        train(small(output=str(folder)), display=Stopper(7))
    return folder


@pytest.fixture
def stopped(broken_off: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(broken_off, tmp_path / "stopped")
