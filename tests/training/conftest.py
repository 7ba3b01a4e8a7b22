"""A run that others are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from flops.training.loop import train
from tests.support.resuming import small


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    train(small(output=str(folder)))
    return folder
