"""Count which of N seeded faults in the numeric core the tests notice: `python tests/mutants.py --help`.

A mutant is one changed operator, comparison, constant or sign, one dropped `not`, mask or argument, inside a
function. pytest collects the tests once. A fork of that process replaces the code of the function and runs
the tests that call it, the shortest first, until one fails. Limits are of CPU time, so that a busy machine
gives the same result. `--again` repeats the mutants of an earlier report with the tests as
they are now, so that two suites are compared by the same faults.
"""

import argparse
import ast
import builtins
import functools
import gc
import json
import math
import multiprocessing
import os
import random
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import polyformer

ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("fork")
CORE = ["attention", "core/ops", "core/sequence", "nn"]
"""The packages that are changed."""

TESTED = ["attention", "contracts", "core", "nn", "models/architectures/test_model.py", "training/objectives"]
"""The tests that run, by default."""

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    },
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And, ast.Mod: ast.FloorDiv},
}
DROPPED = {"masked_fill", "masked_fill_", "clamp_min", "neg", "softmax", "where", "to", "flip", "transpose"}
"""Methods whose call is replaced by the object itself."""


def mutations(node: ast.AST) -> Iterator[Callable[[], None]]:
    """Yield the changes of one node of a syntax tree, each as a function that makes it in place."""
    operator = getattr(node, "op", None) or (getattr(node, "ops", None) or [None])[0]
    if type(operator) in OPERATORS:
        changed = OPERATORS[type(operator)]()
        attribute, value = ("op", changed) if hasattr(node, "op") else ("ops", [changed, *node.ops[1:]])  # type: ignore[attr-defined]
        yield functools.partial(setattr, node, attribute, value)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        wrong = not node.value if isinstance(node.value, bool) else node.value + 1
        yield functools.partial(setattr, node, "value", wrong)
    for name, child in ast.iter_fields(node):
        if isinstance(child, ast.UnaryOp):  # a sign or a `not` less
            yield functools.partial(setattr, node, name, child.operand)
        if (
            isinstance(child, ast.Call)
            and isinstance(child.func, ast.Attribute)
            and child.func.attr in DROPPED
        ):
            yield functools.partial(setattr, node, name, child.func.value)
    for keyword in getattr(node, "keywords", ()):
        if "mask" in (keyword.arg or ""):
            yield functools.partial(setattr, keyword, "value", ast.Constant(None))


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, error messages and annotations apart."""
    for field, value in ast.iter_fields(function):
        if field in ("annotation", "returns", "decorator_list", "args") or isinstance(function, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from inside(child)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the outermost functions and methods with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def candidates() -> list[list[Any]]:
    """Return [file, function, number of the mutation] of every mutant."""
    result = []
    for file in sorted(file for folder in CORE for file in (ROOT / "src/polyformer" / folder).rglob("*.py")):
        for name, function in functions(ast.parse(file.read_text())):
            if name.rpartition(".")[2] in ("__repr__", "__str__", "examples", "example_labels"):
                continue
            count = sum(1 for node in inside(function) for _ in mutations(node))
            result += [[str(file.relative_to(ROOT)), name, number] for number in range(count)]
    return result


def mutated(place: Sequence[Any]) -> tuple[types.CodeType, str]:
    """Return the code of the module with the mutation, and what changed."""
    file, name, number = place
    tree = ast.parse((ROOT / file).read_text())
    function = dict(functions(tree))[name]
    before = ast.unparse(function).splitlines()
    [mutation for node in inside(function) for mutation in mutations(node)][number]()
    after = ast.unparse(function).splitlines()
    text = next((f"{a.strip()} -> {b.strip()}" for a, b in zip(before, after) if a != b), "")
    return compiled(tree, file), text


def marked(file: str, marks: dict[str, int]) -> types.CodeType:
    """Return the code of the module in which each function `name` first calls `__hit__(marks[name])`."""
    tree = ast.parse((ROOT / file).read_text())
    for name, function in functions(tree):
        if name in marks:
            function.body.insert(0, ast.parse(f"__hit__({marks[name]})").body[0])
    return compiled(tree, file)


def compiled(tree: ast.Module, file: str) -> types.CodeType:
    return compile(ast.fix_missing_locations(tree), str(ROOT / file), "exec")


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def install(module: types.CodeType) -> None:
    """Give every function that exists the code that it has in `module`, and empty all caches."""
    new = {(code.co_filename, code.co_qualname): code for code in codes(module)}
    gc.unfreeze()
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType:
            code = new.get((thing.__code__.co_filename, thing.__code__.co_qualname))
            if code is not None and code.co_freevars == thing.__code__.co_freevars:
                thing.__code__ = code
        elif type(thing) is functools._lru_cache_wrapper:
            thing.cache_clear()


class Campaign:
    """A pytest plugin that runs the collected tests with each mutant in place of running them once."""

    def __init__(self, places: list[list[Any]], out: Path, seconds: float, processes: int) -> None:
        self.places, self.out, self.seconds, self.processes = places, out, seconds, processes
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Write for each mutant what changed, how many tests call its function, and the first that fails."""
        items = session.items
        random.Random(0).shuffle(items)
        parts = [range(part, len(items), self.processes) for part in range(self.processes)]
        calls: dict[int, list[int]] = {}
        costs: dict[int, float] = {}
        failed: list[int] = []
        for part in self.forked([functools.partial(self.reach, items, part) for part in parts], None):
            calls |= part[0]
            costs |= part[1]
            failed += part[2]
        # A mark may be what breaks a test, such as a test of compiled graphs.
        (broken,) = self.forked([lambda: [k for k in failed if not self.passes(items, k)]], None)
        reached = {
            mutant: [
                test
                for test in sorted(calls, key=costs.__getitem__)
                if mutant in calls[test] and test not in broken
            ]
            for mutant in range(len(self.places))
        }
        jobs = [functools.partial(self.kill, items, reached[k], k) for k in range(len(self.places))]
        rows = []
        for k, row in enumerate(self.forked(jobs, self.seconds + 120)):
            row = row or {"change": mutated(self.places[k])[1], "killed_by": "it crashes or does not end"}
            rows.append({"place": self.places[k], **row})
            self.out.write_text(json.dumps(rows, indent=1))
        return True

    def reach(
        self, items: list[pytest.Item], part: range
    ) -> tuple[dict[int, list[int]], dict[int, float], list[int]]:
        """Run the tests of a part; return the mutants whose functions each calls, its time, and failures."""
        called: set[int] = set()
        builtins.__hit__ = called.add  # type: ignore[attr-defined]
        names = sorted({(file, name) for file, name, _ in self.places})
        for file in {file for file, _ in names}:
            install(marked(file, {name: k for k, (other, name) in enumerate(names) if other == file}))
        calls, costs, failed = {}, {}, []
        for k in part:
            called.clear()
            start = time.process_time()
            if not self.passes(items, k):
                failed.append(k)
            costs[k] = time.process_time() - start
            functions_called = [list(names[mark]) for mark in called]
            calls[k] = [m for m, place in enumerate(self.places) if place[:2] in functions_called]
        return calls, costs, failed

    def kill(self, items: list[pytest.Item], tests: list[int], mutant: int) -> dict[str, Any]:
        """Run the tests that reach a mutant until one fails or the time is over."""
        code, change = mutated(self.places[mutant])
        install(code)
        end, waiting = time.process_time() + self.seconds, iter(tests)
        killer = ""
        while not killer and time.process_time() < end and (test := next(waiting, None)) is not None:
            killer = "" if self.passes(items, test) else items[test].nodeid
        return {"change": change, "killed_by": killer, "reached": len(tests), "left": len(list(waiting))}

    def passes(self, items: list[pytest.Item], k: int) -> bool:
        item, self.failed = items[k], False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return not self.failed

    def forked(self, jobs: Sequence[Callable[[], Any]], seconds: float | None) -> Iterator[Any]:
        """Yield the results of jobs in order, each computed by a fork; None if it crashes or takes longer.

        seconds: of CPU time.
        """
        with ThreadPoolExecutor(self.processes) as pool:
            yield from pool.map(functools.partial(in_a_fork, seconds=seconds), jobs)


