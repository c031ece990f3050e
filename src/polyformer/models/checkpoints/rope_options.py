"""The options of rotary positions in transformers and in ours: bases, and extensions to longer texts.

`rope_parameters` contains both; older files have `rope_theta` and `rope_scaling` instead.
"""

import math
from typing import Any

from polyformer.core.errors import InputError, quote, unknown
from polyformer.models.checkpoints.config_mapping import Tree

# The options of a configuration that are read here, with their defaults.
ROPE_OPTIONS: Tree = {
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": None,
}

YARN = ("beta_fast", "beta_slow", "attention_factor")
LLAMA3 = ("low_freq_factor", "high_freq_factor")
LONG = ("short_factor", "long_factor")
KNOWN = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *(
        "factor",
        "original_max_position_embeddings",
        *YARN,
        "mscale",
        "mscale_all_dim",
        "truncate",
        *LLAMA3,
        *LONG,
    ),
)
TYPES = ("default", "linear", "yarn", "llama3", "dynamic", "longrope")
REQUIRED = {"llama3": LLAMA3, "longrope": LONG}
OLD_NAMES = {"su": "longrope"}
REASONS = {
    "proportional": "a share of the channels with the frequencies of all is not there",
}


def read_rope(hub: Tree) -> Tree:
    """Return `base` and `extension` of our rotary positions, as trees.

    Raises `InputError` for a type and for options that are not supported, by name.
    """
    options = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    options = {name: value for name, value in options.items() if value is not None}
    options.setdefault("rope_theta", hub.get("rope_theta", ROPE_OPTIONS["rope_theta"]))
    # Older files write `type`.
    kind = options.get("rope_type", options.get("type", "default"))
    kind = OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in TYPES:
        reason = f"; {REASONS[kind]}" if isinstance(kind, str) and kind in REASONS else ""
        raise InputError(
            f"config.json: rope_type is {quote(kind)}, and only {', '.join(TYPES)} are supported{reason}"
        )
    for name, value in options.items():
        if name not in KNOWN:
            raise unknown("option of rope_parameters", name, KNOWN)
        if name in LONG:
            for number in value if isinstance(value, list) else (value,):
                _check_number(name, number)
        elif name not in ("rope_type", "type", "truncate"):
            _check_number(name, value)
    if options.get("partial_rotary_factor", 1) != 1:
        raise InputError("config.json: partial_rotary_factor is supported as 1 only, all channels of a head")
    return {"base": options["rope_theta"], "extension": _extension(kind, options, hub)}


def _extension(kind: str, options: Tree, hub: Tree) -> Tree | None:
    """Return our extension for theirs."""
    if kind == "default":
        return None
    positions = hub["max_position_embeddings"]
    # newer files have it in rope_parameters, Phi's next to them
    trained = options.get("original_max_position_embeddings", positions)
    trained = hub.get("original_max_position_embeddings") or trained
    factor = options.get("factor")
    # YaRN's and LongRoPE's factor follows from the two lengths.
    if kind in ("yarn", "longrope") and factor is None and trained:
        factor = max(positions / trained, 1.0)
    if factor is None:
        raise InputError(f"config.json: rope_parameters of type {quote(kind)} lack 'factor'")
    if kind == "linear":
        return {"kind": "interpolation", "factor": factor}
    tree = {"kind": kind, "factor": factor, "original_max_positions": trained}
    if kind == "dynamic":  # the length of training is the number of positions there
        return {**tree, "original_max_positions": positions}
    if kind in REQUIRED:
        missing = [name for name in REQUIRED[kind] if name not in options]
        if missing:
            raise InputError(f"config.json: rope_parameters of type {quote(kind)} lack {quote(missing[0])}")
        tree |= {name: options[name] for name in REQUIRED[kind]}
        if kind == "longrope" and "attention_factor" in options:
            tree["attention_factor"] = options["attention_factor"]
        return tree
    return tree | _yarn(options, factor)


def _yarn(options: Tree, factor: float) -> Tree:
    """Return our options of YaRN for theirs, besides the factor."""
    tree: Tree = {"truncate": options.get("truncate", True)}
    if not isinstance(tree["truncate"], bool):
        raise InputError(f"config.json: truncate is {quote(tree['truncate'])}, expected true or false")
    tree |= {name: options[name] for name in YARN if options.get(name)}
    # DeepSeek's files give both parts of the temperature instead of their quotient.
    top, bottom = options.get("mscale"), options.get("mscale_all_dim")
    if "attention_factor" not in tree and top and bottom:
        tree["attention_factor"] = temperature(factor, top) / temperature(factor, bottom)
    return tree


def temperature(factor: float, scale: float) -> float:
    """Return the factor of YaRN on the rotated channels."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"config.json: {name} of rope_parameters is {quote(value)}, expected a number")


def write_rope(position: Tree) -> Tree:
    """Return `rope_parameters` for our `position`; an extension without a name in transformers is omitted."""
    options: Tree = {"rope_type": "default", "rope_theta": position.get("base")}
    extension = position.get("extension") or {}
    kind = "linear" if extension.get("kind") == "interpolation" else extension.get("kind")
    if kind not in TYPES:
        return {"rope_parameters": options}
    options |= {"rope_type": kind, "factor": extension["factor"]}
    if kind != "linear":
        options["original_max_position_embeddings"] = extension["original_max_positions"]
    for name in (*YARN, *LLAMA3, *LONG):
        if extension.get(name) is not None:
            options[name] = list(extension[name]) if name in LONG else extension[name]
    if extension.get("truncate") is False:
        options["truncate"] = False
    return {"rope_parameters": options}
