"""LFM2: gated short convolutions, and softmax attention in some layers. Amini et al. 2025.

Files state an inner width; layers use two thirds of it, rounded up (`block_auto_adjust_ff_dim`).
"""

from typing import Any, ClassVar

from polyformer.attention.mechanisms import GatedConvolutionConfig, SoftmaxConfig
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.checkpoints.config_mapping import Tree, option, with_defaults
from polyformer.models.checkpoints.families.experts import ExpertsFamily
from polyformer.models.checkpoints.families.layers import FULL, check_kinds
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Fused, Taps
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import HeadConfig

CONVOLUTION, GATED = "conv", GatedConvolutionConfig.kind
LAYER = "decoder.layers.{i}"


@register
class Lfm2(ExpertsFamily):
    """A decoder of gated short convolutions, with softmax in the layers that `layer_types` names."""

    model_type = "lfm2"
    class_prefix = "Lfm2"
    paper = "Amini et al. 2025"
    template = model_config("qwen3-0.6b").override("decoder.attention.qk_norm", RMSNormConfig(eps=1e-5))
    parts: ClassVar = {
        "softmax": (SoftmaxConfig().to_dict(), ()),
        GATED: (GatedConvolutionConfig().to_dict(), (option("conv_L_cache", 3, "width"),)),
    }
    places: ClassVar = {".self_attn.": "softmax", ".conv.": GATED}
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 65536, "hidden_size": 2560, "num_key_value_heads": 8}
            | {"max_position_embeddings": 128000, "pad_token_id": 0, "tie_word_embeddings": True},
            *("attention_dropout", "hidden_act", "intermediate_size", "rms_norm_eps"),
        ),
        option("norm_eps", 1e-5, "decoder.norm.eps", "decoder.attention.qk_norm.eps"),
    )
    aliases: ClassVar = {"tie_embedding": "tie_word_embeddings"}
    # A bias would be of one kind of layers only.
    required: ClassVar = {"conv_bias": False}
    other_options: ClassVar[dict[str, Any]] = {
        **LlamaFamily.other_options,
        **{"rope_theta": 1_000_000.0, "conv_L_cache": 3, "layer_types": None, "full_attn_idxs": None},
        **{"intermediate_size": 12288, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0},
        "block_multiple_of": 256,
    }
    key_mapping: ClassVar = {
        "embed_tokens": "tokens",
        "layers.{i}.self_attn.[q|k|v|out]_proj": f"{LAYER}.attention.[query|key|value|output]",
        "layers.{i}.self_attn.[q|k]_layernorm": f"{LAYER}.attention.[query|key]_norm",
        "layers.{i}.conv.in_proj": Fused(tuple(f"{LAYER}.attention.{x}" for x in ("key", "query", "value"))),
        "layers.{i}.conv.conv.weight": Taps((f"{LAYER}.attention.mechanism.taps",)),
        "layers.{i}.conv.out_proj": f"{LAYER}.attention.output",
        "layers.{i}.feed_forward.[w1|w3|w2]": f"{LAYER}.feedforward.[gate|up|down]",
        "layers.{i}.[operator|ffn]_norm": f"{LAYER}.block.norms.[0|1]",
        "embedding_norm": "decoder.final_norm",
    }
    tasks: ClassVar = {name: LlamaFamily.tasks[name] for name in ("ForCausalLM", "Model")}

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return the configuration as for every family; `block_ff_dim` is the inner width of older files."""
        older = {"intermediate_size": hub["block_ff_dim"]} if "block_ff_dim" in hub else {}
        hub = {name: value for name, value in hub.items() if name != "block_ff_dim"}
        return super().config({**hub, **older}, task, head)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for unknown kinds of layers, and a wrong number."""
        super().check(hub)
        check_kinds("layer_types", _kinds(hub), (FULL, CONVOLUTION), "num_hidden_layers", hub)

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the mechanism of every layer, and the inner width."""
        LlamaFamily.read_other_options(self, tree, hub)
        self.set_mechanisms(tree, hub, ["softmax" if kind == FULL else GATED for kind in _kinds(hub)])
        tree["decoder"]["feedforward"]["intermediate_size"] = _inner(hub)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the kinds of the layers, the width of the convolutions, and the inner width as it is."""
        parts = self.mechanisms(tree)
        return {
            **LlamaFamily.write_other_options(self, tree),
            **self.write_parts((), parts),
            "layer_types": [FULL if part["kind"] == "softmax" else CONVOLUTION for part in parts],
            "intermediate_size": tree["decoder"]["feedforward"].get("intermediate_size"),
            "block_auto_adjust_ff_dim": False,
        }


def _kinds(hub: Tree) -> list[str]:
    """Return the kind of each layer: from the list, or from the older list of layers with softmax."""
    if hub["layer_types"] is not None:
        return hub["layer_types"]
    chosen, layers = hub["full_attn_idxs"], range(hub["num_hidden_layers"])
    return [FULL if chosen is None or layer in chosen else CONVOLUTION for layer in layers]


def _inner(hub: Tree) -> int:
    """Return the inner width of the feed-forwards."""
    width = hub["intermediate_size"]
    if not hub["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    factor, multiple = hub["block_ffn_dim_multiplier"], hub["block_multiple_of"]
    return width if factor is None else -(-int(factor * width) // multiple) * multiple
