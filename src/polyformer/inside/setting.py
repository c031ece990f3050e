"""What one call of `attach` says: read, put into layers, kept in a configuration and read back."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn

from polyformer.core.config import decode
from polyformer.core.errors import InputError, quote
from polyformer.inside.find import attention_layers, chosen
from polyformer.inside.layer import NAME, Attached
from polyformer.patterns.base import MaskMod, Pattern, ScoreMod
from polyformer.patterns.user_defined import MaskModPattern, as_pattern
from polyformer.position.base import PositionConfig

SAVED = "polyformer_attention"
"""The field of config.json that holds what was attached, a list of calls."""

IMPLEMENTATION = "attn_implementation"
"""The field by which transformers itself knows, when it loads the model, what its layers run."""

Which = Iterable[int | str] | int | str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One call of `attach`, its arguments read."""

    pattern: Pattern | None = None
    layers: tuple[int | str, ...] | None = None
    position: PositionConfig | None = None
    score_mod: ScoreMod | None = None

    def to_dict(self) -> dict[str, Any]:
        """As config.json holds it; a function is named, for it cannot be held."""
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
            **({"functions": names} if names else {}),
        }

    @classmethod
    def from_dict(cls, fields: Any) -> "Setting":
        """Read back; raises `InputError` for what this module has not written, and for functions."""
        if not isinstance(fields, dict) or not fields.keys() <= {
            "attention",
            "layers",
            "position",
            "functions",
        }:
            raise InputError(f"{SAVED}: expected what `attach` writes, got {quote(fields)}")
        if fields.get("functions"):
            raise InputError(
                f"{SAVED}: this model was saved with functions attached ({', '.join(fields['functions'])}), "
                f"which a file cannot hold; load it with {SAVED}=None and attach them again"
            )
        return setting(fields.get("attention"), fields.get("layers"), fields.get("position"), None)


def setting(
    attention: str | Pattern | MaskMod | None,
    layers: Which,
    position: str | dict[str, Any] | PositionConfig | None,
    score_mod: ScoreMod | None,
) -> Setting:
    """The arguments of `attach`, read and checked by type."""
    if isinstance(attention, str):
        attention = Pattern.from_text(attention)
    pattern = None if attention is None else as_pattern(attention, "attention")
    scheme = None
    if position is not None and position != "none":
        scheme = decode(PositionConfig, position, "position")
    if score_mod is not None and not callable(score_mod):
        raise InputError(f"score_mod: expected a function, got {quote(score_mod)}")
    if layers is not None:
        layers = (layers,) if isinstance(layers, int | str) else tuple(layers)
        if not layers or not all(isinstance(part, int | str) for part in layers):
            raise InputError(f"layers: expected numbers or names of layers, got {quote(layers)}")
    return Setting(pattern=pattern, layers=layers, position=scheme, score_mod=score_mod)


def apply(model: nn.Module, call: Setting) -> None:
    """Puts what a call of `attach` says into the layers."""
    inside = []
    for layer in chosen(attention_layers(model), call.layers):
        pattern = None if call.pattern is None else call.pattern.layer_pattern(layer.index)
        num_heads = 1 if call.position is None else layer.num_heads
        inside.append((layer, Attached(layer.index, pattern, call.position, call.score_mod, num_heads)))
    for layer, module in inside:
        like = next(layer.module.parameters(), None)
        if like is not None:
            module.to(device=like.device, dtype=like.dtype)
        layer.module.add_module(NAME, module)


def restore(model: Any) -> None:
    """Attaches what the configuration of a model says, as it is built: before its weights are read."""
    config = model.config
    calls = getattr(config, SAVED, None)
    if calls is None or config._attn_implementation != NAME:
        return
    for fields in calls:
        apply(model, Setting.from_dict(fields))
    setattr(config, IMPLEMENTATION, NAME)
