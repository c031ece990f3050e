"""`bench attention`: what it runs, what it reports; nothing depends on speed."""

import dataclasses
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer_lab import costs
from polyformer_lab.bench import attention
from polyformer_lab.bench.attention import AttentionBench, call, run, slope
from polyformer_lab.bench.member import BenchmarkCase
from polyformer_lab.bench.rows import OURS, SPEED, AbsentError, Table
from polyformer_lab.costs import peak_mib


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
        "plot": str(tmp_path / "sub" / "att.png"),
    }
    return AttentionBench(**{**fields, **changes})


@pytest.mark.parametrize("backward", [False, True])
def test_every_contender_runs_at_every_length(tmp_path: Path, backward: bool) -> None:
    (record,) = run(small(tmp_path, backward=backward, dense_up_to=16)).records
    members = ["Window(4)", "Causal & Window(3)"]
    assert {case.name: [*case.seconds] for case in record.cases} == {
        "n = 16": [members[0], "sdpa", "unfused", members[1]],
        "n = 32": members,
    }
    assert all(0 < s.fastest <= s.median for case in record.cases for s in case.seconds.values())


def test_results_are_kept_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = run(small(tmp_path, out=str(tmp_path / "att.json")))
    assert Table.load(tmp_path / "att.json") == table
    assert (tmp_path / "sub" / "att.png").read_bytes().startswith(b"\x89PNG")
    assert "Window(4): log-log slope of time " in capsys.readouterr().out


def test_members_are_compared_with_peers_and_schemes(tmp_path: Path) -> None:
    members = ("Window(4)", "Window(4) + alibi")
    (record,) = run(small(tmp_path, members=members, against=("sdpa",), lengths=(16,), causal=True)).records
    ratios = {(each.ours, each.peer): each.ratio for each in record.comparisons if each.peer != SPEED}
    assert [*ratios] == [*((member, "sdpa") for member in members), members]
    plain, alibi = (record.cases[0].seconds[member].median for member in members)
    assert ratios[members] == pytest.approx(alibi / plain)


def test_the_share_of_pairs_is_reported(tmp_path: Path) -> None:
    members = ("Window(4, 0)", "Window({sqrt}, 0)", "adaptive_span(max_span=8)")
    (record,) = run(small(tmp_path, members=members, lengths=(16, 64))).records
    short, long = record.cases
    assert {name for name in short.facts if "pairs" not in short.facts[name]} == {
        "sdpa",
        "unfused",
        members[2],
    }
    shares = [short.facts[member]["pairs"] for member in members[:2]]
    assert shares == [(1 + 2 + 3 + 4 + 12 * 5) / 16**2] * 2
    assert long.facts[members[1]]["pairs"] == (36 + 56 * 9) / 64**2
    assert short.flop.keys() == set(members[:2])


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


def test_a_peer_that_cannot_take_part_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = {"against": ("local-attention",), "lengths": (16,)}
    (record,) = run(small(tmp_path, members=("Global(2)",), **peer)).records
    assert record.absent == {"local-attention": "it has no counterpart of Global(2)"}
    monkeypatch.setitem(sys.modules, "local_attention", None)
    (record,) = run(small(tmp_path, members=("Window(4)",), **peer)).records
    assert record.absent == {"local-attention": "not installed (local_attention)"}
    assert [*record.cases[0].seconds] == [OURS]


def test_a_peer_that_fails_is_a_note_but_ours_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setitem(attention.PEERS, "sdpa", fails)
    (record,) = run(small(tmp_path, against=("sdpa",))).records
    assert record.absent == {"sdpa": "RuntimeError: out of luck and more"}
    assert len(record.comparisons) == 4, "shares of the product speed"
    monkeypatch.setattr(attention, "_ours", fails)
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


def test_what_does_not_fit_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(ProcessPoolExecutor):
        """A pool whose processes the system ends, as it does when memory runs out."""

        def submit(self, function: Any, *arguments: Any) -> Any:  # type: ignore[override]
            ours = any(
                isinstance(argument, BenchmarkCase) and argument.peer is None for argument in arguments
            )
            return super().submit(float) if ours else super().submit(os._exit, 1)

    monkeypatch.setattr(costs, "ProcessPoolExecutor", Dying)
    settings = {"members": ("Window(4)",), "against": ("unfused",), "lengths": (16,), "memory": True}
    (record,) = run(small(tmp_path, **settings)).records
    assert record.absent == {"unfused": "it needs more memory than there is"}
    assert record.cases[0].facts[OURS].keys() == {"tokens/s", "pairs", "peak MiB"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_an_absent_device_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'cuda' was requested and this machine has no CUDA device"):
        small(tmp_path, device="cuda")


def test_threads_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    run(small(tmp_path, threads=3, lengths=(16,)))
    assert counts == [3]
