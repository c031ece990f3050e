"""The settings of one call of `attach`: parsed, put into layers, saved in a configuration and read back."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from annotated_types import Le
from torch import Tensor, nn

from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod
from polyformer.attention.patterns.between_sequences import check_within_sequence
from polyformer.attention.patterns.composition import MaskModPattern, as_pattern
from polyformer.attention.positions.base import PositionConfig
from polyformer.core.config import decode
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import EXPRESSION_BYTES, PARTS, check_range
from polyformer.models.attached.attention_layers import Layer, attention_layers, find_rotary, select_layers
from polyformer.models.attached.layer import NAME, Attached, Bound, Rule, has_text, remove_attached
from polyformer.nn.cache import Ada, CachePolicy, ExpectedAttention
from polyformer.nn.memory import MemoryConfig, NoMemoryConfig, SinksConfig

# The field of config.json for attachments, a list of calls.
SAVED = "polyformer_attention"

# The field from which transformers sets the attention of the layers when it loads the model.
IMPLEMENTATION = "attn_implementation"

# The fields of a call in config.json.
FIELDS = {"attention", "layers", "position", "memory", "cache", "functions"}

Which = Iterable[int | str] | int | str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachSettings:
    """The parsed arguments of one call of `attach`."""

    pattern: Pattern | None = None
    layers: tuple[int | str, ...] | None = None
    position: PositionConfig | None = None
    score_mod: ScoreMod | None = None
    memory: SinksConfig | None = None
    cache: CachePolicy | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for config.json; a function is only named, since it cannot be saved."""
        functions: list[Any] = [self.score_mod]
        pattern: str | None = None
        if isinstance(self.pattern, MaskModPattern):
            functions.append(self.pattern.function)
        elif self.pattern is not None:
            pattern = self.pattern.to_text()
        names = [getattr(f, "__name__", type(f).__name__) for f in functions if f is not None]
        return {
            "attention": pattern,
            "layers": None if self.layers is None else list(self.layers),
            "position": None if self.position is None else self.position.to_dict(),
            **{name: rule.to_dict() for name in ("memory", "cache") if (rule := getattr(self, name))},
            **({"functions": names} if names else {}),
        }

    def rules(self, count: int) -> Sequence[Rule | None]:
        """Return the rules for the caches of `count` layers."""
        return [self.memory] * count if self.cache is None else self.cache.for_layers(count)

    @classmethod
    def from_dict(cls, fields: Any) -> "AttachSettings":
        """Return settings from config.json; raises `InputError` for unknown fields, and for functions."""
        if not isinstance(fields, dict) or not fields.keys() <= FIELDS:
            raise InputError(f"{SAVED}: expected the fields that `attach` writes, got {quote(fields)}")
        if functions := fields.get("functions"):
            raise InputError(
                f"{SAVED}: this model was saved with functions attached ({quote(functions)}), "
                f"which cannot be saved in a file; load it with {SAVED}=None and attach them again"
            )
        return parse_settings(**{name: fields.get(name) for name in FIELDS - {"functions"}})


def parse_settings(
    attention: str | Pattern | MaskMod | None = None,
    layers: Which = None,
    position: str | dict[str, Any] | PositionConfig | None = None,
    score_mod: ScoreMod | None = None,
    memory: str | dict[str, Any] | MemoryConfig | None = None,
    cache: str | dict[str, Any] | CachePolicy | None = None,
) -> AttachSettings:
    """Return the parsed arguments of `attach`, checked by type."""
    pattern = None if attention is None else as_pattern(attention, "attention")
    check_within_sequence(pattern, "attention")
    scheme = None
    if position is not None and position != "none":
        scheme = decode(PositionConfig, position, "position")
    if score_mod is not None and not callable(score_mod):
        raise InputError(f"score_mod: expected a function, got {quote(score_mod)}")
    settings = AttachSettings(
        pattern=pattern,
        layers=_parse_layers(layers),
        position=scheme,
        score_mod=score_mod,
        memory=_parse_memory(memory),
        cache=None if cache is None else CachePolicy.from_dict(cache, "cache"),
    )
    _check_bounds(settings)
    return settings


def _parse_layers(layers: Which) -> tuple[int | str, ...] | None:
    """Return numbers and names of layers as a tuple; None for all."""
    if layers is None:
        return None
    if not isinstance(layers, int | str | Iterable) or isinstance(layers, Tensor):
        raise InputError(f"layers: expected numbers or names of layers, got {quote(layers)}")
    layers = (layers,) if isinstance(layers, int | str) else tuple(layers)
    if not layers or not all(isinstance(part, int | str) for part in layers):
        raise InputError(f"layers: expected numbers or names of layers, got {quote(layers)}")
    return layers


