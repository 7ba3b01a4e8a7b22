"""Write constraints.txt: one version of everything that `make demo` and `make test` install.

uv resolves the ranges of pyproject.toml for all systems and for Python 3.11 and newer at once, and
says with markers where versions differ. What the CUDA builds of torch pull in is left out: which
build of torch is taken, and so which of these, is for the machine to say.

Run it with `make lock`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
PYTHON = "3.11"  # the oldest that pyproject.toml allows
TOOLS = "pip\nhatchling\n"  # what installs and builds the package
OF_CUDA = re.compile(r"(nvidia|cuda)-|triton\b")
HEADER = """\
# One version of everything that `make demo` and `make test` install, for pip's `-c`. Made by
# `make lock` from the ranges of pyproject.toml; change those, not this. torch is the version that
# the figures of the docs were measured with.
"""


def resolve() -> str:
    """Pins of all extras, of the tools of development and of what builds the package."""
    with tempfile.TemporaryDirectory() as scratch:
        tools, torch = Path(scratch) / "tools.in", Path(scratch) / "torch.txt"
        tools.write_text(TOOLS, encoding="utf-8")
        torch.write_text(f"{TORCH}\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
        command += ["--python-version", PYTHON, "--extra", "dev", "--constraints", str(torch)]
        command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        command += ["pyproject.toml", str(tools)]
        return subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8"
        ).stdout


def pins(resolved: str) -> list[str]:
    """The lines to keep: neither of CUDA, nor of the browser, nor of one build of a package.

    Raises:
        ValueError: A line is no pin of a version that an index has.
    """
    kept = []
    for line in resolved.splitlines():
        if OF_CUDA.match(line) or line.endswith("sys_platform == 'emscripten'"):
            continue
        line = re.sub(r"^([\w.-]+==[\w.]+)\+\w+", r"\1", line)  # a build, as in 2.13.0+cpu
        if not re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", line) or "://" in line:
            raise ValueError(f"not a pin: {line!r}")
        kept.append(line)
    return kept


def main() -> None:
    """Resolve and write."""
    kept = pins(resolve())
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(kept) + "\n", encoding="utf-8")
    print(f"{len(kept)} pins in constraints.txt")


if __name__ == "__main__":
    main()
