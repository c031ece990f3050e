"""Exports carry the names of labels, the longest text and the calibrated probabilities, in every form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from polyformer.cli.main import main
from polyformer.models.export import export_model
from polyformer.nn.heads import ClassifyConfig
from polyformer.training.recipes.run import Run

TINY = ("--device", "cpu", "--model.num_hidden_layers", "1", "--model.num_attention_heads", "2")
TINY += ("--model.hidden_size", "16", "--model.intermediate_size", "24", "--task.max_length", "32")
TINY += ("--tokenizer.algorithm", "wordpiece", "--tokenizer.vocab_size", "60", "--model", "bert-base")
LABELS = ("bad one", "good one")
LONG = "good film " * 100


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reviews")
    (root / "rows.csv").write_text("text,label\n" + "good film,good one\nbad film,bad one\n" * 20)
    words = ("train", "--task.kind", "classify", "--data", root / "rows.csv", "--out", root / "run")
    assert main([*map(str, words), "--steps", "5", "--task.too_long", "cut", *TINY]) == 0
    return root / "run"


def converted(run: Path, out: Path, *words: str) -> Path:
    assert main(["convert", str(run), str(out), *words]) == 0
    return out


@pytest.mark.parametrize("form", ["hub", "wrapped"])
def test_a_pipeline_has_our_labels_and_truncates(form: str, run: Path, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    import polyformer.models.transformers

    folder = converted(run, tmp_path / "out", "--format", form)
    ours = polyformer.load(run, "cpu").classify("a good film")
    pipeline = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    theirs = {row["label"]: row["score"] for row in pipeline("a good film", top_k=None)}
    assert theirs == pytest.approx(ours.probabilities, abs=1e-5)
    assert pipeline(LONG, truncation=True)[0]["label"] in LABELS
    assert pipeline.tokenizer.model_max_length == 32


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("polyformer", ("--attention", "Window(4) | Global(1)")),
        ("polyformer", ("--weights", "int8")),
        ("hub", ()),
        ("wrapped", ()),
    ],
)
def test_a_converted_checkpoint_has_our_labels(form: str, words: tuple[str, ...], run: Path, tmp_path: Path):
    folder = converted(run, tmp_path / "out", "--format", form, *words)
    loaded = polyformer.load(folder, "cpu")
    assert loaded.labels == LABELS
    assert loaded.classify("a good film").label in LABELS
    loaded.model.save_pretrained(tmp_path / "again")
    loaded.task.tokenizer.save(tmp_path / "again")
    assert polyformer.load(tmp_path / "again", "cpu").labels == LABELS


def test_fine_tuning_replaces_the_labels(run: Path, tmp_path: Path):
    folder = converted(run, tmp_path / "hub", "--format", "hub")
    (tmp_path / "rows.csv").write_text("text,label\n" + "good film,yes\nbad film,no\n" * 10)
    words = ("train", "--data", tmp_path / "rows.csv", "--pretrained", folder, "--out", tmp_path / "new")
    assert main([*map(str, words), "--steps", "1", "--device", "cpu"]) == 0
    assert polyformer.load(tmp_path / "new", "cpu").labels == ("no", "yes")
    again = converted(tmp_path / "new", tmp_path / "out", "--format", "hub")
    described = json.loads((again / "config.json").read_text())
    assert described["id2label"] == {"0": "no", "1": "yes"}
    assert described["label2id"] == {"no": 0, "yes": 1}
    assert polyformer.load(again, "cpu").labels == ("no", "yes")


def test_a_graph_has_a_description_with_the_labels(run: Path, tmp_path: Path):
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "torch"]) == 0
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["id2label"] == dict(zip("01", LABELS))
    assert described["model_type"] == "bert"
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 32


def test_a_classifier_is_exported_for_any_number_of_texts(tmp_path: Path):
    head: Any = ClassifyConfig(num_labels=3, pooling="first")
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    model = polyformer.create_model("encoder-tiny", head=head, vocab_size=20, **sizes).eval()
    graph: Any = export_model(model, tmp_path, "torch").program.module()
    for rows in (1, 2, 5):
        ids, mask = torch.randint(1, 20, (rows, 6)), torch.ones(rows, 6, dtype=torch.long)
        mask[0, 4:] = 0
        with torch.no_grad():
            torch.testing.assert_close(graph(ids, mask)[0], model(ids, mask).logits)


def test_a_converted_attention_keeps_the_generation_settings(tmp_path: Path):
    model = polyformer.create_model("decoder-tiny", vocab_size=20, hidden_size=16, num_attention_heads=2)
    model.generation = {"max_new_tokens": 7}
    model.save_pretrained(tmp_path / "in")
    converted(tmp_path / "in", tmp_path / "out", "--attention", "Window(4, 0)")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"max_new_tokens": 7}


def test_a_translator_has_the_settings_of_its_run(train_tiny: Callable[[str], Path], tmp_path: Path):
    run = train_tiny("translate")
    transformers = pytest.importorskip("transformers")
    import polyformer.models.transformers

    folder = converted(run, tmp_path / "out", "--format", "wrapped")
    settings = json.loads((folder / "generation_config.json").read_text())
    task: Any = Run.open(run).task
    assert settings["num_beams"] == task.config.beam.num_beams == 4
    assert settings["max_new_tokens"] == task.rows.max_generated(task.config.max_length)
    # Beams are divided by another power of the length, but greedy decoding is the same.
    texts = [polyformer.load(place, "cpu").translate("word 3", num_beams=1) for place in (run, folder)]
    assert texts[1].startswith(texts[0])
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    ids = torch.tensor(task.rows.encode(["word 3"]))
    greedy = polyformer.from_pretrained(folder).generate(ids, num_beams=1, max_new_tokens=8)
    expected = greedy.new_tokens()[0]
    assert theirs.generate(ids, num_beams=1, max_new_tokens=8)[0, 1:].tolist() == expected
    assert theirs.generation_config.num_beams == 4
