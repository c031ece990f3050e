"""The commands that use a run use a checkpoint too, as transformers would; and what they refuse."""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import checkpoints as made
import polyformer
from polyformer.cli import main
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.generation import GenerationConfig
from polyformer.heads import ClassifyConfig, MaskedConfig, SpanConfig, TagConfig

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
NAMES = {"id2label": {"0": "bad", "1": "good", "2": "fair"}}
SENTENCE = "Anna flew to Oslo , twice ."


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words), "--device", "cpu"]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    return run


def theirs(folder: Path, task: str):
    """transformers' pipeline of the same directory."""
    transformers = pytest.importorskip("transformers")
    return transformers.pipeline(task, model=str(folder), device="cpu")


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_classify_as_transformers_does(problem: str, tmp_path: Path, output: Callable[..., str]):
    head, hub = ClassifyConfig(num_labels=3), {**NAMES, "problem_type": problem}
    made.save(tmp_path, "bert-base", made.bert_files(tmp_path), head, hub=hub)
    text = "a fine, funny film"
    expected = theirs(tmp_path, "text-classification")(text)[0]
    label, share = output("classify", tmp_path, text).split()
    assert (label, float(share)) == (expected["label"], pytest.approx(expected["score"], abs=1e-4))


def test_lines_with_a_tab_are_two_texts(tmp_path: Path, output: Callable[..., str], monkeypatch, capsys):
    made.save(tmp_path, "bert-base", made.bert_files(tmp_path), ClassifyConfig(num_labels=3), hub=NAMES)
    texts, pairs = ["Who wrote it?", "a film"], ["Anna and Tom", "fine"]
    one_by_one = [output("classify", tmp_path, text, "--pair", pair) for text, pair in zip(texts, pairs)]
    lines = [f"{text}\t{pair}\n" for text, pair in zip(texts, pairs)]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(lines)))
    assert main(["classify", str(tmp_path), "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [line.strip() for line in one_by_one]
    assert shown.err == "polyformer: each line has one tab, and is read as two texts\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{lines[0]}no tab\n"))
    assert len(output("classify", tmp_path).splitlines()) == 2


