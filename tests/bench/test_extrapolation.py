"""The extrapolation claim: its verdict, its segments, and a small run of the real thing."""

import csv
import dataclasses
import math
from pathlib import Path

import pytest
import torch

from polyformer import InputError
from polyformer.bench.reproduce import extrapolation
from polyformer.bench.reproduce.extrapolation import ExtrapolationClaim, perplexity, run, table, verdict
from polyformer.model import Transformer
from polyformer.presets import model_config

PAPER = {"sinusoidal": (24.0, 400.0), "rope": (24.0, 90.0), "t5": (23.5, 25.0), "alibi": (24.0, 20.3)}


def results(**changes: tuple[float, float]) -> dict[tuple[str, int], float | None]:
    """Perplexities at 128 and 2048 tokens, as the paper's but for `changes`."""
    ends = {**PAPER, **changes}
    return {(scheme, n): value for scheme, pair in ends.items() for n, value in zip((128, 2048), pair)}


def test_the_papers_own_ordering_is_a_reproduction():
    assert (
        ": reproduced (perplexity from 128 to 2048 tokens: alibi x0.85, t5 x1.06"
        in verdict(results(), 128).text
    )


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"alibi": (24.0, 24.5)}, "differs from the paper: ALiBi does not hold (perplexity"),
        ({"sinusoidal": (99.0, 120.0)}, "differs from the paper: sinusoids do not explode ("),
        ({"t5": (24.0, 20.0)}, "the order at 2048 is t5 < alibi < rope < sinusoidal (the paper's: alibi <"),
        ({"rope": (24.0, 500.0)}, "the order at 2048 is alibi < t5 < sinusoidal < rope"),
    ],
)
def test_every_difference_is_named(changes: dict[str, tuple[float, float]], difference: str):
    assert difference in verdict(results(**changes), 128).text


def test_without_the_four_schemes_there_is_no_verdict():
    some = {key: value for key, value in results().items() if key[0] != "rope"}
    assert verdict(some, 128).text.startswith(
        "no verdict: it needs alibi, t5, rope, sinusoidal, at 128 tokens"
    )
    assert verdict({key: value for key, value in results().items() if key[1] == 128}, 128).text.startswith(
        "no"
    )


def test_what_learned_positions_cannot_read_is_said():
    lines = table({("learned", 128): 30.0, ("learned", 256): None})
    assert lines[1].split() == ["learned", "30.00", "-"]
    assert "longer than the learned positions" in lines[2]


def tiny(position: str) -> Transformer:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 23}
    torch.manual_seed(0)
    config = model_config("decoder-tiny", {**sizes, "intermediate_size": 16, "position": position})
    return Transformer(dataclasses.replace(config, max_position_embeddings=8, initializer_range=0.5)).double()


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 5, 8, 37, 50])
def test_segments_predict_every_token_once(length: int):
    """37 tokens, in segments that do not overlap but for the token they begin with."""
    model, ids = tiny("alibi").eval(), torch.randint(0, 23, (37,), generator=torch.Generator().manual_seed(1))
    nats, predicted = 0.0, 0
    for start in range(0, 36, length - 1):
        segment = ids[start : start + length]
        logits = model(input_ids=segment[None]).logits[0]
        for place in range(1, len(segment)):
            nats -= math.log(float(logits[place - 1].softmax(-1)[segment[place]]))
            predicted += 1
    assert predicted == 36
    assert perplexity(model, ids, length) == pytest.approx(math.exp(nats / 36), rel=1e-9)


def test_batches_of_segments_change_nothing():
    ids = torch.randint(0, 23, (40,), generator=torch.Generator().manual_seed(1))
    one_by_one = [rows.shape for rows in extrapolation._segments(ids, 9, batch_tokens=1)]
    together = [rows.shape for rows in extrapolation._segments(ids, 9, batch_tokens=27)]
    assert one_by_one == [(1, 9)] * 4 + [(1, 8)]
    assert together == [(3, 9), (1, 9), (1, 8)]


def test_learned_positions_end():
    model, ids = tiny("learned"), torch.arange(20)
    assert perplexity(model, ids, 8) is not None
    assert perplexity(model, ids, 9) is None


def test_a_run_writes_its_figures_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("train", "valid"):
        text = "".join(f" = Title {i} = \n\n The {name} text number {i} . \n\n" for i in range(30))
        (tmp_path / f"{name}.txt").write_text(text)
    config = ExtrapolationClaim(
        data=str(tmp_path),
        schemes=("learned", "alibi"),
        length=16,
        lengths=(16, 32),
        held_out=300,
        steps=2,
        batch_tokens=64,
        layers=1,
        width=16,
        heads=2,
        vocabulary=300,
        out=str(tmp_path / "claim"),
    )
    first = run(config)
    assert first["learned", 16] != first["alibi", 16]
    with (tmp_path / "claim" / "extrapolation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["scheme"], row["length"]) for row in rows] == [
        ("learned", "16"),
        ("learned", "32"),
        ("alibi", "16"),
        ("alibi", "32"),
    ]
    assert rows[1]["perplexity"] == ""
    assert float(rows[2]["perplexity"]) == first["alibi", 16]
    assert (tmp_path / "claim" / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    assert run(config) == first, "what is finished is not trained again"
    with pytest.raises(InputError, match="holds a run of other settings; choose another place with --out"):
        run(dataclasses.replace(config, steps=3))
    assert "no verdict" in capsys.readouterr().out


def test_bad_input_is_named():
    with pytest.raises(InputError, match="unknown position scheme 'alibbi': did you mean 'alibi'"):
        ExtrapolationClaim(schemes=("alibbi",))
    with pytest.raises(InputError, match=r"lengths: expected lengths of 2 or more, got \[1\]"):
        ExtrapolationClaim(lengths=(1,))
