"""Hooks of mkdocs: pages for repository files, formulas as MathML, and no request to other hosts.

The pages of `docs/` link to source files as they lie in the repository (`../src/flops/..`), so that
these links also work where the repository is shown. In the site each linked file gets a page of its
own, `source/<path>`; CHANGELOG.md and CONTRIBUTING.md are rendered.

Run by `make docs`.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
RENDERED = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
FETCHED = re.compile(
    r"""<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=["']?(https?:)?//"""
)
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".txt": "text"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">"}


def on_files(files: Files, config: Any) -> Files:
    """Add the rendered pages, and one page for each file that a page links to."""
    for name, page in RENDERED.items():
        content = rewritten((ROOT / name).read_text("utf-8"), "", page)
        files.append(File.generated(config, page, content=content))
    linked: set[str] = set()
    for file in files.documentation_pages():
        where = RENDERED_FROM.get(file.src_uri, f"docs/{file.src_uri}")
        linked |= outside(file.content_string, where)
    for path in sorted(linked - set(RENDERED)):
        files.append(File.generated(config, source_page(path), content=shown(path)))
    return files


RENDERED_FROM = {page: name for name, page in RENDERED.items()}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to repository files at their pages."""
    uri = page.file.src_uri
    if uri in RENDERED_FROM:  # done already, seen from the root
        return markdown
    return rewritten(markdown, posixpath.dirname(f"docs/{uri}"), uri)


def on_page_content(html: str, **_: Any) -> str:
    r"""Replace formulas, which arithmatex leaves as \(..\) and \[..\], by MathML."""

    def mathml(found: re.Match[str]) -> str:
        formula = found[2].strip()
        for entity, character in ENTITIES.items():
            formula = formula.replace(entity, character)
        display = "block" if found[1] == "div" else "inline"
        return str(convert(formula, display=display))

    return FORMULA.sub(mathml, html)


def on_post_build(config: Any) -> None:
    """Raise if a page would load something from another host.

    Raises:
        PluginError: It would.
    """
    for page in Path(config["site_dir"]).rglob("*.html"):
        found = FETCHED.search(page.read_text("utf-8"))
        if found and 'rel="canonical"' not in found[0]:
            raise PluginError(f"{page.name} loads from another host: {found[0]}")


def outside(markdown: str, where: str) -> set[str]:
    """Paths of repository files that a page links to and that are not pages themselves."""
    return {
        path
        for found in LINK.finditer(markdown)
        if (path := located(found[2], posixpath.dirname(where))) is not None
    }


def located(target: str, folder: str) -> str | None:
    """Path in the repository of a link's target, if the site has no file for it."""
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    inside = path.startswith("docs/") and not path.startswith("docs/data")
    return None if inside and (ROOT / path).is_file() else path


def rewritten(markdown: str, folder: str, page: str) -> str:
    """The text of a page, seen from a folder, with links that the site has."""

    def replaced(found: re.Match[str]) -> str:
        path = located(found[2], folder)
        if path is not None:
            target = RENDERED.get(path, source_page(path))
        elif folder == "" and found[2].startswith("docs/"):
            target = found[2].removeprefix("docs/")
        else:
            return found[0]
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{found[1]}{relative}{found[3] or ''}"

    return LINK.sub(replaced, markdown)


def source_page(path: str) -> str:
    """Page of a repository file."""
    return f"source/{path.lstrip('.')}.md"  # mkdocs leaves out names with a dot in front


def shown(path: str) -> str:
    """A file as a block of code, a folder as a list of its files."""
    place = ROOT / path
    title = f"# {path}\n\n"
    if place.is_dir():
        names = sorted(os.listdir(place))
        return UNSEARCHED + title + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = LANGUAGES.get(place.suffix, "text")
    fence = "`" * 5
    return f"{UNSEARCHED}{title}{fence}{language}\n{place.read_text('utf-8').rstrip()}\n{fence}\n"
