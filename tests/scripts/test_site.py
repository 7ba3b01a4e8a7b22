"""The hooks of the documentation site: links to source files, formulas, and no other host."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from mkdocs.exceptions import PluginError

from tests.support.pages import DOCS, links
from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("site")


@pytest.mark.parametrize(
    ("text", "folder", "page", "expected"),
    [
        (
            "[a](../src/flops/errors.py)",
            "docs",
            "choose.md",
            "[a](source/src/flops/errors.py.md)",
        ),
        (
            "[a](../../src/flops/errors.py)",
            "docs/howto",
            "howto/memory.md",
            "[a](../source/src/flops/errors.py.md)",
        ),
        ("[a](../CHANGELOG.md#x)", "docs", "choose.md", "[a](changelog.md#x)"),
        ("[a](docs/text.md)", "", "contributing.md", "[a](text.md)"),
        ("[a](text.md#comparisons)", "docs", "choose.md", "[a](text.md#comparisons)"),
        ("[a](https://h.example/x)", "docs", "choose.md", "[a](https://h.example/x)"),
        ("`values[i](x)`", "docs", "choose.md", "`values[i](x)`"),
    ],
)
def test_links_to_the_repository_lead_to_pages(
    script: ModuleType, text: str, folder: str, page: str, expected: str
) -> None:
    assert script.rewritten(text, folder, page) == expected


def test_every_linked_file_gets_a_page(script: ModuleType) -> None:
    page = DOCS / "paper.md"
    found = script.outside(page.read_text("utf-8"), "docs/paper.md")
    assert "src/flops/estimators/likelihood_ratio.py" in found
    assert len(found) == len({link for link in links(page) if link.startswith("../src")})
    shown = script.shown("src/flops/errors.py")
    assert "class FlopsError" in shown
    assert "exclude: true" in shown  # from the search


def test_formulas_become_mathml(script: ModuleType) -> None:
    html = '<p><span class="arithmatex">\\(a &lt; b_j\\)</span></p>'
    found = script.on_page_content(html)
    assert "<math" in found
    assert "arithmatex" not in found
    assert "<msub><mi>b</mi><mi>j</mi></msub>" in found
    block = '<div class="arithmatex">\\[x^2\\]</div>'
    assert 'display="block"' in script.on_page_content(block)


def test_a_page_that_loads_from_elsewhere_is_refused(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text('<a href="https://h.example">a link is fine</a><img src="x.png">')
    script.on_post_build({"site_dir": str(tmp_path)})
    page.write_text('<script src="https://h.example/x.js"></script>')
    with pytest.raises(PluginError, match="another host"):
        script.on_post_build({"site_dir": str(tmp_path)})
