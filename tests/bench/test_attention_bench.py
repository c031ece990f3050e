"""`bench attention`: what it runs, what it writes, how it answers bad input; nothing depends on speed."""

import csv
import dataclasses
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer.bench import attention, contenders, memory
from polyformer.bench.attention import AttentionBench, run, slope
from polyformer.bench.benchmark_case import AbsentError, BenchmarkCase
from polyformer.bench.contenders import call
from polyformer.bench.memory import peak_mib
from polyformer.cli import main
from polyformer.core.errors import InputError


def small(tmp_path: Path, **changes: Any) -> AttentionBench:
    """A bench that takes milliseconds."""
    fields = {
        "members": ("Window(4)", "Causal & Window(3)"),
        "against": ("sdpa", "unfused"),
        "lengths": (16, 32),
        "heads": 2,
        "width": 8,
        "repeats": 2,
        "memory": False,
        "out": str(tmp_path / "sub" / "att"),
    }
    return AttentionBench(**{**fields, **changes})


@pytest.mark.parametrize("backward", [False, True])
def test_every_contender_runs_at_every_length(tmp_path: Path, backward: bool) -> None:
    lines = run(small(tmp_path, backward=backward))
    names = ["Window(4)", "sdpa", "unfused", "Causal & Window(3)"]
    assert [(line.name, line.length) for line in lines] == [
        (name, length) for length in (16, 32) for name in names
    ]
    assert all(0 < line.fastest_ms <= line.median_ms for line in lines)


def test_results_are_written_and_drawn(tmp_path: Path) -> None:
    lines = run(small(tmp_path))
    with open(tmp_path / "sub" / "att.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [line.name for line in lines]
    assert float(rows[0]["median_ms"]) == lines[0].median_ms
    assert rows[0]["heads"] == "2"
    assert (tmp_path / "sub" / "att.png").read_bytes().startswith(b"\x89PNG")


def test_slopes_and_ratios_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(small(tmp_path))
    printed = capsys.readouterr().out
    assert "attention, forward: batch 1, 2 heads of 8, float32, cpu" in printed
    assert "Window(4): log-log slope of time " in printed
    assert "Window(4) against sdpa: " in printed
    assert "x at 16, " in printed


def test_what_a_scheme_costs_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(small(tmp_path, members=("Window(4)", "Window(4) + alibi"), against=(), causal=True))
    results = {(line.name, line.length): line.median_ms for line in lines}
    ratio = results["Window(4) + alibi", 16] / results["Window(4)", 16]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Window(4) + alibi costs, of Window(4): {ratio:.2f}x at 16, " in printed
    assert "causal attention, forward: " in printed


def test_the_share_of_pairs_is_printed(tmp_path: Path) -> None:
    lines = run(small(tmp_path, members=("Window(4, 0)", "Window({sqrt}, 0)"), lengths=(16, 64)))
    shares = {(line.name, line.length): line.density for line in lines}
    assert shares["sdpa", 16] is None
    assert shares["Window(4, 0)", 16] == (1 + 2 + 3 + 4 + 12 * 5) / 16**2 == shares["Window({sqrt}, 0)", 16]
    assert shares["Window({sqrt}, 0)", 64] == (36 + 56 * 9) / 64**2


def test_members_are_given_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def note(config: AttentionBench) -> None:
        asked.append(config)

    monkeypatch.setattr(attention, "run", note)
    words = ["--members", "Window(4) | Global(1)", "Window({sqrt}, 0) + t5", "--lengths", "16", "32"]
    assert main(["bench", "attention", *words, "--backward", "--against", "sdpa"]) == 0
    assert main(["bench", "attention", "--members", '["Window(256)", "Window(64)|Global(1)"]']) == 0
    assert asked[0] == AttentionBench(
        members=("Window(4) | Global(1)", "Window({sqrt}, 0) + t5"),
        lengths=(16, 32),
        backward=True,
        against=("sdpa",),
    )
    assert asked[1] == AttentionBench(members=("Window(256)", "Window(64)|Global(1)"))


def test_a_slope_is_an_exponent() -> None:
    assert slope([(2, 12.0), (4, 48.0), (8, 192.0)]) == pytest.approx(2)
    assert slope([(1000, 5.0), (3000, 15.0)]) == pytest.approx(1)
    assert slope([(4, 1.0), (4, 2.0)]) is None


def test_dense_peers_stop_where_they_are_told_to(tmp_path: Path) -> None:
    lines = run(small(tmp_path, dense_up_to=16))
    assert [line.length for line in lines if line.name == "sdpa"] == [16]


def test_a_peer_that_is_not_installed_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "local_attention", None)
    lines = run(small(tmp_path, members=("Window(4)",), against=("local-attention",)))
    assert {line.name for line in lines} == {"Window(4)"}
    assert "local-attention Window(4) at 16: left out, not installed (pip install" in capsys.readouterr().out


