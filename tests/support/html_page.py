"""Reads report pages as a browser would: well-formed, self-contained, without scripts."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link", "input", "hr"}
SVG = {"line", "path", "rect", "circle", "polygon"}  # closed by themselves


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        text: All text, with a line for each element.
        images: Sources of the images.
        tags: Number of elements by name.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text, self.images, self.tags = "", list[str](), dict[str, int]()
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open, f"never closed: {self._open}"
        assert "<script" not in source
        assert "@import" not in source
        assert "url(" not in source

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._check(attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SVG | VOID
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._check(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style" and data.strip():
            self.text += data.strip() + "\n"

    def _check(self, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            assert not name.startswith("on"), f"a script in {name}"
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert (value or "").startswith(("data:image/png;base64,", "#")), value
                if name == "src":
                    self.images.append(value or "")
