"""Language modelling: what is counted, and that packing changes nothing about it."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polyformer import GenerationConfig, InputError
from polyformer.core.ops.cross_entropy import linear_cross_entropy
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.formats.readers import read_articles
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import LanguageModelling, LanguageModellingConfig
from polyformer.training.tasks.text import text_metrics

TEXTS = ["The cat sat.\nIt slept.\n", "A dog", "Long " * 30 + "\n"]
ROWS = [{"text": text} for text in TEXTS]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])


def build(tokenizer: Tokenizer, **options: int) -> tuple[LanguageModelling, Transformer]:
    task = LanguageModellingConfig(row_length=32, batch_tokens=64).override("overlap", 1)
    task = dataclasses.replace(task, **options).build(tokenizer)
    torch.manual_seed(0)
    return task, Transformer(task.adapt(model_config("decoder-tiny", {"hidden_size": 16}))).double().eval()


def test_the_model_gets_vocabulary_special_tokens_and_positions(tokenizer: Tokenizer):
    _, model = build(tokenizer)
    special = model.config.special
    assert model.config.vocab_size == len(tokenizer) == 260
    assert (special.pad, special.bos, special.eos) == (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
    assert model.config.max_position_embeddings == 32


def test_an_adaptive_softmax_stays_and_is_measured_as_any_head(tokenizer: Tokenizer):
    task, _ = build(tokenizer)
    plain = model_config("decoder-tiny", {"hidden_size": 16})
    config = task.adapt(plain.override("head", "adaptive_softmax"))
    assert config.head.kind == "adaptive_softmax"
    torch.manual_seed(0)
    model = Transformer(config).double().eval()
    held = task.rows.held_out(ROWS)
    total = sum(task.metrics.totals(model, batch) for _, batch in held.batches.epoch(0))
    assert isinstance(total, torch.Tensor)
    nats, tokens = total.tolist()
    assert tokens == sum(len(text.encode()) + 1 for text in TEXTS)
    assert 0.5 * math.log(len(tokenizer)) < nats / tokens < 2 * math.log(len(tokenizer))


def test_every_token_but_bos_is_measured_once(tokenizer: Tokenizer):
    """Sums over packed rows are those of the same pieces of text one by one."""
    task, model = build(tokenizer)
    held = task.rows.held_out(ROWS)
    total = sum(task.metrics.totals(model, batch) for _, batch in held.batches.epoch(0))
    assert isinstance(total, torch.Tensor)
    nats, tokens = total.tolist()
    assert tokens == sum(len(text.encode()) + 1 for text in TEXTS)
    alone = 0.0
    for row in task.rows.prepare_held_out(ROWS):
        for document in range(int(row["document_ids"].max()) + 1):
            here = row["document_ids"] == document
            if (row["labels"][here] != -100).any():
                ids = torch.tensor(row["input_ids"][here]).long()[None]
                hidden = model(ids).last_hidden_state[:, :-1]
                mean = linear_cross_entropy(hidden, model.tokens.weight, None, ids[:, 1:])
                alone += mean.item() * (ids.shape[1] - 1)
    assert nats == pytest.approx(alone, rel=1e-10)


def test_overlap_gives_context_and_counts_nothing_twice(tokenizer: Tokenizer):
    counts = []
    for overlap in (1, 16, 31):
        task, _ = build(tokenizer, overlap=overlap)
        counts.append(
            sum(task.objective.weight(batch) for _, batch in task.rows.held_out(ROWS).batches.epoch(0))
        )
    assert counts == [sum(len(text.encode()) + 1 for text in TEXTS)] * 3


def test_metrics_are_per_token_per_word_and_per_byte(tokenizer: Tokenizer):
    task, _ = build(tokenizer)
    counts = task.rows.count([{"text": "two words\nand three more\n"}])
    assert counts == {"words": 5 + 2, "bytes": 25}
    metrics = task.metrics.values([14.0, 28.0], counts)
    assert metrics["perplexity"] == pytest.approx(math.exp(0.5))
    assert metrics["word_perplexity"] == pytest.approx(math.exp(2))
    assert metrics["bits_per_byte"] == pytest.approx(14 / math.log(2) / 25)
    assert text_metrics(1e6, 1, {})["perplexity"] == math.inf


def test_a_lossy_tokenizer_says_nothing_about_words():
    lossy = Tokenizer.train(TokenizerConfig(algorithm="bytes", lowercase=True), [])
    task = LanguageModellingConfig().build(lossy)
    assert task.rows.count([{"text": "Upper"}]) == {}
    assert set(task.metrics.values([1.0, 1.0], {})) == {"loss", "perplexity"}


def test_how_unicode_spells_a_text_changes_no_metric():
    task = LanguageModellingConfig().build(Tokenizer.train(TokenizerConfig(algorithm="bytes"), []))
    assert (
        task.rows.count([{"text": "Vie\u0323\u0302t Nam"}])
        == task.rows.count([{"text": "Việt Nam"}])
        == {"words": 2, "bytes": 10}
    )


def test_words_of_wikitext_are_the_published_number(shared_data: Callable[[str], Path], tokenizer: Tokenizer):
    task, _ = build(tokenizer)
    counts = {"valid": 217_646, "test": 245_569}
    for split, words in counts.items():
        rows = list(read_articles(shared_data("wikitext2") / f"{split}.txt.gz"))
        assert task.rows.count(rows)["words"] == words


def test_a_text_shorter_than_a_row_is_trained_on(tokenizer: Tokenizer):
    task, _ = build(tokenizer)
    (row,) = task.rows.prepare([{"text": "ab"}])
    assert (row["labels"] != -100).sum() == 4


def test_generation_continues_a_document(tokenizer: Tokenizer):
    task, model = build(tokenizer)
    assert task.start("a") == [tokenizer.bos_id, ord("a")]
    (text,) = task.generate(model.float(), "ab", GenerationConfig(max_new_tokens=5))
    assert not text.startswith("ab")


def test_an_encoder_cannot_do_it(tokenizer: Tokenizer):
    task = LanguageModellingConfig().build(tokenizer)
    with pytest.raises(InputError, match="model: this task needs a decoder model, got one with an encoder"):
        task.adapt(model_config("encoder-tiny"))
