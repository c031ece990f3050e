"""The equations of linear attention and of recurrences, in numpy as `naive_mechanisms.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from naive_mechanisms import Array, Mask


def sigmoid(x: Array | float) -> Any:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def rms_norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def unit(x: Array) -> Array:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def convolved(x: Array, taps: Array, documents: list[list[int]], causal: bool, active: bool = True) -> Array:
    """silu(sum_o taps_o x_(t + o)) within each document; padding between its tokens is zeros."""
    y, left = np.zeros_like(x), len(taps) - 1 if causal else (len(taps) - 1) // 2
    for tokens in documents:
        for t in range(min(tokens), max(tokens) + 1):
            for o, tap in enumerate(taps):
                if t + o - left in tokens:
                    y[t] += tap * x[t + o - left]
    return silu(y) if active else y


def scan(
    q: Array,
    k: Array,
    v: Array,
    documents: list[list[int]],
    causal: bool,
    decay: Array | None = None,
    erase: Array | None = None,
) -> Array:
    """S = a S - b k (k^T a S) + k v^T, y = S^T q, token by token; in an encoder in both directions."""
    y = np.zeros_like(v)
    for tokens in documents:
        for order in (tokens,) if causal else (tokens, tokens[::-1]):
            state = np.zeros((k.shape[1], v.shape[1]))
            for t in order:
                if decay is not None:
                    state = np.exp(decay[t])[:, None] * state
                if erase is not None:
                    state = state - erase[t] * np.outer(k[t], k[t] @ state)
                state = state + np.outer(k[t], v[t])
                y[t] += q[t] @ state
        if not causal and erase is None:
            for t in tokens:  # the token itself counts once
                y[t] -= q[t] @ k[t] * v[t]
    return y


def steps_scan(
    q: Array,
    k: Array,
    v: Array,
    documents: list[list[int]],
    causal: bool,
    decay: Array | None,
    erase: Array,
) -> Array:
    """S = a S once, then S = S - b k (k^T S - v^T) for each step: k [n, T, D], v [n, T, Dv], b [T, n]."""
    y = np.zeros_like(v[0])
    for tokens in documents:
        for order in (tokens,) if causal else (tokens, tokens[::-1]):
            state = np.zeros((k.shape[2], v.shape[2]))
            for t in order:
                state = state if decay is None else np.exp(decay[t])[:, None] * state
                for i in range(len(k)):
                    state = state - erase[t, i] * np.outer(k[i, t], k[i, t] @ state - v[i, t])
                y[t] += q[t] @ state
    return y


def rank_one_scan(
    q: Array,
    keys: tuple[Array, Array, Array],
    v: Array,
    documents: list[list[int]],
    causal: bool,
    decay: Array,
) -> Array:
    """S = (diag(w) - e p^T) S + k v^T for keys p, e and k, y = S^T q; in an encoder in both directions."""
    y, (reader, eraser, k) = np.zeros_like(v), keys
    for tokens in documents:
        for order in (tokens,) if causal else (tokens, tokens[::-1]):
            state = np.zeros((k.shape[1], v.shape[1]))
            for t in order:
                change = np.diag(np.exp(decay[t])) - np.outer(eraser[t], reader[t])
                state = change @ state + np.outer(k[t], v[t])
                y[t] += q[t] @ state
    return y


def performer(q: Array, k: Array, v: Array, allowed: Mask, w: Array, features: str, floor: float) -> Array:
    """y_i = sum_j (phi(q_i') . phi(k_j')) v_j / sum_j phi(q_i') . phi(k_j'), x' = x / D^(1/4)."""
    count = len(w)

    def phi(x: Array) -> Array:
        a = w @ x
        if features == "positive":
            return np.exp(a - x @ x / 2) / np.sqrt(count)
        if features == "relu":
            return np.maximum(a, 0) + 1e-3
        return np.exp(x @ x / 2) * np.concatenate([np.cos(a), np.sin(a)]) / np.sqrt(count)

    q, k = q / q.shape[1] ** 0.25, k / k.shape[1] ** 0.25
    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        keys = np.flatnonzero(allowed[i])
        if not len(keys):
            continue
        products = np.array([phi(q[i]) @ phi(k[j]) for j in keys])
        # What the denominator would be if all angles were 0: its floor is a share of that.
        least = floor * sum(np.exp(q[i] @ q[i] / 2 + k[j] @ k[j] / 2) for j in keys)
        total = products.sum()
        y[i] = products @ v[keys] / (max(total, least) if floor else total)
    return y


def rfa(
    q: Array,
    k: Array,
    v: Array,
    allowed: Mask,
    w: Array,
    sigma: float,
    floor: float,
    gate: Callable[[Array], float] | None,
    causal: bool,
) -> Array:
    """S_t = g_t S_(t-1) + (1 - g_t) v_t phi(k_t)^T, z likewise, y_t = S_t phi(q_t) / (z_t . phi(q_t)).

    Without a gate S_t = S_(t-1) + v_t phi(k_t)^T. Without causality a query reads the sums over all its keys,
    each weighted by 1 - g.
    """

    def phi(x: Array) -> Array:
        a = w @ (x / np.linalg.norm(x)) / sigma
        return np.concatenate([np.sin(a), np.cos(a)]) / np.sqrt(len(w))

    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        s, z, mass = np.zeros((v.shape[1], 2 * len(w))), np.zeros(2 * len(w)), 0.0
        for j in np.flatnonzero(allowed[i]):
            g = 0.0 if gate is None else gate(k[j])
            kept, share = (g if causal and gate is not None else 1.0), 1 - g
            s = kept * s + share * np.outer(v[j], phi(k[j]))
            z, mass = kept * z + share * phi(k[j]), kept * mass + share
        if allowed[i].any():
            y[i] = s @ phi(q[i]) / max(z @ phi(q[i]), floor * mass)
    return y
