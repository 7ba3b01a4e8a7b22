"""The command line as a whole: help, version, wrong commands, a reader that has gone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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


PROGRAM = """
import sys
from flops.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as left:
    print(left, file=sys.stderr)
heavy = {"torch", "numpy", "scipy", "matplotlib", "cma", "transformers"}
print(*sorted(heavy & sys.modules.keys()), *sorted(m for m in sys.modules if "flops.cli." in m))
"""


def ended(*arguments: str) -> tuple[str, list[str]]:
    """What a command says in a process of its own, and which of the heavy modules it imports."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    *shown, last = ran.stdout.splitlines()
    return "\n".join([*shown, ran.stderr]), last.split()


@contextmanager
def answering(status: int) -> Iterator[str]:
    """Address of a server that answers everything with a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "no service answers at"),
        (404, "is not a `flops serve` (status 404"),
        (401, "rejects the key (401): pass it with --api-key-env"),
    ],
)
def test_an_address_is_checked_before_torch_is_imported(
    status: int | None, said: str, tmp_path: Path
) -> None:
    """What makes `flops tune` name a wrong address within three seconds of its start."""
    (tmp_path / "key").write_text("another", "utf-8")
    options = ["--api-key-file", str(tmp_path / "key"), "--url"]
    if status is None:
        shown, imported = ended("tune", *options, "http://127.0.0.1:9")
    else:
        with answering(status) as url:
            shown, imported = ended("tune", *options, url)
    assert said in shown
    assert len(shown.splitlines()) == 1
    assert imported == ["flops.cli.main", "flops.cli.tune"]


@pytest.mark.parametrize("given", ["--help", "--version", "finetun"])
def test_what_needs_no_torch_imports_none(given: str) -> None:
    _, imported = ended(given)
    assert imported == ["flops.cli.main"]


@pytest.mark.parametrize("given", ["--help", "--epochs=0"])
def test_options_of_tune_are_read_before_torch_is_imported(given: str) -> None:
    shown, imported = ended("tune", given)
    assert "--epochs" in shown
    assert imported == ["flops.cli.main", "flops.cli.tune"]


def test_completion_knows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--tyro-print-completion", "bash"])
    assert not left.value.code
    shown = capsys.readouterr().out
    for name in SUMMARIES:
        assert f"'{name}'" in shown