@pytest.mark.parametrize("preset", ["roberta-base", "bart-base", "gpt2"])
def test_classify_lines_of_other_families(
    preset: str, tmp_path: Path, output: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    tokenizer = made.byte_files(tmp_path, preset.split("-")[0])
    head = {
        "gpt2": ClassifyConfig(num_labels=3, pooling="last", hidden=False, bias=False, dropout=0.0),
        "bart-base": ClassifyConfig(num_labels=3, drops_twice=True, end_token=tokenizer.eos_id, dropout=0.0),
        "roberta-base": ClassifyConfig(num_labels=3, drops_twice=True),
    }[preset]
    made.save(tmp_path, preset, tokenizer, head, hub=NAMES)
    texts = ["a film", "Anna and Tom flew from Paris to Oslo", "", "fine"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    found = [line.split("\t") for line in output("classify", tmp_path).splitlines()]
    model = polyformer.from_pretrained(tmp_path)
    for text, (label, share) in zip(texts, found, strict=True):
        ids = tokenizer.encode_for_model(text)[0] or [tokenizer.bos_id]
        with torch.no_grad():
            shares = model(torch.tensor([ids])).logits.softmax(-1)[0]
        assert label == NAMES["id2label"][str(int(shares.argmax()))]
        assert float(share) == pytest.approx(float(shares.max()), abs=1e-4)


def test_a_model_of_numbers(tmp_path: Path, output: Callable[..., str]):
    tokenizer = made.bert_files(tmp_path)
    made.save(tmp_path, "bert-base", tokenizer, ClassifyConfig(num_labels=1))
    ids = torch.tensor([tokenizer.encode_for_model("a film")[0]])
    number = polyformer.from_pretrained(tmp_path)(ids).logits.item()
    assert output("classify", tmp_path, "a film") == f"LABEL_0\t{number:.4f}\n"


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_tag_as_transformers_does(family: str, tmp_path: Path, output: Callable[..., str]):
    tokenizer = made.bert_files(tmp_path) if family == "bert" else made.byte_files(tmp_path, family)
    names = {"0": "O", "1": "B-PER", "2": "B-LOC", "3": "B-X", "4": "B-Y"}
    made.save(tmp_path, f"{family}-base", tokenizer, TagConfig(num_labels=5), hub={"id2label": names})
    tokenizer.save(tmp_path)
    found = [line.split("\t") for line in output("tag", tmp_path, SENTENCE).splitlines() if line]
    expected = {one["start"]: one["entity"] for one in theirs(tmp_path, "ner")(SENTENCE, ignore_labels=[])}
    assert [word for word, _ in found] == SENTENCE.split()
    start = 0
    for word, tag in found:
        assert tag == expected.get(start - 1, expected.get(start)), word
        start += len(word) + 1
    assert len({tag for _, tag in found}) > 1


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_answer_as_transformers_does(family: str, tmp_path: Path, output: Callable[..., str]):
    transformers = pytest.importorskip("transformers")
    tokenizer = made.bert_files(tmp_path) if family == "bert" else made.byte_files(tmp_path, family)
    made.save(tmp_path, f"{family}-base", tokenizer, SpanConfig(), max_position_embeddings=600)
    tokenizer.save(tmp_path)
    article = tmp_path / "article.txt"
    article.write_text("Tom flew from Paris to Oslo. Anna and Tom saw a funny film, twice.")
    encode = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path)
    for question in ("Who flew?", "What did Anna see?"):
        given = encode(question, article.read_text(), return_tensors="pt", return_offsets_mapping=True)
        offsets, sides = given.pop("offset_mapping")[0], given.sequence_ids()
        with torch.no_grad():
            found = model(**given)
        places = [i for i, side in enumerate(sides) if side == 1]
        spans = [(i, j) for i in places for j in places if i <= j < i + 30]
        first, last = max(
            spans, key=lambda ends: float(found.start_logits[0, ends[0]] + found.end_logits[0, ends[1]])
        )
        expected = article.read_text()[offsets[first][0] : offsets[last][1]]
        assert output("answer", tmp_path, article, question).strip() == expected.strip()


def test_a_long_article_is_read_in_windows_that_the_model_takes(tmp_path: Path, output: Callable[..., str]):
    tokenizer = made.bert_files(tmp_path)
    made.save(tmp_path, "bert-base", tokenizer, SpanConfig(), max_position_embeddings=40)
    article = tmp_path / "article.txt"
    article.write_text(" ".join(made.TEXT[:4]))
    model = polyformer.from_pretrained(tmp_path)
    question, text = (tokenizer.encode(one) for one in ("who flew?", article.read_text()))
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
    found = output("answer", tmp_path, article, "who flew?")
    assert tokenizer.encode(found) == best[1]


def gpt2(folder: Path, **settings: object) -> Path:
    made.save(folder, "gpt2", made.byte_files(folder, "gpt2"), max_position_embeddings=100)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("settings", [{"max_new_tokens": 7}, {"max_length": 15, "num_beams": 3}])
def test_generate_as_transformers_does(settings: dict, tmp_path: Path, output: Callable[..., str]):
    transformers = pytest.importorskip("transformers")
    gpt2(tmp_path, **settings)
    load_tokenizer(tmp_path).save(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).generate(
        **tokenizer("Anna", return_tensors="pt")
    )
    expected = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert output("generate", tmp_path, "--prompt", "Anna") == expected + "\n"


def test_what_the_command_line_says_wins(tmp_path: Path, output: Callable[..., str]):
    folder = gpt2(tmp_path, max_length=15, num_beams=3, do_sample=False, repetition_penalty=1.5)
    model, tokenizer = polyformer.from_pretrained(folder), load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode("Anna")])

    def written(**options: object) -> str:
        config = GenerationConfig.from_dict({"repetition_penalty": 1.5, **options})
        return "Anna" + model.generate(ids, config=config).texts(tokenizer.decode)[0] + "\n"

    greedy = output("generate", folder, "--prompt", "Anna", "--max-new-tokens", 4, "--num-beams", 1)
    assert greedy == written(max_new_tokens=4)
    sampled = output("generate", folder, "--prompt", "Anna", "--max-new-tokens", 9, "--seed", 3)
    assert sampled == written(max_new_tokens=9, sampling={"do_sample": True, "seed": 3})
    plain = output(
        "generate",
        folder,
        "--prompt",
        "Anna",
        "--max-new-tokens",
        9,
        "--num-beams",
        1,
        "--repetition-penalty",
        1,
    )
    assert plain == written(max_new_tokens=9, repetition_penalty=1.0)


