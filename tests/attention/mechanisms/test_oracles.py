"""Every mechanism, fast and by its definition, against its equation in `naive_mechanisms.py`.

A mechanism of the package without an equation there fails: these are the only tests of a definition that
share nothing with it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import naive_mechanisms as naive
import naive_recurrences as recurrent
import numpy as np
import pytest
import torch
from naive_mechanisms import Array, Mask
from torch import Tensor

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
from polyformer.attention.mechanisms.recurrence.base import RecurrenceConfig
from polyformer.attention.patterns import Window
from polyformer.core.sequence.context import Context

ROWS, HEADS, WIDTH, LENGTH = 2, 3, 4, 13
WINDOW = 3


@dataclasses.dataclass(frozen=True)
class Head:
    """One head of one row: its inputs, who may attend to whom, and where to find what the module has
    learned."""

    module: Any
    number: int
    q: Array
    k: Array
    v: Array
    allowed: Mask
    documents: list[list[int]]
    causal: bool
    gates: dict[str, Array]
    heads: list["Head"]  # all heads of the row, for a norm over them

    @property
    def qkv(self) -> tuple[Array, Array, Array, Mask]:
        return self.q, self.k, self.v, self.allowed

    @property
    def real(self) -> Mask:
        return self.allowed.any(0)


def array(x: Tensor) -> Array:
    return x.detach().numpy()


def softmax(config: Any, head: Head) -> Array:
    allowed = head.allowed
    if config.pattern is not None:
        assert config.pattern == Window(WINDOW), "the equation of other patterns is their own tests'"
        allowed = naive.windowed(allowed, WINDOW, WINDOW)
    return naive.softmax(head.q, head.k, head.v, allowed, config.scale)


def adaptive_span(config: Any, head: Head) -> Array:
    z = float(np.clip(array(head.module.fraction)[head.number], 0, 1)) * config.max_span
    return naive.spans(*head.qkv, np.full(len(head.q), z), config.ramp, config.max_span)


def dynamic_span(config: Any, head: Head) -> Array:
    vector, bias = array(head.module.vector)[head.number], array(head.module.bias)[head.number]
    z = config.max_span / (1 + np.exp(-(head.q @ vector + bias)))
    return naive.spans(*head.qkv, z, config.ramp, config.max_span)


def svd(config: Any, head: Head) -> Array:
    return naive.svd(*head.qkv, config.rank)


def linformer(config: Any, head: Head) -> Array:
    ranks = config.layers[0]
    k = ranks[head.number % len(ranks)]
    same = [h for h in range(HEADS) if ranks[h % len(ranks)] == k]  # heads of one k are one group of matrices
    group = list(dict.fromkeys(ranks[h % len(ranks)] for h in range(HEADS))).index(k)
    step, rows = config.max_length // k, []
    for x, projections in ((head.k, head.module.keys), (head.v, head.module.values)):
        weight = getattr(projections[group], "weight", None)
        own = None if weight is None else array(weight)[same.index(head.number) % len(weight)]
        if config.projection == "linear":
            rows.append(naive.matrix_rows(x, head.real, own))
        elif config.projection == "convolution":
            rows.append(naive.convolved_rows(x, head.real, k, own))
        else:
            pool = {"mean": np.mean, "max": np.max}[config.projection]
            rows.append(naive.pooled_rows(x, head.real, k, step, pool))
    (keys, seen), (values, _) = rows
    return naive.softmax(head.q, keys, values, np.broadcast_to(seen, (len(head.q), len(seen))))


def performer(config: Any, head: Head) -> Array:
    w = array(head.module.directions(torch.zeros((), dtype=torch.float64)))
    floor = config.floor if config.map == "trigonometric" else 0.0
    return naive.performer(*head.qkv, w, config.map, floor)


def rfa(config: Any, head: Head) -> Array:
    w = array(head.module.directions(torch.zeros((), dtype=torch.float64)))
    sigma, gate = float(np.exp(array(head.module.log_sigma)[head.number])), None
    if config.gated:
        u, b = (array(x)[head.number] for x in (head.module.gate.vector, head.module.gate.bias))
        gate = lambda k: float(1 / (1 + np.exp(-(u @ k + b))))  # noqa: E731 - the equation of the gate
    return naive.rfa(*head.qkv, w, sigma, config.floor, gate, head.causal)


def lsh(config: Any, head: Head) -> Array:
    w = array(head.module.directions(torch.zeros((), dtype=torch.float64)))
    rounds = np.split(w, config.rounds)
    scale = 1.0 if config.unscaled else WIDTH**-0.5
    return naive.lsh(*head.qkv, rounds, config.window, scale, config.key_eps, config.whole, head.causal)


def chosen_blocks(config: Any, head: Head) -> Array:
    return naive.chosen_blocks(*head.qkv, config.ranking(), head.documents, head.causal)


def routing(config: Any, head: Head) -> Array:
    local = HEADS // 2 if config.local_heads is None else config.local_heads
    if head.number < local:
        size = config.local_window - 1
        return naive.softmax(head.q, head.k, head.v, naive.windowed(head.allowed, size, size))
    centres = array(head.module.centroids.centres)[head.number - local]
    return naive.routing(*head.qkv, centres, config.window, config.share_queries, head.causal)


def memory_compressed(config: Any, head: Head) -> Array:
    kernels = head.module.key_kernel, head.module.value_kernel
    own = tuple(array(kernel)[head.number] for kernel in kernels)
    return naive.memory_compressed(*head.qkv, own, config.stride, head.documents, head.causal)


def sinkhorn(config: Any, head: Head) -> Array:
    net = head.module.net
    parameters = net.hidden, net.hidden_bias, net.scores, net.scores_bias
    own = [array(parameter)[head.number] for parameter in parameters]
    return naive.sinkhorn(*head.qkv, own, config, head.documents, head.causal)


def linear(config: Any, head: Head) -> Array:
    phi = lambda x: np.where(x > 0, x + 1, np.exp(x))  # noqa: E731 - elu(x) + 1
    values = np.concatenate([head.v, np.ones((len(head.v), 1))], 1)
    y = recurrent.scan(phi(head.q), phi(head.k), values, head.documents, head.causal)
    return y[:, :-1] / np.maximum(y[:, -1:], 1e-300)


def own_gate(head: Head, name: str) -> Array:
    """The channels of a gate [T, C] that belong to the head."""
    return np.split(head.gates[name], HEADS, 1)[head.number]


def convolved(config: Any, head: Head) -> list[Array]:
    if config.short_convolution is None:
        return [head.q, head.k, head.v]
    taps = array(head.module.taps)[:, :, head.number]
    tables = enumerate((head.q, head.k, head.v))
    return [recurrent.convolved(x, taps[:, i], head.documents, head.causal) for i, x in tables]


def recurrence(config: Any, head: Head) -> Array:
    """The scan of a member's keys, values and gates, with the norm and the gate of its output."""
    module, number = head.module, head.number
    q, k, v = convolved(config, head)
    decay = erase = None
    if "erase" in head.gates:
        erase = recurrent.sigmoid(own_gate(head, "erase")) * (2 if getattr(config, "reflect", False) else 1)
        q, k, v = recurrent.unit(q), recurrent.unit(k), v * erase
    if config.kind == "retention":
        decay = np.full((len(q), 1), np.log(1 - 2.0 ** (-5 - number)))
    elif config.kind == "gla":
        w, b = (np.split(array(x), HEADS)[number] for x in (module.decay.weight, module.decay.bias))
        decay = np.log(recurrent.sigmoid(head.gates["low_rank"] @ w.T + b)) / config.temperature
    elif config.kind == "gated_delta":
        rate, bias = (array(x)[number] for x in (module.log_rate, module.bias))
        decay = -np.exp(rate) * recurrent.softplus(own_gate(head, "decay") + bias)
    y = recurrent.scan(q * WIDTH**-0.5, k, v, head.documents, head.causal, decay, erase)
    y = recurrent.rms_norm(y, array(module.norm.weight))
    return y * recurrent.silu(own_gate(head, "output")) if config.output_gate else y


