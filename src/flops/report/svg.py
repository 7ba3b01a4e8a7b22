"""Charts as inline SVG: no script, no request; colours come from the page's style.

A chart is drawn for a width of 420 pixels, which is that of a phone and of a column of a page, so
that its text is never scaled much. The legend is HTML below it: it never covers a curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from flops.report.scales import Scale, fitted, short

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 10, 42
SLOTS = 8  # colours of the page's style
MOST = 240  # points of a curve; more are averaged

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A curve.

    Attributes:
        name: Its name in the legend.
        points: Its points, in order; a value that is not finite is a gap.
        slot: Number of its colour.
        band: Lowest and highest value at each point, parallel to `points`.
        marked: Draw a mark at every point.
        faint: Draw it thin and pale, without an entry in the legend.
    """

    name: str
    points: Sequence[Point]
    slot: int = 0
    band: Sequence[Point] = ()
    marked: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of curves.

    Attributes:
        title: Title above it.
        x: Label of the horizontal axis, with its unit.
        y: Label of the vertical axis, with its unit.
        curves: Its curves.
        levels: Horizontal lines by name, such as chance.
        log_x: Logarithmic horizontal axis; points at 0 are left out.
        log_y: Logarithmic vertical axis.
        limits: Smallest and largest value of the vertical axis; None for those of the curves.
        note: Text below it.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    levels: dict[str, float] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    limits: tuple[float, float] | None = None
    note: str = ""

    def html(self) -> str:
        """The chart with its title, legend and note, as an HTML figure."""
        curves = [self._shown(curve) for curve in self.curves]
        xs = [x for c in curves for x, y in c.points if math.isfinite(y)]
        ys = [y for c in curves for _, y in c.points if math.isfinite(y)]
        ys += [y for c in curves for pair in c.band for y in pair if math.isfinite(y)]
        ys += list(self.levels.values()) if ys else []
        if not xs:
            return ""
        across = fitted(xs, LEFT, WIDTH - RIGHT, log=self.log_x, zero=not self.log_x, room=0.02)
        if self.limits is None:
            up = fitted(ys, HEIGHT - BOTTOM, TOP, log=self.log_y)
        else:
            up = Scale(*self.limits, HEIGHT - BOTTOM, TOP, self.log_y)
        drawn = [_axes(across, up, self.x, self.y)]
        for number, level in enumerate(self.levels.values()):
            place = f'y1="{up.at(level):.1f}" y2="{up.at(level):.1f}"'
            drawn.append(
                f'<line class="level l{number}" x1="{LEFT}" x2="{WIDTH - RIGHT}" {place}/>'
            )
        drawn += [_curve(curve, across, up) for curve in curves]
        return figure(
            self.title, "".join(drawn), _legend(curves, self.levels), self.note, self._said(curves)
        )

    def _shown(self, curve: Curve) -> Curve:
        """The curve without points that a logarithmic axis cannot show, and thinned."""
        keep = [
            i
            for i, (x, y) in enumerate(curve.points)
            if (x > 0 or not self.log_x) and (y > 0 or not self.log_y or not math.isfinite(y))
        ]
        points, band = [curve.points[i] for i in keep], [curve.band[i] for i in keep if curve.band]
        if len(points) > MOST:
            points, band = thinned(points), []
        return Curve(curve.name, points, curve.slot, band, curve.marked, curve.faint)

    def _said(self, curves: Sequence[Curve]) -> str:
        """What the chart shows, for those who cannot see it."""
        ends = [
            f"{curve.name} ends at {short(curve.points[-1][1])}"
            for curve in curves
            if curve.points and not curve.faint
        ]
        return f"{self.title}: {self.y} against {self.x}. {'; '.join(ends)}"


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """Means of equal parts of the points."""
    size = -(-len(points) // most)
    found = []
    for start in range(0, len(points), size):
        part = [p for p in points[start : start + size] if math.isfinite(p[1])]
        if part:
            found.append((part[-1][0], sum(y for _, y in part) / len(part)))
    return found


def figure(title: str, drawn: str, legend: str = "", note: str = "", said: str = "") -> str:
    """An HTML figure around the content of an SVG."""
    label = escape(said or title)
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{drawn}</svg>'
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + (f'<p class="note">{escape(note)}</p>' if note else "")
        + "</figure>"
    )


