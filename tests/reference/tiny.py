"""The smallest configuration of every family in transformers, and each of its classes made of it."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers

from polyformer.checkpoints import FAMILIES

COMMON: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 19,
}
SEQUENCES: dict[str, Any] = {
    "vocab_size": 23,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 14,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 19,
}
DECODER: dict[str, Any] = {
    "vocab_size": 23,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 19,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEBERTA: dict[str, Any] = {
    **COMMON,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
}
LLAMA: dict[str, Any] = {**COMMON, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
TINY: dict[str, dict[str, Any]] = {
    "albert": {**COMMON, "embedding_size": 5},
    "bart": SEQUENCES,
    "bert": COMMON,
    "big_bird": {**COMMON, "max_position_embeddings": 40, "block_size": 4, "num_random_blocks": 1},
    "ctrl": {**DECODER, "dff": 20},
    "deberta": DEBERTA,
    "deberta-v2": {
        **DEBERTA,
        "max_relative_positions": -1,
        "position_buckets": 4,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "decision_transformer": {
        "state_dim": 5,
        "act_dim": 3,
        "hidden_size": 12,
        "max_ep_len": 20,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 40,
    },
    "distilbert": {
        "vocab_size": 23,
        "dim": 12,
        "n_layers": 2,
        "n_heads": 3,
        "hidden_dim": 20,
        "max_position_embeddings": 19,
    },
    "electra": {**COMMON, "embedding_size": 5},
    "gpt_neo": {
        "vocab_size": 23,
        "hidden_size": 12,
        "num_layers": 2,
        "num_heads": 3,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "intermediate_size": 20,
        "max_position_embeddings": 19,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt2": DECODER,
    "gptj": {**DECODER, "rotary_dim": 4},
    "llama": LLAMA,
    "modernbert": {**COMMON, "local_attention": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {**LLAMA, "sliding_window": 4},
    "qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "longformer": {**COMMON, "attention_window": [4, 8], "pad_token_id": 1, "max_position_embeddings": 21},
    "m2m_100": SEQUENCES,
    "openai-gpt": DECODER,
    "reformer": {
        "vocab_size": 23,
        "hidden_size": 12,
        "num_attention_heads": 3,
        "attention_head_size": 4,
        "feed_forward_size": 20,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 5],
        "axial_pos_embds_dim": [4, 8],
        "max_position_embeddings": 20,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "is_decoder": True,
    },
    "roberta": {**COMMON, "max_position_embeddings": 21},
    "t5": {
        "vocab_size": 23,
        "d_model": 12,
        "d_kv": 4,
        "d_ff": 20,
        "num_layers": 2,
        "num_heads": 3,
        "decoder_start_token_id": 0,
    },
    "xlm": {
        "vocab_size": 23,
        "emb_dim": 12,
        "n_layers": 2,
        "n_heads": 3,
        "n_langs": 2,
        "max_position_embeddings": 19,
    },
    "xlm-roberta": {**COMMON, "max_position_embeddings": 21},
}
"""Options by model_type, beyond what transformers has by default."""


def classes() -> Iterator[tuple[str, str]]:
    """Every family with every class of transformers that it reads."""
    for name in (name for name in FAMILIES if not FAMILIES[name].removed):
        for task in FAMILIES[name].tasks:
            yield name, FAMILIES[name].class_prefix + task


def tiny(model_type: str, architecture: str, **options: Any) -> Any:
    """A model of transformers in evaluation mode, no weight of which has its initial value."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    family = FAMILIES[model_type]
    required = family.tasks[architecture.removeprefix(family.class_prefix)].required
    model = kind(kind.config_class(**{**TINY[model_type], **required, **options})).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model
