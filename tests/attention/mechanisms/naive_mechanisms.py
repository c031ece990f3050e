"""The equation of every attention mechanism, for one head of one row, in numpy loops of float64.

Nothing of the library is used here, and nothing is fast: what a mechanism draws or learns comes in as arrays.
q [T, D], k [T, D], v [T, Dv]; allowed [T, T], whether the context (causality, padding, documents) lets query
i attend to key j. Returned is y [T, Dv], zeros for a query with nothing to attend to.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def weighted_mean(scores: Array, values: Array, factors: Array | None = None) -> Array:
    """sum_j m_j e^(s_j) v_j / sum_j m_j e^(s_j), zeros where there is no weight."""
    factors = np.ones(len(scores)) if factors is None else factors
    weights = factors * np.exp(scores)
    return weights @ values / weights.sum() if weights.sum() > 0 else np.zeros(values.shape[1])


def softmax(
    q: Array,
    k: Array,
    v: Array,
    allowed: Mask,
    scale: float | None = None,
    cap: float | None = None,
    sink: float | None = None,
) -> Array:
    """y_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j, with limited scores, and a key `sink` of value 0."""
    scale = 1 / np.sqrt(q.shape[1]) if scale is None else scale
    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        keys = np.flatnonzero(allowed[i])
        scores, values = k[keys] @ q[i] * scale, v[keys]
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        if sink is not None:
            scores, values = np.append(scores, sink), np.vstack([values, np.zeros(v.shape[1])])
        y[i] = weighted_mean(scores, values)
    return y


def differential(maps: list[tuple[Array, Array]], v: Array, allowed: Mask, module: Any) -> Array:
    """y_i = (1 - l_0) norm(sum_j (p_ij - l p'_ij) v_j), l = exp(a . b) - exp(a' . b') + l_0."""
    start, (a, b, c, d) = module.config.initial, module.factors.detach().numpy()
    factor = np.exp(a @ b) - np.exp(c @ d) + start
    first, second = (softmax(q, k, v, allowed) for q, k in maps)
    y = first - factor * second
    rms = np.sqrt((y**2).mean(1, keepdims=True) + 1e-5)
    return (1 - start) * y / rms * module.norm_weight.detach().numpy()


def forgetting(q: Array, k: Array, v: Array, allowed: Mask, gates: Array, real: Mask) -> Array:
    """y_i = sum_j softmax_j(q_i . k_j / sqrt(D) + log of the gates f_l of real l between j and i) v_j."""
    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        keys = np.flatnonzero(allowed[i])
        between = [[m for m in range(min(i, j) + 1, max(i, j) + 1) if real[m]] for j in keys]
        faded = np.array([np.log(gates[m]).sum() for m in between])
        y[i] = weighted_mean(k[keys] @ q[i] / np.sqrt(q.shape[1]) + faded, v[keys])
    return y


def sigmoid(q: Array, k: Array, v: Array, allowed: Mask, bias: float | None) -> Array:
    """y_i = sum_j sigmoid(q_i . k_j / sqrt(D) + b) v_j, b = -log of the number of keys that i sees."""
    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        for j in np.flatnonzero(allowed[i]):
            b = -np.log(allowed[i].sum()) if bias is None else bias
            y[i] += v[j] / (1 + np.exp(-(q[i] @ k[j] / np.sqrt(q.shape[1]) + b)))
    return y


def cosine(q: Array, k: Array, v: Array, allowed: Mask, t: float) -> Array:
    """softmax_j(t q_i . k_j / (|q_i| |k_j|))."""
    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        keys = np.flatnonzero(allowed[i])
        norms = np.linalg.norm(k[keys], axis=1) * np.linalg.norm(q[i])
        y[i] = weighted_mean(t * (k[keys] @ q[i]) / norms, v[keys])
    return y


def persistent(q: Array, k: Array, v: Array, allowed: Mask, more: tuple[Array, Array]) -> Array:
    """softmax_j(q_i . k_j / sqrt(D)) over the keys and N further keys; a query without a key has zeros."""
    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        keys = np.flatnonzero(allowed[i])
        if len(keys):
            both = np.concatenate([k[keys], more[0]]) @ q[i] / np.sqrt(q.shape[1])
            y[i] = weighted_mean(both, np.concatenate([v[keys], more[1]]))
    return y


def talking_heads(qkv: tuple[Array, Array, Array], allowed: Mask, before: Array, after: Array) -> Array:
    """J[h] = q[h] k[h] / sqrt(D), L[g] = sum_h J[h] before[h, g], U = softmax(L) after, y[g] = U[g] v[g].

    q, k, v and y are [H, T, D].
    """
    q, k, v = qkv
    y = np.zeros_like(v)
    for i in range(q.shape[1]):
        keys = np.flatnonzero(allowed[i])
        if len(keys):
            logits = before.T @ np.stack([k[h, keys] @ q[h, i] for h in range(len(q))]) / np.sqrt(q.shape[2])
            weights = after.T @ (np.exp(logits) / np.exp(logits).sum(1, keepdims=True))
            y[:, i] = np.stack([weights[h] @ v[h, keys] for h in range(len(q))])
    return y


def cope(q: Array, k: Array, v: Array, allowed: Mask, e: Array) -> Array:
    """softmax_j(q_i . (k_j + e[p_ij]) / sqrt(D)), p_ij = sum_(l = j .. i) sigmoid(q_i . k_l / sqrt(D))."""
    y, root = np.zeros((len(q), v.shape[1])), np.sqrt(q.shape[1])
    for i in range(len(q)):
        keys, scores = np.flatnonzero(allowed[i]), []
        for j in keys:
            between = [m for m in range(min(i, j), max(i, j) + 1) if allowed[i, m]]
            p = min(sum(1 / (1 + np.exp(-q[i] @ k[m] / root)) for m in between), len(e) - 1)
            low, high = int(np.floor(p)), int(np.ceil(p))
            vector = (p - low) * e[high] + (1 - p + low) * e[low]
            scores.append(q[i] @ (k[j] + vector) / root)
        y[i] = weighted_mean(np.array(scores), v[keys])
    return y


def selective(
    q: Array, k: Array, v: Array, allowed: Mask, chooser: tuple[Array, Array], documents: list[list[int]]
) -> Array:
    """softmax_j(q_i . k_j / sqrt(D) - sum_(l < i) max(0, s_lj)), s of the q and k of `chooser`, a head."""
    y, root = np.zeros((len(q), v.shape[1])), np.sqrt(q.shape[1])
    first = {tokens[0] for tokens in documents}
    for i in range(len(q)):
        keys, scores = np.flatnonzero(allowed[i]), []
        for j in keys:
            masks = [
                max(0.0, chooser[0][m] @ chooser[1][j] / root) for m in range(i) if allowed[m, j] and m != j
            ]
            scores.append(q[i] @ k[j] / root - (0.0 if j in first else sum(masks)))
        y[i] = weighted_mean(np.array(scores), v[keys])
    return y


def windowed(allowed: Mask, before: int, after: int) -> Mask:
    """Keys at most `before` slots before the query and `after` slots after it."""
    i, j = np.indices(allowed.shape)
    return allowed & (i - j <= before) & (j - i <= after)


def spans(q: Array, k: Array, v: Array, allowed: Mask, z: Array, ramp: int, most: int) -> Array:
    """p_ij = m e^(s_ij) / sum m e^(s_ij), m = clip((ramp + z_i - |i - j|) / ramp, 0, 1), 0 beyond `most`."""
    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        keys = np.flatnonzero(allowed[i])
        distance = np.abs(i - keys)
        mask = np.clip((ramp + z[i] - distance) / ramp, 0, 1) * (distance <= most)
        y[i] = weighted_mean(k[keys] @ q[i] / np.sqrt(q.shape[1]), v[keys], mask)
    return y


def svd(q: Array, k: Array, v: Array, allowed: Mask, rank: int) -> Array:
    """The attention matrix P with its `rank` greatest singular values alone: U_r S_r W_r^T v."""
    p = np.stack([softmax(q, k, np.eye(len(k)), allowed)[i] for i in range(len(q))])
    u, s, w = np.linalg.svd(p)
    low = sum(s[r] * np.outer(u[:, r], w[r]) for r in range(min(rank, len(s))))
    return low @ v


def matrix_rows(x: Array, real: Mask, matrix: Array) -> tuple[Array, Mask]:
    """E x for E [k, n]: token j has column j."""
    rows = np.zeros((len(matrix), x.shape[1]))
    for j in np.flatnonzero(real):
        rows += np.outer(matrix[:, j], x[j])
    return rows, np.ones(len(matrix), dtype=bool)


def pooled_rows(x: Array, real: Mask, count: int, step: int, pool: Callable) -> tuple[Array, Mask]:
    """`pool` of the real tokens in each of `count` windows of `step` positions; which windows have a
    token."""
    rows, seen = np.zeros((count, x.shape[1])), np.zeros(count, dtype=bool)
    for r in range(count):
        inside = [x[j] for j in range(r * step, min((r + 1) * step, len(x))) if real[j]]
        if inside:
            rows[r], seen[r] = pool(np.stack(inside), axis=0), True
    return rows, seen


def convolved_rows(x: Array, real: Mask, count: int, kernel: Array) -> tuple[Array, Mask]:
    """x'_r = sum_s x_(r step + s) W_s, kernel W [step, D, D]; which windows have a token."""
    step = len(kernel)
    rows, seen = np.zeros((count, x.shape[1])), np.zeros(count, dtype=bool)
    for j in np.flatnonzero(real):
        rows[j // step] += x[j] @ kernel[j % step]
        seen[j // step] = True
    return rows, seen


def last_of_bucket(same: Mask, i: int, window: int, after: int) -> list[int]:
    """Of the slots `same` as i: the last `window` at or before i, and the next `after` of them."""
    slots = [int(j) for j in np.flatnonzero(same)]
    return [j for j in slots if j <= i][-window:] + [j for j in slots if j > i][:after]


def lsh(
    q: Array,
    k: Array,
    v: Array,
    allowed: Mask,
    rounds: list[Array],
    window: int,
    scale: float,
    key_eps: float,
    whole: int,
    causal: bool,
) -> Array:
    """Keys k / |k|; i attends to the last `window` keys of its bucket h(x) = argmax [R x; -R x] in any round.

    rounds: a matrix R [buckets / 2, D] each. Where something else is there, a token does not attend to
    itself.
    """
    y = np.zeros((len(q), v.shape[1]))
    unit = np.stack([x / np.sqrt(x @ x + key_eps * len(x)) for x in k])
    hashes = [np.array([np.argmax(np.concatenate([r @ x, -(r @ x)])) for x in k]) for r in rounds]
    if (
        whole
    ):  # one more round, in which the first tokens share a bucket, and others are as in the first round
        hashes.append(np.where(np.arange(len(k)) < whole, -1, hashes[0]))
    either = allowed | allowed.T
    for i in range(len(q)):
        seen: set[int] = set()
        for h in hashes:
            seen |= set(last_of_bucket((h == h[i]) & either[i], i, window, 0 if causal else window - 1))
        keys = sorted(seen - {i} or seen)
        y[i] = weighted_mean(unit[keys] @ q[i] * scale, v[keys])
    return y


def routing(
    q: Array,
    k: Array,
    v: Array,
    allowed: Mask,
    centres: Array,
    window: int,
    share_queries: bool,
    causal: bool,
) -> Array:
    """softmax(n(q_i) . n(k_j) / sqrt(D)) over the `window` nearest keys of the query's centroid, n
    LayerNorm."""

    def normed(x: Array) -> Array:
        return (x - x.mean()) / np.sqrt(x.var() + 1e-5)

    q, k = (np.stack([normed(row) for row in x]) for x in (q, k))
    query_cluster, key_cluster = (np.array([np.argmax(centres @ row) for row in x]) for x in (q, k))
    either = allowed | allowed.T
    y = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        keys = last_of_bucket(
            (key_cluster == query_cluster[i]) & either[i], i, window, 0 if causal else window
        )
        if share_queries and len(keys) > 1 and i in keys:
            keys.remove(i)
        y[i] = weighted_mean(k[keys] @ q[i] / np.sqrt(q.shape[1]), v[keys])
    return y


def memory_compressed(
    q: Array,
    k: Array,
    v: Array,
    allowed: Mask,
    kernels: tuple[Array, Array],
    stride: int,
    documents: list[list[int]],
    causal: bool,
) -> Array:
    """k'_s = sum_t k_(s stride + t) W^t in each document, v' likewise, and softmax attention to the slots.

    kernels: W [kernel, D, D] of keys and of values; documents: the slots of the real tokens of each. A causal
    query attends to windows whose last token is at or before it, and to the first token as it is.
    """
    size = len(kernels[0])
    windows: list[tuple[list[int], bool]] = []
    for tokens in documents:
        cut = [tokens[start : start + size] for start in range(0, len(tokens), stride)]
        if causal:
            windows += [(tokens[:1], True)] + [(window, False) for window in cut if len(window) == size]
        else:
            windows += [(window, False) for window in cut]
    slots = []
    for x, kernel in ((k, kernels[0]), (v, kernels[1])):
        slots.append(
            np.stack(
                [
                    x[window[0]] if alone else sum(x[j] @ kernel[t] for t, j in enumerate(window))
                    for window, alone in windows
                ]
            )
        )
    complete = np.array([[allowed[i, window[-1]] for window, _ in windows] for i in range(len(q))])
    return softmax(q, slots[0], slots[1], complete)


def balanced(scores: Array, iterations: int, causal: bool) -> Array:
    """Rows and columns of e^scores divided by their sums in turn; causally by those of the rows so far."""
    n = len(scores)
    s = np.exp(scores) * (np.tril(np.ones((n, n)), -1) if causal else 1)
    for step in range(2 * iterations + 1):
        if step % 2 == 0:
            sums = np.repeat(s.sum(1, keepdims=True), n, 1)
        else:
            sums = s.cumsum(0) if causal else np.repeat(s.sum(0, keepdims=True), n, 0)
        s = np.divide(s, sums, out=np.zeros_like(s), where=sums > 0)
    return s


def sinkhorn(
    q: Array,
    k: Array,
    v: Array,
    allowed: Mask,
    net: list[Array],
    config: Any,
    documents: list[list[int]],
    causal: bool,
) -> Array:
    """A query attends to its own block and to S_ij times block j; or to `cut` sorted blocks alone."""
    y, size = np.zeros((len(q), v.shape[1])), config.block_size
    for tokens in documents:
        blocks = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        scores = np.zeros((len(blocks), len(blocks)))
        for i, block in enumerate(blocks):
            mean = k[tokens[: i * size + 1] if causal else block].mean(0)
            scores[i] = (np.maximum(mean @ net[0] + net[1], 0) @ net[2] + net[3])[: len(blocks)]
        s = balanced(scores / config.temperature, config.iterations, causal)
        for rank, token in enumerate(tokens):
            own = rank // size
            cut = getattr(config, "cut", None)
            keys, values, factors = [], [], []
            for i in [own] if cut is None else range(min(cut, len(blocks))):
                for t in range(size):
                    having = [j for j, block in enumerate(blocks) if t < len(block) and s[i, j] > 0]
                    if having:
                        share, place = s[i, having], [blocks[j][t] for j in having]
                        factors.append(share.sum())
                        keys.append(share @ k[place] / share.sum())
                        values.append(share @ v[place] / share.sum())
            if cut is None:
                local = [j for j in blocks[own] if j <= token or not causal]
                keys, values = [*keys, *k[local]], [*values, *v[local]]
                factors += [1.0] * len(local)
            products = np.stack(keys) @ q[token] / np.sqrt(q.shape[1])
            y[token] = weighted_mean(products, np.stack(values), np.array(factors))
    return y


def chosen_blocks(
    q: Array,
    k: Array,
    v: Array,
    allowed: Mask,
    rule: Any,
    documents: list[list[int]],
    causal: bool,
) -> Array:
    """A query sees its near blocks, and of the other blocks of its document those with the best mean keys.

    rule: `size` of a block of slots, `first` and `local` near blocks, number of `ranked` other blocks.
    """
    y = np.zeros((len(q), v.shape[1]))
    for tokens in documents:
        for i in tokens:
            own, blocks = i // rule.size, {j // rule.size for j in tokens}
            near = {b for b in blocks if b < rule.first or abs(b - own) < rule.local}
            others = [b for b in blocks - near if b < own or not causal]
            means = {b: k[[j for j in tokens if j // rule.size == b]].mean(0) for b in others}
            seen = near | set(sorted(others, key=lambda b: -means[b] @ q[i])[: rule.ranked])
            keys = [j for j in tokens if j // rule.size in seen and allowed[i, j]]
            y[i] = weighted_mean(k[keys] @ q[i] / np.sqrt(q.shape[1]), v[keys])
    return y


def nsa(
    q: Array,
    group: list[Array],
    k: Array,
    v: Array,
    allowed: Mask,
    config: Any,
    weights: tuple[Array, Array],
    gates: list[Array],
    documents: list[list[int]],
    causal: bool,
) -> Array:
    """Three gated sums: over means of whole blocks, tokens of near and best blocks, and the last tokens.

    group: the queries [T, D] of all heads that share k; their softmaxes over the means rank the blocks.
    weights: of keys and values in the means, [size, D] each. gates: [T] each.
    """
    y, size = np.zeros((len(q), v.shape[1])), config.block_size
    for tokens in documents:
        blocks = {b: [j for j in tokens if j // size == b] for b in sorted({j // size for j in tokens})}
        keys, values = (
            {b: np.mean([w[j % size] * x[j] for j in inside], 0) for b, inside in blocks.items()}
            for x, w in zip((k, v), weights)
        )
        for i in tokens:
            own = i // size
            whole = [b for b in blocks if (b + 1) * size <= i + 1 or not causal]
            terms = [{b: np.exp(keys[b] @ x[i] / np.sqrt(q.shape[1])) for b in whole} for x in group]
            importance = {b: sum(each[b] / sum(each.values()) for each in terms) for b in whole}
            near = {b for b in blocks if b == 0 or abs(b - own) < 2}
            others = [b for b in whole if b not in near]
            seen = near | set(sorted(others, key=lambda b: -importance[b])[: config.top_k])
            reads = (
                [(keys[b], values[b]) for b in whole],
                [(k[j], v[j]) for j in tokens if j // size in seen and allowed[i, j]],
                [(k[j], v[j]) for j in tokens if abs(i - j) < config.window and allowed[i, j]],
            )
            for gate, pairs in zip(gates, reads):
                if pairs:
                    scores = np.array([key for key, _ in pairs]) @ q[i] / np.sqrt(q.shape[1])
                    y[i] += gate[i] * weighted_mean(scores, np.array([value for _, value in pairs]))
    return y
