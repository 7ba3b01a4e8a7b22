"""The command line as a whole: help, version, wrong commands, a reader that has gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flops.cli.main import CLOSED_PIPE, SUMMARIES, main, usage
from flops.version import __version__


@pytest.mark.parametrize("given", [[], ["-h"], ["--help"], ["help"]])
def test_help_is_one_line_a_command(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(given)
    shown = capsys.readouterr().out
    assert shown == usage()
    assert len(shown.splitlines()) < 20
    assert all(len(line) <= 88 for line in shown.splitlines())
    for name in SUMMARIES:
        assert sum(line.startswith(f"  {name} ") for line in shown.splitlines()) == 1


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: flops {name}" in shown
    assert "For example" in shown or name == "study"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"flops {__version__}\n"


def test_a_wrong_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (("finetun", "did you mean finetune?"), ("xyz", "commands are finetune, ")):
        with pytest.raises(SystemExit) as left:
            main([given])
        assert left.value.code == 2
        assert f"no command '{given}'; {said}" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of Windows close in another way")
@pytest.mark.parametrize(
    "given", [pytest.param(["--help"], marks=pytest.mark.slow), ["study", "theorem"]]
)
def test_a_closed_pipe_is_no_error(given: list[str]) -> None:
    repeats = ["--repeats", "2"] if given[0] == "study" else []
    ran = subprocess.Popen(
        [sys.executable, "-m", "flops", *given, *repeats],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert ran.stdout is not None
    assert ran.stderr is not None
    ran.stdout.close()  # as `| head -1` does once it has its line
    assert ran.stderr.read() == b""
    ran.stderr.close()
    assert ran.wait() == CLOSED_PIPE


def test_a_command_imports_no_other() -> None:
    """What makes `flops tune` name a wrong address within three seconds."""
    code = (
        "import sys\nfrom flops.cli.main import main\n"
        "try:\n    main(['tune', '--url', 'http://127.0.0.1:9'])\n"
        "except SystemExit as left:\n    assert 'no service answers' in str(left), left\n"
        "others = ('flops.cli', 'flops.experiments', 'matplotlib', 'transformers')\n"
        "print(*sorted(m for m in sys.modules if m.startswith(others)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["flops.cli", "flops.cli.main", "flops.cli.tune"]


def test_completion_knows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--tyro-print-completion", "bash"])
    assert not left.value.code
    shown = capsys.readouterr().out
    for name in SUMMARIES:
        assert f"'{name}'" in shown
