"""Llama: pre-norm decoder with RMS norms, rotary positions, SwiGLU and groups of heads. Touvron et al. 2023.

SmolLM's checkpoints are Llamas; Mistral and Qwen2, in separate files, have its tensors and most options.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import Option, Tree, activation, get_path, option
from polyformer.models.checkpoints.families.gpt_common import LAST_TOKEN, MECHANISM
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.checkpoints.rope_options import ROPE_OPTIONS, read_rope, write_rope
from polyformer.models.checkpoints.values import check_values
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import EmbedConfig, HeadConfig, LanguageModelConfig, SpanConfig, TagConfig

LAYER = {
    "input_layernorm": "block.norms.0",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "post_attention_layernorm": "block.norms.1",
    "mlp.gate_proj": "feedforward.gate",
    "mlp.up_proj": "feedforward.up",
    "mlp.down_proj": "feedforward.down",
}
OPTIONS = (
    option("vocab_size", 32000, "vocab_size"),
    option("hidden_size", 4096, "hidden_size"),
    option("intermediate_size", 11008, "decoder.feedforward.intermediate_size"),
    option("num_hidden_layers", 32, "decoder.num_hidden_layers"),
    option("num_attention_heads", 32, "decoder.attention.num_attention_heads"),
    option("num_key_value_heads", None, "decoder.attention.num_key_value_heads"),
    activation("hidden_act", "silu", "decoder.feedforward.activation"),
    option("max_position_embeddings", 2048, "max_position_embeddings"),
    option("initializer_range", 0.02, "initializer_range"),
    option("rms_norm_eps", 1e-6, "decoder.norm.eps"),
    option("attention_dropout", 0.0, f"{MECHANISM}.dropout"),
    option("pad_token_id", None, "special.pad"),
    option("bos_token_id", 1, "special.bos"),
    option("eos_token_id", 2, "special.eos"),
    option("tie_word_embeddings", False, "embedding.tied"),
)
ANSWERS = Task(SpanConfig(), {"qa_outputs": "head.output"})
OTHER_OPTIONS = ("head_dim", *ROPE_OPTIONS)


def tasks(answers: Task) -> dict[str, Task]:
    """Return the classes of Llama and related families, which differ only in the trunk of one class."""
    dropout = Option("classifier_dropout", None, ("dropout",), lambda p: 0.1 if p is None else p)
    return {
        "ForCausalLM": Task(
            LanguageModelConfig(),
            {"lm_head": "head"},
            tied_keys={"lm_head.weight": "model.embed_tokens.weight"},
        ),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), prefixed=False),
        "ForSequenceClassification": Task(LAST_TOKEN, {"score": "head.output"}),
        "ForTokenClassification": Task(TagConfig(), {"score": "head.output"}, (dropout,)),
        "ForQuestionAnswering": answers,
    }


class LlamaFamily(Family):
    """The base class of Llama, Mistral and Qwen2.

    If several tokens end a text (`eos_token_id` is a list), `special` has the first of them; generation stops
    at any.
    """

    paper = "Touvron et al. 2023"
    objective = "causal language modelling"
    base_model_prefix = "model"
    other_options: ClassVar[tuple[str, ...]] = OTHER_OPTIONS
    ignored_options: ClassVar[tuple[str, ...]] = ("use_cache",)
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        **layered("layers.{i}", "decoder.layers.{i}", LAYER),
        "norm": "decoder.final_norm",
    }
    ignored_keys = ("*rotary_emb.inv_freq",)

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return the configuration as for every family, with the first of several end tokens."""
        ends = hub.get("eos_token_id")
        if not isinstance(ends, list) or not ends:
            return super().config(hub, task, head)
        for end in ends:
            check_values({"eos_token_id": end})
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
        tree["decoder"]["attention"]["head_size"] = hub.get("head_dim")
        positions = {"max_position_embeddings": tree["max_position_embeddings"], **hub}
        tree["decoder"]["position"] |= read_rope(positions)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the head dimension, rotary positions, and all end tokens of a text."""
        hub = write_rope(get_path(tree, "decoder.position") or {})
        size, end = get_path(tree, "decoder.attention.head_size"), get_path(tree, "special.eos")
        ends = (get_path(tree, "origin.fields") or {}).get("eos_token_id")
        if size is not None:
            hub["head_dim"] = size
        if isinstance(ends, list) and ends[:1] == [end]:
            hub["eos_token_id"] = ends
        return hub


def flag(theirs: str, ours: str) -> Option:
    """Return an option for biases: all or none. A partial setting of ours is written as none."""
    return Option(theirs, False, (ours,), write=lambda bias: bias is True)


@register
class Llama(LlamaFamily):
    """A decoder, Llama 1 to 3 and SmolLM; later versions belong to another family of transformers."""

    model_type = "llama"
    class_prefix = "Llama"
    template = model_config("llama-2-7b")
    config_mapping = (
        *OPTIONS,
        flag("attention_bias", "decoder.attention.bias"),
        flag("mlp_bias", "decoder.feedforward.bias"),
    )
    ignored_options = ("use_cache", "pretraining_tp")
    tasks: ClassVar[Mapping[str, Task]] = tasks(dataclasses.replace(ANSWERS, base="transformer"))
    sizes = (
        "llama-7b",
        "llama-2-7b",
        "llama-2-70b",
        "llama-3-8b",
        "llama-3.2-1b",
        "smollm2-135m",
        "smollm2-360m",
        "smollm2-1.7b",
    )
