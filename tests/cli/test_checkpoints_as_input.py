"""The commands that read text with a run read it with a checkpoint too, as transformers would."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch

import polyformer
from polyformer.cli.main import main
from polyformer.data.tokenizers import load_tokenizer
from polyformer.nn.heads import ClassifyConfig, SpanConfig, TagConfig

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
NAMES = {"id2label": {"0": "bad", "1": "good", "2": "fair"}}
SENTENCE = "Anna flew to Oslo , twice ."


def theirs(folder: Path, task: str):
    """transformers' pipeline of the same directory."""
    transformers = pytest.importorskip("transformers")
    return transformers.pipeline(task, model=str(folder), device="cpu")


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_classify_as_transformers_does(problem: str, tmp_path: Path, output: Callable[..., str]):
    head, hub = ClassifyConfig(num_labels=3), {**NAMES, "problem_type": problem}
    checkpoints.save(tmp_path, "bert-base", checkpoints.bert_files(tmp_path), head, hub=hub)
    text = "a fine, funny film"
    expected = theirs(tmp_path, "text-classification")(text)[0]
    label, share = output("classify", tmp_path, text).split()
    assert (label, float(share)) == (expected["label"], pytest.approx(expected["score"], abs=1e-4))


def test_lines_with_a_tab_are_two_texts(tmp_path: Path, output: Callable[..., str], monkeypatch, capsys):
    checkpoints.save(
        tmp_path, "bert-base", checkpoints.bert_files(tmp_path), ClassifyConfig(num_labels=3), hub=NAMES
    )
    texts, pairs = ["Who wrote it?", "a film"], ["Anna and Tom", "fine"]
    one_by_one = [output("classify", tmp_path, text, "--pair", pair) for text, pair in zip(texts, pairs)]
    lines = [f"{text}\t{pair}\n" for text, pair in zip(texts, pairs)]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(lines)))
    assert main(["classify", str(tmp_path), "--lines", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [line.strip() for line in one_by_one]
    assert shown.err == "polyformer: each line contains one tab and is read as a pair of texts\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{lines[0]}no tab\n"))
    assert len(output("classify", tmp_path).splitlines()) == 2


