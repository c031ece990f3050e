"""Preference tuning: the loss of both replies in a row is that of the equation for single conversations."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from chat_models import chat_folder, chat_tokenizer
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.recipes import Recipe, Run
from polyformer.training.recipes.fit import fit
from polyformer.training.tasks import PreferenceTuning, PreferenceTuningConfig
from polyformer.training.tuning import LowRankConfig

SAID = [
    ("Is it 2?", "Yes.", "No, it is 3."),
    ("Why?", "It is so.", "Ask Tom."),
    ("A film?", "Fine, funny.", "?"),
]


def row(asked: str, chosen: str, rejected: str) -> dict[str, str]:
    def whole(reply: str) -> str:
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
        return json.dumps({"messages": messages})

    return {"chosen": whole(chosen), "rejected": whole(rejected)}


ROWS = [row(*said) for said in SAID]


def task_of(**options: Any) -> PreferenceTuning:
    config = PreferenceTuningConfig(**{"max_length": 64, "batch_tokens": 512, "beta": 0.5, **options})
    return config.build(chat_tokenizer())


def model_of(task: PreferenceTuning, preset: str) -> Transformer:
    torch.manual_seed(0)
    keys = {"num_key_value_heads": 1} if preset == "llama-7b" else {}
    sizes = {**keys, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    return Transformer(task.adapt(model_config(preset, {**sizes, "intermediate_size": 24}))).double().eval()


def log_p(model: Transformer, ids: Sequence[int], learned: Sequence[bool]) -> torch.Tensor:
    """The definition: the sum of log P of the reply's tokens, each after all tokens before it."""
    values = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return torch.stack([values[t - 1, ids[t]] for t in range(1, len(ids)) if learned[t]]).sum()


def defined(task: PreferenceTuning, policy: Transformer, reference: Transformer) -> list[torch.Tensor]:
    losses = []
    for number, pair in enumerate(ROWS):
        sides = [task.rows.marked(pair, role, number, last_only=True) for role in ("chosen", "rejected")]
        ratios = [log_p(policy, *side) - log_p(reference, *side) for side in sides]
        losses.append(-logsigmoid(task.config.beta * (ratios[0] - ratios[1])))
    return losses


def moved(model: Transformer) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)


@pytest.mark.parametrize("preset", ["llama-7b", "gpt2"])
def test_the_loss_and_its_gradients_are_those_of_the_equation(preset: str):
    task = task_of()
    model = model_of(task, preset)
    joint = task.objective.training_module(model)
    moved(model)
    batch = task.rows.collate(task.rows.prepare(ROWS))
    assert task.objective.weight(batch) == len(ROWS)
    loss = task.objective.loss(joint, batch)
    expected = torch.stack(defined(task, model, joint.reference)).mean()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    ours, theirs = (torch.autograd.grad(x, list(model.parameters())) for x in (loss, expected))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_the_reference_of_an_adapter_is_the_model_without_it():
    task = task_of()
    plain, model = model_of(task, "llama-7b"), model_of(task, "llama-7b")
    LowRankConfig(rank=3).prepare(model)
    model.double()
    joint = task.objective.training_module(model)
    assert joint.reference is None
    moved(model)
    batch = task.rows.collate(task.rows.prepare(ROWS))
    expected = torch.stack(defined(task, model, plain)).mean()
    joint.train()
    loss = task.objective.loss(joint, batch)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    loss.backward()
    assert all((p.grad is not None) == ("lora_" in name) for name, p in model.named_parameters())
    assert task.objective.auxiliary_models(joint) == {}


def test_before_training_the_loss_is_log_2_and_no_pair_is_right():
    task = task_of()
    model = model_of(task, "llama-7b")
    joint = task.objective.training_module(model)
    totals = task.metrics.totals(joint, task.rows.collate(task.rows.prepare(ROWS)))
    values = task.metrics.values(totals.tolist(), {})
    assert values["loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert (values["margin"], values["accuracy"]) == (0.0, 0.0)


def test_metrics_are_rewards_of_the_definition():
    task = task_of()
    model = model_of(task, "llama-7b")
    joint = task.objective.training_module(model)
    moved(model)
    totals = task.metrics.totals(joint, task.rows.collate(task.rows.prepare(ROWS)))
    values = task.metrics.values(totals.tolist(), {})
    margins = [-math.log(math.expm1(loss.item())) for loss in defined(task, model, joint.reference)]
    assert values["margin"] == pytest.approx(sum(margins) / 3, abs=1e-9)
    assert values["accuracy"] == sum(margin > 0 for margin in margins) / 3
    assert values["margin"] == pytest.approx(values["chosen"] - values["rejected"])


def test_the_reference_stays_frozen_and_without_dropout():
    task = task_of()
    joint = task.objective.training_module(model_of(task, "gpt2"))
    joint.train()
    assert joint.model.training
    assert not joint.reference.training
    assert not any(p.requires_grad for p in joint.reference.parameters())


def test_too_long_pairs_and_empty_replies_are_refused():
    with pytest.raises(
        InputError, match=r"rejected 1 has \d+ tokens, more than task.max_length 40; raise it"
    ):
        task_of(max_length=40).rows.prepare([row("Is it 2?", "Yes.", "No, " * 8)])
    with pytest.raises(InputError, match="batch_tokens: expected twice max_length, 128, or more, got 100"):
        PreferenceTuningConfig(max_length=64, batch_tokens=100)
    silent = row("a", "", "b")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InputError, match="chosen 1: the reply has no token"):
        task_of(template=template).rows.prepare([silent])


def recipe(folder: Path, steps: int, tuning: str | None) -> Recipe:
    model, data = folder / "model", folder / "pairs.jsonl"
    if not model.exists():
        chat_folder(model)
        rows = [dict(zip(("prompt", "chosen", "rejected"), said)) for said in SAID * 10]
        data.write_text("".join(json.dumps(pair) + "\n" for pair in rows))
    parts = {
        "task": {"kind": "dpo", "max_length": 64, "batch_tokens": 512},
        "model": {"pretrained": str(model)},
        "data": {"path": str(data)},
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "training": {
            "steps": steps,
            "engine": {"device": "cpu"},
            "saving": {"checkpoint_every": 4, "final": "last"},
        },
    }
    return Recipe.from_dict(parts | ({} if tuning is None else {"tuning": tuning}))


@pytest.mark.parametrize("tuning", [None, "lora(rank=4)"])
def test_a_run_prefers_the_chosen_replies_resumes_and_is_measured_again(tmp_path: Path, tuning: str | None):
    from polyformer.data import load

    fit(recipe(tmp_path, 8, tuning), tmp_path / "run")
    resumed = fit(recipe(tmp_path, 16, tuning), tmp_path / "run", resume=True)
    assert resumed.scores["validation"]["loss"] < math.log(2) - 0.1
    assert resumed.scores["validation"]["accuracy"] == 1
    assert (tmp_path / "run" / "reference").exists() == (tuning is None)
    run = Run.open(tmp_path / "run")
    splits = load(run.recipe.data, run.recipe.task.needs)
    assert splits.validation is not None
    again = run.task.measure_rows(run.measured("cpu"), splits.validation)
    assert again == pytest.approx(resumed.scores["validation"], abs=1e-4)
