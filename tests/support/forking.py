"""Commands in processes that start fast: forks of one that has imported torch and the commands.

Run as ``python -m tests.support.forking``: every line of its input is a request, answered by the
return code. What is blocked does not import, neither in the command nor in processes it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flops

BLOCKER = """
import os, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == os.environ["BLOCKED"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


class Forks:
    """Runs commands where a module does not import, one at a time."""

    def __init__(self) -> None:
        places = [str(Path(flops.__file__).parents[1]), str(Path(__file__).parents[2])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "COLUMNS": "500"},
        )

    def run(
        self, command: Sequence[str], folder: Path, without: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``flops COMMAND`` in a folder, which gets files of the run's own."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        (folder / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
        request = {"command": list(command), "folder": str(folder), "without": without}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        out, err = ((folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess(list(command), code, out, err)

    def close(self) -> None:
        """End the process that is forked."""
        self._process.communicate()


def become(request: dict[str, Any]) -> None:
    """Turn this process into that of the command."""
    from flops.cli.main import main

    os.chdir(request["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), number)
    imported = [name for name in sys.modules if name.partition(".")[0] == request["without"]]
    assert not imported, "the command line imports what should be optional"
    os.environ["BLOCKED"] = request["without"]
    path = os.pathsep.join([request["folder"], os.environ["PYTHONPATH"]])
    os.environ["PYTHONPATH"] = path  # processes that the command starts block it too
    exec(BLOCKER, {})
    sys.argv = ["flops", *request["command"]]
    main()


def serve() -> None:
    """Fork for every request."""
    import flops.cli.main
    import flops.training.trainer  # noqa: F401  # torch, too

    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            become(json.loads(line))
            return  # and end as any process does
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
