"""The equation of each mechanism for one head, from its options and what its module has learned."""

import dataclasses
from collections.abc import Callable
from typing import Any

import naive_mechanisms as naive
import naive_recurrences as recurrent
import numpy as np
import torch
from naive_mechanisms import Array, Mask
from torch import Tensor

from polyformer.attention.patterns import Window

ROWS, HEADS, WIDTH, LENGTH = 2, 4, 4, 13
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
    others: tuple[Array, Array, Array]  # q, k, v [H, T, D] of all heads
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
    sink = None if head.module.sink is None else float(array(head.module.sink)[head.number])
    return naive.softmax(head.q, head.k, head.v, allowed, config.scale, config.soft_cap, sink)


def differential(config: Any, head: Head) -> Array:
    """Half of the output of a pair of heads."""
    half, (q, k, v) = HEADS // 2, head.others
    pair = head.number % half, head.number % half + half
    values = np.concatenate([v[number] for number in pair], 1)
    y = naive.differential([(q[number], k[number]) for number in pair], values, head.allowed, head.module)
    return y[:, :WIDTH] if head.number < half else y[:, WIDTH:]


def forgetting(config: Any, head: Head) -> Array:
    vector, bias = (array(x)[head.number] for x in (head.module.gate_vector, head.module.gate_bias))
    gates = 1 / (1 + np.exp(-(head.k @ vector + bias)))
    return naive.forgetting(*head.qkv, gates, head.real)


def sigmoid(config: Any, head: Head) -> Array:
    return naive.sigmoid(*head.qkv, config.score_bias)


def cosine(config: Any, head: Head) -> Array:
    return naive.cosine(*head.qkv, float(np.exp(array(head.module.log_scale)[head.number])))


def persistent(config: Any, head: Head) -> Array:
    keys, values = (array(x)[head.number] for x in (head.module.keys, head.module.values))
    return naive.persistent(*head.qkv, (keys * np.sqrt(WIDTH), values * np.sqrt(config.vectors)))


def talking_heads(config: Any, head: Head) -> Array:
    matrices = array(head.module.of_scores), array(head.module.of_weights)
    return naive.talking_heads(head.others, head.allowed, *matrices)[head.number]


def cope(config: Any, head: Head) -> Array:
    return naive.cope(*head.qkv, array(head.module.positions))


def selective(config: Any, head: Head) -> Array:
    return naive.selective(*head.qkv, (head.heads[0].q, head.heads[0].k), head.documents)


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
    return recurrent.performer(*head.qkv, w, config.map, floor)


def rfa(config: Any, head: Head) -> Array:
    w = array(head.module.directions(torch.zeros((), dtype=torch.float64)))
    sigma, gate = float(np.exp(array(head.module.log_sigma)[head.number])), None
    if config.gated:
        u, b = (array(x)[head.number] for x in (head.module.gate.vector, head.module.gate.bias))
        gate = lambda k: float(1 / (1 + np.exp(-(u @ k + b))))  # noqa: E731 - the equation of the gate
    return recurrent.rfa(*head.qkv, w, sigma, config.floor, gate, head.causal)


def lsh(config: Any, head: Head) -> Array:
    w = array(head.module.directions(torch.zeros((), dtype=torch.float64)))
    rounds = np.split(w, config.rounds)
    scale = 1.0 if config.unscaled else WIDTH**-0.5
    return naive.lsh(*head.qkv, rounds, config.window, scale, config.key_eps, config.whole, head.causal)


def chosen_blocks(config: Any, head: Head) -> Array:
    return naive.chosen_blocks(*head.qkv, config.ranking(), head.documents, head.causal)


def nsa(config: Any, head: Head) -> Array:
    """Every head has its own keys, and so is a group of its own."""
    weights = array(head.module.key_weights), array(head.module.value_weights)
    gates = [1 / (1 + np.exp(-head.gates[name][:, head.number])) for name in config.gate_sizes(1, 1)]
    own = [head.q], head.k, head.v, head.allowed
    return naive.nsa(head.q, *own, config, weights, gates, head.documents, head.causal)


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
    tables, active = enumerate((head.q, head.k, head.v)), config.kind != "rwkv7"
    return [recurrent.convolved(x, taps[:, i], head.documents, head.causal, active) for i, x in tables]


def gated_convolution(config: Any, head: Head) -> Array:
    """Sums of at most `width` products of keys and values, slot by slot, of tokens of one document."""
    channels = slice(head.number * WIDTH, (head.number + 1) * WIDTH)
    taps, bias = array(head.module.taps)[:, channels], head.module.bias
    last = 0 if head.causal else config.width // 2
    y = np.zeros_like(head.q)
    for tokens in head.documents:
        for t in tokens:
            for tap in range(config.width):
                other = t + tap + 1 - config.width + last
                if other in tokens:
                    y[t] += taps[tap] * head.k[other] * head.v[other]
            y[t] = head.q[t] * (y[t] if bias is None else y[t] + array(bias)[channels])
    return y


def delta_product(config: Any, head: Head) -> Array:
    """Several steps for each token; heads of keys and values without steps belong to all steps."""
    module, number, n = head.module, head.number, config.steps
    tables = [head.q, *[head.k] * n, *[head.v] * n]
    if config.short_convolution is not None:
        taps = array(module.taps)[:, :, number]
        tables = [
            recurrent.convolved(x, taps[:, i], head.documents, head.causal) for i, x in enumerate(tables)
        ]
    q, k, v = (
        recurrent.unit(tables[0]),
        recurrent.unit(np.array(tables[1 : n + 1])),
        np.array(tables[n + 1 :]),
    )
    erase, decay = recurrent.sigmoid(own_gate(head, "erase")) * (2 if config.reflect else 1), None
    if config.kind == "gated_delta":
        rate, bias = (array(x)[number] for x in (module.log_rate, module.bias))
        decay = -np.exp(rate) * recurrent.softplus(own_gate(head, "decay") + bias)
    y = recurrent.steps_scan(q * WIDTH**-0.5, k, v, head.documents, head.causal, decay, erase)
    y = recurrent.rms_norm(y, array(module.norm.weight))
    return y * recurrent.silu(own_gate(head, "output")) if config.output_gate else y


