"""`polyformer.load`: what it returns in Python is what the commands print; and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch

import polyformer
from polyformer import InputError
from polyformer.applications.loaded import Choice, Prediction, TaggedWord, Verbatim
from polyformer.cli.main import main
from polyformer.core.errors import Caution
from polyformer.nn.heads import ClassifyConfig, MaskedConfig

Trained = Callable[[str], Path]
Output = Callable[..., str]
TINY = ["--steps", "2", "--device", "cpu", "--tokenizer.algorithm", "bytes", "--model.hidden_size", "16"]


def trained(root: Path, kind: str, name: str, rows: str) -> Path:
    """A run of the task `kind` on `rows`."""
    (root / name).write_text(rows)
    words = ["train", "--task.kind", kind, "--model", "encoder-tiny", "--data", str(root / name)]
    assert main([*words, "--out", str(root / "run"), *TINY]) == 0
    return root / "run"


def test_texts_are_classified_as_the_command_does(train_tiny: Trained, output: Output, tmp_path: Path):
    run, texts = train_tiny("classify"), ["a good film", "bad", "a film " * 9]
    (tmp_path / "review.txt").write_text("a long review\nof two lines\n")
    loaded = polyformer.load(run, "cpu")
    results = loaded.classify(texts)
    lines = [f"{result.label}\t{result.probability:.4f}\n" for result in results]
    assert "".join(lines) == output("classify", run, *texts)
    whole = loaded.classify(tmp_path / "review.txt")
    assert f"{whole.label}\t{whole.probability:.4f}\n" == output(
        "classify", run, "--file", tmp_path / "review.txt"
    )
    assert [loaded.classify(text).label for text in texts] == [result.label for result in results]
    assert isinstance(results[0], Prediction)
    assert tuple(results[0].probabilities) == loaded.labels == ("neg", "pos")
    assert results[0].probability == max(results[0].probabilities.values())
    assert sum(results[0].probabilities.values()) == pytest.approx(1)
    assert loaded.predict(texts) == results == loaded.classify(iter(texts))
    assert loaded.classify([]) == []


def test_a_model_in_training_mode_is_evaluated_and_stays_trainable(train_tiny: Trained):
    loaded = polyformer.load(train_tiny("classify"), "cpu")
    before = loaded.classify("a good film")
    loaded.model.train()
    assert loaded.classify("a good film") == before
    assert loaded.model.training
    loaded.model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([1])).loss.backward()


def test_a_text_that_is_cut_is_a_warning(train_tiny: Trained):
    with pytest.warns(Caution, match="1 of 2 texts are cut to 512 tokens"):
        polyformer.load(train_tiny("classify"), "cpu").classify(["long " * 200, "short"])


def test_names_of_files_and_pairs_are_refused_as_texts(train_tiny: Trained, tmp_path: Path):
    loaded, file = polyformer.load(train_tiny("classify"), "cpu"), tmp_path / "review.txt"
    file.write_text("good film")
    with pytest.raises(InputError, match=r"got the name of a file, .* with pathlib\.Path\('.*review.txt'\)"):
        loaded.classify(["a film", str(file)])
    assert loaded.classify(Verbatim(file)).label in loaded.labels
    with pytest.raises(InputError, match=r"nowhere\.txt: cannot be read"):
        loaded.classify(tmp_path / "nowhere.txt")
    with pytest.raises(InputError, match=r"expected single texts, for which .* was trained, got a pair"):
        loaded.classify(["a film", ("a", "b")])
    with pytest.raises(InputError, match=r"expected a text or the pathlib\.Path of its file, got nan"):
        loaded.classify(["a film", float("nan")])
    with pytest.raises(InputError, match="expected an input or a list of inputs, got 3"):
        loaded.classify(3)


@pytest.mark.parametrize("name", ["regress", "tag", "translate", "summarize", "generate", "answer", "choose"])
def test_another_method_names_what_the_model_can_do(name: str, train_tiny: Trained):
    loaded = polyformer.load(train_tiny("classify"), "cpu")
    inputs = ("a", "b") if name in ("answer", "choose") else ("a",)
    with pytest.raises(
        InputError, match=rf"{name}: not available for .*; this model can predict, classify, em"
    ):
        getattr(loaded, name)(*inputs)
    assert loaded.can == ("predict", "classify", "embed")


def test_words_are_tagged(train_tiny: Trained, output: Output):
    run = train_tiny("tag")
    loaded = polyformer.load(run, "cpu")
    sentences = loaded.tag(["Anna sleeps.", "in New York"])
    lines = ["".join(f"{word}\t{tag}\n" for word, tag in tagged) for tagged in sentences]
    assert "".join(f"{text}\n" for text in lines) == output("tag", run, "Anna sleeps.", "in New York")
    assert loaded.predict("in New York") == sentences[1] == loaded.tag(("in", "New", "York"))
    assert isinstance(sentences[0][0], TaggedWord)
    assert {tag for _, tag in sentences[1]} <= {*loaded.labels}


def test_texts_are_translated(train_tiny: Trained, output: Output):
    run, texts = train_tiny("translate"), ["word 3", "a longer word 4"]
    loaded = polyformer.load(run, "cpu")
    assert "".join(f"{text}\n" for text in loaded.translate(texts, num_beams=1)) == output(
        "translate", run, *texts, "--num-beams", 1
    )
    assert loaded.predict(texts[1]) + "\n" == output("translate", run, texts[1])
    with pytest.raises(
        InputError, match=r"summarize: not available for .*; this model can predict, translate"
    ):
        loaded.summarize("a text")
    with pytest.raises(InputError, match="a run has no language codes"):
        loaded.translate("a text", target_language="de")


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 2}, {"temperature": 0.9, "seed": 3}, {"penalty_alpha": 0.5}, {"stop": "e"}]
)
def test_prompts_are_continued(settings: dict[str, Any], train_tiny: Trained, output: Output):
    run, prompts = train_tiny("lm"), ["line 1", "a", "a small text"]
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    loaded = polyformer.load(run, "cpu")
    texts = loaded.generate(prompts, max_new_tokens=5, **settings)
    words = "--max-new-tokens", 5, *options
    assert "\n\n".join(texts) + "\n" == output("generate", run, "--prompt", *prompts, *words)
    assert loaded.generate(prompts[0], 5, **settings) == texts[0]


def test_several_texts_of_a_prompt(train_tiny: Trained):
    loaded = polyformer.load(train_tiny("lm"), "cpu")
    texts = loaded.generate(["line", "a"], 4, do_sample=True, num_return_sequences=3)
    assert [len(several) for several in texts] == [3, 3]
    assert all(text.startswith("line") for text in texts[0])
    with pytest.raises(InputError, match="unknown argument or setting of generate 'num_beem'"):
        loaded.generate("line", num_beem=2)


def test_pairs_of_texts(tmp_path: Path, output: Output):
    rows = "text,pair,label\n" + "a cat,an animal,yes\na stone,an animal,no\n" * 10
    run = trained(tmp_path, "classify_pair", "pairs.csv", rows)
    loaded, pair = polyformer.load(run, "cpu"), ("a dog", "an animal")
    (result,) = loaded.classify([pair])
    assert f"{result.label}\t{result.probability:.4f}\n" == output(
        "classify", run, pair[0], "--pair", pair[1]
    )
    assert loaded.classify(pair).label == result.label
    with pytest.raises(InputError, match=r"expected a pair of texts, \(first, second\), got 'a dog'"):
        loaded.classify("a dog")


def test_numbers_of_pairs(tmp_path: Path, output: Output):
    rows = "text,pair,label\n" + "a cat,an animal,4.5\na stone,an animal,1.0\n" * 10
    run = trained(tmp_path, "regress_pair", "pairs.csv", rows)
    loaded, pairs = polyformer.load(run, "cpu"), [("a dog", "an animal"), ("a stone", "an animal")]
    numbers = loaded.predict(pairs)
    assert [type(number) for number in numbers] == [float, float]
    assert loaded.regress(pairs[0]) == pytest.approx(numbers[0], abs=1e-6)
    assert f"{numbers[0]:.4f}\n" == output("classify", run, pairs[0][0], "--pair", pairs[0][1])
    with pytest.raises(InputError, match=r"classify: not available for .*; this model can predict, regress"):
        loaded.classify(pairs)


def test_questions_are_answered(tmp_path: Path, output: Output):
    row = {"question": "Where?", "context": "Here it is.", "answers": {"text": ["Here"], "answer_start": [0]}}
    run = trained(tmp_path, "qa", "questions.jsonl", (json.dumps(row) + "\n") * 20)
    article = tmp_path / "article.txt"
    article.write_text("It is here, and not there.\n")
    loaded = polyformer.load(run, "cpu")
    answers = loaded.answer(["Where?", "Why?"], article)
    assert "".join(f"{answer}\n" for answer in answers) == output("answer", run, article, "Where?", "Why?")
    text = article.read_text().strip()
    assert loaded.predict("Where?", text) == answers[0]
    assert loaded.answer(["Where?", "Why?"], [text, text]) == answers
    with pytest.raises(InputError, match="context: expected one for each of 2 questions, got 1"):
        loaded.answer(["Where?", "Why?"], [text])


def test_choices(tmp_path: Path, output: Output):
    rows = "text,choice1,choice2,label\n" + "cat,miaows,barks,0\ndog,miaows,barks,1\n" * 9
    run = trained(tmp_path, "choose", "rows.csv", rows)
    loaded, choices = polyformer.load(run, "cpu"), ["miaows", "barks", "swims"]
    result = loaded.choose("cow", choices)
    assert isinstance(result, Choice)
    assert f"{result.choice}\t{result.probability:.4f}\n" == output(
        "choose", run, "cow", "--choices", json.dumps(choices)
    )
    assert result.probability == max(result.probabilities)
    assert loaded.predict(["cow", "cat"], [choices, choices[:2]])[1].choice in choices[:2]
    for wrong, message in ((["one"], "choices: expected two or more"), ("ab", "choices: expected a list of")):
        with pytest.raises(InputError, match=message):
            loaded.choose("cow", wrong)


def test_a_model_without_labels_has_vectors(train_tiny: Trained):
    loaded = polyformer.load(train_tiny("mlm"), "cpu")
    vectors = loaded.embed(["a text", "another, longer text"], pooling="mean")
    assert (vectors.shape, vectors.dtype) == ((2, 16), np.float32)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)
    assert loaded.predict("a text", pooling="mean") == pytest.approx(vectors[0], abs=1e-5)
    assert np.linalg.norm(loaded.embed("a text", pooling="mean", normalize=False)) != pytest.approx(1)
    with pytest.raises(InputError, match="neither model nor folder defines a pooling"):
        loaded.embed("a text")


def test_a_checkpoint_is_classified_by_text_or_pair(tmp_path: Path, output: Output):
    names = {"id2label": {"0": "bad", "1": "good", "2": "fair"}}
    head = ClassifyConfig(num_labels=3)
    checkpoints.save(tmp_path, "bert-base", checkpoints.bert_files(tmp_path), head, hub=names)
    loaded = polyformer.load(tmp_path, "cpu")
    for words, text in ((("a film",), "a film"), (("a film", "--pair", "fine"), ("a film", "fine"))):
        result = loaded.classify(text)
        assert f"{result.label}\t{result.probability:.4f}\n" == output("classify", tmp_path, *words)
    assert loaded.labels == ("bad", "good", "fair")
    with pytest.raises(InputError, match="expected either only texts or only pairs of texts, got both"):
        loaded.classify(["a film", ("a", "b")])


def test_the_language_of_a_call_does_not_change_the_next(tmp_path: Path):
    tokenizer = checkpoints.piece_files(tmp_path, "__en__ $A </s>", checkpoints.LANGUAGES)
    checkpoints.save(tmp_path, "m2m100-418m", tokenizer)
    loaded = polyformer.load(tmp_path, "cpu")
    german = loaded.translate("a film", target_language="de")
    assert loaded.translate("a film", target_language="en", num_beams=1) != german
    assert loaded.translate(["a film"], target_language="de") == [german]
    with pytest.raises(InputError, match="target-language: this model writes many languages"):
        loaded.translate("a film")


def test_a_folder_of_sentence_transformers_defines_its_pooling(tmp_path: Path):
    checkpoints.save(tmp_path, "bert-base", checkpoints.bert_files(tmp_path), MaskedConfig())
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules += [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    loaded = polyformer.load(tmp_path, "cpu")
    assert loaded.predict(["a film", "fine"]).shape == (2, 16)
    assert loaded.can == ("predict", "embed")


def test_a_path_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="nowhere: no such directory"):
        polyformer.load("nowhere")
    with pytest.raises(InputError, match="not a model directory"):
        polyformer.load(tmp_path)
