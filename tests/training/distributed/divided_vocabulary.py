"""Models that are divided by hand, without a training: logits, a shared table, what stays whole."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from divided_cases import DECODER, SMALL, WORDS, build
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyformer.core.errors import InputError
from polyformer.core.ops import cross_entropy
from polyformer.models.architectures import build_model
from polyformer.models.presets import create_model
from polyformer.training.distributed.tensor_parallel import apply_tensor_parallel
from polyformer.training.tasks.masked import GeneratorAndModel, generator_config

WHOLE: dict[str, dict[str, Any]] = {
    "the head 'semiparametric' reads all of it": {**DECODER, "head": "semiparametric"},
    "the head 'adaptive_softmax' reads all of it": {**DECODER, "head": "adaptive_softmax"},
    "one of clusters": {**DECODER, "head": "adaptive_softmax", "embedding.adaptive": {"cutoffs": (5,)}},
    "its 1 rows leave one": {**DECODER, "vocab_size": 1},
}
"""Models whose token table stays whole, by what is said."""


def check_vocabulary() -> None:
    """Every process calls it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    for kind in ("untied", "windows", "encoder"):
        check_logits(kind, mesh)
    check_shared_table(mesh)
    check_other_expert(mesh)
    for said, options in WHOLE.items():
        check_note(said, mesh, **options)


def check_logits(kind: str, mesh: DeviceMesh) -> None:
    """Logits, their gradients, the loss in many chunks and what is written are those of the whole model."""
    whole: Any = build(kind).train()
    divided: Any = copy.deepcopy(whole)
    assert apply_tensor_parallel(divided, mesh) == []
    ids = torch.arange(24).view(2, 12) % WORDS
    chunk, cross_entropy.CHUNK_ENTRIES = cross_entropy.CHUNK_ENTRIES, 1
    figures = []
    for model in (whole, divided):
        output = model(input_ids=ids, labels=ids)
        (output.loss + output.logits.square().mean()).backward()
        gradient = model.tokens.weight.grad
        gradient = gradient.full_tensor() if model is divided else gradient
        figures.append((output.loss, output.logits, gradient))
    cross_entropy.CHUNK_ENTRIES = chunk
    for one_process, several in zip(*figures):
        assert torch.allclose(one_process, several, rtol=0, atol=1e-10)
    with pytest.raises(InputError, match=r"expected (numbers|ids) from 0 to 22"):
        divided(input_ids=ids, labels=ids + 3)
    if kind != "encoder":
        sequences = [model.eval().generate(ids, max_new_tokens=5).sequences for model in (whole, divided)]
        assert torch.equal(*sequences)


def check_shared_table(mesh: DeviceMesh) -> None:
    """ELECTRA's generator predicts by the table of the model, whose head reads none."""
    torch.manual_seed(5)
    model: Any = create_model("encoder-tiny", **SMALL, head="detect")
    generator: Any = build_model(generator_config(model.config, 1.0))
    whole = GeneratorAndModel(generator, model, 50.0).double()
    divided = copy.deepcopy(whole)
    assert apply_tensor_parallel(divided, mesh) == []
    ids = torch.arange(24).view(2, 12) % WORDS
    labels = ids.masked_fill(ids % 3 > 0, -100)
    for both in (whole, divided):
        torch.manual_seed(6)
        both(ids, labels).loss.backward()
    gradient: Any = divided.generator.tokens.weight.grad
    assert torch.allclose(gradient.full_tensor(), whole.model.tokens.weight.grad, rtol=0, atol=1e-10)


def check_other_expert(mesh: DeviceMesh) -> None:
    """An expert that is not divided beside some that are."""
    whole: Any = build("experts")
    for layer in whole.decoder.layers:
        layer.feedforward.experts[1] = torch.nn.Tanh()
    divided: Any = copy.deepcopy(whole)
    assert apply_tensor_parallel(divided, mesh) == []
    ids = torch.arange(24).view(2, 12) % WORDS
    losses = [model(input_ids=ids, labels=ids).loss for model in (whole, divided)]
    assert torch.allclose(*losses, rtol=0, atol=1e-10)


def check_note(said: str, mesh: DeviceMesh, preset: str, **options: Any) -> None:
    """Its table stays whole, and the loss is right."""
    torch.manual_seed(5)
    whole: Any = create_model(preset, **options).double()
    divided: Any = copy.deepcopy(whole)
    (note,) = apply_tensor_parallel(divided, mesh)
    assert said in note
    ids = torch.arange(6).view(1, 6) % whole.config.vocab_size
    losses = [model(input_ids=ids, labels=ids).loss for model in (whole, divided)]
    assert torch.allclose(*losses, rtol=0, atol=1e-10)
