"""A self-contained HTML page: one file without scripts and without requests.

Its policy forbids everything but the style and the images inside it. It follows the colour scheme
of the reader's system, and the width of the window.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from flops.version import __version__

MAIN: tuple[str, ...] = (
    "model",
    "data",
    "method",
    "queries",
    "sigma",
    "learning_rate",
    "optimizer",
    "schedule",
)
MAIN += ("batch", "epochs", "steps", "budget", "lora", "seed", "seeds")  # settings
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Okabe and Ito's colours, darker on white and lighter on black, so that all have contrast.
STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1b1f24; --soft: #57606a;
  --edge: #d8dee4; --link: #0550ae; --warn: #fff4d6;
  --s0: #0069a8; --s1: #c2410c; --s2: #00805c; --s3: #8b3fb8; --s4: #9a6700; --s5: #c0257a;
  --s6: #1f7a8c; --s7: #5b5f66; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #161b22; --text: #e6edf3;
  --soft: #9da7b3; --edge: #30363d; --link: #79b8ff; --warn: #3a2d0b;
  --s0: #58b0f0; --s1: #ff9559; --s2: #3ddba4; --s3: #cf9fff; --s4: #e3c04b; --s5: #ff86c0;
  --s6: #6fd3e0; --s7: #b8bfc8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 40px 0 12px; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 24px 0 8px; }
.columns h3 { margin-top: 0; }
p { margin: 8px 0; max-width: 75ch; }
a { color: var(--link); }
.soft, .note, figcaption small { color: var(--soft); }
.note { font-size: .85rem; }
.warn { background: var(--warn); border: 1px solid var(--edge); border-radius: 6px;
  padding: 8px 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 10px;
  margin: 16px 0; padding: 0; list-style: none; }
.tiles li, .chart, details, .card { background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px; }
.tiles li { padding: 10px 14px; color: var(--soft); font-size: .85rem; }
.tiles b { display: block; font-size: 1.25rem; color: var(--text); font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr));
  gap: 14px; }
.chart { margin: 0; padding: 12px; }
.chart figcaption { font-weight: 600; margin-bottom: 4px; }
.chart > svg { display: block; width: 100%; height: auto; max-width: 560px; }
.chart .note { margin: 6px 0 0; }
svg text { fill: var(--soft); font-size: 12px; }
svg .label { fill: var(--text); }
svg .grid { stroke: var(--edge); }
svg .axis { stroke: var(--soft); }
svg .line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
svg .faint { fill: none; stroke: var(--c); stroke-width: 1; opacity: .3; }
svg .band { fill: var(--c); opacity: .15; }
svg .mark, svg .bar { fill: var(--c); }
svg .level { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4; }
svg .l1 { stroke-dasharray: 2 3; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); stroke-dasharray: none; } .s2 { --c: var(--s2); }
.s3 { --c: var(--s3); } .s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); }
.s7 { --c: var(--s7); }
svg .line.s1 { stroke-dasharray: 8 3; } svg .line.s2 { stroke-dasharray: 3 3; }
svg .line.s3 { stroke-dasharray: 9 3 2 3; } svg .line.s5 { stroke-dasharray: 5 2; }
svg .line.s6 { stroke-dasharray: 1.5 2.5; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 6px 0 0; padding: 0;
  list-style: none; font-size: .85rem; }
.legend li { display: inline-flex; align-items: center; gap: 6px; min-width: 0;
  overflow-wrap: anywhere; }
.legend svg { width: 26px; height: 10px; flex: none; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: 6px 12px; text-align: right; border-bottom: 1px solid var(--edge);
  vertical-align: top; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { font-weight: 600; color: var(--soft); }
th:first-child, td:first-child, .texts td, .texts th, .pairs td, .pairs th { text-align: left; }
.texts td:last-child, .pairs td { white-space: normal; overflow-wrap: anywhere; }
.pairs td:first-child { color: var(--soft); width: 40%; }
.pairs tbody { display: grid;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); }
.pairs tr { display: flex; }
.pairs td { border: 0; }
.pairs td:first-child { flex: 0 0 42%; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr));
  gap: 14px; align-items: start; }
.thumbs { display: grid; grid-template-columns: repeat(auto-fill, minmax(72px, 1fr)); gap: 8px;
  margin: 0; padding: 0; list-style: none; font-size: .8rem; }
.thumbs li { overflow-wrap: anywhere; color: var(--soft); }
.thumbs b { color: var(--text); }
.thumbs img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain;
  image-rendering: pixelated; background: #000; border-radius: 4px; }
.smooth img { image-rendering: auto; }
.picture img { display: block; max-width: 100%; height: auto; background: #fff;
  border-radius: 6px; }
details { margin: 10px 0; }
summary { padding: 8px 12px; cursor: pointer; font-weight: 600; }
details .scroll { border: 0; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px;
  background: var(--c); margin-right: 6px; vertical-align: -1px; }
@media (max-width: 600px) { svg text { font-size: 14px; }
  th, td { padding: 6px 8px; } th, td:first-child { white-space: normal; }
  td:first-child { min-width: 6.5em; } }
footer { margin-top: 40px; color: var(--soft); font-size: .85rem; }
"""


def page(title: str, lead: str, *parts: str) -> str:
    """A whole page.

    Args:
        title: Title.
        lead: Sentence below it.
        parts: HTML of the sections.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        f'<h1>{escape(title)}</h1><p class="soft">{escape(lead)}</p>\n'
        + "\n".join(part for part in parts if part)
        + f"\n<footer>FLOPS {__version__}</footer></main></body></html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of text, which scrolls by itself if it is too wide for the window."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """The most important numbers, each with its name."""
    found = "".join(f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in values)
    return f'<ul class="tiles">{found}</ul>'


def folded(title: str, content: str, open: bool = False) -> str:
    """A section that can be opened."""
    return (
        f"<details{' open' if open else ''}><summary>{escape(title)}</summary>{content}</details>"
    )


def warning(text: str) -> str:
    """A sentence about something that is missing."""
    return f'<p class="warn">{escape(text)}</p>'


def shown_value(value: Any) -> str:
    """A setting for people."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown_value, value)) or "-"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def setting_table(settings: Mapping[str, Any]) -> str:
    """The settings: the main ones, and the others to open."""
    if not settings:
        return ""
    main = [[n, shown_value(settings[n])] for n in MAIN if settings.get(n) is not None]
    rest = [[n, shown_value(v)] for n, v in settings.items() if n not in MAIN or v is None]
    others = folded("All other settings", table([], rest, "pairs")) if rest else ""
    return table([], main, "pairs") + others


def environment_table(found: Mapping[str, Any]) -> str:
    """Versions, cores and threads, to open; empty if unknown."""
    packages = found.get("packages")
    rows = [[n, shown_value(v)] for n, v in found.items() if n != "packages" and v is not None]
    if isinstance(packages, dict):
        rows += [[n, shown_value(v)] for n, v in packages.items()]
    return folded("Environment", table([], rows, "pairs")) if rows else ""


def image_source(pixels: Tensor) -> str:
    """A data URI of a PNG of an image, uint8, (1 or 3, height, width)."""
    channels, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).reshape(height, width * channels).contiguous().numpy()
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    ]
    return _source(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


def file_source(path: Path) -> str:
    """A data URI of a PNG file.

    Raises:
        OSError: It cannot be read.
    """
    return _source(path.read_bytes())


def _source(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")