def _parse_memory(memory: str | dict[str, Any] | MemoryConfig | None) -> SinksConfig | None:
    """Return a memory without parameters; raises `InputError` for any other."""
    config = None if memory is None else MemoryConfig.from_dict(memory, "memory")
    if config is None or isinstance(config, NoMemoryConfig):
        return None
    if not isinstance(config, SinksConfig):
        raise InputError(
            f"memory: expected 'sinks', the memory that is only a bounded cache, got {quote(config.kind)}; "
            "convert the model for others (`polyformer convert --memory`)"
        )
    return config


def _check_bounds(settings: AttachSettings) -> None:
    """Raise `InputError` for attachments that do not fit a bounded cache."""
    if settings.memory is not None and settings.cache is not None:
        raise InputError("memory and cache: expected one of them, as each bounds the cache; leave one out")
    if settings.memory is None and (settings.cache is None or not settings.cache.drops_keys):
        return
    name = "memory" if settings.cache is None else "cache"
    if any(isinstance(rule, Ada) for rule in settings.rules(1)):
        raise InputError(
            "cache: expected the same number of keys in each head, as transformers masks them by token, got "
            "'ada'; convert the model for it, or attach the policy inside"
        )
    others = {"position": settings.position, "score_mod": settings.score_mod}
    if settings.cache is not None:
        others["attention"] = settings.pattern
    for other, value in others.items():
        if value is not None:
            raise InputError(
                f"{name}: expected no {other}, which reads places of keys that {name} drops; attach only one "
                "of the two"
            )
    if settings.pattern is not None and not has_text(settings.pattern):
        raise InputError(
            "memory: expected a pattern with a text, such as 'Window(64)', got a function, which reads "
            "places of keys that memory drops"
        )


def apply(model: nn.Module, calls: Iterable[AttachSettings], loaded: bool) -> None:
    """Put the settings of calls of `attach` into the layers; the last of several calls for a layer counts.

    loaded: whether the layers have their weights; otherwise they are read at the first call.
    """
    layers, last = attention_layers(model), dict[str, tuple[Layer, AttachSettings, Rule | None]]()
    for call in calls:
        chosen = select_layers(layers, call.layers)
        rules = call.rules(len(chosen))
        last |= {layer.name: (layer, call, rule) for layer, rule in zip(chosen, rules)}
    # Modules are built before any is added, so an error leaves the model unchanged.
    inside = []
    for layer, call, rule in last.values():
        pattern = None if call.pattern is None else call.pattern.layer_pattern(layer.index)
        num_heads = 1 if call.position is None else layer.num_heads
        bound = None if rule is None else _bound(model, layer, rule)
        if bound is not None and loaded and not any(weight.is_meta for weight in layer.module.parameters()):
            bound.read_rotation(layer.module)
        inside.append(
            (layer, Attached(layer.index, pattern, call.position, call.score_mod, num_heads, bound))
        )
    for layer, module in inside:
        remove_attached(layer.module)
        like = next(layer.module.parameters(), None)
        if like is not None:
            module.to(device=like.device, dtype=like.dtype)
        layer.module.add_module(NAME, module)
        if module.bound is not None:
            from polyformer.models.attached.bounded import before_call  # it imports transformers

            module.hook = layer.module.register_forward_pre_hook(before_call, with_kwargs=True)


def _bound(model: nn.Module, layer: Layer, rule: Rule) -> Bound:
    """Return the rule for the cache of a layer; raises `InputError` for a layer that it does not fit."""
    bound = Bound(rule)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise InputError(
            f"{bound.argument}: expected a decoder without an encoder, got {type(model).__name__}; leave out "
            f"{bound.argument}"
        )
    if isinstance(rule, SinksConfig | ExpectedAttention):
        bound.rotary = find_rotary(model, layer, bound.argument)
    return bound


def saved_calls(calls: object) -> list[AttachSettings]:
    """Return the settings of the calls of `attach` in a configuration's field `SAVED`.

    Raises `InputError` for fields that `attach` does not write, and for more calls and layer names than
    `PARTS`.
    """
    if not isinstance(calls, list | tuple):
        raise InputError(f"{SAVED}: expected a list written by `attach`, got {quote(calls)}")
    # The configuration is untrusted.
    check_range(f"{SAVED}: calls", len(calls), Le(PARTS))
    check_range(f"{SAVED}: characters", len(json.dumps(calls, default=str)), Le(EXPRESSION_BYTES))
    settings = [AttachSettings.from_dict(fields) for fields in calls]
    names = sum(len(call.layers or ()) for call in settings)
    check_range(f"{SAVED}: calls and names of layers", len(calls) + names, Le(PARTS))
    return settings


def restore(model: Any) -> None:
    """Attach the settings in a model's configuration while it is built, before its weights are read.

    Raises `InputError` as `saved_calls` does.
    """
    config = model.config
    calls = getattr(config, SAVED, None)
    if calls is None or config._attn_implementation != NAME:
        return
    apply(model, saved_calls(calls), loaded=False)
    setattr(config, IMPLEMENTATION, NAME)
