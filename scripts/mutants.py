"""Mutation testing: change one operator, constant or statement at a time, and see if a test fails.

First, every test module of `TESTS` runs once with line coverage (coverage.py, one context a test):
which tests execute which line, how long each takes, and which fail without any change (these are
skipped, and listed in the report). This is cached by the version of the sources and of the module.

Then each mutant is applied to a copy of the package and run against the tests that execute its
lines: one for each path through its function, the quick ones, then one case of every test
function, the fastest first, until one fails or the next does not fit into ``--seconds``. A line
that runs at import (a constant, a default) is tested by all tests that execute anything of its
file. Tests of `UNTRACED` start processes, whose lines are not seen: they run last, for their files
and for lines that no other test executes. Where there is none, the mutant is "not covered".

A mutant that no test catches is in ``runs/mutants/report.md`` with its diff: it needs a test, the
code is redundant there, or it is equivalent. A mutant that does not end is caught. Results are
saved as they come; the next run resumes. It repeats a mutant if its file has changed, and one that
was not caught if a test has, or with more ``--seconds``.

    python scripts/mutants.py --sample 60 --seed 0
    python scripts/mutants.py --files src/flops/estimators/variance.py src/flops/engine/rows.py:120

Tests run in processes that are forked from this one, which has imported what they need; a mutant
in a function replaces only its code there. So this runs where `os.fork` does. Limits are of
processor time, for a busy machine.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/flops")
MUTATED = ("estimators", "allocators", "subspace", "engine/rows.py")
TESTS = (
    "tests/estimators",
    "tests/exact",
    "tests/allocators",
    "tests/subspace",
    "tests/engine/test_rows.py",
    "tests/engine/test_pilot.py",
    "tests/engine/test_gradients.py",
    "tests/engine/test_collectives.py",
    "tests/engine/test_allocation.py",
    "tests/engine/test_automatic_queries.py",
    "tests/engine/test_budgets.py",
    "tests/blackbox/test_tuner.py",
    "tests/blackbox/test_tuner_gradients.py",
)
UNTRACED = {"tests/engine/test_collectives.py": "engine/rows.py"}
IMPORTED = ("torch", "scipy.optimize", "scipy.stats", "pytest", "hypothesis.extra.numpy")
QUICK = 0.1  # seconds of a test
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
# Not mutated, since they do not affect results: types, messages, decorators, `strict=` of a zip.
SKIPPED = (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the bytes from start to end are replaced.

    It is on the lines from `line` to `last`, of the statement that begins on line `statement`.
    """

    file: str
    line: int
    last: int
    statement: int
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
    """Outcome of a mutant, version and time limit of the tests, their number, who caught it."""

    name: str
    outcome: str
    seconds: float
    version: str
    limit: float = 0.0
    tests: int = 0
    by: str = ""


class Finder:
    """Finds all mutants of a file."""

    def __init__(self, file: str) -> None:
        self._file, self._source = file, (ROOT / file).read_bytes()
        self._version = hashlib.sha256(self._source).hexdigest()[:12]
        self._statement = 0
        lines = self._source.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def find(self) -> list[Mutant]:
        """All mutants in the order of the file."""
        return list(self._walk(ast.parse(self._source)))

    def _walk(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.stmt):
            self._statement = node.lineno
        if isinstance(node, SKIPPED):
            if isinstance(node, ast.Raise):
                yield self._mutant(node, "statement", "pass")
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
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
        place = (self._file, node.lineno, node.end_lineno, self._statement)
        return Mutant(*place, kind, start, end, new, self._version)


@dataclass(frozen=True)
class Trace:
    """What one test module does: time and outcome of its tests, and who executes which line.

    Lines are by file; an empty name stands for what runs at import.
    """

    version: str
    seconds: dict[str, float]
    failed: list[str]
    lines: dict[str, dict[int, list[str]]]


def processor_time() -> float:
    """Of this process and of those that it has waited for: a busy machine changes it little."""
    return sum(os.times()[:4])


class Recorder:
    """Plugin of pytest: records failures and times and, with coverage, the lines of each test."""

    def __init__(self, coverage: Any = None) -> None:
        self._coverage = coverage
        self._before = 0.0
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Lines from here on are those of this test."""
        self._before = processor_time()
        if self._coverage is not None:
            self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Setup, call and teardown of a test."""
        self.seconds[report.nodeid] = processor_time() - self._before
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        """A module that cannot be imported."""
        if report.failed:
            self.failed.append(report.nodeid)