def recurrence(config: Any, head: Head) -> Array:
    """The scan of a member's keys, values and gates, with the norm and the gate of its output."""
    if getattr(config, "steps", 1) > 1:
        return delta_product(config, head)
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
    elif config.kind == "kda":
        w = np.split(array(module.decay.weight), HEADS)[number]
        rate, bias = (array(x)[number] for x in (module.log_rate, module.bias))
        decay = -np.exp(rate) * recurrent.softplus(head.gates["low_rank"] @ w.T + bias)
    y = recurrent.scan(q * WIDTH**-0.5, k, v, head.documents, head.causal, decay, erase)
    y = recurrent.rms_norm(y, array(module.norm.weight))
    if config.kind == "kda":
        gate = head.gates["output_low_rank"] @ np.split(array(module.output_gate.weight), HEADS)[number].T
        if config.gate_bias:
            gate = gate + np.split(array(module.output_gate.bias), HEADS)[number]
        return y * recurrent.sigmoid(gate)
    return y * recurrent.silu(own_gate(head, "output")) if config.output_gate else y


def ssd(config: Any, head: Head) -> Array:
    """The norm is over the channels of all heads; factors are of z, v, k, q and the step."""
    outputs, gates = [], []
    z, v_scale, k_scale, q_scale, step_scale = config.scales or (1.0,) * 5
    for each in head.heads:
        own = dataclasses.replace(each, q=each.q * q_scale, k=each.k * k_scale, v=each.v * v_scale)
        q, k, v = convolved(config, own)
        parameters = each.module.log_rate, each.module.bias, each.module.residual
        rate, bias, residual = (array(x)[each.number] for x in parameters)
        step = recurrent.softplus(own_gate(each, "step") * step_scale + bias)
        y = recurrent.scan(q, k, v * step, each.documents, each.causal, -np.exp(rate) * step) + residual * v
        outputs.append(y)
        gates.append(recurrent.silu(own_gate(each, "output") * z))
    y, gate = np.array(outputs), np.array(gates)
    if config.norm_of == "none":
        return (y * gate)[head.number]
    before, after = (y, gate) if config.norm_of == "before_gate" else (y * gate, np.ones_like(gate))
    size = np.mean(np.square(before), (0, 2))[:, None] + 1e-5
    return (before / np.sqrt(size) * array(head.module.norm.weight) * after)[head.number]


def rwkv7(config: Any, head: Head) -> Array:
    """Gates of low rank, three keys, a LayerNorm of the head, the token's own value, and the output gate."""
    module, number = head.module, head.number

    def projected(layer: Any, x: Array) -> Array:
        y = x @ np.split(array(layer.weight), HEADS)[number].T
        return y if layer.bias is None else y + np.split(array(layer.bias), HEADS)[number]

    r, h, v = convolved(config, head)
    xi, alpha, rho = (array(x)[number] for x in (module.erase_scale, module.rate_share, module.bonus))
    d = projected(module.decay, np.tanh(head.gates["decay_low_rank"]))
    rate = recurrent.sigmoid(projected(module.rate, head.gates["rate_low_rank"]))
    reader, k = recurrent.unit(h * xi), h * (1 + (rate - 1) * alpha)
    decay, keys = -np.exp(-0.5) * recurrent.sigmoid(d), (reader, rate * reader, k)
    y = recurrent.rank_one_scan(r, keys, v, head.documents, head.causal, decay)
    y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + config.norm_eps)
    y = y * array(module.head_norm.weight)[number] + array(module.head_norm.bias)[number]
    y = y + (r * rho * k).sum(1, keepdims=True) * v
    return y * projected(module.output_gate, recurrent.sigmoid(head.gates["output_low_rank"]))


def alternate(config: Any, head: Head) -> Array:
    """Outside a stack there is one layer, the first."""
    first = config.for_layer(0)
    return ORACLES[first.kind](first, head)


ORACLES: dict[str, Callable[[Any, Head], Array]] = {
    "adaptive_span": adaptive_span,
    "alternate": alternate,
    "cope": cope,
    "cosine": cosine,
    "delta": recurrence,
    "dynamic_span": dynamic_span,
    "gated_convolution": gated_convolution,
    "gated_delta": recurrence,
    "gla": recurrence,
    "kda": recurrence,
    "linear": linear,
    "differential": differential,
    "forgetting": forgetting,
    "linformer": linformer,
    "lsh": lsh,
    "memory_compressed": memory_compressed,
    "moba": chosen_blocks,
    "nsa": nsa,
    "performer": performer,
    "persistent": persistent,
    "retention": recurrence,
    "rfa": rfa,
    "routing": routing,
    "rwkv7": rwkv7,
    "selective": selective,
    "sigmoid": sigmoid,
    "sinkhorn": sinkhorn,
    "softmax": softmax,
    "sort_cut": sinkhorn,
    "ssd": ssd,
    "svd": svd,
    "talking_heads": talking_heads,
    "top_blocks": chosen_blocks,
}
"""The equation of every kind of mechanism in the package."""
