"""Layers that differ in windows, in rotary bases or in the scale of scores: the lists of families, and ours.

Windows: Mistral, Qwen2, GPT-Neo and many others. Bases: ModernBERT and Gemma 3. Scales: GPT-2's option
`scale_attn_by_inverse_layer_idx`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import PerLayer, Window
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Full
from polyformer.attention.positions import RopeConfig
from polyformer.core.errors import InputError, quote, unknown
from polyformer.models.checkpoints.config_mapping import Tree, get_path, read_rope

T = TypeVar("T")

# The kinds of layers in `layer_types`.
FULL, LOCAL = KINDS = "full_attention", "sliding_attention"

# The kinds of feed-forwards in `mlp_layer_types`: a dense one, and experts.
DENSE, SPARSE = FEEDFORWARDS = "dense", "sparse"


def check_kinds(name: str, kinds: Sequence[str], known: Sequence[str], count: str, hub: Tree) -> None:
    """Raise `InputError` unless an option lists one of the `known` kinds for each layer.

    count: the option with the number of layers.
    """
    for kind in kinds:
        if kind not in known:
            raise unknown(name, str(kind), known)
    if len(kinds) != hub[count]:
        raise InputError(f"config.json: {name} has {len(kinds)} layers, and {count} {hub[count]}")


def feedforward_kinds(hub: Tree) -> list[str]:
    """Return the kind of each layer's feed-forward: of their list, or dense ones in the first layers.

    Raises `InputError` for unknown kinds and a wrong number.
    """
    kinds = hub["mlp_layer_types"]
    if kinds is None:
        first = hub["first_k_dense_replace"]
        return [DENSE if layer < first else SPARSE for layer in range(hub["num_hidden_layers"])]
    check_kinds("mlp_layer_types", kinds, FEEDFORWARDS, "num_hidden_layers", hub)
    return kinds


def set_windows(tree: Tree, windows: list[int | None]) -> None:
    """Set a decoder's pattern: each layer's window in tokens, including the query's own, or None."""
    set_patterns(tree, "decoder", [None if tokens is None else Window(tokens - 1, 0) for tokens in windows])


def get_windows(tree: Tree) -> list[int | None] | None:
    """Return the window of each layer of a decoder in tokens; None without softmax attention."""
    windows = get_patterns(tree, "decoder")
    if windows is None:
        return None
    return [None if window is None else window.before + 1 for window in windows]


def set_patterns(tree: Tree, side: str, windows: Sequence[Window | None]) -> None:
    """Set a stack's pattern: each layer's window, or None for the whole text."""
    # The shortest form, as in presets, so that equal models compare equal.
    parts: list[Pattern] = [Full() if window is None else window for window in period(windows)]
    pattern = parts[0] if len(parts) == 1 else PerLayer(tuple(parts))
    config = SoftmaxConfig(pattern=None if parts == [Full()] else pattern)
    tree[side]["attention"]["mechanism"]["pattern"] = config.to_dict()["pattern"]


def get_patterns(tree: Tree, side: str) -> list[Window | None] | None:
    """Return the window of each layer of a stack, or None; None for all without softmax attention."""
    mechanism: Any = get_path(tree, f"{side}.attention.mechanism") or {}
    if mechanism.get("kind") != "softmax":
        return None
    config = SoftmaxConfig.from_dict(mechanism)
    patterns = [config.for_layer(layer).pattern for layer in range(tree[side]["num_hidden_layers"])]
    return [pattern if isinstance(pattern, Window) else None for pattern in patterns]


def in_turn(name: str, parts: Sequence[Tree]) -> Tree:
    """Return the parts of all layers as one: the only one, or an `alternate` with the list `name`."""
    parts = period(parts)
    return parts[0] if len(parts) == 1 else {"kind": "alternate", name: parts}


def of_layers(name: str, tree: Tree, count: int) -> list[Tree]:
    """Return the part of each of `count` layers, the inverse of `in_turn`."""
    parts = tree[name] if tree["kind"] == "alternate" else [tree]
    return [parts[layer % len(parts)] for layer in range(count)]


def period(values: Sequence[T]) -> list[T]:
    """Return the shortest beginning of a list that gives the whole list by repetition."""
    lengths = range(1, len(values) + 1)
    length = next(n for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))
    return list(values[:length])


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


def divide_by_layer(tree: Tree) -> None:
    """Divide the scores of layer i (from 0) by i + 1, with a mechanism for each layer."""
    attention = tree["decoder"]["attention"]
    mechanism = attention["mechanism"]
    # None stands for 1 / sqrt(D).
    scale = mechanism["scale"] or _scale(tree)
    layers = range(tree["decoder"]["num_hidden_layers"])
    attention["mechanism"] = {
        "kind": "alternate",
        "mechanisms": [{**mechanism, "scale": scale / (i + 1)} for i in layers],
    }


def write_scales(tree: Tree) -> Tree:
    """Return the options of a `tree` whose scores may be divided by the layer number."""
    mechanism = get_path(tree, "decoder.attention.mechanism") or {}
    if mechanism.get("kind") != "alternate":
        return {"scale_attn_by_inverse_layer_idx": False}
    first: dict[str, Any] = mechanism["mechanisms"][0]
    return {
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": first.get("scale") == _scale(tree),
        # the option's path leads to no single mechanism
        "attn_pdrop": first.get("dropout"),
    }


def _scale(tree: Tree) -> float:
    """Return 1 / sqrt(D)."""
    return (tree["hidden_size"] // tree["decoder"]["attention"]["num_attention_heads"]) ** -0.5
