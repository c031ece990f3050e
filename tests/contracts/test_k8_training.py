"""K8 every parameter learns and nothing else changes; K9 training repeats, evaluation is deterministic."""

import copy
import dataclasses
import random
import re

import numpy as np
import pytest
import torch
from members import Case, cases, gradients, score, selected
from torch import Tensor

from polyformer.generation import GenerationConfig
from polyformer.model import Transformer
from polyformer.stack import StackConfig


def objective(model: Transformer, batch: dict[str, Tensor]) -> Tensor:
    """A loss that depends on all of the output: the loss or the logits, and every hidden state."""
    output = model(**batch)
    hidden = output.last_hidden_state
    loss = weighted(output.logits) if output.loss is None else output.loss
    return loss + weighted(hidden)


def weighted(values: Tensor) -> Tensor:
    """A sum that no norm makes constant."""
    return (values * torch.linspace(-1, 2, values.shape[-1], dtype=values.dtype)).mean()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_parameter_gets_a_gradient(case: Case):
    """Finite, and for matrices not all zero: a bias of the keys moves all scores of a query alike.

    Of the experts of a layer some may get no token; a memory's own weights learn from later segments.
    """
    model, batch = case.model(), case.labels(case.batch())
    copies = {name: tensor.clone() for name, tensor in batch.items()}
    objective(model.train(case.adaptive), batch).backward()
    learns = dict[str, bool]()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        if ".memory." in name:
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        part = re.sub(r"experts\.\d+", "experts", name)
        learns[part] = learns.get(part, False) or parameter.dim() < 2 or bool(parameter.grad.abs().max() > 0)
    assert all(learns.values()), learns
    for name, kept in copies.items():
        assert torch.equal(batch[name], kept), name


@pytest.mark.parametrize("case", cases(), ids=str)
def test_nothing_turns_gradients_off(case: Case):
    """Neither evaluation nor a state changes parameters or whether they learn."""
    model, batch = case.model(), case.batch()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model(**batch)
        if case.shape != "encoder" and case.can("caches"):
            model(**batch, use_cache=True)
    model.train()
    model(**batch, output_hidden_states=True)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        assert torch.equal(parameter, before[name]), name
    assert all(slope.isfinite().all() for slope in gradients(model, score(model(**batch))).values())


def trained(case: Case) -> dict[str, Tensor]:
    """Parameters after three steps with dropout, from one seed."""
    batch = case.labels(case.batch())
    torch.manual_seed(11)
    model = Transformer(case.config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        objective(model, batch).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_training_repeats_exactly(case: Case):
    first, second = trained(case), trained(case)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("case", cases(), ids=str)
def test_evaluation_is_deterministic_and_reads_no_global_random_state(case: Case):
    model, batch = case.model(torch.float32), case.labels(case.batch())
    states = torch.get_rng_state(), random.getstate(), numpy_state()
    first = model(**batch)
    case.config.from_dict(case.config.to_dict())
    torch.manual_seed(12)
    second = model(**batch)
    assert torch.equal(first.last_hidden_state, second.last_hidden_state)
    assert torch.equal(first.logits, second.logits)
    assert first.loss is None or torch.equal(first.loss, second.loss)
    torch.set_rng_state(states[0])
    model(**batch)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(numpy_state(), states[2])


def numpy_state() -> np.ndarray:
    return np.random.get_state(legacy=False)["state"]["key"].copy()


GENERATES = [
    case
    for case in selected("causal", "caches", shape=("decoder", "pair"))
    if case.model().head.predicts_next
]


@pytest.mark.parametrize("case", GENERATES, ids=str)
def test_generation_reads_no_global_random_state(case: Case):
    model, batch = case.model(torch.float32), case.batch()
    torch.manual_seed(13)
    state = torch.get_rng_state()
    first = model.generate(batch["input_ids"], config=GenerationConfig(max_new_tokens=3)).sequences
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(14)
    second = model.generate(batch["input_ids"], config=GenerationConfig(max_new_tokens=3)).sequences
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", selected(shape=("decoder",)), ids=str)
def test_dropout_is_active_in_training_alone(case: Case):
    case = case.changed(
        StackConfig, lambda stack: dataclasses.replace(stack, dropout=0.1)
    )  # not all have some
    model, batch = case.model(), case.batch()
    still = model(**batch).last_hidden_state
    before = copy.deepcopy(model.state_dict())
    model.train()
    assert not torch.equal(model(**batch).last_hidden_state, model(**batch).last_hidden_state)
    model.eval().load_state_dict(before)  # a pass in training may go on with running statistics
    assert torch.equal(model(**batch).last_hidden_state, still)