def test_generate_without_settings_or_prompt(tmp_path: Path, output: Callable[..., str]):
    folder = made.save(tmp_path, "gpt2", made.byte_files(tmp_path, "gpt2"), max_position_embeddings=100)
    model, tokenizer = polyformer.from_pretrained(folder), load_tokenizer(folder)
    expected = model.generate(torch.tensor([[tokenizer.bos_id]])).texts(tokenizer.decode)[0]
    assert output("generate", folder) == expected + "\n"


@pytest.mark.parametrize("form", ["hub", "polyformer"])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_translate_as_the_model_does(family: str, form: str, tmp_path: Path, output: Callable[..., str]):
    tokenizer = made.piece_files(tmp_path) if family == "t5" else made.byte_files(tmp_path, "bart")
    made.save(tmp_path, {"t5": "t5-small", "bart": "bart-base"}[family], tokenizer)
    polyformer.from_pretrained(tmp_path).save_pretrained(tmp_path / "copy", format=form)
    tokenizer.save(tmp_path / "copy")
    (tmp_path / "copy/generation_config.json").write_text('{"num_beams": 2, "max_new_tokens": 9}')
    model, ids = polyformer.from_pretrained(tmp_path), tokenizer.encode_for_model("a funny film")[0]
    for words, beam in (
        ((), {"num_beams": 2, "normalization": "length", "length_penalty": 1.0, "early_stopping": False}),
        (("--num-beams", 1), {}),
    ):
        config = GenerationConfig.from_dict({"max_new_tokens": 9, "beam": beam})
        expected = model.generate(torch.tensor([ids]), config=config).texts(tokenizer.decode)[0]
        assert output("translate", tmp_path / "copy", "a funny film", *words) == expected.strip() + "\n"


