"""`polyformer.explain`: the plan of a call of `attend`, the layers of a transformers model, or the keys in a
state."""

import dataclasses
from typing import Any, overload

from torch import Tensor, nn

from polyformer.attention.functional import attend as calls
from polyformer.attention.functional.plan import Plan
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import Int8Cache, PairCache
from polyformer.core.state import State
from polyformer.models.attached.attention_layers import Layer, attention_layers
from polyformer.models.attached.layer import NAME, attached
from polyformer.models.outputs import ModelState
from polyformer.nn.cache import CompressedCache


@dataclasses.dataclass(frozen=True, eq=False)
class Explanation:
    """The attention or the cache of each layer of a model, `lines` by the layer's name, to be printed."""

    implementation: str | None
    lines: dict[str, str]

    def __str__(self) -> str:
        """Return a line for each layer; successive layers with the same attention share a line."""
        rows: list[tuple[list[str], str]] = []
        for name, line in self.lines.items():
            if rows and rows[-1][1] == line:
                rows[-1][0].append(name)
            else:
                rows.append(([name], line))
        spans = [names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" for names, _ in rows]
        width = max(map(len, spans))
        return "\n".join(f"{span:<{width}}  {line}" for span, (_, line) in zip(spans, rows))


@overload
def explain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Plan: ...
@overload
def explain(q: nn.Module | ModelState) -> Explanation: ...
def explain(q: Any, *inputs: Any, **options: Any) -> Any:
    """Return the plan by which `attend` would run a call; for a model, the attention of each layer; for a
    state, the keys that each layer's cache keeps.

    Args:
        q: [B, H, Tq, D], with the other arguments of `attend`; or only a model of transformers; or only the
            state of a decoder after some tokens.
    """
    if isinstance(q, ModelState):
        caches = {f"layer {i + 1}": layer.self_attention for i, layer in enumerate(q.layers)}
        return Explanation(None, {name: _kept(cache) for name, cache in caches.items()})
    if not isinstance(q, nn.Module):
        return calls.explain(q, *inputs, **options)
    layers = attention_layers(q)
    if not layers:
        raise InputError(
            f"explain: no layer of {type(q).__name__} asks transformers' AttentionInterface what to run"
        )
    implementation = str(getattr(getattr(q, "config", None), "_attn_implementation", None))
    return Explanation(implementation, {layer.name: _line(layer, implementation) for layer in layers})


def _kept(cache: State | None) -> str:
    """Return a line with the keys in a cache."""
    if isinstance(cache, PairCache):
        return f"{cache.held:,} tokens" + (" in int8" if isinstance(cache, Int8Cache) else "")
    return str(cache) if isinstance(cache, CompressedCache) else type(cache).__name__


def _line(layer: Layer, whole: str) -> str:
    """Return a line with the attention of one layer."""
    config = getattr(layer.module, "config", None)
    # Parts of a model may run different attention.
    implementation = getattr(config, "_attn_implementation", whole)
    if implementation != NAME:
        return f"{implementation}, its own mask"
    inside = attached(layer.module)
    kind = "cross-attention, its own mask" if layer.cross else "its own mask"
    return f"{NAME}: {kind}" + ("" if inside is None else f" and {inside.extra_repr()}")
