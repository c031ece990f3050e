"""`polyformer bench all`: every row runs, what is kept is gone on with, what fails or is absent is said."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from polyformer import InputError
from polyformer.bench import all as bench_all
from polyformer.bench.all import AllBench, run
from polyformer.bench.table import processes
from polyformer.bench.table.measuring import SPEED, measure
from polyformer.bench.table.records import Machine, Record, Table, load, save, taken_up
from polyformer.bench.table.report import markdown
from polyformer.bench.table.row import OURS, Asked, Case, Row
from polyformer.bench.table.rows import ROWS
from polyformer.cli import main


def row(*asked: Asked, flop: float | None = None, share: float | None = None, **contenders) -> Row:
    """A row whose contenders are made by functions."""
    return Row("mine", "mine", lambda quick: [Case(contenders, flop=flop)], asked, share=share)


def idle():
    """A contender that does nothing."""
    return lambda: None


def missing():
    """One whose package is not installed."""
    import a_package_that_nobody_has  # pyright: ignore[reportMissingImports]

    return a_package_that_nobody_has


@pytest.mark.filterwarnings("ignore")  # what peers say is no matter of ours
@pytest.mark.parametrize("name", ROWS)
def test_every_row_runs_at_a_tiny_size(name: str):
    pytest.importorskip("transformers")
    record = measure(ROWS[name], "default", quick=True)
    assert record.failure is None
    asked = {(asked.ours, asked.peer) for asked in ROWS[name].asked}
    for ours, peer in asked - {(c.ours, c.peer) for c in record.comparisons}:
        absent = {*record.absent, "flex", "transformers-compiled", "llama.cpp", "llama.cpp-int8"}
        assert {ours, peer} & absent, (ours, peer)
    for case in record.cases:
        assert OURS in case.seconds
        assert all(0 < s.fastest <= s.median <= s.slowest for s in case.seconds.values())
        assert (case.peak is None) == (case.flop is None)
    assert Record.from_dict(json.loads(record.to_json())) == record
    assert ROWS[name].what in markdown(Table(machine=Machine.here(True), records=(record,)))


def test_each_row_has_names_of_its_own():
    assert len({row.what for row in ROWS.values()}) == len(ROWS)


def test_the_worst_case_counts_and_peers_that_fail_are_left_out():
    def slow():
        return lambda: time.sleep(0.02)

    def broken():
        raise RuntimeError("no  room\nfor it")

    asked = (Asked("slow", 3.0, narrow=4.0), Asked("idle"), Asked("broken"), Asked("missing", 1.0))
    contenders = {"slow": slow, "idle": idle, OURS: lambda: lambda: time.sleep(0.005), "broken": broken}
    contenders["missing"] = missing
    cases = [Case({**contenders, "idle": slow}, "easy"), Case(contenders, "hard")]
    record = measure(Row("mine", "mine", lambda quick: cases, asked), "default", quick=False)
    ratios = {comparison.peer: comparison for comparison in record.comparisons}
    assert set(ratios) == {"slow", "idle"}
    assert 1 < ratios["slow"].ratio < 5
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    assert ratios["slow"].asked == (3.0 if wide else 4.0)
    assert (ratios["idle"].case, ratios["idle"].verdict) == ("hard", "")
    assert record.absent == {
        "broken": "RuntimeError: no room for it",
        "missing": "not installed (a_package_that_nobody_has)",
    }


def test_what_ours_raises_is_no_absence():
    with pytest.raises(ModuleNotFoundError):
        measure(row(**{OURS: missing}), "default", quick=True)


def test_a_row_that_needs_a_package_from_the_start_says_so():
    def cases(quick: bool):
        missing()
        yield

    record = measure(Row("mine", "mine", cases, (Asked("x", 1.0),)), "default", quick=True)
    assert (record.cases, record.comparisons) == ((), ())
    assert record.absent == {"a_package_that_nobody_has": "not installed (a_package_that_nobody_has)"}


def test_short_calls_are_repeated_and_their_share_of_the_product_speed_is_counted():
    calls = []
    record = measure(
        row(flop=1e9, share=0.5, **{OURS: lambda: lambda: calls.append(0)}), "default", quick=True
    )
    assert len(calls) > 100
    (share,) = record.comparisons
    (case,) = record.cases
    assert case.peak is not None
    assert (share.peer, share.asked, share.verdict) == (SPEED, 0.5, "reached")
    assert share.ratio == pytest.approx(1e9 / case.seconds[OURS].median / case.peak)


def test_tokens_are_compared():
    def tokens(*numbers: int):
        return lambda: lambda: torch.tensor([numbers])

    record = measure(row(a=tokens(1, 2, 3), b=tokens(1, 5, 3), **{OURS: tokens(1, 2, 3)}), "default", True)
    assert record.agreement == {"a": "the same tokens", "b": "2 of 3 tokens the same"}


def fake(record: Record, calls: list[tuple[str, str]]):
    """In the place of a process: notes the call."""

    def in_process(name: str, instructions: str, quick: bool, limit: float) -> Record:
        calls.append((name, instructions))
        return dataclasses.replace(record, row=name, instructions=instructions)

    return in_process


def test_what_is_kept_is_not_measured_again_and_what_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    file, calls = tmp_path / "mine.json", []
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    config = AllBench(only=("window", "lsh"), out=str(file))
    failed = Record(row="", instructions="", date="2026-01-01", failure="no luck")
    monkeypatch.setattr(bench_all, "in_process", fake(failed, calls))
    run(config)
    both = [(name, instructions) for name in config.only for instructions in ("default", "avx2")]
    assert calls == both
    assert "window (avx2): measured: failed: no luck" in capsys.readouterr().out
    monkeypatch.setattr(bench_all, "in_process", fake(dataclasses.replace(failed, failure=None), calls))
    run(dataclasses.replace(config, only=("lsh",)))
    run(config)
    assert calls[4:] == [*both[2:], *both[:2]]
    run(config)
    assert len(calls) == 8
    assert [record.failure for record in load(file).records] == [None] * 4


def test_a_processor_without_wide_vectors_is_measured_once(monkeypatch: pytest.MonkeyPatch, capsys):
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    record = Record(row="", instructions="", date="2026-01-01")
    monkeypatch.setattr(bench_all, "in_process", fake(record, calls))
    run(AllBench(only=("lsh",)))
    assert calls == [("lsh", "default")]
    assert "avx2: left out, as the processor's own instructions are AVX2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processor": "Z80"}, "holds rows measured with processor Z80, now it is"),
        ({"quick": False}, "measured with quick False, now it is True; name another file"),
        ({"versions": {"torch": "1.0"}}, "rows measured with .* now it is"),
    ],
)
def test_records_of_another_machine_stay_apart(tmp_path: Path, changes, message: str):
    file, here = tmp_path / "mine.json", Machine.here(True)
    save(file, Table(machine=dataclasses.replace(here, **changes)))
    with pytest.raises(InputError, match=message):
        taken_up(file, here)


COMMAND = [sys.executable, "-m", "polyformer", "bench", "all", "--quick", "--threads", "1"]


def test_the_command_measures_in_processes_and_goes_on_after_a_kill(tmp_path: Path):
    file = tmp_path / "mine.json"
    words = [*COMMAND, "--only", "products-forward", "lsh", "--instruction-sets", "avx2", "--out", str(file)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while not file.exists() or not load(file).records:
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    first = load(file).records
    done = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    table = load(file)
    assert table.records[: len(first)] == first
    assert [record.row for record in table.records] == ["products-forward", "lsh"]
    for record in table.records:
        assert record.failure is None
        assert record.vectors == "AVX2, oneDNN up to AVX2"
        assert record.threads == 1
    assert done.startswith(f"{table.machine.processor}, {table.machine.cores} cores, ")
    assert "products-forward (avx2): kept" in done
    assert markdown(table) in done


def test_a_process_that_dies_or_takes_too_long_is_a_failed_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes.sys, "executable", shutil.which("false"))
    assert processes.in_process("lsh", "default", True, 60).failure == "exit status 1"
    monkeypatch.undo()
    late = processes.in_process("lsh", "default", True, 0.01)
    assert late.failure == "not done after 0.01 seconds"


def test_the_report_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mine.json"
    record = measure(ROWS["products-forward"], "default", quick=True)
    save(file, Table(machine=Machine.here(True), records=(record,)))
    assert main(["bench", "report", "--files", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("| work")]
    assert len(heads) == 1
    assert sum(line.startswith("| products") for line in lines) == 1
    assert len({len(line) for line in lines if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all --only windw", "unknown row 'windw': did you mean 'window'"),
        ("all --instruction-sets avx3", "unknown instruction set 'avx3': did you mean 'avx2'"),
        ("all --instruction-sets []", "instruction_sets: expected some of default, avx2, got none"),
        ("all --limit 0", "limit: expected 1 or more, got 0"),
        ("all --threads 0", "threads: expected 1 or more, got 0"),
        ("all --out broken.json", "broken.json"),
        ("all --out other.json", "other.json: 'machine' is missing"),
        ("report", "'files' is missing"),
        ("report --files absent.json", "no such file: absent.json"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("other.json").write_text("{}")
    assert main(["bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
