"""What a person sees of a run."""

from __future__ import annotations

import io
import re
import warnings

from rich.console import Console

from flops.tasks.classification.config import FinetuneConfig
from flops.training.console import Lines, LiveDisplay, closing, display_for, duration
from flops.training.loop import train

SMALL = FinetuneConfig(limit=24, batch=8, queries=4, epochs=2, test=True)


def watched(terminal: bool) -> str:
    out = io.StringIO()
    display = display_for(Console(file=out, force_terminal=terminal, width=120))
    assert type(display) is (LiveDisplay if terminal else Lines)
    with display.warnings():
        result = train(SMALL.replace(method="ops-lr"), display=display)
    display.say(closing(result))
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())


def test_plain_lines_when_there_is_no_terminal() -> None:
    shown = watched(terminal=False).splitlines()
    assert shown[0] == (
        "bundled (305,994 parameters) on digits (24 images, 10 classes) with ops-lr"
    )
    assert [line[:12] for line in shown[1:4]] == ["epoch  0.00 ", "epoch  1.00 ", "epoch  2.00 "]
    assert re.search(r"loss \d\.\d{4}  validation [\d.]+%  queries [\d,]+  forwards", shown[2])
    assert "test" in shown[3]
    assert "test" not in shown[2]
    assert len(shown) == 6


def test_a_resumed_run_prints_what_an_uninterrupted_one_does(tmp_path) -> None:
    def last(name: str, epochs: int, resume: bool = False) -> str:
        out = io.StringIO()
        config = SMALL.replace(method="ops-lr", epochs=epochs, output=str(tmp_path / name))
        train(config, resume=resume, display=Lines(Console(file=out, width=120)))
        (line,) = [x for x in out.getvalue().splitlines() if x.startswith(f"epoch  {epochs}.00 ")]
        return re.sub(r"time \S+", "", line)

    last("cut", 1)
    assert last("cut", 2, resume=True) == last("whole", 2)


def test_a_live_panel_in_a_terminal() -> None:
    shown = watched(terminal=True)
    for part in ("left", "signal-to-noise", "validation accuracy", "queries", "forwards", "loss"):
        assert part in shown
    assert re.search(r"epoch 1\.33, step 4 .* 67%, \d:\d\d left", shown)


def test_warnings_are_lines() -> None:
    out = io.StringIO()
    display = Lines(Console(file=out))
    with display.warnings():
        warnings.simplefilter("always")
        warnings.warn("two images cannot be read", stacklevel=1)
    assert out.getvalue() == "warning: two images cannot be read\n"


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3599, 3723)] == ["0:00", "1:00", "59:59", "1:02:03"]
