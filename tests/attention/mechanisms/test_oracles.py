"""Every mechanism, fast and by its definition, against its equation in `naive_mechanisms.py`.

A mechanism of the package without an equation there fails: these are the only tests of a definition that
share nothing with it.
"""

from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from naive_mechanisms import Mask
from oracles import HEADS, LENGTH, ORACLES, ROWS, WIDTH, WINDOW, Head, array

from polyformer.attention.mechanisms import (
    AdaptiveSpanConfig,
    DynamicSpanConfig,
    LinformerConfig,
    LSHConfig,
    PerformerConfig,
    RFAConfig,
    RoutingConfig,
    SoftmaxConfig,
    SVDConfig,
)
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig
from polyformer.attention.patterns import Window
from polyformer.core.sequence.context import Context

MORE: list[MechanismConfig] = [
    SoftmaxConfig(scale=0.7),
    SoftmaxConfig(pattern=Window(WINDOW)),
    PerformerConfig(features=7, map="trigonometric", floor=0.3),
    RFAConfig(features=5, floor=0.3),
    AdaptiveSpanConfig(max_span=5, ramp=3, initial=0.3),
    DynamicSpanConfig(max_span=5, ramp=3, initial=-0.2),
    LinformerConfig(max_length=16, k=4, sharing="none", projection="max"),
    RoutingConfig(clusters=3, window=2, local_heads=1, local_window=2),
    SVDConfig(rank=2),
    LSHConfig(rounds=2, buckets=6, window=3),
]
"""Options that the examples of the members leave out."""


def own_kinds() -> dict[str, type[MechanismConfig]]:
    """The mechanisms of the package, without those that a test or a user registered."""
    members = MechanismConfig.kinds
    return {kind: member for kind, member in members.items() if member.__module__.startswith("polyformer.")}


def test_every_mechanism_has_an_equation():
    assert own_kinds().keys() == ORACLES.keys(), (
        "give every mechanism a plain equation in naive_mechanisms.py"
    )


CONFIGS = [example for member in own_kinds().values() for example in member.examples()] + MORE


def contexts(config: MechanismConfig) -> list[Context]:
    """Whole rows, and rows with padding at the end; causal ones and packed ones where the mechanism can."""
    valid = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    valid[1, 9:] = False
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    documents[0, 5:], documents[1, 3:] = 1, 1
    limits: list[dict[str, Any]] = [{}, {"kv_valid": valid}]
    if config.supports_packing and not getattr(config, "whole", 0):
        limits.append({"kv_valid": valid, "q_doc": documents, "kv_doc": documents})
    causal = (False, True) if config.causal else (False,)
    return [Context(LENGTH, LENGTH, causal=flag, **limit) for flag in causal for limit in limits]


def allowed(context: Context, row: int) -> tuple[Mask, list[list[int]]]:
    """Who may attend to whom, pair by pair, and the slots of the real tokens of each document."""
    real = [context.kv_valid is None or bool(context.kv_valid[row, j]) for j in range(LENGTH)]
    doc = [0 if context.kv_doc is None else int(context.kv_doc[row, j]) for j in range(LENGTH)]
    mask = np.zeros((LENGTH, LENGTH), dtype=bool)
    for i in range(LENGTH):
        for j in range(LENGTH):
            mask[i, j] = real[i] and real[j] and doc[i] == doc[j] and (j <= i or not context.causal)
    slots = [[j for j in range(LENGTH) if real[j] and doc[j] == number] for number in sorted(set(doc))]
    return mask, [tokens for tokens in slots if tokens]


Module = TypeVar("Module", bound=Mechanism)


def away_from_initial_values(module: Module) -> Module:
    """In float64, with every parameter moved: zeros and ones hide faults."""
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return module


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "definition"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_mechanism_is_its_equation(config: MechanismConfig, plain: bool):
    torch.manual_seed(8)
    form = config.definition() if plain else config
    module = away_from_initial_values(form.build(HEADS, WIDTH))
    q, k, v = (torch.randn(ROWS, HEADS, LENGTH, WIDTH, dtype=torch.float64) for _ in range(3))
    k = q if config.shares_queries else k
    sizes = config.gate_sizes(HEADS, WIDTH)
    gates = [torch.randn(ROWS, LENGTH, sum(sizes.values()), dtype=torch.float64)] if sizes else []
    for context in contexts(config):
        y = array(module(q, k, v, context, None, None, *gates)[0])
        for row in range(ROWS):
            mask, documents = allowed(context, row)
            table = dict(zip(sizes, gates[0][row].split(list(sizes.values()), 1))) if gates else {}
            own = {name: array(x) for name, x in table.items()}
            heads: list[Head] = []
            others = array(q[row]), array(k[row]), array(v[row])
            for number in range(HEADS):
                rows = (array(x[row, number]) for x in (q, k, v))
                heads.append(Head(module, number, *rows, mask, documents, context.causal, own, others, heads))
            for number, head in enumerate(heads):
                expected = ORACLES[config.kind](config, head)
                real = head.real
                np.testing.assert_allclose(
                    y[row, number][real], expected[real], rtol=1e-9, atol=1e-11, err_msg=f"{config} {context}"
                )
