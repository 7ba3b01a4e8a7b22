"""Links of README, guides and documentation: files exist, anchors are headings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT, TOP, anchors, links


def broken(page: Path, target: str) -> str | None:
    """What is wrong with a link, or None."""
    path, _, anchor = target.partition("#")
    if path.startswith(("https://", "http://")):
        return None
    place = (page.parent / path).resolve() if path else page
    if not place.exists():
        return f"{target}: no such file"
    if ROOT not in (place, *place.parents):
        return f"{target}: outside of the repository"
    if anchor and place.suffix == ".md" and anchor not in anchors(place):
        return f"{target}: no such heading"
    return None


@pytest.mark.parametrize("page", [*TOP, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = [found for target in links(page) if (found := broken(page, target)) is not None]
    assert not wrong


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    assert broken(page, "docs/tutorial.md#next") is None
    assert "no such file" in str(broken(page, "docs/nothing.md"))
    assert "no such heading" in str(broken(page, "docs/tutorial.md#nothing"))
    assert "outside" in str(broken(page, "../.."))
