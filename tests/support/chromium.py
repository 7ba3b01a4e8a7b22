"""Measures a page in headless Chromium, at any width and in both colour schemes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HEIGHT = 6000
# The page is in a frame, since windows have a least width; the frame's width is the phone's.
SCRIPT = """
function ratio(one, other) {
  const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(Number).map(x => x / 255)
      .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
  const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}
function under(element, view) {
  for (let e = element; e; e = e.parentElement) {
    const c = view.getComputedStyle(e).backgroundColor;
    if (c && !/, 0\\)$/.test(c) && c !== 'transparent') return c;
  }
  return 'rgb(255, 255, 255)';
}
window.onload = () => {
  const frame = document.querySelector('iframe'), page = frame.contentDocument;
  const view = frame.contentWindow, root = page.documentElement, found = {};
  found.scroll = root.scrollWidth; found.client = root.clientWidth;
  found.height = root.scrollHeight;
  found.dark = view.matchMedia('(prefers-color-scheme: dark)').matches;
  const all = [...page.body.querySelectorAll('*')];
  found.wide = all.filter(e => !e.closest('.scroll') && !e.closest('svg')
    && e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.outerHTML.slice(0, 80));
  found.clipped = []; found.overlaps = []; found.small = [];
  for (const svg of page.querySelectorAll('.chart > svg')) {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')]
      .map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const [said, r] of texts) {
      if (r.left < box.left - 1 || r.right > box.right + 1 || r.bottom > box.bottom + 1)
        found.clipped.push(said);
      if (Math.min(r.width, r.height) < 9 && said.length > 1) found.small.push(said);
    }
    texts.forEach(([a, r], i) => texts.slice(i + 1).forEach(([b, s]) => {
      const beside = r.left >= s.right - 1 || s.left >= r.right - 1;
      if (!beside && r.top < s.bottom - 3 && s.top < r.bottom - 3)
        found.overlaps.push(a + ' | ' + b);
    }));
  }
  found.pale = [];
  for (const e of all) {
    const style = view.getComputedStyle(e);
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    const colour = e.closest('svg') ? style.fill : style.color;
    if (own && e.tagName !== 'title' && ratio(colour, under(e, view)) < 4.5)
      found.pale.push(e.textContent.slice(0, 40) + ' ' + colour);
  }
  for (const e of page.querySelectorAll('path.line'))
    if (ratio(view.getComputedStyle(e).stroke, under(e, view)) < 3)
      found.pale.push(e.className.baseVal);
  const out = document.createElement('pre'); out.id = 'found';
  out.textContent = JSON.stringify(found); document.body.append(out);
};
"""


def measured(page: str, width: int, dark: bool, folder: Path) -> dict[str, Any]:
    """Sizes, overflowing and overlapping elements, and text with too little contrast."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("Chromium is not installed (Debian: apt install chromium)")
    outer = folder / f"frame-{width}-{dark}.html"
    outer.write_text(
        '<!doctype html><meta charset="utf-8"><body style="margin:0">'
        f'<iframe width="{width}" height="{HEIGHT}" srcdoc="{escape(page)}"></iframe>'
        f"<script>{SCRIPT}</script>",
        encoding="utf-8",
    )
    ran = subprocess.run(
        [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width + 100},{HEIGHT}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--virtual-time-budget=10000",
            "--dump-dom",
            outer.as_uri(),
        ],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found, ran.stderr[-2000:]
    values: dict[str, Any] = json.loads(unescape(found[1]))
    return values
