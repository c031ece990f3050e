"""Llama, Mistral, Qwen2 and Phi-3: pre-norm decoders with RMS norms, rotary positions and SwiGLU.

Touvron et al. 2023; Jiang et al. 2023; Yang et al. 2024; Abdin et al. 2024. SmolLM's checkpoints are Llamas.

In texts of Phi-3 longer than `original_max_position_embeddings`, transformers rotates all tokens of
a batch by the long factors; here the tokens before that position keep the short factors, so that no later
token and no other row changes a prediction.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import (
    ROPE_OPTIONS,
    Tree,
    flag,
    get_path,
    read_rope,
    with_defaults,
    write_rope,
)
from polyformer.models.checkpoints.families.common import LAST_TOKEN, QUESTION_ANSWERING, SCORED, TAG_DROPOUT
from polyformer.models.checkpoints.families.layers import (
    FULL,
    KINDS,
    LOCAL,
    Thetas,
    check_kinds,
    get_windows,
    read_base,
    set_bases,
    set_windows,
    write_bases,
)
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Fused
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


T = TypeVar("T")


def without(table: Mapping[str, T], *parts: str) -> dict[str, T]:
    """Return a table of a related family without the entries whose names contain one of `parts`."""
    return {name: entry for name, entry in table.items() if not any(part in name for part in parts)}


# Gate and inner projection of a feed-forward in one matrix.
FUSED_GATE = {
    "layers.{i}.mlp.gate_up_proj": Fused(
        ("decoder.layers.{i}.feedforward.gate", "decoder.layers.{i}.feedforward.up")
    ),
    "layers.{i}.mlp.down_proj": "decoder.layers.{i}.feedforward.down",
}


class LlamaFamily(Family):
    """The base class of Llama and the decoders of its layout, which differ by their tables.

    windows: "all" for families with a window of `sliding_window` tokens in all layers, "layers" for families
    in which `layer_types` names the layers with it; every `full_every`-th layer is then full in files without
    this list. window_flag: the option without which no layer has the window, "" for none. thetas: for
    each kind of layer the name of its rotary base and the default, for families with several bases. A
    family with the option `partial_rotary_factor` rotates a part of the channels.

    If several tokens end a text (`eos_token_id` is a list), `special` has the first of them; generation stops
    at any.
    """

    objective = "causal language modelling"
    base_model_prefix = "model"
    windows: ClassVar[Literal["", "all", "layers"]] = ""
    window_flag: ClassVar[str] = ""
    full_every: ClassVar[int] = 1
    thetas: ClassVar[Thetas] = {}
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
        """Raise `InputError` for an inner width of null, and for wrong layers, windows and bases."""
        if hub.get("intermediate_size", 1) is None:
            raise InputError("config.json: intermediate_size is None, expected an integer from 1")
        if self.windows == "layers":
            kinds = self.kinds(hub)
            check_kinds("layer_types", kinds, KINDS, "num_hidden_layers", hub)
            if LOCAL in kinds and self.window(hub) is None:
                raise InputError(f"config.json: sliding_window is None; expected 1 or more for {LOCAL}")
        for kind in self.thetas:
            read_base(hub, kind, self.thetas)

    def window(self, hub: Tree) -> int | None:
        """Return the window in tokens, the query's included; None for no window in any layer."""
        return hub["sliding_window"] if hub.get(self.window_flag, True) else None

    def kinds(self, hub: Tree) -> list[str]:
        """Return the kind of each layer: from transformers' list, or from the period of older files."""
        if self.windows == "layers" and hub["layer_types"] is not None:
            return hub["layer_types"]
        layers = range(hub["num_hidden_layers"])
        if self.windows == "all":
            return [FULL if self.window(hub) is None else LOCAL for _ in layers]
        every = hub.get("sliding_window_pattern", self.full_every)
        return [LOCAL if every and (layer + 1) % every else FULL for layer in layers]

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the head dimension, rotary positions and windows."""
        position, kinds = tree["decoder"]["position"], self.kinds(hub)
        tree["decoder"]["attention"]["head_size"] = hub["head_dim"]
        if self.windows:
            set_windows(tree, [self.window(hub) if kind == LOCAL else None for kind in kinds])
        if self.thetas:
            set_bases(position, hub, kinds, self.thetas)
            return
        rope = hub["rope_parameters"] or self.other_options["rope_parameters"]
        if "partial_rotary_factor" in self.other_options:
            position["fraction"] = rotary_fraction(hub)
            rope = {name: value for name, value in (rope or {}).items() if name != "partial_rotary_factor"}
        position |= read_rope({**hub, "rope_parameters": rope})

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the head dimension, rotary positions, windows, and all end tokens of a text."""
        position = get_path(tree, "decoder.position") or {}
        windows = get_windows(tree) or []
        kinds = [FULL if window is None else LOCAL for window in windows]
        hub = write_bases(position, kinds) if self.thetas else write_rope(position)
        if "partial_rotary_factor" in self.other_options:
            hub["rope_parameters"]["partial_rotary_factor"] = position.get("fraction", 1.0)
        if self.windows == "all":
            hub["sliding_window"] = windows[0] if windows else None
        elif self.windows == "layers":
            usual = self.other_options["sliding_window"]
            hub |= {"layer_types": kinds, "sliding_window": next(filter(None, windows), usual)}
        if self.window_flag:
            hub[self.window_flag] = any(windows)
        size, end = get_path(tree, "decoder.attention.head_size"), get_path(tree, "special.eos")
        ends = (get_path(tree, "origin.fields") or {}).get("eos_token_id")
        if size is not None:
            hub["head_dim"] = size
        # a list whose first token was changed since it was loaded describes another model
        if isinstance(ends, list) and ends[:1] == [end]:
            hub["eos_token_id"] = ends
        return hub


