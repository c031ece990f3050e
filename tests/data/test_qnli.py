"""Pairs of question and sentence from SQuAD's files, and whole articles held out."""

import json
from pathlib import Path

import pytest

from polyformer.core.errors import InputError
from polyformer.data import DataConfig, load
from polyformer.data.formats.guess import guess
from polyformer.data.formats.published import question_sentences, read_qnli, sentence_spans
from polyformer.data.sources.held_out import split_rows

CONTEXT = "Oslo is a city. It lies in Norway! Which city is large? Bergen is a city in the west."
NEEDS = ("text", "pair", "label")
COLUMNS = {"text": "question", "pair": "sentence"}


def answers(text: str) -> dict[str, list]:
    return {"text": [text], "answer_start": [CONTEXT.index(text)]}


def write(path: Path, articles: int, title: bool = True) -> str:
    """Articles of one question, the last one without an answer."""
    rows = []
    for number in range(articles + 1):
        asked = {"id": "1", "question": f"Where lies city {number}?", "answers": []}
        if number < articles:
            asked["answers"] = [{"text": "Norway", "answer_start": CONTEXT.index("Norway")}]
        named = {"title": f"T{number}"} if title else {}
        rows.append({**named, "paragraphs": [{"context": CONTEXT, "qas": [asked]}]})
    path.write_text(json.dumps({"data": rows}))
    return str(path)


def test_sentences_with_their_places():
    parts = [CONTEXT[a:b] for a, b in sentence_spans(CONTEXT)]
    assert parts == [
        "Oslo is a city.",
        "It lies in Norway!",
        "Which city is large?",
        "Bergen is a city in the west.",
    ]
    assert [*sentence_spans(" ")] == []


def test_the_other_sentence_shares_most_words_and_not_the_answer():
    pairs = question_sentences("Which city lies in Norway?", CONTEXT, answers("Norway"))
    assert pairs == {"entailment": "It lies in Norway!", "not_entailment": "Which city is large?"}
    assert question_sentences("Which city is in the west?", CONTEXT, answers("Norway"))["not_entailment"] == (
        "Bergen is a city in the west."
    )
    # "city" stands in three sentences, "Norway! Which" crosses two.
    assert question_sentences("What?", CONTEXT, answers("city"))["not_entailment"] == "It lies in Norway!"
    assert question_sentences("What?", CONTEXT, answers("Norway! Which")) == {}
    assert question_sentences("What?", "Oslo.", {"text": ["Oslo"], "answer_start": [0]}) == {}
    assert question_sentences("What?", CONTEXT, {"text": [], "answer_start": []}) == {}


@pytest.mark.parametrize("title", [True, False])
def test_both_labels_of_every_answered_question(tmp_path: Path, title: bool):
    rows = list(read_qnli(Path(write(tmp_path / "a.json", 2, title))))
    assert [row["label"] for row in rows] == ["entailment", "not_entailment"] * 2
    assert {row["article"] for row in rows} == ({"T0", "T1"} if title else {"1", "2"})


def test_whole_articles_are_held_out(tmp_path: Path):
    path = write(tmp_path / "a.json", 10)
    config = DataConfig(
        path=path,
        format="qnli",
        columns=COLUMNS,
        together="article",
        validation_fraction=0.2,
        test_fraction=0.3,
    )
    splits = load(config, NEEDS)
    questions = [{row["text"] for row in split} for split in splits if split is not None]
    assert [len(split) for split in questions] == [6, 1, 3]
    assert len(set.union(*questions)) == 10
    assert [*splits.train[0]] == [*NEEDS]
    with pytest.raises(InputError, match="no column 'chapter'"):
        load(DataConfig(path=path, format="qnli", columns=COLUMNS, together="chapter"), NEEDS)
    with pytest.raises(InputError, match="too short to hold so much of it out"):
        load(DataConfig(path=write(tmp_path / "b.json", 1), format="qnli", together="article"), ("label",))


def test_groups_are_held_out_by_their_rows_wherever_they_stand():
    rows = [{"g": name, "n": number} for number, name in enumerate("aabacccbbb")]
    for fraction in (0.1, 0.3, 0.5):
        kept, held = split_rows(rows, ("n",), fraction, "g")
        assert held
        assert not {row["g"] for row in kept} & {row["g"] for row in held}
        assert sorted(row["n"] for row in (*kept, *held)) == list(range(10))


@pytest.mark.parametrize("format", ["qnli", "squad"])
def test_whole_articles_are_held_out_where_nothing_is_said(tmp_path: Path, format: str):
    guessed = guess(write(tmp_path / "a.json", 3), {"format": format})
    assert guessed.data["together"] == "article"
    assert "together" not in guess(write(tmp_path / "b.json", 0), {"format": format}).data
    streamed = {"format": format, "streaming": True}
    assert "together" not in guess(write(tmp_path / "a.json", 3), streamed).data