def in_a_fork(job: Callable[[], Any], seconds: float | None) -> Any:
    """Return the result of a job; None if it crashes, takes more CPU time, or waits five times as long."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=send, args=(job, sender, seconds))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds and 5 * seconds) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def send(job: Callable[[], Any], sender: Connection, seconds: float | None) -> None:
    """Compute a job in 16 GiB and so much CPU time without printing, and send its result."""
    if seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds),) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sender.send(job())


def main() -> None:
    """Choose the mutants, run the campaign, and print a line for each that no test notices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="a report whose mutants are taken")
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants.json")
    parser.add_argument(
        "--seconds", type=float, default=100, help="of CPU time for each mutant (default: 100)"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("tests", nargs="*", default=[str(ROOT / "tests" / name) for name in TESTED])
    options = parser.parse_args()
    if options.again:
        places = [row["place"] for row in json.loads(options.again.read_text())]
    else:
        places = random.Random(options.seed).sample(candidates(), options.count)
    assert polyformer.__file__.startswith(str(ROOT)), "the package is not the one next to these tests"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(places, options.out, options.seconds, options.processes)
    words = ["-n", "0", "-q", "--capture=no", "-p", "no:randomly", "-p", "no:cacheprovider"]
    sys.path.insert(0, str(ROOT))  # as `python -m pytest` does: some tests import others by it
    status = pytest.main([*words, *options.tests], plugins=[campaign])
    if status:
        sys.exit(int(status))
    rows = json.loads(options.out.read_text())
    alive = [row for row in rows if not row["killed_by"]]
    for row in alive:
        file, name, _ = row["place"]
        print(f"alive: {file}, {name}: {row['change']} ({row['reached']} tests call it)")
    print(f"{len(rows) - len(alive)} of {len(rows)} noticed")


if __name__ == "__main__":
    main()
