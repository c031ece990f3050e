"""Backward passes written by hand: none leaves its part of a second-order gradient out."""

import ast
from pathlib import Path

import pytest
import torch

import polyformer
from polyformer.attention.functional.key_exchange import _ToPeers
from polyformer.core.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")

PACKAGE = Path(polyformer.__file__).parent

DIFFERENTIABLE = {"_Linear", "_Dropped", "_LinearCrossEntropy", "_Anchored", "_WithLoss"}
"""Functions that compute their gradients by operations of torch, or without any that depends on an input."""

NOT_RUN = {"_Masked", "_Fused"}
"""Functions of `polyformer show`, which computes no gradients."""


def test_every_autograd_function_says_what_it_does():
    kinds = {}
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "once_differentiable" not in text or file.name == "autograd.py", file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                (backward,) = (part for part in node.body if getattr(part, "name", "") == "backward")
                assert isinstance(backward, ast.FunctionDef)
                decorators = [ast.unparse(decorator) for decorator in backward.decorator_list]
                kinds[node.name] = any(decorator.startswith("first_order") for decorator in decorators)
    undecorated = {name for name, decorated in kinds.items() if not decorated}
    assert undecorated == DIFFERENTIABLE | NOT_RUN


def test_a_reversible_stack_says_how_its_activations_are_kept():
    model = polyformer.create_model("decoder-tiny", block="reversible", backend="definition").train()
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(InputError, match=r"a reversible stack in training .* output_hidden_states=True"):
        model(ids, labels=ids).loss.backward(create_graph=True)
    model(ids, labels=ids, output_hidden_states=True).loss.backward(create_graph=True)


def test_an_exchange_between_processes_is_refused():
    rows = torch.ones(2, 3, requires_grad=True)
    sent = _ToPeers.apply(rows, None, "rows", [2], [2])
    with pytest.raises(InputError, match=r"spread over processes .* whole sequences in one process"):
        sent.sum().backward(create_graph=True)
