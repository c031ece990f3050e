"""Translation: rows, order, and BLEU on plain text."""

import pytest
import torch

from polyformer import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.generation import BeamConfig
from polyformer.models.presets import model_config
from polyformer.training.tasks import Translation, TranslationConfig

ROWS = [
    {"source": "one two", "target": "eins zwei"},
    {"source": "a", "target": "ein sehr langes Ziel"},
    {"source": "three and more", "target": "drei"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])


@pytest.fixture(scope="module")
def task(tokenizer: Tokenizer) -> Translation:
    return TranslationConfig(batch_tokens=64, max_length=32, beam=BeamConfig(num_beams=2)).build(tokenizer)


@pytest.fixture(scope="module")
def model(task: Translation) -> Transformer:
    torch.manual_seed(1)
    return Transformer(task.adapt(model_config("transformer-tiny"))).eval()


def test_both_sides_end_with_eos(task: Translation, tokenizer: Tokenizer):
    rows = task.rows.prepare(ROWS)
    assert tokenizer.decode(rows[1]["labels"]) == "ein sehr langes Ziel"
    for row in rows:
        assert row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_id


def test_tokenizer_learns_from_both_sides():
    assert list(TranslationConfig().texts(ROWS[:2])) == ["one two", "eins zwei", "a", "ein sehr langes Ziel"]


def test_loss_is_over_target_tokens(task: Translation, model: Transformer):
    held = task.rows.held_out(ROWS)
    totals = sum(task.metrics.totals(model, batch) for _, batch in held.batches.epoch(0))
    assert isinstance(totals, torch.Tensor)
    assert totals[1] == sum(len(row["target"]) + 1 for row in ROWS)
    assert task.metrics.measure(model, held)["loss"] == pytest.approx((totals[0] / totals[1]).item())


def test_translations_keep_their_order(task: Translation, model: Transformer):
    texts = ["one two", "two one", "a b c d", "zzzzzzz", "one owt"]  # as long, so that all have the same room
    together = task.translate(model, texts)
    assert together == [task.translate(model, [text])[0] for text in texts]
    assert task.translate(model, []) == []


def test_bleu_of_the_finished_model(task: Translation, model: Transformer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(task, "translate", lambda model, texts: [row["target"] for row in rows])
    rows = [{"source": "x", "target": "Zwei Hunde laufen durch den Schnee ."}]
    assert task.finish(model, rows) == {"bleu": pytest.approx(100)}
    assert set(task.score(model, rows)) == {"loss", "perplexity", "bleu"}


def test_long_pairs_are_refused_or_dropped(tokenizer: Tokenizer):
    config = TranslationConfig(max_length=12, batch_tokens=64)
    with pytest.raises(
        InputError, match=r"pair 2 \('a'\) has 21 tokens, more than task.max_length 12.*'drop'"
    ):
        config.build(tokenizer).rows.prepare(ROWS)
    kept = config.override("too_long", "drop").build(tokenizer).rows.prepare(ROWS)
    assert [len(row["labels"]) for row in kept] == [10]
