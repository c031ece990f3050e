"""Pages of the explorer made of numbers that are known, without a model."""

from typing import Any

import numpy as np
from playwright.sync_api import Page

from polyformer.cli.plots.explorer.calls import Buffers, distance_edges
from polyformer.cli.plots.explorer.explore import write

HOSTILE = [
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "\u202ereversed",
    "\x00\x07\x1b",
    "\U0001f600\U00020000",
    "\u0301\u0300combining",
    "long" * 1250,
    "<!--",
    "&lt;b&gt;",
    "\ud800",
    "",
    " ",
]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "slept", "until", "noon", "then", "ran", "home", "."]
WIDTH = 16


def page(*runs: dict[str, Any], buffers: Buffers, title: str = "A page of known numbers") -> str:
    """The page of the runs."""
    return write({"version": 1, "title": title, "subtitle": "made by a test", "runs": list(runs)}, buffers)


def run(
    tokens: dict[str, list[str]], sites: list[dict[str, Any]], name: str = "known", **more: Any
) -> dict[str, Any]:
    """One run of a page."""
    facts = {"prompt": None, "pixels": None, "before": [], "stored": [], "notes": ["made of random numbers"]}
    return {"name": name, "model": "no model", "tokens": tokens, "sites": sites, **facts, **more}


def text(length: int) -> list[str]:
    """Tokens that read as words."""
    return [WORDS[i * i % len(WORDS)] for i in range(length)]


