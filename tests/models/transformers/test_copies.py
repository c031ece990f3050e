"""Wrapped models are copied and pickled as any module of torch is."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import CASES, rows, trained
from torch import nn
from twins import FIRST_OF_EACH, T, texts, transformers, twins

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}
STEPS = {
    "states": torch.ones(3, T, 3),
    "actions": torch.ones(3, T, 2),
    "returns_to_go": torch.ones(3, T, 1),
    "timesteps": torch.arange(20).repeat(2)[:T].expand(3, T),
}


def inputs(model: Any, task: str) -> dict[str, Any]:
    if model.main_input_name == "states":
        return STEPS
    ids = texts()
    ids[:, -1] = 1 if model.model.config.origin.model_type in ("t5", "xlm") else 2
    ids[:, [2, 3]] = 2  # with the last one they mark a question's end
    ids = ids[None] if task in ("ForMultipleChoice", "DoubleHeadsModel") else ids
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}


def called(module: nn.Module, args: Any, output: Any) -> None:
    module.calls = getattr(module, "calls", 0) + 1


@pytest.mark.parametrize(("family", "task"), FIRST_OF_EACH)
def test_a_copy_computes_the_same(family: str, task: str):
    model, _ = twins(family, task, torch.float32)
    model.register_forward_hook(called)
    next(model.parameters()).requires_grad_(False)
    expected = model(**inputs(model, task)).to_tuple()[0]
    for way, copied in WAYS.items():
        other = copied(model)
        assert type(other) is type(model)
        assert other.config.to_dict() == model.config.to_dict()
        assert other.model.config == model.model.config
        assert other.state_dict().keys() == model.state_dict().keys()
        for own, weight in zip(model.parameters(), other.parameters(), strict=True):
            assert (weight is own) == (way == "copy")
            assert weight.requires_grad == own.requires_grad
        assert not other.training
        assert torch.equal(other(**inputs(model, task)).to_tuple()[0], expected)
        assert other.calls == 2
        assert copied(model.train()).training
        model.eval()


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_tied_head_stays_tied(way: str):
    model, _ = twins("gpt2", "LMHeadModel", torch.float32)
    other, ids = WAYS[way](model), texts()
    before = model(ids).logits
    assert len(list(other.parameters())) == len(list(model.parameters()))
    other(ids, labels=ids).loss.backward()
    assert other.get_input_embeddings().weight.grad.any()
    assert model.get_input_embeddings().weight.grad is None
    with torch.no_grad():
        other.get_input_embeddings().weight.zero_()
    assert not other(ids).logits.any()
    assert torch.equal(model(ids).logits, before)


class Average(transformers.TrainerCallback):
    """Keeps a moving average of the weights in a copy of the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.average.update_parameters(model)


@pytest.mark.parametrize("kind", CASES)
def test_an_average_of_weights_is_kept_in_training(kind: str, tmp_path: Path):
    averages = []
    for model in twins(*CASES[kind], torch.float32):
        callback = Average()
        trained(model, tmp_path, rows(kind), callbacks=[callback])
        averages.append(callback.average.module.get_input_embeddings().weight)
        assert not torch.equal(averages[-1], model.get_input_embeddings().weight)
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-5)
