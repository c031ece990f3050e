"""Our attention in the layers of transformers' own models: `attach`, `detach`, and `explain` to show them.

Patterns, position schemes and score functions are attached to the layers of any model of transformers that
dispatches. `polyformer.explain` returns the plan of a call of `attend`, the layers of a transformers model,
or the keys in a state.
"""

import dataclasses
from typing import Any, TypeVar, overload

from torch import Tensor, nn

from polyformer.attention.functional import attend as calls
from polyformer.attention.functional.plan import Plan
from polyformer.attention.mechanisms.base import Mechanism
from polyformer.attention.mechanisms.forgetting import Forgetting
from polyformer.attention.mechanisms.pair_weights import CachedAttention
from polyformer.attention.mechanisms.recurrence.base import Recurrence
from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod
from polyformer.attention.positions.base import PositionConfig
from polyformer.core.errors import InputError, quote
from polyformer.core.int4_cache import Int4Cache
from polyformer.core.kv_cache import Int8Cache, PairCache
from polyformer.core.modules import names_wrong_types
from polyformer.core.state import State
from polyformer.models.attached.attach_settings import IMPLEMENTATION, SAVED, Which, apply, parse_settings
from polyformer.models.attached.attention_layers import Layer, attention_layers
from polyformer.models.attached.layer import NAME, attached, remove_attached
from polyformer.models.config import ModelConfig
from polyformer.models.outputs import ModelState
from polyformer.nn.cache import CachePolicy, CompressedCache
from polyformer.nn.memory import MemoryConfig

Model = TypeVar("Model", bound=nn.Module)


