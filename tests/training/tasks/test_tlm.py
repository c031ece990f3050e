"""Translation language modelling: rows of two languages, the model they need, and that it learns."""

import numpy as np
import pytest
import torch
from fitted import learned

from polyformer.data import MaskingConfig, Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import TranslationModelling, TranslationModellingConfig

ROWS = [
    {"source": "one two three", "target": "eins zwei drei"},
    {"source": "red dog", "target": "roter Hund"},
    {"source": "a cat", "target": "eine Katze"},
]


@pytest.fixture(scope="module")
def task() -> TranslationModelling:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    config = TranslationModellingConfig(max_length=32, batch_tokens=96, masking=MaskingConfig(share=0.3))
    return config.build(tokenizer)


def test_rows(task: TranslationModelling):
    row = task.rows.prepare(ROWS)[1]
    assert row["input_ids"].tolist() == [
        task.rows.cls,
        *b"red dog",
        task.rows.sep,
        task.rows.cls,
        *b"roter Hund",
        task.rows.sep,
    ]
    assert row["position_ids"].tolist() == [*range(9), *range(12)]
    assert row["langs"].tolist() == [0] * 9 + [1] * 12


def test_tokens_are_hidden_on_both_sides_and_marks_never(task: TranslationModelling):
    hidden = np.zeros(21)
    plain = task.rows.prepare(ROWS)[1]
    for seed in range(200):
        row = task.rows.corrupt(plain, np.random.default_rng(seed))
        hidden += row["labels"] != -100
        assert (row["langs"] == plain["langs"]).all()
    assert (np.flatnonzero(hidden == 0) == [0, 8, 9, 20]).all()


def test_the_model_gets_languages(task: TranslationModelling):
    assert task.adapt(model_config("encoder-tiny")).embedding.num_languages == 2
    more = TranslationModellingConfig(languages=(4, 2)).build(task.tokenizer)
    assert more.adapt(model_config("encoder-tiny")).embedding.num_languages == 5
    assert more.rows.prepare(ROWS)[0]["langs"][0] == 4


def test_a_longer_pair_is_cut(task: TranslationModelling):
    rows = task.rows.prepare([{"source": "x" * 100, "target": "y" * 100}])
    assert len(rows[0]["input_ids"]) == 32


def test_padding_and_languages_reach_the_model(task: TranslationModelling):
    """What is measured over a padded batch is what its rows give alone; languages count."""
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("encoder-tiny"))).double().eval()
    torch.nn.init.normal_(model.encoder_embedding.languages.weight)  # type: ignore[union-attr]
    rows = [task.rows.corrupt(row, np.random.default_rng(0)) for row in task.rows.prepare(ROWS)]
    with torch.no_grad():
        together = task.metrics.totals(model, task.rows.collate(rows))
        alone = torch.stack([task.metrics.totals(model, task.rows.collate([row])) for row in rows]).sum(0)
        assert torch.allclose(together, alone)
        swapped = [{**row, "langs": 1 - row["langs"]} for row in rows]
        assert not torch.allclose(task.metrics.totals(model, task.rows.collate(swapped)), together)


def test_a_model_learns_masked_tokens_of_both_languages():
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    masking = MaskingConfig(share=0.3, static_copies=1)
    task = TranslationModellingConfig(max_length=32, batch_tokens=96, masking=masking).build(tokenizer)
    before, after = learned(task, model_config("encoder-tiny"), ROWS, steps=120)
    assert before["loss"] > 4
    assert after["loss"] < 1
    assert after["accuracy"] > 0.9
