"""CLIPs that several tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from flops.tasks.models.clip import PromptedClip
from tests.support.clips import save_random_clip


@pytest.fixture(scope="session")
def bundled() -> PromptedClip:
    return PromptedClip.load()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a random CLIP of other sizes."""
    path = tmp_path_factory.mktemp("clip")
    save_random_clip(path)
    return path