@names_wrong_types
def attach(
    model: Model,
    attention: str | Pattern | MaskMod | None = None,
    *,
    layers: Which = None,
    position: str | dict[str, Any] | PositionConfig | None = None,
    score_mod: ScoreMod | None = None,
    memory: str | dict[str, Any] | MemoryConfig | None = None,
    cache: str | dict[str, Any] | CachePolicy | None = None,
) -> Model:
    """Attach a pattern, a position scheme, a `score_mod` or a bounded cache to the self-attention layers of a
    transformers model.

    All layers then run `attend`. The model's own mask still applies: the future, padding, other documents,
    and keys outside its own windows remain hidden. A later call replaces earlier attachments.

    Args:
        model: any model of transformers whose layers dispatch through its `AttentionInterface`.
        attention: a pattern, its text such as "Window(512) | Global(1)", or a `mask_mod`; `PerLayer` and
            `PerHead` have a pattern for each layer or head. None for all keys of the model's own mask.
        layers: numbers of layers in their stack, or (parts of) names such as "encoder" or "text_model.*.3".
        position: a scheme that is added to scores, "alibi" or "t5(num_buckets=32)"; it starts from 0.
        score_mod: FlexAttention's `score_mod(score, b, h, q_idx, kv_idx)`, on scaled scores.
        memory: "sinks(first=4, length=508)", for decoders with rotary positions: layers attend to the first
            and the latest tokens, with positions counted inside the cache, and `generate` keeps only these.
        cache: the policy of the keys that each head keeps, "snapkv(budget=1024)", "h2o(ratio=0.5)"; or
            "int8", which keeps all keys as integers.

    Returns:
        The model itself. `save_pretrained` saves patterns and schemes in config.json, but no functions;
        `from_pretrained` restores them if `polyformer.models.transformers_attention` is imported.

    Raises:
        InputError: a model that does not dispatch, unknown layers, arguments that cannot be parsed.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"attach: expected a model of transformers first, got {quote(model)}")
    call = parse_settings(attention, layers, position, score_mod, memory, cache)
    dispatching = attention_layers(model)
    if not dispatching:
        raise without_dispatch(model)
    if (memory or cache) and any(getattr(layer.module, "indexer", None) for layer in dispatching):
        raise InputError(
            f"{'memory' if memory else 'cache'}: indexers of this model choose keys of the whole text, and a "
            "bounded cache drops some; leave it out"
        )
    import polyformer.models.attached.attention  # only here: it imports transformers

    apply(model, [call], loaded=True)
    config: Any = model.config
    # A call for all layers replaces all earlier calls.
    earlier = [] if call.layers is None else getattr(config, SAVED, None) or []
    _run_ours(model)
    setattr(config, SAVED, [*earlier, call.to_dict()])
    return model


def without_dispatch(model: nn.Module) -> InputError:
    """Return the error for a model that does not dispatch, with the way that is left for its family."""
    from polyformer.models.checkpoints import FAMILIES
    from polyformer.models.checkpoints.load import REFUSED

    name = getattr(getattr(model, "config", None), "model_type", None)
    way = "expected one of its models that does"
    if isinstance(name, str) and name in list(FAMILIES):
        way = (
            f"convert it: polyformer.from_pretrained(FOLDER, attention=...) reads {quote(name)} as a model "
            "of this library, in Python also polyformer.models.checkpoints.from_transformers(model)"
        )
    elif isinstance(name, str) and name in REFUSED:
        way = f"it cannot be converted either, since {quote(name)} needs {REFUSED[name]}"
    return InputError(
        f"attach: no layer of {type(model).__name__} asks transformers' AttentionInterface what to run; {way}"
    )


def _run_ours(model: Any) -> None:
    """Make all layers run `attend`, and record it in config.json."""
    config = model.config
    before = config._attn_implementation
    if before != NAME:
        model.set_attn_implementation(NAME)
        # Models that do not dispatch ignore the call.
        if config._attn_implementation != NAME:
            raise InputError(f"attach: {type(model).__name__} does not let its attention be set")
        model._polyformer_before = before
    setattr(config, IMPLEMENTATION, NAME)


def detach(model: Model) -> Model:
    """Remove the attachments of `attach`; the layers run their previous attention (sdpa, for a loaded model).

    Raises `InputError` for a model without attachments.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"detach: expected a model of transformers, got {quote(model)}")
    config: Any = getattr(model, "config", None)
    layers = [layer for layer in attention_layers(model) if attached(layer.module) is not None]
    if not layers and getattr(config, "_attn_implementation", None) != NAME:
        raise InputError(f"detach: nothing is attached to this {type(model).__name__}")
    for layer in layers:
        remove_attached(layer.module)
    for field in (SAVED, IMPLEMENTATION):
        if hasattr(config, field):
            delattr(config, field)
    before = getattr(model, "_polyformer_before", None)
    anything: Any = model
    anything.set_attn_implementation(before or "sdpa")
    return model


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
        q: [B, H, Tq, D], with the other arguments of `attend`; or only a model; or only the state of a
            decoder after some tokens.
    """
    if isinstance(q, ModelState):
        caches = {f"layer {i + 1}": layer.self_attention for i, layer in enumerate(q.layers)}
        return Explanation(None, {name: _kept(cache) for name, cache in caches.items()})
    if not isinstance(q, nn.Module):
        return calls.explain(q, *inputs, **options)
    if isinstance(getattr(q, "config", None), ModelConfig):
        parts = {name: part for name, part in q.named_modules() if isinstance(part, Mechanism)}
        return Explanation(None, {name: _mechanism_line(part) for name, part in parts.items()})
    layers = attention_layers(q)
    if not layers:
        raise InputError(
            f"explain: no layer of {type(q).__name__} asks transformers' AttentionInterface what to run"
        )
    implementation = str(getattr(getattr(q, "config", None), "_attn_implementation", None))
    return Explanation(implementation, {layer.name: _line(layer, implementation) for layer in layers})


def _mechanism_line(mechanism: Mechanism) -> str:
    """Return a line with what computes a mechanism of this library."""
    kind = getattr(mechanism, "config").kind  # noqa: B009 - every mechanism of a model has a configuration
    if isinstance(mechanism, Recurrence | Forgetting):
        return f"{kind}, by {mechanism.explained()}"
    if isinstance(mechanism, CachedAttention):
        return f"{kind}, planned for each call (explain(q, k, v, ...))"
    return f"{kind}, by its own code"


def _kept(cache: State | None) -> str:
    """Return a line with the keys in a cache."""
    if isinstance(cache, PairCache):
        kinds = {Int8Cache: " in int8", Int4Cache: " in int4"}
        return f"{cache.held:,} tokens" + kinds.get(type(cache), "")
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
