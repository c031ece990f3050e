"""Llama, Mistral and Qwen2: pre-norm decoders with RMS norms, rotary positions, SwiGLU and groups of heads.

Touvron et al. 2023; Jiang et al. 2023; Yang et al. 2024. SmolLM's checkpoints are Llamas.
"""

import dataclasses
from typing import Any, ClassVar

from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Tree, flag, get_path, with_defaults
from polyformer.models.checkpoints.families.common import LAST_TOKEN, QUESTION_ANSWERING, SCORED, TAG_DROPOUT
from polyformer.models.checkpoints.families.window_layers import (
    FULL,
    KINDS,
    LOCAL,
    check_kinds,
    get_windows,
    set_windows,
)
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.rope_options import ROPE_OPTIONS, read_rope, write_rope
from polyformer.models.checkpoints.values import check_values, options, special
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import HeadConfig, LanguageModelConfig, TagConfig

OPTIONS = options(
    "decoder",
    {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    {"num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    {"max_position_embeddings": 2048, "attention_dropout": 0.0, "initializer_range": 0.02},
    special(None, 1, 2, tied=False),
)


class LlamaFamily(Family):
    """The base class of Llama, Mistral and Qwen2.

    If several tokens end a text (`eos_token_id` is a list), `special` has the first of them; generation stops
    at any.
    """

    objective = "causal language modelling"
    base_model_prefix = "model"
    other_options: ClassVar[dict[str, Any]] = {"head_dim": None, **ROPE_OPTIONS}
    ignored_options: ClassVar[tuple[str, ...]] = ("use_cache",)
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        "layers.{i}.self_attn.[q|k|v|o]_proj": "decoder.layers.{i}.attention.[query|key|value|output]",
        "layers.{i}.mlp.[gate|up|down]_proj": "decoder.layers.{i}.feedforward.[gate|up|down]",
        "layers.{i}.[input|post_attention]_layernorm": "decoder.layers.{i}.block.norms.[0|1]",
        "norm": "decoder.final_norm",
    }
    ignored_keys = ("*rotary_emb.inv_freq",)
    tasks: ClassVar = {
        "ForCausalLM": Task(
            LanguageModelConfig(),
            {"lm_head": "head"},
            tied_keys={"lm_head.weight": "model.embed_tokens.weight"},
        ),
        "Model": LAST_TOKEN,
        "ForSequenceClassification": SCORED,
        "ForTokenClassification": Task(TagConfig(), {"score": "head.output"}, (TAG_DROPOUT,)),
        # this class calls its trunk "transformer", except in Mistral
        "ForQuestionAnswering": dataclasses.replace(QUESTION_ANSWERING, base="transformer"),
    }

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return the configuration as for every family, with the first of several end tokens."""
        ends = hub.get("eos_token_id")
        if not isinstance(ends, list) or not ends:
            return super().config(hub, task, head)
        for end in ends:
            check_values({"eos_token_id": end})
        # Only generation stops at the others; `origin` keeps them.
        config = super().config({**hub, "eos_token_id": ends[0]}, task, head)
        assert config.origin is not None
        fields = {**config.origin.fields, "eos_token_id": ends}
        return dataclasses.replace(config, origin=dataclasses.replace(config.origin, fields=fields))

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for an inner width of null."""
        if hub.get("intermediate_size", 1) is None:
            raise InputError("config.json: intermediate_size is None, expected an integer from 1")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the head dimension, and rotary positions."""
        tree["decoder"]["attention"]["head_size"] = hub["head_dim"]
        tree["decoder"]["position"] |= read_rope(hub)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the head dimension, rotary positions, and all end tokens of a text."""
        hub = write_rope(get_path(tree, "decoder.position") or {})
        size, end = get_path(tree, "decoder.attention.head_size"), get_path(tree, "special.eos")
        ends = (get_path(tree, "origin.fields") or {}).get("eos_token_id")
        if size is not None:
            hub["head_dim"] = size
        # a list whose first token was changed since it was loaded describes another model
        if isinstance(ends, list) and ends[:1] == [end]:
            hub["eos_token_id"] = ends
        return hub


@register
class Llama(LlamaFamily):
    """A decoder, Llama 1 to 3 and SmolLM; later versions belong to another family of transformers."""

    model_type = "llama"
    class_prefix = "Llama"
    paper = "Touvron et al. 2023"
    template = model_config("llama-2-7b")
    config_mapping = (
        *OPTIONS,
        flag("attention_bias", "decoder.attention.bias"),
        flag("mlp_bias", "decoder.feedforward.bias"),
    )
    ignored_options = ("use_cache", "pretraining_tp")
    sizes = (
        *("llama-7b", "llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3.2-1b"),
        *("smollm2-135m", "smollm2-360m", "smollm2-1.7b"),
    )


@register
class Mistral(LlamaFamily):
    """A decoder with a window of `sliding_window` tokens, the query's included, in all layers, or without."""

    model_type = "mistral"
    class_prefix = "Mistral"
    paper = "Jiang et al. 2023"
    template = model_config("mistral-7b")
    config_mapping = with_defaults(
        OPTIONS, {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    )
    other_options: ClassVar = {**LlamaFamily.other_options, "sliding_window": 4096}
    tasks: ClassVar = {**LlamaFamily.tasks, "ForQuestionAnswering": QUESTION_ANSWERING}
    sizes = ("mistral-7b",)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for layers of different kinds, which the class does not compute."""
        super().check(hub)
        if hub.get("layer_types") is not None:
            raise InputError(
                f"config.json: layer_types is {quote(hub['layer_types'])}; 'mistral' has layers of one kind, "
                f"with sliding_window or without"
            )

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the model fits; without windows only if it was loaded as a Mistral."""
        # Without windows it is a Llama, which more libraries read.
        return super().fits(config) and (
            config.origin is not None or any(get_windows(config.to_dict()) or ())
        )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the window too."""
        super().read_other_options(tree, hub)
        set_windows(tree, [hub["sliding_window"]])

    def write_other_options(self, tree: Tree) -> Tree:
        """Return also the window of the first layer."""
        windows = get_windows(tree)
        return {**super().write_other_options(tree), "sliding_window": windows[0] if windows else None}


@register
class Qwen2(LlamaFamily):
    """A decoder with biases of queries, keys and values, and a window of `sliding_window` tokens from layer
    `max_window_layers` on, if `use_sliding_window` is set.

    Newer files list the kinds of all layers.
    """

    model_type = "qwen2"
    class_prefix = "Qwen2"
    paper = "Yang et al. 2024"
    template = model_config("qwen2-7b")
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
        | {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None},
    )
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None},
    }
    sizes = ("qwen2-0.5b", "qwen2-7b")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for unknown kinds of layers, a wrong number, and windows without a size."""
        super().check(hub)
        kinds = _kinds(hub)
        check_kinds("layer_types", kinds, KINDS, "num_hidden_layers", hub)
        if LOCAL in kinds and _window(hub) is None:
            raise InputError(f"config.json: sliding_window is None; expected 1 or more for {LOCAL}")

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the window of every layer too."""
        super().read_other_options(tree, hub)
        set_windows(tree, [_window(hub) if kind == LOCAL else None for kind in _kinds(hub)])

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the kinds of all layers and their window too."""
        windows = get_windows(tree) or []
        kinds = [FULL if window is None else LOCAL for window in windows]
        return {
            **super().write_other_options(tree),
            "layer_types": kinds,
            "use_sliding_window": LOCAL in kinds,
            "sliding_window": next(filter(None, windows), None),
            "max_window_layers": kinds.index(LOCAL) if LOCAL in kinds else len(kinds),
        }


def _window(hub: Tree) -> int | None:
    # Qwen2's files have a window that no layer uses, unless this flag is set.
    return hub["sliding_window"] if hub["use_sliding_window"] else None


def _kinds(hub: Tree) -> list[str]:
    """Return the kind of each layer: from transformers' list, or else from the options."""
    if hub["layer_types"] is not None:
        return hub["layer_types"]
    layers = hub["num_hidden_layers"]
    full = layers if _window(hub) is None else min(hub["max_window_layers"], layers)
    return [FULL] * full + [LOCAL] * (layers - full)
