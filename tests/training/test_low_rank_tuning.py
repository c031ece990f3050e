"""Low-rank adapters: only they are trained and saved, and merged they are the same function."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chat_models import chat_folder
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import from_pretrained
from polyformer.models.checkpoints.adapters import AdapterFiles, merge
from polyformer.models.presets import create_model
from polyformer.training.recipes import Recipe, Run
from polyformer.training.recipes.fit import fit
from polyformer.training.tuning import LowRankConfig, TuningConfig, adapted, without_adapter

peft = pytest.importorskip("peft")

TINY = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
IDS = torch.arange(3, 20).view(1, -1)


def tuned(preset: str = "llama-7b", **options: Any) -> Transformer:
    torch.manual_seed(0)
    keys = {"num_key_value_heads": 1} if preset.startswith("llama") else {}
    model: Any = create_model(preset, vocab_size=40, **keys, **TINY)
    model.eval()
    LowRankConfig(**{"rank": 3, **options}).prepare(model)
    model.double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def factors(model: Transformer) -> dict[str, Any]:
    state = model.state_dict()
    return {
        name: tuple(state[f"{name}.lora_{side}.default.weight"] for side in "AB") for name in adapted(model)
    }


@pytest.mark.parametrize(("preset", "layers"), [("llama-7b", 7), ("gpt2", 6), ("t5-small", 16)])
def test_projections_of_attention_and_feed_forward_are_tuned(preset: str, layers: int):
    model = tuned(preset)
    per_layer = len(adapted(model)) / 2
    assert per_layer == layers
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("preset", ["llama-7b", "gpt2"])
def test_merged_weights_are_the_same_function_as_the_adapter_and_as_pefts_merge(preset: str):
    model = tuned(preset)
    adapter = AdapterFiles("", 2.0, factors(model))
    torch.manual_seed(0)
    keys = {"num_key_value_heads": 1} if preset.startswith("llama") else {}
    plain: Any = create_model(preset, vocab_size=40, **keys, **TINY).double().eval()
    expected = model(IDS).logits
    with without_adapter(model):
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=0, atol=1e-12)
    assert not torch.allclose(expected, plain(IDS).logits, atol=1e-2)
    merge(plain, adapter)
    torch.testing.assert_close(plain(IDS).logits, expected, rtol=0, atol=1e-10)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()  # type: ignore[operator]
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=0, atol=1e-10)


def test_gradients_reach_the_adapter_alone():
    model = tuned()
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert all((p.grad is not None) == ("lora_" in name) for name, p in model.named_parameters())
    assert all(p.grad.abs().sum() > 0 for p in model.parameters() if p.grad is not None)


def test_the_reference_keeps_the_gradients_of_the_adapter():
    model = tuned()
    with torch.no_grad(), without_adapter(model):
        model(IDS)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)


def test_targets_alpha_and_dropout_are_options():
    model = tuned(targets=("query", "value"), alpha=6.0, dropout=0.25)
    assert len(adapted(model)) == 4
    config: Any = TuningConfig.from_dict("lora(rank=8, targets=['query'])")
    assert (config.rank, config.targets) == (8, ("query",))
    with pytest.raises(InputError, match=r"tuning.targets: expected names of linear layers .* got \['w'\]"):
        tuned(targets=("w",))


def test_an_adapter_that_does_not_fit_is_refused():
    model = tuned()
    wrong = {"decoder.layers.7.attention.query": next(iter(factors(model).values()))}
    with pytest.raises(InputError, match=r"adapter: decoder.layers.7.* the model a weight of None"):
        merge(create_model("gpt2", vocab_size=40, **TINY), AdapterFiles("", 1.0, wrong))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a chat model with an adapter, interrupted after step 4 of 8 and resumed."""
    folder = tmp_path_factory.mktemp("tuned")
    fit(recipe(folder, 4), folder / "run")
    fit(recipe(folder, 8), folder / "run", resume=True)
    fit(recipe(folder, 8, steps_of_checkpoint=4), folder / "whole")
    return folder / "run"


