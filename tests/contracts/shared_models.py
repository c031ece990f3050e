"""The model of a case, built once and reused by every test of it."""

import copy
import functools
from typing import Any

import torch
from members import Case, gradients, score
from torch import Tensor

from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelOutput


def versions(model: Transformer) -> tuple[bool, list[int], bool]:
    """What differs once anything has been written into a model."""
    tensors = [*model.parameters(), *model.buffers()]
    learnt = any(tensor.grad is not None for tensor in tensors)
    return model.training, [tensor._version for tensor in tensors], learnt


@functools.cache
def built(case: Case, dtype: torch.dtype) -> tuple[Transformer, Any]:
    model = case.model(dtype)
    return model, versions(model)


def shared(case: Case, dtype: torch.dtype = torch.float64) -> Transformer:
    """The model of the case, built once for all tests: none of them may change it."""
    model, before = built(case, dtype)
    assert versions(model) == before, f"a test has changed the shared model of {case}"
    return model


@functools.cache
def defined(case: Case) -> Case:
    """The one case of its plain equations, so that its model is built once too."""
    return case.definition()


@functools.cache
@torch.enable_grad()
def plain(case: Case) -> tuple[ModelOutput, dict[str, Tensor]]:
    """What the shared model makes of the case's batch, and the gradients of its score."""
    output = shared(case)(**case.batch())
    return copy.deepcopy(output), gradients(shared(case), score(output))