def test_a_peer_without_a_counterpart_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(small(tmp_path, members=("Global(2)",), against=("local-attention",), lengths=(16,)))
    assert "left out, it has no counterpart of Global(2)" in capsys.readouterr().out


def test_a_peer_that_fails_is_a_note_but_ours_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(contenders.PEERS, "sdpa", fails)
    assert {line.name for line in run(small(tmp_path, against=("sdpa",)))} == {
        "Window(4)",
        "Causal & Window(3)",
    }
    monkeypatch.setattr(contenders, "_ours", fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        run(small(tmp_path))


def test_flex_has_no_backward_on_a_cpu() -> None:
    case = BenchmarkCase("Window(4)", "flex", 16, 1, 2, 8, backward=True, device="cpu", dtype="float32")
    with pytest.raises(AbsentError, match="FlexAttention has no backward on a CPU"):
        call(case)


def test_peak_memory_is_what_a_call_needs_beside_its_inputs() -> None:
    unfused = BenchmarkCase("Full()", "unfused", 1024, 1, 8, 8, backward=False, device="cpu", dtype="float32")
    peak = peak_mib(call, unfused, dataclasses.replace(unfused, length=16), "cpu")
    assert 2 * 32 - 8 < peak < 4 * 32, "scores and weights of 8 heads at length 1024 are 32 MiB each"


def test_what_does_not_fit_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dying(ProcessPoolExecutor):
        """A pool whose processes the system ends, as it does when memory runs out."""

        def submit(self, function: Any, *arguments: Any) -> Any:  # type: ignore[override]
            ours = any(
                isinstance(argument, BenchmarkCase) and argument.peer is None for argument in arguments
            )
            return super().submit(float) if ours else super().submit(os._exit, 1)

    monkeypatch.setattr(memory, "ProcessPoolExecutor", Dying)
    lines = run(small(tmp_path, members=("Window(4)",), against=("unfused",), lengths=(16,), memory=True))
    assert [line.name for line in lines] == ["Window(4)"]
    assert "unfused at 16: left out, it needs more memory than there is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"members": ("Windw(4)",)},
            "unknown mechanism or pattern of members 'Windw': did you mean 'Window'?",
        ),
        ({"members": (3,)}, r"members: expected expressions such as 'Window\(256\)', got 3"),
        ({"against": ("spda",)}, "unknown peer 'spda': did you mean 'sdpa'?"),
        ({"lengths": ()}, r"lengths: expected lengths of 1 or more, got \[\]"),
        ({"lengths": (0,)}, r"lengths: expected lengths of 1 or more, got \[0\]"),
        ({"repeats": 0}, "repeats: expected 1 or more, got 0"),
        ({"threads": 0}, "threads: expected 1 or more, got 0"),
        ({"dtype": "float3"}, "unknown dtype 'float3': did you mean 'float"),
        ({"device": "gpu"}, "device: expected 'cpu' or 'cuda', got 'gpu'"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        small(tmp_path, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_an_absent_device_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="'cuda' was asked for and this machine has no CUDA device; use 'cpu'"
    ):
        small(tmp_path, device="cuda")


def test_threads_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(attention.torch, "set_num_threads", asked.append)
    run(small(tmp_path, threads=3, lengths=(16,)))
    assert asked == [3]
