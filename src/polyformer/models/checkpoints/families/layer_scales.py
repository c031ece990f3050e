"""Scores that each layer divides by its number: GPT-2's option `scale_attn_by_inverse_layer_idx`."""

from typing import Any

from polyformer.models.checkpoints.config_mapping import Tree, get_path


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