def ssd(config: Any, head: Head) -> Array:
    """The norm is over the channels of all heads."""
    outputs = []
    for each in head.heads:
        q, k, v = convolved(config, each)
        parameters = each.module.log_rate, each.module.bias, each.module.residual
        rate, bias, residual = (array(x)[each.number] for x in parameters)
        step = recurrent.softplus(own_gate(each, "step") + bias)
        y = recurrent.scan(q, k, v * step, each.documents, each.causal, -np.exp(rate) * step) + residual * v
        outputs.append(y * recurrent.silu(own_gate(each, "output")))
    size = np.mean(np.square(outputs), (0, 2))[:, None] + 1e-5
    return outputs[head.number] / np.sqrt(size) * array(head.module.norm.weight)


def alternate(config: Any, head: Head) -> Array:
    """Outside a stack there is one layer, the first."""
    first = config.for_layer(0)
    return ORACLES[first.kind](first, head)


ORACLES: dict[str, Callable[[Any, Head], Array]] = {
    "adaptive_span": adaptive_span,
    "alternate": alternate,
    "delta": recurrence,
    "dynamic_span": dynamic_span,
    "gated_delta": recurrence,
    "gla": recurrence,
    "linear": linear,
    "linformer": linformer,
    "lsh": lsh,
    "memory_compressed": memory_compressed,
    "moba": chosen_blocks,
    "performer": performer,
    "retention": recurrence,
    "rfa": rfa,
    "routing": routing,
    "sinkhorn": sinkhorn,
    "softmax": softmax,
    "sort_cut": sinkhorn,
    "ssd": ssd,
    "svd": svd,
    "top_blocks": chosen_blocks,
}
"""The equation of every kind of mechanism in the package."""

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
    sizes = config.gate_sizes(HEADS, WIDTH) if isinstance(config, RecurrenceConfig) else {}
    gates = [torch.randn(ROWS, LENGTH, sum(sizes.values()), dtype=torch.float64)] if sizes else []
    for context in contexts(config):
        y = array(module(q, k, v, context, None, None, *gates)[0])
        for row in range(ROWS):
            mask, documents = allowed(context, row)
            table = dict(zip(sizes, gates[0][row].split(list(sizes.values()), 1))) if gates else {}
            own = {name: array(x) for name, x in table.items()}
            heads: list[Head] = []
            for number in range(HEADS):
                rows = (array(x[row, number]) for x in (q, k, v))
                heads.append(Head(module, number, *rows, mask, documents, context.causal, own, heads))
            for number, head in enumerate(heads):
                expected = ORACLES[config.kind](config, head)
                real = head.real
                np.testing.assert_allclose(
                    y[row, number][real], expected[real], rtol=1e-9, atol=1e-11, err_msg=f"{config} {context}"
                )