def rotary_fraction(hub: Tree) -> float:
    """Return the fraction of rotated channels, which older files have outside of rope_parameters."""
    rope = hub["rope_scaling"] or hub["rope_parameters"] or {}
    return rope.get("partial_rotary_factor", hub["partial_rotary_factor"])


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
    windows = "all"
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
    windows = "layers"
    window_flag = "use_sliding_window"
    other_options: ClassVar = {
        **LlamaFamily.other_options,
        **{"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None},
    }
    sizes = ("qwen2-0.5b", "qwen2-7b")

    def kinds(self, hub: Tree) -> list[str]:
        """Return the kind of each layer: from transformers' list, or else from the options."""
        if hub["layer_types"] is not None:
            return hub["layer_types"]
        layers = hub["num_hidden_layers"]
        full = layers if self.window(hub) is None else min(hub["max_window_layers"], layers)
        return [FULL] * full + [LOCAL] * (layers - full)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the first layer of the windows too."""
        hub = super().write_other_options(tree)
        kinds = hub["layer_types"]
        first = kinds.index(LOCAL) if LOCAL in kinds else len(kinds)
        return {**hub, "max_window_layers": first}


@dataclasses.dataclass(frozen=True)
class GroupedHeads(Fused):
    """Queries, keys and values in one matrix [(H + 2 Hkv) D, E]; `group`: query heads per key head."""

    group: int = 1

    def for_config(self, config: ModelConfig) -> "GroupedHeads":
        """Return the converter for the heads of a model."""
        assert config.decoder is not None
        heads = config.decoder.attention
        return dataclasses.replace(self, group=heads.num_attention_heads // heads.kv_heads)

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Split the rows into queries, keys and values."""
        rows = len(theirs) // (self.group + 2)
        return theirs.split([self.group * rows, rows, rows])


@register
class Phi3(LlamaFamily):
    """A decoder with a window of `sliding_window` tokens, the query's included, in all layers, or without."""

    model_type = "phi3"
    class_prefix = "Phi3"
    paper = "Abdin et al. 2024"
    template = model_config("phi-3-mini")
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5}
            | {"max_position_embeddings": 4096, "pad_token_id": 32000, "eos_token_id": 32000},
        ),
        *options("decoder", {"resid_pdrop": 0.0}),
    )
    # The model has no dropout of embeddings in spite of the option.
    ignored_options = ("use_cache", "embd_pdrop")
    windows = "all"
    other_options: ClassVar = {**LlamaFamily.other_options, "sliding_window": None}
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        "layers.{i}.[input|post_attention]_layernorm": "decoder.layers.{i}.block.norms.[0|1]",
        "norm": "decoder.final_norm",
        "layers.{i}.self_attn.qkv_proj": GroupedHeads(
            tuple(f"decoder.layers.{{i}}.attention.{name}" for name in ("query", "key", "value"))
        ),
        "layers.{i}.self_attn.o_proj": "decoder.layers.{i}.attention.output",
        **FUSED_GATE,
    }
    tasks: ClassVar = without(LlamaFamily.tasks, "ForQuestionAnswering")
    sizes = ("phi-3-mini",)

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the model fits; another vocabulary only if it was loaded as a Phi-3."""
        # The layout is Llama's, which more libraries read.
        return super().fits(config) and (
            config.origin is not None or config.vocab_size == self.template.vocab_size
        )

    def write_other_options(self, tree: Tree) -> Tree:
        """Return also the length of training."""
        hub = super().write_other_options(tree)
        length = hub["rope_parameters"].get("original_max_position_embeddings")
        return hub if length is None else {**hub, "original_max_position_embeddings": length}
