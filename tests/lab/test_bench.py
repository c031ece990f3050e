"""How every bench measures: rows, medians, ratios, records in a file, processes, the report, bad input."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from forking import run_python, start_python
from polyformer import InputError
from polyformer.cli.main import main
from polyformer_lab.bench import generation, running
from polyformer_lab.bench.all import LIST, AllBench, run_all
from polyformer_lab.bench.rows import OURS, SPEED, Case, Record, Row, Table
from polyformer_lab.bench.running import markdown, measure


def row(**contenders) -> Row:
    """A row whose contenders are made by functions."""
    return Row("mine", "mine", lambda: [Case(contenders)], repeats=1)


def idle():
    """A contender that does nothing."""
    return lambda: None


def missing():
    """One whose package is not installed."""
    import a_package_that_nobody_has  # pyright: ignore[reportMissingImports]

    return a_package_that_nobody_has


NARROW = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000}


@pytest.mark.filterwarnings("ignore")  # what peers say is no matter of ours
@pytest.mark.parametrize("name", LIST)
def test_every_row_runs_at_a_tiny_size(name: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    for model in ("gpt2", "t5-small"):
        family, _ = generation.MODELS[model]
        monkeypatch.setitem(generation.MODELS, model, (family, NARROW))
    listed = LIST[name].row(name, quick=True)
    record = measure(listed)
    assert listed.asked.keys() <= {(each.ours, each.peer) for each in record.comparisons} | {
        (ours, absent) for ours, _ in listed.asked for absent in (*record.absent, "flex")
    }
    for case in record.cases:
        assert OURS in case.seconds
        assert all(0 < s.fastest <= s.median <= s.slowest for s in case.seconds.values())
        assert (case.peak is None) == (not case.flop)
    assert Record.from_dict(json.loads(record.to_json())) == record
    assert LIST[name].what in markdown(table(record))


def table(*records: Record) -> Table:
    return dataclasses.replace(Table.here("AllBench", {"quick": True}), records=records)


def test_names_and_settings_of_the_rows():
    assert len({listed.what for listed in LIST.values()}) == len(LIST)
    window = LIST["window"].row("window", quick=False)
    assert (window.name, window.repeats) == ("window", 9)
    assert window.asked == {
        (OURS, "sdpa"): 8,
        (OURS, "local-attention"): 3,
        (OURS, "flex"): 1,
        (OURS, SPEED): 0.6,
    }
    assert LIST["gpt2-greedy-1"].row("", False).asked["polyformer-int8", "ctranslate2-int8"] == 1


def test_the_worst_case_counts_and_peers_that_fail_are_left_out():
    def slow():
        return lambda: time.sleep(0.02)

    def broken():
        raise RuntimeError("no  room\nfor it")

    contenders = {"slow": slow, "idle": idle, OURS: lambda: lambda: time.sleep(0.005), "broken": broken}
    contenders["missing"] = missing
    cases = [Case({**contenders, "idle": slow}, "easy"), Case(contenders, "hard")]
    asked = {(OURS, "slow"): 3.0, (OURS, "missing"): 1.0}
    mine = Row("mine", "mine", lambda: cases, asked=asked, narrow={(OURS, "slow"): 4.0}, worst=True)
    record = measure(mine)
    ratios = {comparison.peer: comparison for comparison in record.comparisons}
    assert set(ratios) == {"slow", "idle"}
    assert 1 < ratios["slow"].ratio < 5
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    assert ratios["slow"].asked == (3.0 if wide else 4.0)
    assert (ratios["idle"].case, ratios["idle"].verdict, ratios["idle"].worst_of) == ("hard", "", 2)
    assert record.absent == {
        "broken": "RuntimeError: no room for it",
        "missing": "not installed (a_package_that_nobody_has)",
    }
    assert "| mine; the worst: hard " in markdown(table(record))
    every = measure(dataclasses.replace(mine, worst=False)).comparisons
    assert [(each.peer, each.case) for each in every] == [
        (peer, case) for case in ("easy", "hard") for peer in ("slow", "idle")
    ]


def test_what_ours_raises_is_no_absence():
    with pytest.raises(ModuleNotFoundError):
        measure(row(**{OURS: missing}))


def test_a_row_that_needs_a_package_from_the_start_says_so():
    def cases():
        missing()
        yield

    record = measure(Row("mine", "mine", cases))
    assert (record.cases, record.comparisons) == ((), ())
    assert record.absent == {"a_package_that_nobody_has": "not installed (a_package_that_nobody_has)"}


def test_short_calls_are_repeated_and_their_share_of_the_product_speed_is_counted(
    monkeypatch: pytest.MonkeyPatch,
):
    """By a clock that only the calls advance: 10 microseconds each, and 10 milliseconds for the product."""
    calls, clock = [], [0.0]

    def call() -> None:
        calls.append(0)
        clock[0] += 1e-5

    def product() -> None:
        clock[0] += 1e-2

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(running, "products_at_their_best", lambda: {"product": product})
    case = Case({OURS: lambda: call}, flop={OURS: 1e9}, work={"tokens": 3})
    record = measure(Row("mine", "mine", lambda: [case], asked={(OURS, SPEED): 0.5}, repeats=1))
    assert 202 <= len(calls) <= 203  # once to prepare, once to count the loops, then 2 milliseconds
    (share,) = record.comparisons
    (case,) = record.cases
    assert case.peak == pytest.approx(running.PRODUCT_FLOP / 1e-2)
    assert (share.peer, share.asked, share.verdict) == (SPEED, 0.5, "reached")
    assert share.ratio == pytest.approx(1e9 / case.seconds[OURS].median / case.peak)
    assert case.facts[OURS]["tokens/s"] == pytest.approx(3 / 1e-5)


def test_tokens_are_compared():
    def tokens(*numbers: int):
        return lambda: lambda: torch.tensor([numbers])

    (case,) = measure(row(a=tokens(1, 2, 3), b=tokens(1, 5, 3), **{OURS: tokens(1, 2, 3)})).cases
    assert case.facts["a"] == {"same tokens": 1}
    assert case.facts["b"] == {"same tokens": pytest.approx(2 / 3)}


def fake(record: Record, calls: list[tuple[str, str]]):
    """In the place of a process: notes the call."""

    def in_process(config: AllBench, row: Row, instructions: str) -> Record:
        calls.append((row.name, instructions))
        return dataclasses.replace(record, row=row.name, instructions=instructions)

    return in_process


def test_what_is_kept_is_not_measured_again_and_what_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    file, calls = tmp_path / "mine.json", []
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    config = AllBench(only=("window", "lsh"), out=str(file))
    failed = Record(row="", what="", instructions="", date="2026-01-01", failure="no luck")
    monkeypatch.setattr(running, "in_process", fake(failed, calls))
    run_all(config)
    both = [(name, instructions) for name in config.only for instructions in ("default", "avx2")]
    assert calls == both
    assert "window (avx2): failed: no luck" in capsys.readouterr().out
    monkeypatch.setattr(running, "in_process", fake(dataclasses.replace(failed, failure=None), calls))
    run_all(dataclasses.replace(config, only=("lsh",)))
    run_all(config)
    assert calls[4:] == [*both[2:], *both[:2]]
    run_all(config)
    assert len(calls) == 8
    assert [record.failure for record in Table.load(file).records] == [None] * 4


def test_a_device_gets_the_whole_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table, calls = tmp_path / "table", []
    monkeypatch.setattr(
        running, "in_process", fake(Record(row="", what="", instructions="", date="now"), calls)
    )
    with pytest.raises(InputError, match="out: expected a file, got the directory"):
        run_all(AllBench(only=("lsh",), out=str(tmp_path)))
    assert not calls
    with table.open("wb", buffering=0) as file:
        file.write(b"before\n")
        run_all(AllBench(only=("window", "lsh"), out=f"/dev/fd/{file.fileno()}"))
    before, *lines = table.read_text().splitlines()
    assert before == "before"
    assert {record["row"] for record in json.loads("".join(lines))["records"]} == {"window", "lsh"}


def test_a_processor_without_wide_vectors_is_measured_once(monkeypatch: pytest.MonkeyPatch, capsys):
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    record = Record(row="", what="", instructions="", date="2026-01-01")
    monkeypatch.setattr(running, "in_process", fake(record, calls))
    run_all(AllBench(only=("lsh",)))
    assert calls == [("lsh", "default")]
    assert "avx2: left out, as the processor's own instructions are AVX2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": {"processor": "Z80"}}, "holds rows measured with processor Z80, now it is"),
        ({"settings": {"quick": False}}, "measured with quick False, now it is True; name another file"),
        ({"versions": {"torch": "1.0"}}, "rows measured with .* now it is"),
        ({"bench": "StoreBench"}, "rows measured with bench StoreBench, now it is AllBench"),
    ],
)
def test_records_of_another_machine_or_bench_stay_apart(tmp_path: Path, changes, message: str):
    file = str(tmp_path / "mine.json")
    dataclasses.replace(table(), **changes).save(file)
    with pytest.raises(InputError, match=message):
        table().taken_up(file)


def test_any_bench_keeps_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    file = str(tmp_path / "steps.json")
    sizes = ["--layers", "1", "--hidden-size", "8", "--heads", "2", "--vocab-size", "50", "--length", "8"]
    words = ["bench", "training", *sizes, "--repeats", "1", "--out", file]
    assert main(words) == 0
    assert "\ntraining (default): measured\n" in capsys.readouterr().out
    assert main(words) == 0
    assert "\ntraining (default): kept\n" in capsys.readouterr().out
    assert main([*words, "--batch", "1"]) == 2
    assert "measured with batch 2, now it is 1" in capsys.readouterr().err


COMMAND = ["-m", "polyformer", "bench", "all", "--quick", "--threads", "1"]


def test_the_command_measures_in_processes_and_goes_on_after_a_kill(tmp_path: Path):
    file = tmp_path / "mine.json"
    words = [*COMMAND, "--only", "products-forward", "lsh", "--instruction-sets", "avx2", "--out", str(file)]
    program = start_python(*words)
    while not file.exists() or not Table.load(file).records:
        assert program.poll() is None
        time.sleep(0.05)
    program.kill_all()
    first = Table.load(file).records
    done = run_python(*words).stdout
    table = Table.load(file)
    assert table.records[: len(first)] == first
    assert [record.row for record in table.records] == ["products-forward", "lsh"]
    for record in table.records:
        assert record.failure is None
        assert record.vectors == "AVX2, oneDNN up to AVX2"
        assert record.threads == 1
    assert done.startswith(f"{table.machine['processor']}, {table.machine['cores']} cores, ")
    assert "products-forward (avx2): kept" in done
    assert markdown(table) in done


def test_a_process_that_dies_or_takes_too_long_is_a_failed_row(monkeypatch: pytest.MonkeyPatch):
    bench = AllBench(only=("lsh",), quick=True)
    (lsh,) = bench.rows()
    monkeypatch.setattr(running.sys, "executable", shutil.which("false"))
    assert running.in_process(bench, lsh, "default").failure == "exit status 1"
    monkeypatch.undo()
    object.__setattr__(bench, "limit", 0.01)
    assert running.in_process(bench, lsh, "default").failure == "not done after 0.01 seconds"


def test_the_report_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mine.json"
    products = measure(LIST["products-forward"].row("products-forward", quick=True))
    table(dataclasses.replace(products, what="products | Global(1)")).save(file)
    capsys.readouterr()
    assert main(["bench", "report", "--files", str(file)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split()[1] for line in lines[::2]] == ["work", "products"]
    assert len({len(line) for line in lines}) == 1
    assert "| products \\| Global(1); the worst: " in lines[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all --only windw", "unknown row 'windw': did you mean 'window'"),
        ("all --instruction-sets avx3", "unknown instruction set 'avx3': did you mean 'avx2'"),
        ("all --instruction-sets []", "instruction_sets: expected some of default, avx2, got none"),
        ("all --limit 0", "limit: expected 1 or more, got 0"),
        ("all --threads 0", "threads: expected 1 or more, got 0"),
        ("all --out broken.json", "broken.json"),
        ("all --out other.json", "other.json: 'bench' is missing"),
        ("training --threads 0", "threads: expected 1 or more, got 0"),
        (
            "attention --members Windw(4)",
            "unknown mechanism or pattern of members 'Windw': did you mean 'Window'",
        ),
        ("attention --against spda", "unknown peer 'spda': did you mean 'sdpa'?"),
        ("attention --lengths []", "members, lengths: expected one or more of each, got none"),
        ("attention --lengths 0", "lengths: expected 1 or more, got [0]"),
        ("attention --dtype float3", "unknown dtype 'float3': did you mean 'float"),
        ("attention --device gpu", "device: expected 'cpu' or 'cuda', got 'gpu'"),
        ("families --presets bret", "'bert-base'"),
        ("families --data x", "expected both"),
        ("generation --beams 1", "beams: expected 2 or more, got [1]"),
        ("generation --libraries ctranslat", "unknown library 'ctranslat': did you mean 'ctranslate2'"),
        ("generation --models bart", "unknown model 'bart': did you mean 'bart-base'"),
        ("models --models longformr", "unknown model 'longformr': did you mean 'longformer'"),
        ("models --window 5", "window: expected an even number of keys on both sides, got 5"),
        ("models --length 4097", "length: expected a multiple of block 64 above 704, below which"),
        ("models --length 704", "length: expected a multiple of block 64 above 704"),
        ("report", "'files' is missing"),
        ("report --files absent.json", "no such file: absent.json"),
    ],
)
def test_options_of_the_bench_out_of_range_are_refused_in_a_line(
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
