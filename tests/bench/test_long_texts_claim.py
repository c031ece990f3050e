"""The claims of texts longer than a checkpoint takes: verdicts, and a small run of the real thing."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from polyformer import InputError, create_model
from polyformer.bench.experiment import DIFFERS
from polyformer.bench.reproduce.long_texts import DENSE, Figures, LongTextsClaim, run, table, verdicts
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.model import Transformer

SIZES = LongTextsClaim(
    model="m",
    lengths=(16, 64),
    own=16,
    tokens=64,
    attentions=("Window(8)", "Window(8) | Global(4)"),
    trained_on=("Window(8)",),
)


def figures(**perplexities: float) -> Figures:
    at_longest = {DENSE: 90.0, "Window(8)": 50.0, "Window(8) | Global(4)": 10.4, "yarn": 10.5, **perplexities}
    return {name: {16: {"perplexity": 10.0}, 64: {"perplexity": value}} for name, value in at_longest.items()}


def said(measured: Figures) -> list[str]:
    return [verdict.text for verdict in verdicts(SIZES, measured, own=16) if verdict is not None]


def test_what_stays_within_a_twentieth_is_a_reproduction():
    sinks, yarn = said(figures())
    assert "reads on: reproduced (10.40 at 64 tokens, without them 50.00, dense at 16 10.00)" in sinks
    assert "of training: reproduced (10.50 at 64 tokens, without it 90.00, dense at 16 10.00)" in yarn


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [("Window(8) | Global(4)", 10.6, 0), ("Window(8)", 10.3, 0), ("yarn", 10.6, 1), (DENSE, 10.4, 1)],
)
def test_every_difference_is_seen(name: str, value: float, line: int):
    assert "differs from the paper" in said(figures(**{name: value}))[line]
    judged = verdicts(SIZES, figures(**{name: value}), own=16)[line]
    assert judged is not None
    assert judged.outcome == DIFFERS


def test_what_was_not_measured_at_a_length_leaves_a_gap():
    kept = figures()
    del kept["yarn"][64]
    assert table(SIZES, kept)[-1].split() == ["yarn", "10.00"]
    assert len(said(kept)) == 1


def test_a_run_measures_trains_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 260}
    model = create_model(
        "decoder-tiny", num_hidden_layers=2, position="rope", **sizes, max_position_embeddings=16
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="bytes"), [])
    tokenizer.save(tmp_path / "model")
    book = tmp_path / "book.txt"
    book.write_text("".join(f"Line {i} of the book, and all was quiet.\n" for i in range(400)))
    claim = dataclasses.replace(
        SIZES,
        model=str(tmp_path / "model"),
        data=str(book),
        own=None,
        steps=3,
        row_length=32,
        lr=1e-2,
        out=str(tmp_path / "claim"),
    )
    first = run(claim)
    sparse = {f"Window(8) | Global(4), {name}" for name in SIZES.extensions}
    assert set(first) == {DENSE, *SIZES.attentions, *SIZES.extensions, *sparse, "Window(8), trained on"}
    text = (tmp_path / "claim" / "text" / "validation.txt").read_text()
    ids = torch.tensor([tokenizer.encode(text)[:65]])
    plain = Transformer.from_pretrained(tmp_path / "model").eval()
    losses = [plain(ids[:, i : i + 16], shift_labels=ids[:, i + 1 : i + 17]).loss for i in range(0, 64, 16)]
    mean = float(torch.stack([loss.detach() for loss in losses if loss is not None]).mean())
    assert first[DENSE][16]["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
    assert first["yarn"][64] != first["ntk"][64] != first["interpolation"][64] != first[DENSE][64]
    assert first["Window(8), trained on"][16]["perplexity"] < first["Window(8)"][16]["perplexity"]
    assert (tmp_path / "claim" / "long-texts.png").read_bytes().startswith(b"\x89PNG")
    assert run(claim) == first, "what is finished is neither trained nor measured again"
    assert "a window that keeps the first tokens reads on" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"figures.json holds figures of other settings; choose another"):
        run(dataclasses.replace(claim, steps=4))


def test_bad_input_is_named():
    with pytest.raises(InputError, match=r"lengths: expected numbers from 2 to tokens, 32768, got \[65536\]"):
        LongTextsClaim(model="m", lengths=(65_536,))
    with pytest.raises(InputError, match="trained_on: expected 'dense' or one of attentions, got 'Window"):
        LongTextsClaim(model="m", trained_on=("Window(3)",))
