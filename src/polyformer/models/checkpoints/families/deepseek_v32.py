"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer that chooses the keys of each query.

Positions rotate pairs of neighbouring channels of the attention's heads in both. In DeepSeek-V3.2 they rotate
channel i of an indexer's vector with channel i + R / 2, and here and in GLM-5 pairs of neighbours there too.
DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import Tree, get_path, with_defaults
from polyformer.models.checkpoints.families.deepseek import ATTENTION, DeepseekV3
from polyformer.models.checkpoints.families.layers import DENSE, SPARSE, feedforward_kinds
from polyformer.models.checkpoints.families.llama import OPTIONS
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Converter
from polyformer.models.config import ModelConfig
from polyformer.nn.stack.attention_options import IndexerConfig

INDEX_SIZES = {"index_topk": "top_k", "index_n_heads": "heads", "index_head_dim": "size"}


@dataclasses.dataclass(frozen=True)
class NeighbouringPairs(Converter):
    """Vectors of an indexer [J D, ...], where channel i of each is rotated with channel i + R / 2."""

    heads: int | None = None  # by default the indexer's
    rotated: int = 0

    def for_config(self, config: ModelConfig) -> "NeighbouringPairs":
        """Return the converter for the indexer of a model."""
        assert config.decoder is not None
        attention = config.decoder.attention
        assert attention.indexer is not None
        rotated = attention.rotary_width(config.hidden_size)
        return dataclasses.replace(self, heads=self.heads or attention.indexer.heads, rotated=rotated)

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Put the channels of each pair next to each other."""
        return (self._arranged(theirs, (2, -1)),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Put the first channels of all pairs before the second ones."""
        return self._arranged(ours[0], (-1, 2))

    def _arranged(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        assert self.heads is not None
        vectors = x.unflatten(0, (self.heads, -1))
        turned, rest = vectors[:, : self.rotated], vectors[:, self.rotated :]
        turned = turned.unflatten(1, shape).transpose(1, 2).flatten(1, 2)
        return torch.cat([turned, rest], 1).flatten(0, 1)


class IndexedFamily(DeepseekV3):
    """The base class of DeepSeek-V3.2 and GLM-5."""

    required: ClassVar = {**DeepseekV3.required, "rope_interleave": True}
    ignored_options = (*DeepseekV3.ignored_options, "layer_types", "head_dim")
    tasks: ClassVar = {name: DeepseekV3.tasks[name] for name in ("ForCausalLM", "Model")}

    def fits(self, config: ModelConfig) -> bool:
        """Return whether the model is a decoder with latent attention and an indexer."""
        return super().fits(config) and config.decoder.attention.indexer is not None  # type: ignore[union-attr]

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the indexer, and what DeepSeek-V3 sets."""
        super().read_other_options(tree, {**hub, "first_k_dense_replace": dense_layers(hub)})
        sizes: dict[str, Any] = {ours: hub[theirs] for theirs, ours in INDEX_SIZES.items()}
        tree["decoder"]["attention"]["indexer"] = IndexerConfig(**sizes).to_dict()

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the sizes of the indexer, and what DeepSeek-V3 has."""
        indexer = get_path(tree, "decoder.attention.indexer") or {}
        return super().write_other_options(tree) | {
            theirs: indexer.get(ours) for theirs, ours in INDEX_SIZES.items()
        }


def dense_layers(hub: Tree) -> int:
    """Return the number of first layers without experts; `InputError` for dense layers after these."""
    kinds = feedforward_kinds(hub)
    first = kinds.index(SPARSE) if SPARSE in kinds else len(kinds)
    if DENSE in kinds[first:]:
        raise InputError(
            f"config.json: mlp_layer_types is {kinds}, expected 'dense' for the first layers, then "
            "'sparse' for all others"
        )
    return first


@register
class DeepseekV32(IndexedFamily):
    """DeepSeek-V3 with an indexer in every layer."""

    model_type = "deepseek_v32"
    class_prefix = "DeepseekV32"
    paper = "DeepSeek-AI 2025 (DeepSeek-V3.2)"
    key_mapping: ClassVar = {
        **DeepseekV3.key_mapping,
        "layers.{i}.self_attn.indexer.wq_b": NeighbouringPairs((f"{ATTENTION}.indexer.query",)),
        "layers.{i}.self_attn.indexer.wk": NeighbouringPairs((f"{ATTENTION}.indexer.key",), heads=1),
        "layers.{i}.self_attn.indexer.k_norm": NeighbouringPairs((f"{ATTENTION}.indexer.key_norm",), heads=1),
        "layers.{i}.self_attn.indexer.weights_proj": f"{ATTENTION}.indexer.weights",
    }
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128}
        | {"num_key_value_heads": 128, "max_position_embeddings": 163840}
        | {"bos_token_id": 0, "eos_token_id": 1},
        *("intermediate_size", "hidden_act"),
    )
    other_options: ClassVar = {
        **DeepseekV3.other_options,
        **{"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128, "mlp_layer_types": None},
    }


@register
class GlmMoeDsa(IndexedFamily):
    """GLM-5: DeepSeek-V3.2 in other sizes. Layers that share the choice of the layer before are refused."""

    model_type = "glm_moe_dsa"
    class_prefix = "GlmMoeDsa"
    paper = "GLM-5 Team 2026 (GLM-5)"
    key_mapping: ClassVar = {
        **DeepseekV3.key_mapping,
        "layers.{i}.self_attn.indexer.[wq_b|wk]": f"{ATTENTION}.indexer.[query|key]",
        "layers.{i}.self_attn.indexer.[k_norm|weights_proj]": f"{ATTENTION}.indexer.[key_norm|weights]",
    }
    config_mapping = with_defaults(
        OPTIONS,
        {"vocab_size": 154880, "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64}
        | {"num_key_value_heads": 64, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5}
        | {"bos_token_id": 0, "eos_token_id": 1},
        *("intermediate_size", "hidden_act"),
    )
    other_options: ClassVar = {
        **DeepseekV3.other_options,
        **{"intermediate_size": 12288, "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192},
        **{"v_head_dim": 256, "n_group": 1, "topk_group": 1, "index_topk": 2048, "index_n_heads": 32},
        **{"index_head_dim": 128, "mlp_layer_types": None, "indexer_types": None},
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for layers that share an indexer's choice."""
        super().check(hub)
        if "shared" in (hub["indexer_types"] or ()):
            raise InputError(
                "config.json: indexer_types has 'shared', a layer with the choice of the one before, and "
                "only 'full' is supported"
            )