def bars(title: str, x: str, y: str, edges: Sequence[float], heights: Sequence[float]) -> str:
    """A histogram: bars between edges, with a logarithmic axis if the edges need one."""
    log = edges[0] > 0 and edges[-1] > 10 * edges[0]
    across = Scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT, log)
    up = Scale(0.0, 1.05 * max(heights), HEIGHT - BOTTOM, TOP)
    drawn = [_axes(across, up, x, y)]
    for left, right, height in zip(edges, edges[1:], heights, strict=False):
        if height:
            start, end = across.at(left), across.at(right)
            top = up.at(height)
            drawn.append(
                f'<rect class="bar s0" x="{start:.1f}" y="{top:.1f}" '
                f'width="{max(1.0, end - start - 0.6):.1f}" height="{HEIGHT - BOTTOM - top:.1f}">'
                f"<title>{short(left)} to {short(right)}: {short(height)}</title></rect>"
            )
    return figure(title, "".join(drawn))


def _axes(across: Scale, up: Scale, x: str, y: str) -> str:
    found = []
    for tick in up.ticks():
        place = up.at(tick)
        found.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" '
            f'y2="{place:.1f}"/><text class="tick" x="{LEFT - 6}" y="{place + 4:.1f}" '
            f'text-anchor="end">{short(tick)}</text>'
        )
    bottom = HEIGHT - BOTTOM
    for tick in across.ticks():
        place = across.at(tick)
        found.append(
            f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" '
            f'y2="{bottom + 4}"/><text class="tick" x="{place:.1f}" y="{bottom + 17}" '
            f'text-anchor="middle">{short(tick)}</text>'
        )
    found.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    found.append(
        f'<text class="label" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f'{escape(x)}</text><text class="label" transform="translate(12 {(TOP + bottom) / 2:.0f}) '
        f'rotate(-90)" text-anchor="middle">{escape(y)}</text>'
    )
    return "".join(found)


def _curve(curve: Curve, across: Scale, up: Scale) -> str:
    slot, found = f"s{curve.slot % SLOTS}", []
    places = [None if not math.isfinite(y) else (across.at(x), up.at(y)) for x, y in curve.points]
    if curve.band:
        xs = [across.at(x) for x, _ in curve.points]
        lows = [f"{x:.1f},{up.at(low):.1f}" for x, (low, _) in zip(xs, curve.band, strict=True)]
        highs = [f"{x:.1f},{up.at(high):.1f}" for x, (_, high) in zip(xs, curve.band, strict=True)]
        found.append(f'<polygon class="band {slot}" points="{" ".join(lows + highs[::-1])}"/>')
    path, pen = "", "M"
    for place in places:
        if place is None:
            pen = "M"
            continue
        path, pen = f"{path}{pen}{place[0]:.1f} {place[1]:.1f}", "L"
    found.append(f'<path class="{"faint" if curve.faint else "line"} {slot}" d="{path}"/>')
    for place, (x, y) in zip(places, curve.points, strict=True):
        if place is not None and (curve.marked or len(curve.points) == 1):
            found.append(
                f'<circle class="mark {slot}" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3">'
                f"<title>{escape(curve.name)}: {short(y)} at {short(x)}</title></circle>"
            )
    return "".join(found)


def _legend(curves: Sequence[Curve], levels: dict[str, float]) -> str:
    named = [c for c in curves if not c.faint and c.points]
    found = [
        f'<li><svg viewBox="0 0 26 10" aria-hidden="true"><path class="line s{c.slot % SLOTS}" '
        f'd="M1 5L25 5"/></svg>{escape(c.name)}</li>'
        for c in named
    ]
    found += [
        f'<li><svg viewBox="0 0 26 10" aria-hidden="true"><line class="level l{number}" x1="1" '
        f'x2="25" y1="5" y2="5"/></svg>{escape(name)}</li>'
        for number, name in enumerate(levels)
    ]
    return "".join(found) if len(found) > 1 else ""
