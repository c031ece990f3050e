"""K8 every parameter learns and nothing else changes; K9 training repeats, evaluation is deterministic."""

import copy
import dataclasses
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from members import Case, assert_same, gradients, score
from selection import cases, patterns, predicting
from shared_models import defined, shared
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Pattern
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.generation import GenerationConfig
from polyformer.nn.stack import StackConfig


def objective(model: Transformer, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """A loss that depends on all of the output: the loss or the logits, and every hidden state."""
    output = model(**batch, **options)
    hidden = output.last_hidden_state
    loss = weighted(output.logits) if output.loss is None else output.loss
    return loss + weighted(hidden)


def weighted(values: Tensor) -> Tensor:
    """A sum that no norm makes constant."""
    return (values * torch.linspace(-1, 2, values.shape[-1], dtype=values.dtype, device=values.device)).mean()


@pytest.mark.parametrize("case", cases("gradients"), ids=str)
def test_every_parameter_gets_a_gradient(case: Case):
    """Finite, and for matrices not all zero: a bias of the keys moves all scores of a query alike.

    Of the experts of a layer some may get no token.
    """
    model, batch = case.model(), case.labels(case.batch())
    copies = {name: tensor.clone() for name, tensor in batch.items()}
    objective(model.train(case.adaptive), batch).backward()
    learns = dict[str, bool]()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        if not case.learns(name):
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        part = re.sub(r"experts\.\d+", "experts", name)
        learns[part] = learns.get(part, False) or parameter.dim() < 2 or bool(parameter.grad.abs().max() > 0)
    assert all(learns.values()), learns
    for name, kept in copies.items():
        assert torch.equal(batch[name], kept), name


NO_SECOND_ORDER = r"create_graph=True: .* gives no second-order gradients; .*backend=\"definition\""


def second_order(model: Transformer, batch: dict[str, Tensor], way: str) -> dict[str, Tensor]:
    """The gradients of the squared gradients of the model's loss and outputs, by one of torch's two ways."""
    named = dict(model.named_parameters())
    # A reversible stack keeps the inputs of its layers only if hidden states are asked for.
    value = objective(model, batch, output_hidden_states=True)
    firsts = torch.autograd.grad(value, list(named.values()), create_graph=True, allow_unused=True)
    square = torch.stack([first.square().sum() for first in firsts if first is not None]).sum()
    if way == "grad":
        return gradients(model, square)
    square.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in named.items()
    }


@pytest.mark.parametrize("case", cases("second order"), ids=str)
def test_second_order_gradients_are_those_of_the_definition_or_refused(case: Case):
    """A backward pass written by hand must not leave its part out."""
    batch = case.labels(case.batch())
    mechanism = None if case.config.decoder is None else case.config.decoder.attention.mechanism
    softmax = mechanism is not None and isinstance(mechanism.cross(), SoftmaxConfig)
    if case.shape == "pair" and softmax and not hasattr(mechanism, "backend"):
        for way in ("grad", "backward"):  # no option asks for the definition of its cross-attention
            with pytest.raises(InputError, match=NO_SECOND_ORDER):
                second_order(case.model(), batch, way)
        return
    expected = second_order(shared(defined(case)), batch, "grad")
    assert all(tensor.isfinite().all() for tensor in expected.values())
    for way in ("grad", "backward"):
        refused = ""
        actual = expected
        try:
            actual = second_order(case.model(), batch, way)
        except InputError as error:
            refused = str(error)
        assert not refused or re.match(NO_SECOND_ORDER, refused)
        assert_same(actual, expected, 1e-8)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize(
    ("named", "backend"), [(part, ("sdpa", "tiled")[i % 2]) for i, part in enumerate(patterns())], ids=str
)
def test_second_order_gradients_through_a_backend_are_refused(named: tuple[str, Pattern], backend: str):
    """Also where the second one is asked for an input that the first one was not."""
    torch.manual_seed(3)
    _, pattern = named
    x, matrix = torch.randn(1, 2, 40, 8), torch.randn(8, 8, requires_grad=True)
    context = Context(40, 40, causal=pattern.causal())
    for leaf in (x.requires_grad_(), matrix):
        q = x @ matrix
        y = attend(q, q, q, pattern=pattern, context=context, backend=backend).square().sum()
        with pytest.raises(InputError, match=NO_SECOND_ORDER):
            torch.autograd.grad(y, leaf, create_graph=True)
        with pytest.raises(InputError, match=NO_SECOND_ORDER):
            y.backward(create_graph=True)


@pytest.mark.parametrize("case", cases("untouched"), ids=str)
def test_nothing_turns_gradients_off(case: Case):
    """Neither evaluation nor a state changes parameters or whether they learn."""
    model, batch = case.model(), case.batch()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        model(**batch)
        if case.shape != "encoder" and case.can("supports_kv_cache"):
            model(**batch, use_cache=True)
    model.train()
    model(**batch, output_hidden_states=True)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad, name
        assert torch.equal(parameter, before[name]), name
    assert all(slope.isfinite().all() for slope in gradients(model, score(model(**batch))).values())


def trained(case: Case) -> dict[str, Tensor]:
    """Parameters after two steps with dropout, from one seed."""
    batch = case.labels(case.batch())
    torch.manual_seed(11)
    model = Transformer(case.config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        objective(model, batch).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("case", cases("repeats"), ids=str)
def test_training_repeats_exactly(case: Case):
    first, second = trained(case), trained(case)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("case", cases("evaluation"), ids=str)
def test_evaluation_is_deterministic_and_reads_no_global_random_state(case: Case):
    model, batch = shared(case, torch.float32), case.labels(case.batch())
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


@pytest.mark.parametrize("case", predicting("generation"), ids=str)
def test_generation_reads_no_global_random_state(case: Case):
    model, batch = shared(case, torch.float32), case.batch()
    torch.manual_seed(13)
    state = torch.get_rng_state()
    first = model.generate(batch["input_ids"], config=GenerationConfig(max_new_tokens=3)).sequences
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(14)
    second = model.generate(batch["input_ids"], config=GenerationConfig(max_new_tokens=3)).sequences
    assert torch.equal(first, second)


@pytest.mark.parametrize("case", cases("dropout", shape=("decoder",)), ids=str)
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
