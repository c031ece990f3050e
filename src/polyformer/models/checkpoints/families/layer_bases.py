"""Layers of full and of windowed attention with a rotary base for each kind: ModernBERT and Gemma 3."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyformer.attention.positions import RopeConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Tree
from polyformer.models.checkpoints.families.window_layers import KINDS, period
from polyformer.models.checkpoints.rope_options import read_rope

Thetas = Mapping[str, tuple[str, float]]
"""For each kind of layer the name of its base in older files, and the default."""


def read_base(hub: Tree, kind: str, thetas: Thetas) -> float:
    """Return the base of a kind of layers; raises `InputError` for an extension to longer texts."""
    theta, _ = thetas[kind]
    own = (hub["rope_parameters"] or {}).get(kind) or {}
    if not isinstance(own, dict):
        raise InputError(f"config.json: rope_parameters of {kind} is {quote(own)}, expected options")
    rope = {"rope_theta": hub[theta], **own, **(hub["rope_scaling"] or {})}
    read = read_rope({"rope_parameters": rope, "max_position_embeddings": hub["max_position_embeddings"]})
    if read["extension"] is not None:
        raise InputError(
            f"config.json: rope_type of {kind} is {quote(rope['rope_type'])}, and only 'default' is "
            "supported if each kind of layer has its own rotary positions"
        )
    return read["base"]


def set_bases(position: Tree, hub: Tree, kinds: Sequence[str], thetas: Thetas) -> None:
    """Set the base of every layer in our `position`."""
    bases = period([read_base(hub, kind, thetas) for kind in kinds])
    several = {"base": RopeConfig().base, "bases": bases}
    position |= several if len(bases) > 1 else {"base": bases[0], "bases": []}


def write_bases(position: Tree, kinds: Sequence[str]) -> Tree:
    """Return `rope_parameters` of the kinds of layers that a model has."""
    bases: Any = position.get("bases") or [position.get("base")]
    ropes = {
        kind: {"rope_type": "default", "rope_theta": bases[kinds.index(kind) % len(bases)]}
        for kind in KINDS
        if kind in kinds
    }
    return {"rope_parameters": ropes}