def test_translate_draws_anew_every_time(tmp_path: Path, output: Callable[..., str]):
    """Where a checkpoint's settings sample, whatever torch's own generator says."""
    made.save(tmp_path, "t5-small", made.piece_files(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "max_new_tokens": 20, "top_k": 0}')
    before, texts = torch.get_rng_state(), set[str]()
    for _ in range(3):
        torch.manual_seed(0)
        texts.add(output("translate", tmp_path, "a funny film"))
    torch.set_rng_state(before)
    assert len(texts) > 1


def test_translate_between_languages(
    tmp_path: Path, output: Callable[..., str], complaint: Callable[..., str]
):
    tokenizer = made.piece_files(tmp_path, "__en__ $A </s>", made.LANGUAGES)
    made.save(tmp_path, "m2m100-418m", tokenizer)
    model = polyformer.from_pretrained(tmp_path)
    ids = tokenizer.encode_for_model("a film", language="fr")[0]
    config = GenerationConfig.from_dict(
        {"max_new_tokens": len(ids) + 50, "constraints": {"forced_bos_token_id": tokenizer.languages["de"]}}
    )
    expected = model.generate(torch.tensor([ids]), config=config).texts(tokenizer.decode)[0].strip()
    words = "translate", tmp_path, "a film", "--source-language", "fr"
    assert output(*words, "--target-language", "de") == expected + "\n"
    assert output(*words, "--target-language", "en") != expected + "\n"
    known = "this model writes many languages; expected one of them, such as en, de, fr"
    assert f"--target-language: {known}" in complaint(*words)
    assert "unknown --target-language 'dee': did you mean 'de'" in complaint(
        *words, "--target-language", "dee"
    )


def test_translate_by_the_task_in_the_configuration(tmp_path: Path, output: Callable[..., str]):
    tokenizer = made.piece_files(tmp_path)
    task = {"prefix": "from Oslo to Paris: ", "max_length": 8, "num_beams": 1}
    hub = {"task_specific_params": {"translation_en_to_de": task}}
    made.save(tmp_path, "t5-small", tokenizer, hub=hub)
    ids = tokenizer.encode_for_model("from Oslo to Paris: a film")[0]
    config = GenerationConfig(max_new_tokens=7)
    made_here = polyformer.from_pretrained(tmp_path).generate(torch.tensor([ids]), config=config)
    words = "--source-language", "en", "--target-language", "de"
    assert (
        output("translate", tmp_path, "a film", *words) == made_here.texts(tokenizer.decode)[0].strip() + "\n"
    )


def test_spectrum_of_a_checkpoint(tmp_path: Path, output: Callable[..., str]):
    made.save(tmp_path, "bert-base", made.bert_files(tmp_path))
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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "classify",
            "its head is 'masked', with which it cannot classify; train one from it by polyformer "
            "train --pretrained .* --task.kind classify",
        ),
        ("tag", "--task.kind tag"),
        ("answer", "--task.kind qa"),
        ("generate", "--task.kind lm"),
        ("translate", "--task.kind translate"),
        ("evaluate", "not a run .it has no recipe.yaml."),
    ],
)
def test_a_head_for_something_else(command: str, message: str, tmp_path: Path, complaint: Callable[..., str]):
    made.save(tmp_path, "bert-base", made.bert_files(tmp_path), MaskedConfig())
    words = {"answer": [__file__, "What?"], "generate": [], "evaluate": []}.get(command, ["text"])
    assert re.search(message, complaint(command, tmp_path, *words))


def test_a_head_for_another_command(tmp_path: Path, complaint: Callable[..., str]):
    made.save(tmp_path, "bart-base", made.byte_files(tmp_path, "bart"))
    assert "with which it cannot generate; use polyformer translate" in complaint("generate", tmp_path)
    assert "it cannot tag; use polyformer translate" in complaint("tag", tmp_path, "text")
    words = "--source-language", "en", "--target-language", "de"
    assert "knows none such; leave them out" in complaint("translate", tmp_path, "text", *words)


def test_a_text_that_is_too_long(tmp_path: Path, complaint: Callable[..., str]):
    made.save(tmp_path, "bert-base", made.bert_files(tmp_path), ClassifyConfig(), max_position_embeddings=20)
    error = complaint("classify", tmp_path, "a film " * 30)
    assert error.startswith("polyformer: error: text ('a film a film ")
    assert " a film a film ') has 62 tokens" in error
    assert f"takes 20; shorten it, or make a model for more by polyformer convert {tmp_path} OUT" in error
    article = tmp_path / "article.txt"
    article.write_text("A film.")
    folder = made.save(
        tmp_path, "bert-base", made.bert_files(tmp_path), SpanConfig(), max_position_embeddings=20
    )
    assert "question: expected at most 20 tokens with its marks, got 6" in complaint(
        "answer", folder, article, "film " * 60
    )


def test_no_tokenizer(tmp_path: Path, complaint: Callable[..., str]):
    made.save(tmp_path, "bert-base", made.bert_files(tmp_path), ClassifyConfig())
    (tmp_path / "vocab.txt").unlink()
    assert "no vocab.txt in it, which a WordPiece tokenizer needs" in complaint("classify", tmp_path, "text")


def test_no_checkpoint(tmp_path: Path, complaint: Callable[..., str]):
    assert "nowhere: no such directory" in complaint("classify", "nowhere", "text")
    assert "not a model directory (it has no config.json)" in complaint("tag", tmp_path, "text")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type 'llama' is not supported" in complaint("translate", tmp_path, "text")
