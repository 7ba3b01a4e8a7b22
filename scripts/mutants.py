"""Mutation testing: change one operator, constant or statement at a time, and see if a test fails.

Each mutant is applied to a copy of the package and run against the tests that mirror its file:
first those named after it, then the others of `TESTS`. Tests that fail without any change are
skipped, and listed in the report. A mutant that no test catches is in ``runs/mutants/report.md``
with its diff: it needs a test, or the code is redundant there.

Results are saved as they come; the next run resumes, and repeats a mutant only if its file has
changed.

    python scripts/mutants.py --sample 60 --seed 0
    python scripts/mutants.py --files src/flops/estimators/variance.py
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/flops")
TESTS = {
    "estimators": ["tests/estimators", "tests/exact"],
    "estimators/shaped_parameters.py": ["tests/subspace/test_shaping_parameters.py"],
    "estimators/shaped_activations.py": [
        "tests/subspace/test_outputs.py",
        "tests/subspace/test_shaping.py",
        "tests/subspace/test_reliability.py",
    ],
    "allocators": ["tests/allocators"],
    "subspace": ["tests/subspace"],
    "engine/rows.py": [
        "tests/engine/test_rows.py",
        "tests/engine/test_pilot.py",
        "tests/engine/test_gradients.py",
        "tests/engine/test_collectives.py",
    ],
}
COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
}
# Not mutated, since they do not affect results: types, messages, decorators.
SKIPPED = (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the bytes from start to end are replaced."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    new: str
    version: str

    @property
    def name(self) -> str:
        """Identifies the change and the version of the file."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    def applied(self, source: bytes) -> bytes:
        """The changed file."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def diff(self) -> str:
        """The change as a diff."""
        old = (ROOT / self.file).read_bytes()
        before, after = old.decode().splitlines(), self.applied(old).decode().splitlines()
        return "\n".join(list(difflib.unified_diff(before, after, lineterm="", n=0))[2:])


@dataclass(frozen=True)
class Result:
    """Outcome of a mutant: caught, survived or timed out, and the test that caught it."""

    name: str
    outcome: str
    seconds: float
    by: str = ""


class Finder:
    """Finds all mutants of a file."""

    def __init__(self, file: str) -> None:
        self._file, self._source = file, (ROOT / file).read_bytes()
        self._version = hashlib.sha256(self._source).hexdigest()[:12]
        lines = self._source.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def find(self) -> list[Mutant]:
        """All mutants in the order of the file."""
        return list(self._walk(ast.parse(self._source)))

    def _walk(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, SKIPPED):
            if isinstance(node, ast.Raise):
                yield self._mutant(node, "statement", "pass")
            return
        yield from self._of(node)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        other: ast.expr
        match node:
            case ast.Compare(left, [op, *ops], comparators) if type(op) in COMPARE:
                other = ast.Compare(left, [COMPARE[type(op)](), *ops], comparators)
                yield self._expression(node, "comparison", other)
            case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
                other = ast.BinOp(left, ARITHMETIC[type(op)](), right)
                yield self._expression(node, "arithmetic", other)
            case ast.BoolOp(op, values):
                other = ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
                yield self._expression(node, "boolean", other)
            case ast.UnaryOp(ast.Not() | ast.USub(), operand):
                yield self._expression(node, "boolean", operand)
            case ast.Constant(bool() as value):
                yield self._expression(node, "constant", ast.Constant(not value))
            case ast.Constant(int() | float() as value):
                for change in (1, -1):
                    yield self._expression(node, "constant", ast.Constant(value + change))
            case ast.If(test) | ast.IfExp(test) | ast.While(test):
                yield self._expression(test, "boolean", ast.UnaryOp(ast.Not(), test))
            case ast.Expr(ast.Call()) | ast.Continue() | ast.Break() | ast.AugAssign():
                yield self._mutant(node, "statement", "pass")
            case ast.Assign([ast.Attribute() | ast.Subscript()]):
                yield self._mutant(node, "statement", "pass")

    def _expression(self, node: ast.expr, kind: str, other: ast.expr) -> Mutant:
        return self._mutant(node, kind, f"({ast.unparse(other)})")

    def _mutant(self, node: ast.expr | ast.stmt, kind: str, new: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(self._file, node.lineno, kind, start, end, new, self._version)


class Baselines:
    """Tests that fail without any change, and the time of all, by tests; shared by the copies."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, ...], tuple[list[str], float]] = {}
        self.lock = threading.Lock()

    @property
    def broken(self) -> list[str]:
        """Tests that fail without any change."""
        return sorted({test for tests, _ in self.found.values() for test in tests})


