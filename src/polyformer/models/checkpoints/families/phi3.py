"""Phi-3: a Llama with one matrix for the projections of an input; LongRoPE in versions for long texts.

Abdin et al. 2024. In texts longer than `original_max_position_embeddings`, transformers rotates all tokens of
a batch by the long factors; here the tokens before that position keep the short factors, so that no later
token and no other row changes a prediction.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from polyformer.models.checkpoints.config_mapping import Tree, with_defaults
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily
from polyformer.models.checkpoints.families.window_layers import get_windows, set_windows
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Fused
from polyformer.models.checkpoints.values import options
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config


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
    other_options: ClassVar = {**LlamaFamily.other_options, "sliding_window": None}
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        "layers.{i}.[input|post_attention]_layernorm": "decoder.layers.{i}.block.norms.[0|1]",
        "norm": "decoder.final_norm",
        "layers.{i}.self_attn.qkv_proj": GroupedHeads(
            tuple(f"decoder.layers.{{i}}.attention.{name}" for name in ("query", "key", "value"))
        ),
        "layers.{i}.self_attn.o_proj": "decoder.layers.{i}.attention.output",
        "layers.{i}.mlp.gate_up_proj": Fused(
            tuple(f"decoder.layers.{{i}}.feedforward.{name}" for name in ("gate", "up"))
        ),
        "layers.{i}.mlp.down_proj": "decoder.layers.{i}.feedforward.down",
    }
    tasks: ClassVar = {
        name: task for name, task in LlamaFamily.tasks.items() if name != "ForQuestionAnswering"
    }
    sizes = ("phi-3-mini",)

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the model fits; another vocabulary only if it was loaded as a Phi-3."""
        # The layout is Llama's, which more libraries read.
        return super().fits(config) and (
            config.origin is not None or config.vocab_size == self.template.vocab_size
        )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the window too."""
        super().read_other_options(tree, hub)
        set_windows(tree, [hub["sliding_window"]])

    def write_other_options(self, tree: Tree) -> Tree:
        """Return also the window of the first layer, and the length of training."""
        hub, windows = super().write_other_options(tree), get_windows(tree)
        length = hub["rope_parameters"].get("original_max_position_embeddings")
        if length is not None:
            hub["original_max_position_embeddings"] = length
        return {**hub, "sliding_window": windows[0] if windows else None}
