"""The card of a saved model: what a run recorded, only as long as it holds, and never over somebody's own."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from local_hub import local_hub

import polyformer.models.transformers
from polyformer import InputError, create_model
from polyformer.cli.main import main
from polyformer.models.architectures.model_card import is_generated
from polyformer.training.recipes import Recipe, fit

TEXT = "".join(f"the line of number {index} says little\n" for index in range(30))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secret-place")
    (folder / "lines.txt").write_text(TEXT)
    recipe = {
        "task": {"kind": "lm", "row_length": 16, "batch_tokens": 64, "ngram_order": 2},
        "model": {"preset": "decoder-tiny", "hidden_size": 16, "num_hidden_layers": 1, "position": "rope"},
        "data": {"path": str(folder / "lines.txt"), "format": "lines", "validation_fraction": 0.25},
        "tokenizer": {"algorithm": "bytes"},
        "training": {"steps": 2, "engine": {"device": "cpu"}},
    }
    fit(Recipe.from_dict(recipe), folder / "run")
    return folder / "run"


@pytest.fixture
def wrapped(run: Path) -> Any:
    return polyformer.models.transformers.wrap(polyformer.from_pretrained(run))


def card(folder: Path) -> huggingface_hub.ModelCard:
    return huggingface_hub.ModelCard.load(folder / "README.md")


def figures(folder: Path) -> dict[str, float]:
    results = card(folder).data.eval_results or []
    return {result.metric_type: result.metric_value for result in results}


def test_the_card_says_what_the_run_recorded(run: Path, wrapped: Any, tmp_path: Path):
    wrapped.save_pretrained(tmp_path / "mine")
    data, text = card(tmp_path / "mine").data, (tmp_path / "mine" / "README.md").read_text()
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", None)
    assert {"polyformer", "softmax", "rope", "custom_code"} <= {*data.tags}
    assert data.datasets is None, "a file is no data set of the hub"
    assert figures(tmp_path / "mine") == json.loads((run / "run.json").read_text())["metrics"]["validation"]
    (result, *_) = data.eval_results
    assert (result.dataset_name, result.dataset_type, result.dataset_split) == (
        "lines.txt",
        "custom",
        "validation",
    )
    assert 'AutoModelForCausalLM.from_pretrained("mine", trust_remote_code=True)' in text
    assert "trained on rows of 16 tokens" in text
    assert "earlier ones alone (causal)" in text
    assert "license: none is stated" in text
    assert "secret-place" not in text + (tmp_path / "mine" / "config.json").read_text()


def test_figures_last_as_long_as_the_weights(wrapped: Any, tmp_path: Path):
    wrapped.save_pretrained(tmp_path / "first")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    assert figures(tmp_path / "second") == figures(tmp_path / "first") != {}
    with torch.no_grad():
        again.model.tokens.weight[0, 0] += 1
    again.save_pretrained(tmp_path / "third")
    assert figures(tmp_path / "third") == {}
    assert "weights have changed since" in (tmp_path / "third" / "README.md").read_text()
    tensors = {name: tensor + 1 for name, tensor in wrapped.state_dict().items()}
    wrapped.save_pretrained(tmp_path / "fourth", state_dict=tensors)
    assert figures(tmp_path / "fourth") == {}


def test_somebodys_own_card_stays(wrapped: Any, tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text("mine")
    wrapped.save_pretrained(tmp_path)
    assert readme.read_text() == "mine"
    readme.unlink()
    wrapped.config.license = "mit"
    wrapped.save_pretrained(tmp_path)
    assert is_generated(readme.read_text())
    assert card(tmp_path).data.license == "mit"
    wrapped.config.license = "apache-2.0"
    wrapped.save_pretrained(tmp_path)
    assert card(tmp_path).data.license == "apache-2.0", "one that nobody changed is made anew"
    changed = readme.read_text().replace("## Limits", "## What it cannot do")
    readme.write_text(changed)
    wrapped.save_pretrained(tmp_path)
    assert readme.read_text() == changed


@pytest.mark.parametrize(
    ("preset", "options", "pipeline", "limit"),
    [
        ("encoder-tiny", {"head": "masked"}, "fill-mask", "at most 64 tokens"),
        ("encoder-tiny", {"head": "classify(num_labels=3)"}, "text-classification", "on both sides of it"),
        ("transformer-tiny", {}, None, "texts of any length"),
    ],
)
def test_a_model_without_a_run(
    preset: str, options: dict[str, Any], pipeline: str | None, limit: str, tmp_path: Path
):
    model = create_model(preset, vocab_size=30, max_position_embeddings=64, **options)
    polyformer.models.transformers.wrap(model, license="mit").save_pretrained(tmp_path)
    data, text = card(tmp_path).data, (tmp_path / "README.md").read_text()
    assert (data.pipeline_tag, data.license, data.eval_results) == (pipeline, "mit", None)
    assert limit in text
    assert "No record of its training" in text


def test_a_damaged_record_is_refused(wrapped: Any, tmp_path: Path):
    wrapped.config.training_record = {"recipe": {}, "metrics": [], "weights": ""}
    with pytest.raises(InputError, match=r"training_record\.metrics: expected a dict, got \[\]"):
        wrapped.save_pretrained(tmp_path)


@pytest.mark.parametrize(("format", "library"), [("polyformer", "polyformer"), ("hub", "transformers")])
def test_a_converted_checkpoint_has_a_card(format: str, library: str, run: Path, tmp_path: Path):
    source = run
    if format == "hub":
        config = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
        source = tmp_path / "gpt2"
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**config)).save_pretrained(source)
    assert main(["convert", str(source), str(tmp_path / "out"), "--format", format]) == 0
    data, text = card(tmp_path / "out").data, (tmp_path / "out" / "README.md").read_text()
    assert data.library_name == library
    assert bool(data.eval_results) == (source == run)
    assert ("GPT2LMHeadModel.from_pretrained" if format == "hub" else "polyformer.from_pretrained") in text


def test_what_is_uploaded(wrapped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with local_hub() as server:
        constants = huggingface_hub.constants  # what HF_ENDPOINT sets when a process begins
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        address = wrapped.push_to_hub("me/mine", commit_message="Say more", token="t", tags=["tiny"])
        assert str(address).startswith(f"{server.url}/me/mine/")
        files = server.files["me/mine"]
        assert {"README.md", "config.json", "model.safetensors", "modeling_polyformer.py"} <= files.keys()
        text = files["README.md"].decode()
        data = huggingface_hub.ModelCard(text).data
        assert is_generated(text)
        assert "tiny" in data.tags
        assert 'from_pretrained("me/mine"' in text
        assert data.eval_results
        assert [line["value"]["summary"] for path, line in server.asked if "/commit/" in path] == ["Say more"]
        files["README.md"] = b"---\nlicense: mit\n---\nwritten by hand\n"
        wrapped.save_pretrained(tmp_path / "folder", push_to_hub=True, repo_id="me/mine", token="t")
        assert files["README.md"] == b"---\nlicense: mit\n---\nwritten by hand\n"
        assert is_generated((tmp_path / "folder" / "README.md").read_text())