class Copy:
    """A copy of the package for mutants, and the tests that run on it."""

    def __init__(self, folder: Path, limit: float, baselines: Baselines) -> None:
        self._folder, self._limit, self._baselines = folder, limit, baselines
        self._process: subprocess.Popen[str] | None = None
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, mutant: Mutant) -> Result:
        """Run the tests until one fails."""
        source, target = (ROOT / mutant.file).read_bytes(), self._folder / mutant.file
        outcome, by = "survived", ""
        runs = [(tests, *self._baseline(tests)) for tests in tests_of(mutant.file)]
        started = time.monotonic()
        try:
            target.write_bytes(mutant.applied(source))
            for tests, broken, seconds in runs:
                code, output = self._pytest(tests, broken, min(self._limit, 30 + 5 * seconds))
                if code != 0:
                    outcome = "timed out" if code is None else "caught"
                    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                    by = found[1] if found else ""
                    break
        finally:
            target.write_bytes(source)
        return Result(mutant.name, outcome, round(time.monotonic() - started, 1), by)

    def stop(self) -> None:
        """End the tests in flight."""
        if self._process is not None and self._process.poll() is None:
            _end(self._process)

    def _baseline(self, tests: list[str]) -> tuple[list[str], float]:
        """Tests that fail without a change, and the time of all tests."""
        key = tuple(tests)
        with self._baselines.lock:
            if key not in self._baselines.found:
                self._baselines.found[key] = self._measured(tests)
            return self._baselines.found[key]

    def _measured(self, tests: list[str]) -> tuple[list[str], float]:
        started = time.monotonic()
        code, output = self._pytest(tests, [], None)
        seconds = time.monotonic() - started
        failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
        if code not in (0, 1) or (code == 1 and not failed):
            raise SystemExit(f"the tests do not run without any change:\n{output[-3000:]}")
        print(f"{' '.join(tests)}: {seconds:.0f} s, {len(failed)} fail anyway", flush=True)
        return failed, seconds

    def _pytest(
        self, tests: list[str], without: list[str], limit: float | None
    ) -> tuple[int | None, str]:
        """Exit code, None after the time limit, and output."""
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--tb=no", *tests]
        command += ["-p", "no:cacheprovider", *(() if limit is None else ("-x",))]
        for test in without:
            command += ["--deselect", test]
        path = os.pathsep.join([str(self._folder / "src"), os.environ.get("PYTHONPATH", "")])
        settings = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        ) as process:
            self._process = process
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                _end(process)
                return None, process.communicate()[0]
        return process.returncode, output


def _end(process: subprocess.Popen[str]) -> None:
    """End a test run and the processes that it started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def tests_of(file: str) -> list[list[str]]:
    """Tests named after a file, then all of its package."""
    inside = Path(file).relative_to(SOURCE)
    package = inside.as_posix() if inside.as_posix() in TESTS else inside.parts[0]
    every = TESTS[package]
    folder = ROOT / "tests" / inside.parts[0]
    found = {*folder.glob(f"test_{inside.stem}*.py"), *folder.glob(f"test_*_{inside.stem}.py")}
    own = sorted(path.relative_to(ROOT).as_posix() for path in found)
    return [own, every] if own and own != every else [every]


def sources() -> list[str]:
    """Files that have mutants."""
    found = []
    for name in TESTS:
        path = ROOT / SOURCE / name
        files = [path] if path.is_file() else sorted(path.glob("*.py"))
        found += [p.relative_to(ROOT).as_posix() for p in files if p.name != "__init__.py"]
    return list(dict.fromkeys(found))


def report(mutants: list[Mutant], results: dict[str, Result], broken: list[str]) -> str:
    """Counts, and every mutant that was not caught."""
    done = [m for m in mutants if m.name in results]
    lines = ["# Mutants", ""]
    by = {kind: [m for m in done if results[m.name].outcome == kind] for kind in OUTCOMES}
    counts = ", ".join(f"{len(by[kind])} {kind}" for kind in OUTCOMES)
    lines += [f"{len(done)} of {len(mutants)} mutants run: {counts}.", ""]
    if broken:
        lines += ["Skipped, since they fail without any change:", ""]
        lines += [*(f"- `{test}`" for test in broken), ""]
    for kind in ("survived", "timed out"):
        lines += [f"## {kind.capitalize()}", ""] if by[kind] else []
        for m in by[kind]:
            lines += [f"`{m.file}:{m.line}` ({m.kind})", "", "```diff", m.diff(), "```", ""]
    return "\n".join(lines)


OUTCOMES = ("caught", "survived", "timed out")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", nargs="*", default=None, help="source files; default: all")
    parser.add_argument("--sample", type=int, default=None, help="how many; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--limit", type=float, default=600, help="time limit of a test run in seconds"
    )
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("--output", type=Path, default=Path("runs/mutants"), help="folder")
    return parser.parse_args()


def _run(free: queue.SimpleQueue[Copy], mutant: Mutant) -> Result:
    """Run a mutant in a copy that no other one uses."""
    copy = free.get()
    try:
        return copy.run(mutant)
    finally:
        free.put(copy)


def main() -> None:
    """Run the mutants that have no result yet."""
    asked = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests in flight end too
    asked.output.mkdir(parents=True, exist_ok=True)
    journal = asked.output / "results.jsonl"
    results: dict[str, Result] = {}
    if journal.exists():
        for line in journal.read_text(encoding="utf-8").splitlines():
            result = Result(**json.loads(line))
            results[result.name] = result
    mutants = [m for file in asked.files or sources() for m in Finder(file).find()]
    chosen = mutants
    if asked.sample is not None and asked.sample < len(mutants):
        chosen = random.Random(asked.seed).sample(mutants, asked.sample)
    print(f"{len(chosen)} of {len(mutants)} mutants", flush=True)
    waiting = [m for m in chosen if m.name not in results]
    with tempfile.TemporaryDirectory() as scratch:
        baselines = Baselines()
        copies = [Copy(Path(scratch, str(i)), asked.limit, baselines) for i in range(asked.workers)]
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)
        with ThreadPoolExecutor(asked.workers) as pool:
            running = {pool.submit(_run, free, mutant): mutant for mutant in waiting}
            try:
                for number, future in enumerate(as_completed(running)):
                    mutant, result = running[future], future.result()
                    results[mutant.name] = result
                    with journal.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
                    place = f"{mutant.file}:{mutant.line} {result.seconds} s"
                    print(f"{number + 1}/{len(waiting)} {result.outcome} {place}", flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in copies:
                    copy.stop()
                raise
    text = report(chosen, results, baselines.broken)
    (asked.output / "report.md").write_text(text, encoding="utf-8")
    print(f"written to {asked.output / 'report.md'}")


if __name__ == "__main__":
    main()