class Copy:
    """A copy of the package, and a forked process that runs tests on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(ROOT / "src", folder / "src")
        compileall.compile_dir(folder / "src", quiet=1)  # what has not been yet
        source = str(folder / "src")
        sys.path[:0] = [source, str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[bytes]:
        """Apply a mutant for a while; gives the file as it was.

        The changed file is newer than its compiled form, which is ignored therefore; the restored
        one is as old as before.
        """
        path = self._folder / mutant.file
        source, before = path.read_bytes(), path.stat()
        try:
            path.write_bytes(mutant.applied(source))
            yield source
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def start(self, work: Callable[[Path], int], limit: float = 1e9) -> int:
        """Fork a process whose `flops` is the copy, with a limit of its processor time.

        Its work gets the folder for its result.
        """
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            os.setsid()  # so that the processes it starts end with it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
            output = os.open(self._folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True
            code = work(self._folder)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def output(self) -> str:
        """What the process has printed."""
        return (self._folder / "output").read_text(encoding="utf-8", errors="replace")

    def result(self) -> Any:
        """What the process has found, None if it ended before."""
        path = self._folder / "result"
        if not path.exists():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return found


def run_tests(
    folder: Path, stages: Sequence[Sequence[str]], mutant: Mutant, source: bytes, inside: bool
) -> int:
    """In a forked process: run tests until one fails; the result is its name."""
    import pytest

    if not (inside and swapped(mutant, source)):
        forget()
    recorder = Recorder()
    options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow"]
    for tests in filter(None, stages):
        code = int(pytest.main([*options, *tests], plugins=[recorder]))
        if code != 0:
            break
    (folder / "result").write_text(json.dumps(recorder.failed[:1]), encoding="utf-8")
    return code


def codes(code: CodeType) -> list[CodeType]:
    """A module's code and that of all functions and classes in it, in order."""
    inner = [codes(c) for c in code.co_consts if isinstance(c, CodeType)]
    return [code, *(c for part in inner for c in part)]


def swapped(mutant: Mutant, source: bytes) -> bool:
    """In a forked process: give the functions of an imported module the code of a mutant.

    False if the change is not within functions, or changes what they share with others.
    """
    name = ".".join(Path(mutant.file).relative_to("src").with_suffix("").parts)
    old, new = (
        codes(compile(text, mutant.file, "exec")) for text in (source, mutant.applied(source))
    )
    if [c.co_qualname for c in old] != [c.co_qualname for c in new]:
        return False
    changes = {a: b for a, b in zip(old, new, strict=True) if a != b}
    found = [
        f
        for f in gc.get_objects()
        if type(f) is FunctionType and f.__module__ == name and f.__code__ in changes
    ]
    try:
        for function in found:
            function.__code__ = changes[function.__code__]
    except ValueError:  # other closures
        return False
    return bool(found)


def forget() -> None:
    """In a forked process: import the package and its tests again."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("flops", "tests"):
            del sys.modules[name]


def trace_tests(folder: Path, module: str, version: str) -> int:
    """In a forked process: run a test module with coverage; the result is its trace."""
    import coverage
    import pytest

    files = {file: os.path.realpath(folder / file) for file in sources()}
    tracer = coverage.Coverage(data_file=None, include=list(files.values()), config_file=False)
    tracer.set_option("run:core", "ctrace")  # the only one that knows contexts in all versions
    recorder = Recorder(tracer)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow"]
    tracer.start()
    code = int(pytest.main([*options, module], plugins=[recorder]))
    tracer.stop()
    data = tracer.get_data()
    lines = {file: data.contexts_by_lineno(path) for file, path in files.items()}
    trace = Trace(version, recorder.seconds, recorder.failed, lines)
    (folder / "result").write_text(json.dumps(asdict(trace)), encoding="utf-8")
    return 0 if code in (0, 1, 5) else code


def wait(pid: int, limit: float | None = None) -> int | None:
    """Exit code of a forked process, None if it had to be ended after the time limit."""
    started = time.monotonic()
    try:
        while limit is None or time.monotonic() - started < limit:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
    except BaseException:
        end(pid)
        raise
    end(pid)
    return None


def end(pid: int) -> None:
    """End a forked process and those that it started."""
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def digest(paths: Sequence[Path]) -> str:
    """Version of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def modules_of(path: Path) -> list[Path]:
    """Test modules of a folder, or the module itself."""
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