class Attention:
    """Scores of random q [H, T, D] and k [Hkv, T, D], over `window` keys of the past (0: all of it)."""

    def __init__(
        self,
        seed: int,
        heads: int,
        length: int,
        window: int = 0,
        *,
        key_heads: int = 0,
        position: bool = False,
    ):
        random = np.random.default_rng(seed)
        self.heads, self.length, self.window = heads, length, window
        self.q = random.normal(size=(heads, length, WIDTH)).astype(np.float32)
        self.k = random.normal(size=(key_heads or heads, length, WIDTH)).astype(np.float32)
        self.scale, self.first = 0.4, -2
        vectors = random.normal(size=(2, heads, 9, WIDTH)).astype(np.float32)
        content = random.normal(size=(heads, length, WIDTH)).astype(np.float32)
        bias = np.linspace(1, -1, 9, dtype=np.float32)[None].repeat(heads, 0)
        tables = {"position_keys": vectors[0], "content": content, "position_queries": vectors[1, :1]}
        self.tables = {"bias": bias, **tables} if position else {}

    def scores(self) -> np.ndarray:
        """[H, Tq, Tk], as the contract says: the sum of all terms."""
        scores = self.q @ self.k.repeat(self.heads // len(self.k), 0).transpose(0, 2, 1) * self.scale
        at = np.arange(self.length)
        entries = np.clip(at[:, None] - at - self.first, 0, 8)
        if self.tables:
            scores = scores + sum(self.terms(entries))
        return scores

    def terms(self, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[H, Tq, Tk] each, for the entries of the tables: what queries, keys and nothing meet there."""
        tables = self.tables
        by_query = np.einsum("hid,hijd->hij", tables["content"], tables["position_keys"][:, entries])
        by_key = np.einsum("hjd,hijd->hij", self.k, tables["position_queries"][:, entries])
        return by_query * self.scale, by_key * self.scale, tables["bias"][:, entries]

    def lse_and_weights(self) -> tuple[np.ndarray, np.ndarray]:
        """[H, T] and [H, T, T]."""
        at = np.arange(self.length)
        distance = at[:, None] - at
        allowed = (distance >= 0) & (distance < (self.window or self.length))
        exponentials = np.where(allowed, np.exp(self.scores()), 0)
        total = exponentials.sum(-1)
        return np.log(total), exponentials / total[..., None]

    def site(self, layer: int, buffers: Buffers, dtype: str = "float32", **more: Any) -> dict[str, Any]:
        """The site of a page."""
        lse, weights = self.lse_and_weights()
        starts = np.maximum(np.arange(self.length) - (self.window or self.length) + 1, 0)
        vectors = {name: buffers.add(array.astype(dtype)) for name, array in (("q", self.q), ("k", self.k))}
        tables = {"bias": None, "projected": None}
        tables |= {name: buffers.add(array) for name, array in self.tables.items()}
        detail = {
            **{"kind": "pairs", **vectors, "q_scales": None, "k_scales": None, "scale": self.scale},
            **{"lse": buffers.add(lse.astype(np.float32)), **tables, "first": self.first},
            "changes": [],
        }
        allowed = intervals(starts, buffers)
        return site(layer, weights, buffers, detail=detail, **allowed, **more)


def intervals(starts: np.ndarray, buffers: Buffers) -> dict[str, Any]:
    """From `starts` up to each query itself."""
    stops = np.arange(1, len(starts) + 1)
    arrays = {"offsets": np.arange(len(starts) + 1), "starts": starts, "stops": stops}
    lists = {name: buffers.add(array.astype(np.int32)) for name, array in arrays.items()}
    return {"allowed": [lists], "allowed_of_head": [0] * 64}


def stored(weights: np.ndarray, buffers: Buffers) -> dict[str, Any]:
    """Weights as they are, of a mechanism that is no softmax."""
    return {"kind": "weights", "values": buffers.add(weights.astype(np.float16))}


def site(layer: int, weights: np.ndarray, buffers: Buffers, **more: Any) -> dict[str, Any]:
    """A site whose thumbnails and distances are those of the weights [H, Tq, Tk]; `more` replaces parts."""
    heads, queries, keys = weights.shape
    rows, columns = min(queries, 48), min(keys, 48)
    cells = np.zeros((heads, rows, columns))
    at = np.arange(queries)[:, None] * rows // queries, np.arange(keys)[None] * columns // keys
    for head in range(heads):
        np.maximum.at(cells[head], at, np.abs(weights[head]))
    edges = distance_edges(max(queries, keys))
    bins = np.searchsorted(edges, np.abs(np.arange(queries)[:, None] - np.arange(keys)), side="right") - 1
    mass = np.stack([np.bincount(bins.ravel(), np.abs(head).ravel(), len(edges)) for head in weights])
    facts = {
        **{"name": f"decoder layer {layer + 1}, self-attention", "stack": "decoder", "kind": "self"},
        **{"layer": layer, "mechanism": "softmax", "pattern": None, "heads": heads},
        **{"queries": "decoder", "keys": "decoder", "distance_edges": edges, "allowed": None},
        **{"detail": None, "marks": [], "memory": 0, "slots": None, "lookups": []},
        "thumbnails": buffers.add((np.sqrt(cells.clip(0, 1)) * 255).round().astype(np.uint8)),
        "distance": buffers.add((mass / mass.sum(1, keepdims=True)).astype(np.float32)),
    }
    return facts | more


def long_site(layer: int, length: int, window: int, buffers: Buffers) -> dict[str, Any]:
    """4 heads of width 32 over a window of a long text, q and k in int8; no weights are computed here."""
    random = np.random.default_rng(layer)
    vectors = random.integers(-127, 128, size=(2, 4, length, 32)).astype(np.int8)
    scales = np.full((2, 4, length), 0.01, np.float32)
    names = {"q": vectors[0], "k": vectors[1], "q_scales": scales[0], "k_scales": scales[1]}
    detail = {
        **{
            "kind": "pairs",
            "scale": 0.5,
            "lse": buffers.add(np.full((4, length), np.log(window), np.float32)),
        },
        **{name: buffers.add(array) for name, array in names.items()},
        **{"bias": None, "first": 0, "projected": None, "changes": []},
    }
    starts = np.maximum(np.arange(length) - window + 1, 0)
    edges = distance_edges(length)
    band = np.eye(48, dtype=np.uint8) * 40
    return {
        **{"name": f"decoder layer {layer + 1}, self-attention", "stack": "decoder", "kind": "self"},
        **{"layer": layer, "mechanism": "softmax", "pattern": f"Window({window})", "heads": 4},
        **{"queries": "decoder", "keys": "decoder", "thumbnails": buffers.add(np.stack([band] * 4))},
        "distance": buffers.add(np.full((4, len(edges)), 1 / len(edges), np.float32)),
        **{"distance_edges": edges, **intervals(starts, buffers), "detail": detail, "marks": [], "memory": 0},
        **{"slots": None, "lookups": []},
    }


def place(tab: Page) -> str:
    """Return the hash of a tab's address, read in the page: `tab.url` follows only after a message."""
    return str(tab.evaluate("location.hash"))
