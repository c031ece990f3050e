"""The table between a public config.json and our configuration, read in one direction to load and in the
other to save.

Both sides are plain nested dicts. An `Option` maps an entry of theirs to one or more entries in our tree, by
dotted path; a family handles the rest in two functions (`read_other_options`, `write_other_options`).

The options of rotary positions, bases and extensions to longer texts, have two functions of their own:
`rope_parameters` contains both; older files have `rope_theta` and `rope_scaling` instead.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.ops.layers import ActivationName

Tree = dict[str, Any]


def identity(value: Any) -> Any:
    """Return the value unchanged."""
    return value


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of theirs, `default` if absent; `read` converts its value to ours, `write` back."""

    theirs: str
    default: Any
    ours: tuple[str, ...]
    read: Callable[[Any], Any] = identity
    write: Callable[[Any], Any] = identity


def option(theirs: str, default: Any, *ours: str) -> Option:
    """Return an option with the same value on both sides."""
    return Option(theirs, default, ours)


def choice(theirs: str, default: Any, names: Mapping[Any, Any], *ours: str) -> Option:
    """Return an option with other names of values here: `names` maps their names to ours.

    If several of their names map to one of ours, the first is written.
    """
    back: dict[Any, Any] = {}
    for name, value in names.items():
        # The first of several names is the usual one.
        back.setdefault(value, name)

    def translate(table: Mapping[Any, Any]) -> Callable[[Any], Any]:
        def look_up(value: Any) -> Any:
            if not isinstance(value, Hashable) or value not in table:
                raise unknown(theirs, value, map(str, table))
            return table[value]

        return look_up

    return Option(theirs, default, ours, translate(names), translate(back))


# Their names of activations, with ours.
ACTIVATIONS: dict[str, ActivationName] = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "quick_gelu": "quick_gelu",
    "relu2": "squared_relu",
}


def activation(theirs: str, default: str, *ours: str) -> Option:
    """Return an option that names an activation."""
    return choice(theirs, default, ACTIVATIONS, *ours)


def flag(theirs: str, *ours: str, default: bool = False) -> Option:
    """Return an option for biases: all or none. A partial setting of ours is written as none."""
    return Option(theirs, default, ours, write=lambda bias: bias is True)


def projection_biases(theirs: str) -> Option:
    """Return an option for the biases of an encoder's queries, keys and values; the output keeps its bias."""
    # a list names the projections with a bias
    return Option(
        theirs,
        True,
        ("encoder.attention.bias",),
        lambda biased: True if biased else ["output"],
        lambda bias: bias is True,
    )


# The kinds of labels of a text.
PROBLEM = choice(
    "problem_type",
    None,
    {
        None: None,
        "regression": "regression",
        "single_label_classification": "single_label",
        "multi_label_classification": "multi_label",
    },
    "problem",
)


def with_defaults(options: tuple[Option, ...], defaults: Tree, *without: str) -> tuple[Option, ...]:
    """Return the options of a related family with other defaults, except the options `without`."""
    return tuple(
        dataclasses.replace(option, default=defaults.get(option.theirs, option.default))
        for option in options
        if option.theirs not in without
    )


def set_path(tree: Tree, path: str, value: Any) -> None:
    """Set the entry at a dotted path, which must exist."""
    *parents, last = path.split(".")
    for name in parents:
        tree = tree[name]
    assert last in tree, f"no such option: {path}"
    tree[last] = value


def get_path(tree: Tree, path: str) -> Any:
    """Return the entry at a dotted path; None if there is none."""
    entry: Any = tree
    for name in path.split("."):
        entry = entry.get(name) if isinstance(entry, dict) else None
    return entry


def read_options(options: tuple[Option, ...], hub: Tree, tree: Tree) -> None:
    """Set the options of their configuration `hub` in our `tree`."""
    for option in options:
        value = option.read(hub.get(option.theirs, option.default))
        for path in option.ours:
            set_path(tree, path, value)


def write_options(options: tuple[Option, ...], tree: Tree) -> Tree:
    """Return their configuration for our `tree`, without the options of a missing stack."""
    hub: Tree = {}
    for option in options:
        # An option of both stacks is written from a stack that exists.
        path = next((path for path in option.ours if "." not in path or tree.get(path.split(".")[0])), None)
        if path is not None:
            hub[option.theirs] = option.write(get_path(tree, path))
    return hub


def check_required(required: Mapping[str, Any], hub: Tree) -> None:
    """Raise `InputError` for an option with a value that is not supported."""
    for name, supported in required.items():
        value = hub.get(name, supported)
        # Null means false or 0.
        if value != supported and not (value is None and not supported):
            raise InputError(
                f"config.json: {name} is {quote(value)}, and only {quote(supported)} is supported"
            )


def check_same(name: str, other: str, hub: Tree, why: str = "") -> None:
    """Raise `InputError` if the option `name` is set, and to another value than the option `other`."""
    value, expected = hub.get(name), hub[other]
    if value not in (None, expected):
        raise InputError(f"config.json: {name} is {quote(value)}, expected {other} {expected}{why}")


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the dotted paths at which two trees differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [
            difference
            for key in keys
            for difference in differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if a == b else [f"{path}: {quote(a)} instead of {quote(b)}"]


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
ROPE_KNOWN = (
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
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "dynamic", "longrope")
ROPE_REQUIRED = {"llama3": LLAMA3, "longrope": LONG}
OLD_ROPE_NAMES = {"su": "longrope"}
ROPE_REASONS = {
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
    kind = OLD_ROPE_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ROPE_TYPES:
        reason = f"; {ROPE_REASONS[kind]}" if isinstance(kind, str) and kind in ROPE_REASONS else ""
        raise InputError(
            f"config.json: rope_type is {quote(kind)}, and only {', '.join(ROPE_TYPES)} are supported{reason}"
        )
    for name, value in options.items():
        if name not in ROPE_KNOWN:
            raise unknown("option of rope_parameters", name, ROPE_KNOWN)
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
    if kind in ROPE_REQUIRED:
        missing = [name for name in ROPE_REQUIRED[kind] if name not in options]
        if missing:
            raise InputError(f"config.json: rope_parameters of type {quote(kind)} lack {quote(missing[0])}")
        tree |= {name: options[name] for name in ROPE_REQUIRED[kind]}
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
    if kind not in ROPE_TYPES:
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
