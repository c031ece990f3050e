"""Summaries: articles as pairs, sources that are cut, ROUGE beside the first three sentences."""

from pathlib import Path

import pytest
import torch

from polyformer.data import DataConfig, Tokenizer, TokenizerConfig, load
from polyformer.data.formats.published import lead, rouge, summary_row
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import Summarization, SummarizationConfig

ARTICLE = (
    " \n = Cat = \n \n The cat is small . \n \n = = Food = = \n \n"
    " It eats fish . It sleeps . \n It purrs . Often . \n"
)
ROWS = [
    {"source": "It eats fish. It sleeps. It purrs. Often.", "target": "The cat eats."},
    {"source": "ab", "target": "a b c"},
]


@pytest.fixture(scope="module")
def task() -> Summarization:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    return SummarizationConfig(batch_tokens=64, max_length=16, max_summary=8).build(tokenizer)


@pytest.fixture(scope="module")
def model(task: Summarization) -> Transformer:
    torch.manual_seed(1)
    return Transformer(task.adapt(model_config("transformer-tiny"))).eval()


def test_an_article_is_its_first_paragraph_and_the_rest():
    assert summary_row(ARTICLE) == {
        "source": "It eats fish . It sleeps .\nIt purrs . Often .",
        "target": "The cat is small .",
    }
    assert summary_row(" = Cat = \n \n The cat is small . \n") is None
    assert summary_row("") is None


def test_articles_of_a_file(tmp_path: Path):
    path = tmp_path / "wiki.txt"
    path.write_text(ARTICLE + " \n = Dog = \n \n A dog . \n" + ARTICLE.replace("Cat", "Tiger"))
    splits = load(DataConfig(path=str(path), format="summaries", validation_fraction=0), ("source", "target"))
    assert len(splits.train) == 2
    assert splits.train[0] == summary_row(ARTICLE)


def test_the_lead():
    assert lead("One. Two! Three? Four.") == "One. Two! Three?"
    assert lead("It eats fish . It sleeps .\nIt purrs . Often .") == "It eats fish . It sleeps . It purrs ."
    assert lead("") == ""


def test_long_sides_are_cut_and_counted(task: Summarization):
    rows = task.rows.prepare(ROWS)
    assert [len(row["input_ids"]) for row in rows] == [16, 3]
    assert [len(row["labels"]) for row in rows] == [8, 6]
    assert rows[0]["input_ids"][-1] == rows[1]["labels"][-1] == task.rows.eos
    assert rows[0]["labels"][-1] != task.rows.eos, "a summary that is cut does not end there"
    assert task.tokenizer.decode(rows[0]["labels"]) == "The cat "
    assert task.notes == ["1 of 2 sources are cut to 16 tokens", "1 of 2 summaries are cut to 8 tokens"]
    assert task.architecture.positions == 16


def test_scores_beside_the_lead(task: Summarization, model: Transformer, monkeypatch: pytest.MonkeyPatch):
    assert all(len(text) <= 8 for text in task.translate(model, [row["source"] for row in ROWS]))
    scores = task.finish(model, ROWS)
    monkeypatch.setattr(task, "translate", lambda model, texts: [row["target"] for row in ROWS])
    best = task.finish(model, ROWS)
    assert [best[name] for name in ("rouge1", "rouge2", "rougeL")] == pytest.approx([100, 100, 100])
    first = rouge(["It eats fish. It sleeps. It purrs.", "ab"], ["The cat eats.", "a b c"])
    for name, value in first.items():
        assert best[f"lead3_{name}"] == scores[f"lead3_{name}"] == pytest.approx(value)


def test_rouge_counts_words_of_any_language():
    # Words: "hai con chó" and "hai con mèo" share two of three, one pair of two, two in order.
    scores = rouge(["Hai con chó", "x"], ["hai con mèo", "y"])
    assert scores == {
        "rouge1": pytest.approx(100 / 3),
        "rouge2": pytest.approx(25),
        "rougeL": pytest.approx(100 / 3),
    }


def test_unknown_words_are_not_shared():
    assert rouge(["<unk> <unk> the"], ["<unk> <unk> a"]) == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    assert rouge(["<unk> the"], ["the <unk>"])["rouge1"] == pytest.approx(100)


def test_a_decoder_starts_from_padding_where_no_token_begins_a_text(task: Summarization):
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    tokenizer.bos_id = None
    config = SummarizationConfig().build(tokenizer).adapt(model_config("transformer-tiny"))
    assert config.special.bos == config.special.pad == tokenizer.pad_id