class Traces:
    """Who executes which line, over all test modules."""

    def __init__(self, copy: Copy, cache: Path) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        shared = [
            *sorted((ROOT / "src").rglob("*.py")),
            *sorted((ROOT / "tests/support").rglob("*.py")),
        ]
        common = digest([*shared, ROOT / "tests/conftest.py"])
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._lines: dict[str, dict[int, set[str]]] = {f: defaultdict(set) for f in sources()}
        modules = [p for name in TESTS for p in modules_of(ROOT / name)]
        self.version = common + digest(modules)
        for path in modules:
            module = path.relative_to(ROOT).as_posix()
            self._add(self._traced(copy, module, common + digest([path]), cache))

    def _traced(self, copy: Copy, module: str, version: str, cache: Path) -> Trace:
        saved = cache / f"{module.replace('/', '.')}.json"
        if saved.exists():
            trace = Trace(**json.loads(saved.read_text(encoding="utf-8")))
            if trace.version == version:
                return trace
        code = wait(copy.start(lambda folder: trace_tests(folder, module, version)))
        found = copy.result()
        if code != 0 or found is None:
            raise SystemExit(f"{module} does not run without any change:\n{copy.output()[-3000:]}")
        saved.write_text(json.dumps(found), encoding="utf-8")
        trace = Trace(**found)
        print(
            f"{module}: {sum(trace.seconds.values()):.0f} s, {len(trace.seconds)} tests, "
            f"{len(trace.failed)} fail anyway",
            flush=True,
        )
        return trace

    def _add(self, trace: Trace) -> None:
        self.failed += trace.failed
        self.seconds |= {t: s for t, s in trace.seconds.items() if t not in trace.failed}
        for file, lines in trace.lines.items():
            for line, tests in lines.items():
                self._lines[file][int(line)] |= set(tests) - set(trace.failed)

    def _executed(self, mutant: Mutant) -> set[str]:
        lines = self._lines[mutant.file]
        found: set[str] = set().union(*(lines[n] for n in range(mutant.line, mutant.last + 1)))
        return found or lines[mutant.statement]

    def inside(self, mutant: Mutant) -> bool:
        """Whether a mutant is in a function that does not run at import."""
        return "" not in self._executed(mutant)

    def tests(self, mutant: Mutant, seconds: float) -> list[str]:
        """Tests that execute a mutant, in the order to run them, as many as fit in the time."""
        lines, found = self._lines[mutant.file], self._executed(mutant)
        after: set[str] = set()
        if "" in found:
            after = set().union(*lines.values()) - found
        untraced = {
            test
            for test in self.seconds
            for module, file in UNTRACED.items()
            if test.startswith(module) and (not found or (SOURCE / file).as_posix() == mutant.file)
        }
        parts = (found - {""}, after - {""}, untraced)
        order = [self._paths(mutant, found - {""}), *(self._order(p, seconds) for p in parts)]
        return list(dict.fromkeys(test for part in order for test in part))

    def _paths(self, mutant: Mutant, tests: set[str]) -> list[str]:
        """For each line of the mutant's function, the fastest of these tests that executes it."""
        first, last = function_around(mutant)
        lines = self._lines[mutant.file]
        there = [lines[n] & tests for n in range(first, last + 1)]
        chosen = {min(found, key=lambda t: (self.seconds[t], t)) for found in there if found}
        return sorted(chosen, key=lambda t: self.seconds[t])

    def _order(self, tests: set[str], seconds: float) -> list[str]:
        """Quick ones; then one case of every test function, then another one; fastest first.

        As many as fit in the time, at least one.
        """
        ranks: dict[str, int] = defaultdict(int)
        keys = {}
        for test in sorted(tests, key=lambda t: (self.seconds[t], t)):
            function, own = test.partition("[")[0], self.seconds[test]
            keys[test] = (0 if own < QUICK else 1 + ranks[function], own, test)
            ranks[function] += 1
        order = sorted(tests, key=lambda t: keys[t])
        ends = itertools.accumulate(self.seconds[test] for test in order)
        return order[: max(1, sum(end <= seconds for end in ends))]


def function_around(mutant: Mutant) -> tuple[int, int]:
    """First and last line of the innermost function around a mutant, or of its statement."""
    found = (mutant.line, mutant.last)
    for node in ast.walk(ast.parse((ROOT / mutant.file).read_bytes())):  # outer ones come first
        if isinstance(node, ast.FunctionDef) and node.lineno <= mutant.line <= (
            node.end_lineno or 0
        ):
            found = (node.lineno + 1, node.end_lineno or node.lineno)
    return found