def recipe(folder: Path, steps: int, steps_of_checkpoint: int = 4) -> Recipe:
    model, data = folder / "model", folder / "chats.jsonl"
    if not model.exists():
        chat_folder(model)
        pairs = [("Is it 2?", "Yes."), ("Why?", "So."), ("A film?", "Fine, funny."), ("?", "No")] * 10
        data.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in pairs))
    return Recipe.from_dict(
        {
            "task": {"kind": "sft", "row_length": 128, "batch_tokens": 256},
            "model": {"pretrained": str(model)},
            "data": {"path": str(data)},
            "tuning": "lora(rank=4)",
            "optimizer": {"kind": "adamw", "lr": 1e-2},
            "schedule": {"kind": "constant"},
            "training": {
                "steps": steps,
                "engine": {"device": "cpu"},
                "saving": {"checkpoint_every": steps_of_checkpoint, "final": "last"},
            },
        }
    )


def test_a_run_is_saved_as_an_adapter_that_peft_reads(run: Path):
    assert not (run / "model.safetensors").exists()
    tensors = load_file(run / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.decoder.layers.") for name in tensors)
    base: Any = from_pretrained(run.parent / "model").double()
    ids = torch.arange(5, 25).view(1, -1)
    ours = Run.open(run).model("cpu").double()(ids).logits
    theirs = peft.PeftModel.from_pretrained(base, str(run)).double()(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert not torch.allclose(ours, from_pretrained(run.parent / "model").double()(ids).logits, atol=1e-3)


def test_a_resumed_run_ends_as_a_run_without_an_interruption(run: Path):
    files = [load_file(folder / "adapter_model.safetensors") for folder in (run, run.parent / "whole")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_an_adapter_can_start_from_another(run: Path, tmp_path: Path):
    data = recipe(run.parent, 4).to_dict()
    second = Recipe.from_dict({**data, "model": {"pretrained": str(run)}, "tokenizer": {"path": str(run)}})
    fitted = fit(second, tmp_path / "second")
    ids = torch.arange(5, 25).view(1, -1)
    with torch.no_grad():
        expected = fitted.model.eval()(ids).logits
        with without_adapter(fitted.model):
            before = fitted.model(ids).logits
        torch.testing.assert_close(Run.open(run).model("cpu")(ids).logits, before, rtol=0, atol=1e-5)
        actual = Run.open(tmp_path / "second").model("cpu")(ids).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_checkpoints_leave_out_the_frozen_weights(run: Path):
    (checkpoint,) = {path.parent for path in run.glob("checkpoints/*8/model.safetensors")}
    assert all("lora_" in name for name in load_file(checkpoint / "model.safetensors"))


def test_convert_merges_the_adapter(run: Path, tmp_path: Path):
    from polyformer.cli.main import main

    assert main(["convert", str(run), str(tmp_path / "merged")]) in (0, None)
    merged = from_pretrained(tmp_path / "merged").double()
    ids = torch.arange(5, 25).view(1, -1)
    expected = Run.open(run).model("cpu").double()(ids).logits
    torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=1e-12)
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()


def test_an_unfinished_run_is_read_with_its_adapter(run: Path, tmp_path: Path):
    import shutil

    copy = shutil.copytree(run, tmp_path / "copy")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (copy / name).unlink()
    ids = torch.arange(5, 25).view(1, -1)
    expected = Run.open(run).model("cpu")(ids).logits
    torch.testing.assert_close(Run.open(copy).model("cpu")(ids).logits, expected, rtol=0, atol=1e-5)


def test_a_missing_base_and_another_rank_are_refused(run: Path, tmp_path: Path):
    import shutil

    copy = shutil.copytree(run, tmp_path / "copy")
    settings = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "/gone"}))
    with pytest.raises(InputError, match=r"the model of its adapter, /gone, cannot be read"):
        Run.open(copy).model("cpu")
    (copy / "adapter_config.json").write_text(json.dumps({**settings, "use_dora": True}))
    with pytest.raises(InputError, match="expected plain LoRA, got 'LORA' use_dora"):
        Run.open(copy).model("cpu")
    data = recipe(run.parent, 12).to_dict()
    changed = Recipe.from_dict({**data, "tuning": "lora(rank=5)"})
    with pytest.raises(InputError, match=r"--resume .*: tuning.rank is 4 there, got 5"):
        fit(changed, run, resume=True)


def test_tuning_needs_a_checkpoint():
    with pytest.raises(InputError, match=r"tuning: it changes a trained model; name a checkpoint"):
        Recipe.from_dict({"tuning": "lora"})
