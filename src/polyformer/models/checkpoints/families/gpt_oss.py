"""gpt-oss: windows in every second layer, sinks, and experts with a clamped SwiGLU. OpenAI 2025.

A tensor of a file has the weights of all experts, with the columns of gate and inner projection in turn.
Published files in MXFP4 (`quantization_config`) are refused.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Tree, flag, option, with_defaults
from polyformer.models.checkpoints.families.llama import OPTIONS, LlamaFamily
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Converter
from polyformer.models.presets import model_config
from polyformer.nn.feedforward import ExpertsConfig, GatedConfig

FEEDFORWARD = "decoder.layers.{i}.feedforward"
EXPERT = GatedConfig(activation="quick_gelu", bias=True, clamp=7.0, up_offset=1.0)
YARN: Tree = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


@dataclasses.dataclass(frozen=True)
class AllExperts(Converter):
    """Layers of all X experts: weights [X, E, n F], biases [X, n F], with the columns of n layers in turn."""

    count: int = 1  # n

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Return the weights [F, E] or biases [F] of each layer of each expert."""
        rows = theirs.mT if theirs.dim() == 3 else theirs
        return [part.contiguous() for each in rows for part in each.unflatten(0, (-1, self.count)).unbind(1)]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Return the tensor of all experts."""
        groups = zip(*(ours[number :: self.count] for number in range(self.count)))
        rows = torch.stack([torch.stack(group, 1).flatten(0, 1) for group in groups])
        return rows.mT if rows.dim() == 3 else rows


def of_experts(name: str, *layers: str) -> dict[str, Converter]:
    """Return the entries of weights and biases of layers of all experts."""
    return {
        f"layers.{{i}}.mlp.experts.{name}{theirs}": AllExperts(
            tuple(f"{FEEDFORWARD}.experts.{{e}}.{layer}.{ours}" for layer in layers), len(layers)
        )
        for theirs, ours in (("", "weight"), ("_bias", "bias"))
    }


@register
class GptOss(LlamaFamily):
    """A decoder with windows and full attention in turn, each head with a sink."""

    model_type = "gpt_oss"
    class_prefix = "GptOss"
    paper = "OpenAI 2025"
    template = (
        model_config("llama-2-7b")
        .override("mechanism", SoftmaxConfig(sink=True))
        .override("decoder.attention.head_size", 64)
        .override("feedforward", ExpertsConfig(expert=EXPERT, router_bias=True))
    )
    config_mapping = (
        *with_defaults(
            OPTIONS,
            {"vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64}
            | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
            | {"bos_token_id": None, "eos_token_id": None},
            *("intermediate_size", "hidden_act"),
        ),
        option("intermediate_size", 2880, "decoder.feedforward.expert.intermediate_size"),
        option("swiglu_limit", 7.0, "decoder.feedforward.expert.clamp"),
        option("num_local_experts", 128, "decoder.feedforward.experts"),
        option("num_experts_per_tok", 4, "decoder.feedforward.top_k"),
        option("router_aux_loss_coef", 0.001, "decoder.feedforward.balance"),
        flag("attention_bias", "decoder.attention.bias", default=True),
    )
    required: ClassVar = {"swiglu_alpha": 1.702, "output_router_logits": False}
    windows = "layers"
    full_every = 2
    other_options: ClassVar[dict[str, Any]] = {
        **{**LlamaFamily.other_options, "rope_theta": 150000.0, "rope_parameters": YARN},
        **{"head_dim": 64, "sliding_window": 128, "layer_types": None},
    }
    ignored_options = ("use_cache", "hidden_act")
    key_mapping: ClassVar = {
        **{key: ours for key, ours in LlamaFamily.key_mapping.items() if ".mlp." not in key},
        "layers.{i}.self_attn.sinks": "decoder.layers.{i}.attention.mechanism.sink",
        "layers.{i}.mlp.router": f"{FEEDFORWARD}.router",
        **of_experts("gate_up_proj", "gate", "up"),
        **of_experts("down_proj", "down"),
    }
    tasks: ClassVar = {
        name: task for name, task in LlamaFamily.tasks.items() if name != "ForQuestionAnswering"
    }

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for quantized weights too."""
        super().check(hub)
        if hub.get("quantization_config"):
            raise InputError(
                f"config.json: quantization_config is {quote(hub['quantization_config'])}, expected none; "
                "load the model by transformers with dequantize=True, and save it"
            )
