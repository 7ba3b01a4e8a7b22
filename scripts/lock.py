"""Write constraints.txt: pinned versions of everything that `make demo` and `make test` install.

uv resolves the ranges of pyproject.toml for all systems and for Python 3.11 and newer at once, with
markers where versions differ. Dependencies of the CUDA builds of torch are omitted: they depend on
the build that a machine uses. Versions that are pinned already stay, as far as the ranges allow;
`make lock UPGRADE=--upgrade` takes the newest.

Run it with `make lock`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
PYTHON = "3.11"  # the oldest that pyproject.toml allows
TOOLS = "pip\nhatchling\n"  # to install and build the package
OF_CUDA = re.compile(r"(nvidia|cuda)-|triton\b")
HEADER = """\
# Pinned versions of everything that `make demo` and `make test` install, for pip's `-c`. Generated
# by `make lock` from the ranges of pyproject.toml; edit those, not this file. torch is the version
# that the numbers in the docs were measured with.
"""


def resolve(options: Sequence[str] = ()) -> str:
    """Pins of all extras, development tools and build requirements.

    Args:
        options: Further options of `uv pip compile`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tools, torch = Path(scratch) / "tools.in", Path(scratch) / "torch.txt"
        kept = Path(scratch) / "kept.txt"  # an output that exists is preferred
        kept.write_text((ROOT / "constraints.txt").read_text("utf-8"), encoding="utf-8")
        tools.write_text(TOOLS, encoding="utf-8")
        torch.write_text(f"{TORCH}\n", encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
        command += ["--python-version", PYTHON, "--extra", "dev", "--constraints", str(torch)]
        command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        command += ["pyproject.toml", str(tools), "--output-file", str(kept), *options]
        subprocess.run(command, cwd=ROOT, check=True)
        return kept.read_text("utf-8")


def pins(resolved: str) -> list[str]:
    """The lines to keep: without CUDA packages, browser markers and build tags.

    Raises:
        ValueError: A line is not a pin of a released version.
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
    kept = pins(resolve(sys.argv[1:]))
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(kept) + "\n", encoding="utf-8")
    print(f"{len(kept)} pins in constraints.txt")


if __name__ == "__main__":
    main()
