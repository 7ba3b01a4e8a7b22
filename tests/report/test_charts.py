"""Charts: round ticks, points where they belong, gaps, legends."""

from __future__ import annotations

import math
import re

import pytest

from flops.report.gradient_quality import running_mean
from flops.report.names import method_name
from flops.report.scales import Scale, fitted, short
from flops.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart, Curve, bars, thinned
from tests.support.html_page import Page


def test_numbers_are_short() -> None:
    values = (0, 0.25, 12, 999.9, 1200, 2.5e6, 1e9, 0.00012, -3400)
    assert [short(v) for v in values] == [
        "0", "0.25", "12", "1k", "1.2k", "2.5M", "1G", "1.2e-4", "-3.4k",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (7.0, 96.0, False, [20, 40, 60, 80]),
        (-0.1, 0.1, False, [-0.1, -0.05, 0, 0.05, 0.1]),
        (900.0, 60_000.0, True, [1000, 2000, 5000, 10_000, 20_000, 50_000]),
        (2900.0, 6100.0, True, [3000, 4000, 5000, 6000]),  # within a decade
        (1e-3, 1e6, True, [1e-3, 1e-1, 1e1, 1e3, 1e5]),
    ],
)
def test_ticks_are_round(low: float, high: float, log: bool, expected: list[float]) -> None:
    assert Scale(low, high, 0, 1, log).ticks() == pytest.approx(expected)


def test_scales_place_values() -> None:
    scale = Scale(10, 1000, 0, 200, log=True)
    assert [scale.at(v) for v in (1, 10, 100, 1000, 9999)] == pytest.approx([0, 0, 100, 200, 200])
    assert fitted([3.0], 0, 1).ticks()  # a single value has a scale too
    assert fitted([], 0, 1).ticks()


def test_a_curve_is_drawn_where_its_values_are() -> None:
    gap = Curve("ours <1>", [(0, 0.0), (5, math.nan), (10, 1.0)], marked=True)
    drawn = Chart("T", "x", "y", [gap], {"chance": 0.5}, limits=(0.0, 1.0)).html()
    page = Page(drawn)
    assert "ours <1>" in page.text
    drawn = drawn.partition("<ul")[0]  # without the legend
    (path,) = re.findall(r'<path class="line s0" d="(.*?)"/>', drawn)
    assert path.count("M") == 2  # the value that is not finite is a gap
    assert page.tags["circle"] == 2
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    assert heights == [HEIGHT - BOTTOM, TOP]
    (level,) = re.findall(r'class="level l0" x1="\d+" x2="\d+" y1="([\d.]+)"', drawn)
    assert float(level) == pytest.approx((HEIGHT - BOTTOM + TOP) / 2)


def test_what_an_axis_cannot_show_is_left_out() -> None:
    points = [(0.0, 1.0), (10.0, 0.0), (100.0, 1.0), (1000.0, 10.0)]
    drawn = Chart("T", "x", "y", [Curve("c", points, marked=True)], log_x=True, log_y=True).html()
    assert Page(drawn).tags["circle"] == 2
    assert Chart("T", "x", "y", [Curve("c", [(0.0, math.nan)])]).html() == ""


def test_long_curves_are_averaged() -> None:
    found = thinned([(float(i), float(i % 2)) for i in range(1000)], 100)
    assert len(found) == 100
    assert found[-1] == (999, 0.5)
    assert running_mean([(1, 1.0), (2, 3.0), (3, 8.0)], 2) == [(1, 1.0), (2, 2.0), (3, 5.5)]
    assert running_mean([(1, 1.0), (2, 100.0)], 2, True)[1][1] == pytest.approx(10)


def test_bars_fill_the_chart() -> None:
    drawn = bars("T", "x", "y", [1.0, 10.0, 100.0], [4, 2])
    found = re.findall(
        r'class="bar s0" x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="([\d.]+)"', drawn
    )
    (left, wide, high), (_, _, low) = ([float(v) for v in row] for row in found)
    assert left == LEFT
    assert wide == pytest.approx((WIDTH - LEFT - RIGHT) / 2, abs=1)  # the axis is logarithmic
    assert high == pytest.approx(2 * low, rel=1e-2)


def test_methods_have_names_for_people() -> None:
    assert method_name("mezo+lora") == "MeZO + LoRA"
    assert method_name("shaped-lr+last4") == "shaped likelihood ratio (ours) + last 4"
    assert method_name("own") == "own"
