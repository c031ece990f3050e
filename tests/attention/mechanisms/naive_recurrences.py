"""The equations of linear recurrences, token by token in numpy, as `naive_mechanisms.py`."""

from typing import Any

import numpy as np
from naive_mechanisms import Array


def sigmoid(x: Array | float) -> Any:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def rms_norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def unit(x: Array) -> Array:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


def convolved(x: Array, taps: Array, documents: list[list[int]], causal: bool) -> Array:
    """silu(sum_o taps_o x_(t + o)) within each document; padding between its tokens is zeros."""
    y, left = np.zeros_like(x), len(taps) - 1 if causal else (len(taps) - 1) // 2
    for tokens in documents:
        for t in range(min(tokens), max(tokens) + 1):
            for o, tap in enumerate(taps):
                if t + o - left in tokens:
                    y[t] += tap * x[t + o - left]
    return silu(y)


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