def judge(copy: Copy, mutant: Mutant, traces: Traces, seconds: float) -> Result:
    """Run a mutant."""
    tests = traces.tests(mutant, seconds)
    result = Result(mutant.name, "not covered", 0.0, traces.version, seconds)
    if not tests:
        return result
    started = time.monotonic()
    # Quick tests of the mirroring folder come before others are imported.
    near = f"tests/{Path(mutant.file).relative_to(SOURCE).parts[0]}/"
    quick = {test for test in tests if test.startswith(near) and traces.seconds[test] < QUICK}
    stages = [[t for t in tests if t in quick], [t for t in tests if t not in quick]]
    inside = traces.inside(mutant)
    if inside:  # the child finds them imported
        for module in dict.fromkeys(test.partition("::")[0] for test in tests):
            importlib.import_module(module.removesuffix(".py").replace("/", "."))
    with copy.changed(mutant) as source:
        limit = 30 + 5 * sum(traces.seconds[test] for test in tests)
        work = partial(run_tests, stages=stages, mutant=mutant, source=source, inside=inside)
        code = wait(copy.start(work, limit), 20 * limit)
        failed = copy.result()
    late = code in (None, -signal.SIGKILL, -signal.SIGXCPU)
    outcome = "survived" if code == 0 else "timed out" if late else "caught"
    by = failed[0] if failed else "" if code == 0 else copy.output()[-300:]
    taken = round(time.monotonic() - started, 1)
    return Result(mutant.name, outcome, taken, traces.version, seconds, len(tests), by)


def sources() -> list[str]:
    """Files that have mutants."""
    found: list[str] = []
    for name in MUTATED:
        path = ROOT / SOURCE / name
        files = [path] if path.is_file() else sorted(path.glob("*.py"))
        found += [p.relative_to(ROOT).as_posix() for p in files if p.name != "__init__.py"]
    return found


def mutants_of(files: Sequence[str]) -> list[Mutant]:
    """All mutants of files, or of their lines (``file:line``)."""
    found = []
    for asked in files:
        file, _, line = asked.partition(":")
        if file not in sources():
            raise SystemExit(f"no mutants of {file}: choose from {', '.join(sources())}")
        found += [m for m in Finder(file).find() if not line or m.line <= int(line) <= m.last]
    return found


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
    for kind in ("survived", "not covered", "timed out"):
        lines += [f"## {kind.capitalize()}", ""] if by[kind] else []
        for m in by[kind]:
            tests = f"{results[m.name].tests} tests, {results[m.name].seconds:.0f} s"
            lines += [
                f"`{m.file}:{m.line}` ({m.kind}; {tests})",
                "",
                "```diff",
                m.diff(),
                "```",
                "",
            ]
    return "\n".join(lines)


OUTCOMES = ("caught", "survived", "not covered", "timed out")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", nargs="*", help="source files, or file:line; default: all")
    parser.add_argument("--sample", type=int, default=None, help="how many; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--seconds",
        type=float,
        default=40,
        help="processor time of the tests of a mutant, as measured without it",
    )
    parser.add_argument("--output", type=Path, default=Path("runs/mutants"), help="folder")
    return parser.parse_args()


def main() -> None:
    """Run the mutants that have no result yet."""
    asked = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests in flight end too
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    asked.output = asked.output.resolve()
    asked.output.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    journal = asked.output / "results.jsonl"
    results: dict[str, Result] = {}
    if journal.exists():
        for line in journal.read_text(encoding="utf-8").splitlines():
            result = Result(**json.loads(line))
            results[result.name] = result
    mutants = mutants_of(asked.files or sources())
    chosen = mutants
    if asked.sample is not None and asked.sample < len(mutants):
        chosen = random.Random(asked.seed).sample(mutants, asked.sample)
    print(f"{len(chosen)} of {len(mutants)} mutants", flush=True)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and they are slow
    for name in IMPORTED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Copy(Path(scratch))
        traces = Traces(copy, asked.output / "traces")
        waiting = [m for m in chosen if not settled(results.get(m.name), traces, asked.seconds)]
        for number, mutant in enumerate(waiting):
            result = judge(copy, mutant, traces, asked.seconds)
            results[mutant.name] = result
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            place = f"{mutant.file}:{mutant.line} {result.seconds} s, {result.tests} tests"
            print(f"{number + 1}/{len(waiting)} {result.outcome} {place}", flush=True)
    text = report(chosen, results, traces.failed)
    (asked.output / "report.md").write_text(text, encoding="utf-8")
    print(f"written to {asked.output / 'report.md'}")


def settled(result: Result | None, traces: Traces, seconds: float) -> bool:
    """Whether a mutant needs no further run: more tests, or more time, catch more, never less."""
    if result is None or result.outcome in ("caught", "timed out"):
        return result is not None
    return result.version == traces.version and result.limit >= seconds


if __name__ == "__main__":
    main()
