"""Kimi Linear by the configuration of its released files; the values are compared in `tests/reference`."""

from typing import Any

import pytest
import torch

from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import FAMILIES
from registered import nightly

FULL = [4, 8, 12, 16, 20, 24, 27]
LINEAR = [layer for layer in range(1, 28) if layer not in FULL]
RELEASED: dict[str, Any] = {
    **{"hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "vocab_size": 163840},
    **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "mla_use_nope": True, "model_max_length": 1048576, "rms_norm_eps": 1e-5},
    **{"moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True, "num_experts": 256},
    **{"moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts_per_token": 8},
    **{"num_shared_experts": 1, "routed_scaling_factor": 2.446, "topk_group": 1, "use_grouped_topk": True},
    **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "tie_word_embeddings": False},
    **{"rope_theta": 10000.0, "rope_scaling": None, "initializer_range": 0.02},
    "linear_attn_config": {
        **{"full_attn_layers": FULL, "kda_layers": LINEAR},
        **{"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
    },
}
"""Options of Kimi-Linear-48B-A3B that decide what it computes."""


def test_the_released_configuration_is_written_as_it_was():
    family = FAMILIES["kimi_linear"]
    config = family.config(RELEASED, "ForCausalLM")
    assert config.decoder is not None
    mechanism, feedforward = config.decoder.attention.mechanism, config.decoder.feedforward
    kinds = [mechanism.for_layer(layer).kind for layer in range(27)]
    assert [layer + 1 for layer in range(27) if kinds[layer] == "softmax"] == FULL
    assert [feedforward.for_layer(layer).kind for layer in range(27)] == ["gated", *["experts"] * 26]
    hub, _ = family.hub_config(config)
    assert {name: hub.get(name) for name in RELEASED} == RELEASED


@nightly
def test_the_released_size_is_that_of_transformers():
    """KimiLinearForCausalLM of the same configuration has as many parameters."""
    config = FAMILIES["kimi_linear"].config(RELEASED, "ForCausalLM")
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 49_122_675_072


@pytest.mark.parametrize("kda", [[1, 2, 3], [1]], ids=["twice", "missing"])
def test_every_layer_is_in_one_list(kda: list[int]):
    options = {"num_hidden_layers": 3, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": kda}}
    with pytest.raises(InputError, match="linear_attn_config, or in none; expected each layer from 1"):
        FAMILIES["kimi_linear"].config(options, "ForCausalLM")


def test_both_names_of_dense_layers_are_read():
    family = FAMILIES["kimi_linear"]
    assert family.usual_key("model.layers.0.block_sparse_moe.up_proj.weight") == (
        "model.layers.0.mlp.up_proj.weight"
    )
    shared = "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight"
    assert family.usual_key(shared) == shared
