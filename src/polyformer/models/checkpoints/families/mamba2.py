"""Mamba-2: decoders of state space layers, one mixer per layer. Dao and Gu 2024.

Their names: x, B and C are values, keys and queries; z is the gate of the output, dt the step. Files have no
limit of positions, and `use_bias` is supported as false only, as in all published models. With limits of the
step, transformers' single steps with a cache leave them out; here all passes are the same.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Tree, option
from polyformer.models.checkpoints.families.common import LAST_TOKEN
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter, Interleaved, Taps
from polyformer.models.checkpoints.values import options, special
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import LanguageModelConfig

MECHANISM = "decoder.attention.mechanism"
LAYER = "decoder.layers.{i}.attention"
INFINITY = {"__float__": "Infinity"}
"""Infinity in files of transformers."""


def channels(config: ModelConfig) -> tuple[int, int]:
    """Return the channels of values, and of keys or queries, of a layer."""
    heads = mixer(config)["heads"]
    return heads["value_heads"] * heads["value_size"], heads["key_heads"] * heads["key_size"]


def mixer(config: ModelConfig) -> Tree:
    """Return the options of the first state space layer of a model."""
    assert config.decoder is not None
    parts = map(config.decoder.attention.mechanism.for_layer, range(config.decoder.num_hidden_layers))
    return next(part.to_dict() for part in parts if part.kind == "ssd")


def projected(config: ModelConfig) -> tuple[int, Sequence[int]]:
    """Return the rows of z, x, B, C and dt in their matrix, in one group."""
    values, keys = channels(config)
    return 1, (values, values, keys, keys, mixer(config)["heads"]["value_heads"])


@dataclasses.dataclass(frozen=True)
class ReversedTaps(Taps):
    """The convolution of x, B and C, or its bias; ours is of C, B and x."""

    sizes: tuple[int, ...] = ()

    def for_config(self, config: ModelConfig) -> "ReversedTaps":
        """Return the converter for the channels of a model."""
        values, keys = channels(config)
        return dataclasses.replace(self, sizes=(values, keys, keys))

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Reverse the order of x, B and C."""
        ours = torch.cat(theirs.split(self.sizes)[::-1])
        return super().split(ours) if ours.dim() == 3 else (ours,)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Reverse the order of C, B and x."""
        theirs = super().join(ours) if ours[0].dim() == 2 else ours[0]
        return torch.cat(theirs.split(self.sizes[::-1])[::-1])


def mixer_keys(theirs: str) -> dict[str, str | Converter]:
    """Return the tensors of a state space layer with the path `theirs` in files."""
    inputs = tuple(f"{LAYER}.{name}" for name in ("output_gate", "value", "key", "query", "gate"))
    return {
        f"{theirs}.in_proj": Interleaved(inputs, projected),
        f"{theirs}.out_proj": f"{LAYER}.output",
        f"{theirs}.norm": f"{LAYER}.mechanism.norm",
        f"{theirs}.conv1d.weight": ReversedTaps((f"{LAYER}.mechanism.taps",)),
        f"{theirs}.conv1d.bias": ReversedTaps((f"{LAYER}.mechanism.taps_bias",)),
        f"{theirs}.[A_log|dt_bias|D]": f"{LAYER}.mechanism.[log_rate|bias|residual]",
    }


@register
class Mamba2(Family):
    """A decoder with `n_groups` queries and keys per layer, each of a group of `num_heads` heads."""

    model_type = "mamba2"
    class_prefix = "Mamba2"
    objective = "causal language modelling"
    base_model_prefix = "backbone"
    paper = "Dao and Gu 2024"
    template = model_config("mamba-codestral-7b")
    config_mapping = (
        *options(
            "decoder",
            {"vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "initializer_range": 0.1},
            special(1, 0, 2, tied=False),
        ),
        option("layer_norm_epsilon", 1e-5, "decoder.norm.eps", f"{MECHANISM}.norm_eps"),
        option("conv_kernel", 4, f"{MECHANISM}.short_convolution"),
        option("use_conv_bias", True, f"{MECHANISM}.convolution_bias"),
        option("n_groups", 8, f"{MECHANISM}.heads.key_heads"),
        option("state_size", 128, f"{MECHANISM}.heads.key_size"),
        option("head_dim", 64, f"{MECHANISM}.heads.value_size", "decoder.attention.head_size"),
        option("num_heads", 128, f"{MECHANISM}.heads.value_heads", "decoder.attention.num_attention_heads"),
    )
    required: ClassVar = {"use_bias": False, "hidden_act": "silu"}
    other_options: ClassVar[dict[str, Any]] = {"expand": 2, "time_step_limit": [0.0, INFINITY]}
    # Of the initial weights, of the chunks of a scan, and of half precision.
    ignored_options = (
        *("use_cache", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
        *("rescale_prenorm_residual", "chunk_size", "residual_in_fp32"),
    )
    key_mapping: ClassVar = {
        "embeddings": "tokens",
        "layers.{i}.norm": "decoder.layers.{i}.block.norms.0",
        **mixer_keys("layers.{i}.mixer"),
        "norm_f": "decoder.final_norm",
    }
    tasks: ClassVar = {
        "ForCausalLM": Task(
            LanguageModelConfig(),
            {"lm_head": "head"},
            tied_keys={"lm_head.weight": "backbone.embeddings.weight"},
        ),
        "Model": LAST_TOKEN,
    }
    sizes = ("mamba2-130m", "mamba-codestral-7b")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for heads that do not cover the inner width, and for wrong limits of steps."""
        check_inner_width(hub, "expand", "num_heads", "head_dim")
        if hub["num_heads"] % hub["n_groups"]:
            raise InputError(
                f"config.json: n_groups is {hub['n_groups']}, expected a divisor of the {hub['num_heads']} "
                "num_heads"
            )
        _limits(hub["time_step_limit"])

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the limits of the step."""
        tree["decoder"]["attention"]["mechanism"] |= step_limits(hub)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the inner width as a multiple of the width, and the limits of the step."""
        attention = tree["decoder"]["attention"]
        mechanism = attention["mechanism"]
        inner = attention["num_attention_heads"] * (attention["head_size"] or 0)
        return {"expand": inner // tree["hidden_size"], **write_limits(mechanism)}


def check_inner_width(hub: Tree, expand: str, heads: str, width: str) -> None:
    """Raise `InputError` if heads do not cover the inner width; the names of the options differ by family."""
    inner, covered = hub[expand] * hub["hidden_size"], hub[heads] * hub[width]
    if inner != covered:
        raise InputError(
            f"config.json: {expand} is {quote(hub[expand])}, expected {heads} x {width} = {covered} to be "
            f"{expand} x hidden_size = {inner}"
        )


def step_limits(hub: Tree) -> Tree:
    """Return our limits of the step."""
    low, high = _limits(hub["time_step_limit"])
    return {"min_step": low, "max_step": None if math.isinf(high) else high}


def write_limits(mechanism: Tree) -> Tree:
    """Return their limits of the step, if there are any."""
    low, high = mechanism.get("min_step") or 0.0, mechanism.get("max_step")
    # JSON has no infinity: a missing range has no limits.
    return {"time_step_limit": [low, math.inf if high is None else high]} if low or high else {}


def _limits(limit: Any) -> tuple[float, float]:
    """Return the limits of the step; raise `InputError` for anything but an ordered pair of them."""
    pair = list(limit) if isinstance(limit, list | tuple) else []
    low, high = (math.inf if end == INFINITY else end for end in (pair if len(pair) == 2 else (0, -1)))
    if (
        any(isinstance(end, bool) or not isinstance(end, int | float) for end in (low, high))
        or not 0 <= low < high
    ):
        raise InputError(
            f"config.json: time_step_limit is {quote(limit)}, expected two numbers, 0 <= low < high"
        )
    return low, high
