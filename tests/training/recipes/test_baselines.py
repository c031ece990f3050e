"""Baselines of every kind of task against counts by hand and scikit-learn."""

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyformer.cli.main import main
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.training.recipes.report import baselines, verdict
from polyformer.training.recipes.run import Run
from polyformer.training.tasks import (
    ClassificationConfig,
    ImageClassificationConfig,
    PairClassificationConfig,
    QuestionAnsweringConfig,
    SummarizationConfig,
    TaggingConfig,
    TranslationConfig,
)

GOOD, BAD = ("fine", "lovely", "great"), ("dull", "awful", "poor")


def of(config: Any, train: list[Any], held: list[Any]) -> dict[str, dict[str, float]]:
    """The baselines of a task for these rows, by name."""
    config = config.resolve(train)
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), []) if config.tokenized else None
    return dict(baselines(config.build(tokenizer), Splits(train, held, None)))  # type: ignore[arg-type]


def reviews(number: int, seed: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    rows = []
    for _ in range(number):
        label = draw.choice(["bad", "bad", "good"])
        words = draw.choices(GOOD if label == "good" else BAD, k=2) + draw.choices(GOOD + BAD, k=3)
        rows.append({"text": " ".join(words), "label": label})
    return rows


def test_words_decide_labels_as_in_scikit_learn():
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    train, held = reviews(200, 0), reviews(100, 1)
    result = of(ClassificationConfig(), train, held)
    words = CountVectorizer()
    model = LogisticRegression(max_iter=500)
    model.fit(words.fit_transform([row["text"] for row in train]), [row["label"] for row in train])
    expected = model.score(words.transform([row["text"] for row in held]), [row["label"] for row in held])
    bad = np.mean([row["label"] == "bad" for row in held])
    assert result["most frequent label"]["accuracy"] == pytest.approx(bad)
    assert result["logistic regression, bag of words"]["accuracy"] == pytest.approx(expected, abs=0.011)
    assert expected > bad + 0.1


def test_pairs_are_compared_by_their_common_words():
    draw = random.Random(0)
    rows = []
    for i in range(80):
        words = draw.sample([f"w{n}" for n in range(400)], 8)
        same = i % 2 == 0
        rows.append(
            {
                "text": " ".join(words[:4]),
                "pair": " ".join(words[1:5] if same else words[4:]),
                "label": str(same),
            }
        )
    result = of(PairClassificationConfig(), rows[:60], rows[60:])
    assert result["logistic regression, common words"]["accuracy"] == 1
    assert result["logistic regression, bag of words"]["accuracy"] < 0.8


def test_images_are_near_the_mean_of_their_class():
    generator = np.random.default_rng(0)
    rows = [
        {
            "image": np.clip(generator.normal(60 if i % 2 else 190, 20, 16), 0, 255)
            .astype(np.uint8)
            .tobytes(),
            "height": 4,
            "width": 4,
            "label": "dark" if i % 2 else "light",
        }
        for i in range(31)
    ]
    result = of(ImageClassificationConfig(), rows[:21], rows[21:])
    assert result["nearest class mean"]["accuracy"] == 1
    assert result["most frequent label"]["accuracy"] == 0.5


def test_words_keep_their_most_frequent_tag():
    train = [{"tokens": ["a", "b", "b"], "tags": ["X", "Y", "Y"]}, {"tokens": ["a", "a"], "tags": ["X", "Y"]}]
    held = [{"tokens": ["a", "b", "c"], "tags": ["X", "X", "Y"]}]
    assert of(TaggingConfig(), train, held) == {
        "most frequent tag of each word": {"accuracy": pytest.approx(2 / 3)}
    }
    train = [{"tokens": ["Ana", "sings"], "tags": ["B-PER", "O"]}, {"tokens": ["so"], "tags": ["O"]}]
    (metrics,) = of(TaggingConfig(), train, train).values()
    assert metrics == {"accuracy": 1, "precision": 1, "recall": 1, "f1": 1}


def test_sources_and_first_sentences_are_copied():
    rows = [{"source": "a b c d e f", "target": "a b c d e f"}]
    assert of(TranslationConfig(), rows, rows)["the source itself"]["bleu"] == pytest.approx(100)
    rows = [{"source": "One. Two. Three. Four.", "target": "One. Two. Three."}]
    assert of(SummarizationConfig(), rows, rows)["first three sentences"]["rouge1"] == pytest.approx(100)


def test_an_answer_is_near_the_words_of_the_question():
    context = "Ana sings in Hue. The old bridge is red."
    row = {"question": "Where does Ana sing?", "context": context}
    row |= {"answers": {"text": ["Ana sings in Hue"], "answer_start": [0]}}  # type: ignore[dict-item]
    assert of(QuestionAnsweringConfig(), [row], [row])["most words of the question"]["exact_match"] == 100


def test_the_verdict_compares_with_the_best_baseline():
    config = ClassificationConfig(labels=("a", "b"))
    task = config.build(Tokenizer.train(TokenizerConfig(algorithm="bytes"), []))
    rows = [("one", {"accuracy": 0.5}), ("two", {"accuracy": 0.75})]
    better = "This model beats the best baseline, two: accuracy 0.8 against 0.75."
    assert verdict(task, rows, {"loss": 1.0, "accuracy": 0.8}) == better
    assert verdict(task, rows, {"accuracy": 0.75}).startswith(
        "This model does not beat the best baseline, two"
    )
    translation = TranslationConfig().build(task.tokenizer)
    assert "bleu 4 against 1" in verdict(translation, [("copy", {"bleu": 1.0})], {"loss": 2.0, "bleu": 4.0})
    assert verdict(translation, [("copy", {"bleu": 1.0})], {"loss": 2.0}) == ""


def test_a_run_prints_its_verdict_and_the_report_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("polyformer.cli.plots.report.measure_growth", list)
    monkeypatch.setattr("polyformer.cli.plots.report.scaling", lambda growth: "")
    with (tmp_path / "reviews.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("text", "label"))
        writer.writeheader()
        writer.writerows(reviews(60, 0))
    folder = tmp_path / "run"
    words = [
        "--out",
        str(folder),
        "--steps",
        "2",
        "--device",
        "cpu",
        "--tokenizer.vocab_size",
        "300",
        "--report",
    ]
    assert main(["train", "--data", str(tmp_path / "reviews.csv"), *words]) == 0
    out = capsys.readouterr().out
    said = Run.open(folder).facts["verdict"]
    assert said.startswith("This model ")
    assert f"\n{said}\n" in out
    assert "logistic regression, bag of words" in out
    assert said in (folder / "report.html").read_text(encoding="utf-8")