@pytest.mark.parametrize("preset", ["roberta-base", "bart-base", "gpt2"])
def test_classify_lines_of_other_families(
    preset: str, tmp_path: Path, output: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    tokenizer = checkpoints.byte_files(tmp_path, preset.split("-")[0])
    head = {
        "gpt2": ClassifyConfig(num_labels=3, pooling="last", hidden=False, bias=False, dropout=0.0),
        "bart-base": ClassifyConfig(num_labels=3, drops_twice=True, end_token=tokenizer.eos_id, dropout=0.0),
        "roberta-base": ClassifyConfig(num_labels=3, drops_twice=True),
    }[preset]
    checkpoints.save(tmp_path, preset, tokenizer, head, hub=NAMES)
    texts = ["a film", "Anna and Tom flew from Paris to Oslo", "", "fine"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    lines = [line.split("\t") for line in output("classify", tmp_path).splitlines()]
    model = polyformer.from_pretrained(tmp_path)
    for text, (label, share) in zip(texts, lines, strict=True):
        ids = tokenizer.encode_for_model(text)[0] or [tokenizer.bos_id]
        with torch.no_grad():
            shares = model(torch.tensor([ids])).logits.softmax(-1)[0]
        assert label == NAMES["id2label"][str(int(shares.argmax()))]
        assert float(share) == pytest.approx(float(shares.max()), abs=1e-4)


def test_a_model_of_numbers(tmp_path: Path, output: Callable[..., str]):
    tokenizer = checkpoints.bert_files(tmp_path)
    checkpoints.save(tmp_path, "bert-base", tokenizer, ClassifyConfig(num_labels=1))
    ids = torch.tensor([tokenizer.encode_for_model("a film")[0]])
    number = polyformer.from_pretrained(tmp_path)(ids).logits.item()
    assert output("classify", tmp_path, "a film") == f"LABEL_0\t{number:.4f}\n"


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_tag_as_transformers_does(family: str, tmp_path: Path, output: Callable[..., str]):
    tokenizer = (
        checkpoints.bert_files(tmp_path) if family == "bert" else checkpoints.byte_files(tmp_path, family)
    )
    names = {"0": "O", "1": "B-PER", "2": "B-LOC", "3": "B-X", "4": "B-Y"}
    checkpoints.save(tmp_path, f"{family}-base", tokenizer, TagConfig(num_labels=5), hub={"id2label": names})
    tokenizer.save(tmp_path)
    tagged = [line.split("\t") for line in output("tag", tmp_path, SENTENCE).splitlines() if line]
    expected = {
        entity["start"]: entity["entity"] for entity in theirs(tmp_path, "ner")(SENTENCE, ignore_labels=[])
    }
    assert [word for word, _ in tagged] == SENTENCE.split()
    start = 0
    for word, tag in tagged:
        assert tag == expected.get(start - 1, expected.get(start)), word
        start += len(word) + 1
    assert len({tag for _, tag in tagged}) > 1


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_answer_as_transformers_does(family: str, tmp_path: Path, output: Callable[..., str]):
    transformers = pytest.importorskip("transformers")
    tokenizer = (
        checkpoints.bert_files(tmp_path) if family == "bert" else checkpoints.byte_files(tmp_path, family)
    )
    checkpoints.save(tmp_path, f"{family}-base", tokenizer, SpanConfig(), max_position_embeddings=600)
    tokenizer.save(tmp_path)
    article = tmp_path / "article.txt"
    article.write_text("Tom flew from Paris to Oslo. Anna and Tom saw a funny film, twice.")
    encode = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path)
    for question in ("Who flew?", "What did Anna see?"):
        encoded = encode(question, article.read_text(), return_tensors="pt", return_offsets_mapping=True)
        offsets, sides = encoded.pop("offset_mapping")[0], encoded.sequence_ids()
        with torch.no_grad():
            answer = model(**encoded)
        places = [i for i, side in enumerate(sides) if side == 1]
        spans = [(i, j) for i in places for j in places if i <= j < i + 30]
        first, last = max(
            spans, key=lambda ends: float(answer.start_logits[0, ends[0]] + answer.end_logits[0, ends[1]])
        )
        expected = article.read_text()[offsets[first][0] : offsets[last][1]]
        assert output("answer", tmp_path, article, question).strip() == expected.strip()


def test_a_long_article_is_read_in_windows_that_the_model_takes(tmp_path: Path, output: Callable[..., str]):
    tokenizer = checkpoints.bert_files(tmp_path)
    checkpoints.save(tmp_path, "bert-base", tokenizer, SpanConfig(), max_position_embeddings=40)
    article = tmp_path / "article.txt"
    article.write_text(" ".join(checkpoints.TEXT[:4]))
    model = polyformer.from_pretrained(tmp_path)
    question, text = (tokenizer.encode(string) for string in ("who flew?", article.read_text()))
    room, best = 40 - 3 - len(question), (-1e9, [0])
    for first in range(0, len(text), room):
        part = text[first : first + room]
        ids = [tokenizer.cls_id, *question, tokenizer.sep_id, *part, tokenizer.sep_id]
        types = [0] * (len(question) + 2) + [1] * (len(part) + 1)
        starts, ends = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0].T.tolist()
        place = len(question) + 2
        best = max(
            [
                best,
                *(
                    (starts[i] + ends[j], ids[i : j + 1])
                    for i in range(place, place + len(part))
                    for j in range(i, min(i + 30, place + len(part)))
                ),
            ]
        )
        if first + room >= len(text):
            break
    answer = output("answer", tmp_path, article, "who flew?")
    assert tokenizer.encode(answer) == best[1]


def test_spectrum_of_a_checkpoint(tmp_path: Path, output: Callable[..., str]):
    checkpoints.save(tmp_path, "bert-base", checkpoints.bert_files(tmp_path))
    words = "--length", "16", "--texts", "1", "--out", tmp_path / "a.csv"
    assert "encoder, 1 text of 16 tokens" in output("spectrum", tmp_path, *words)


def test_our_models_read_what_their_tasks_gave_them(train_tiny, tmp_path: Path, output: Callable[..., str]):
    for task, *words in (
        ("classify", "good film"),
        ("translate", "word 3"),
        ("tag", "Anna sleeps in New York"),
    ):
        run, copy = train_tiny(task), tmp_path / task
        polyformer.from_pretrained(run).save_pretrained(copy)
        load_tokenizer(run).save(copy)
        text = output(task, copy, *words, *(["--num-beams", "1"] if task == "translate" else []))
        own = output(task, run, *words, *(["--num-beams", "1"] if task == "translate" else []))
        labels = sorted({"classify": ("neg", "pos"), "tag": ("B-LOC", "B-PER", "I-LOC", "O")}.get(task, ()))
        for number, label in enumerate(labels):
            text = text.replace(f"LABEL_{number}", label)
        assert text == own
