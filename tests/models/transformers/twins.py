"""A tiny model of transformers of every class of every family, and ours with the same weights."""

import copy
import os
from typing import Any

import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import transformers
from torch import nn

from polyformer.models import transformers as hub
from polyformer.models.architectures import VisionTransformer
from polyformer.models.checkpoints import FAMILIES, from_transformers

V, T = 40, 24
BERT = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT = {
    "vocab_size": V,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
BART = {
    "vocab_size": V,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "decoder_start_token_id": 2,
}
LLAMA = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "classifier_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
EXPERTS = LLAMA | {
    **{
        "num_key_value_heads": 4,
        "q_lora_rank": 6,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
    },
    **{"v_head_dim": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 6, "n_shared_experts": 1},
}
DELTA = LLAMA | {
    **{"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5},
    **{"linear_value_head_dim": 3, "layer_types": ["linear_attention", "full_attention"]},
}
SPARSE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6},
    "shared_expert_intermediate_size": 5,
}
SIZES: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "roberta": BERT | {"pad_token_id": 1},
    "xlm-roberta": BERT | {"pad_token_id": 1},
    "albert": BERT | {"embedding_size": 8},
    "electra": BERT | {"embedding_size": 8},
    "big_bird": BERT | {"attention_type": "original_full"},
    "longformer": BERT | {"attention_window": 8, "pad_token_id": 1},
    "deberta": BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "distilbert": {
        "vocab_size": V,
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 24,
        "dropout": 0.0,
        "max_position_embeddings": 64,
        "attention_dropout": 0.0,
        "qa_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "gpt2": GPT | {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 2, "summary_first_dropout": 0.0},
    "openai-gpt": GPT | {"pad_token_id": 0},
    "gptj": GPT | {"rotary_dim": 4, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 2},
    "ctrl": {**GPT, "dff": 24, "pad_token_id": 0},
    "deepseek_v2": EXPERTS,
    "deepseek_v3": EXPERTS | {"n_group": 2, "topk_group": 1},
    "deepseek_v32": EXPERTS
    | {"n_group": 2, "topk_group": 1, "index_topk": 4, "index_n_heads": 8, "index_head_dim": 8},
    "gpt_oss": LLAMA | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "mamba2": {
        **{"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8},
        **{"n_groups": 2, "state_size": 5, "chunk_size": 4},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    },
    "qwen3_next": DELTA | SPARSE,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | SPARSE,
    "llama": LLAMA,
    "modernbert": {
        "vocab_size": V,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "local_attention": 24,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "cls_token_id": 2,
        "sep_token_id": 2,
    },
    "mistral": LLAMA | {"sliding_window": 12},  # eager ones give NaN behind a window of padding
    "phi3": LLAMA | {"sliding_window": 12},
    "olmo2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 8},
    "gemma3_text": LLAMA | {"head_dim": 8, "sliding_window": 12},
    "qwen2": LLAMA | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "gpt_neo": {
        "vocab_size": V,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 24,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "pad_token_id": 0,
        "max_position_embeddings": 64,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "classifier_dropout": 0.0,
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "bart": BART,
    "bigbird_pegasus": BART | {"eos_token_id": 2},
    "m2m_100": BART,
    "t5": {
        "vocab_size": V,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "classifier_dropout": 0.0,
    },
    "xlm": {
        "vocab_size": V,
        "emb_dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "max_position_embeddings": 64,
        "n_langs": 3,
    },
    "reformer": {
        "vocab_size": V,
        "hidden_size": 16,
        "attention_head_size": 8,
        "num_attention_heads": 2,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
        "feed_forward_size": 24,
        "axial_pos_embds": False,
        "max_position_embeddings": 64,
        "is_decoder": True,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
    },
    "decision_transformer": {
        "hidden_size": 16,
        "state_dim": 3,
        "act_dim": 2,
        "n_layer": 2,
        "n_head": 2,
        "max_ep_len": 20,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}

# Others have the same parts; tests/reference compares them.
PRESENT = [name for name in FAMILIES if name in SIZES and FAMILIES[name].model is not VisionTransformer]
CLASSES = [(name, task) for name in PRESENT for task in FAMILIES[name].tasks]
FIRST_OF_EACH = [
    case
    for i, case in enumerate(CLASSES)
    if case[0] not in [name for name, _ in CLASSES[:i]] or case[1] not in [task for _, task in CLASSES[:i]]
]
"""A class of every family and one of every task."""

LABELLED = ("ForSequenceClassification", "TextForSequenceClassification", "ForTokenClassification")


def theirs(family: str, task: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """A model in evaluation mode, its weights far from 0."""
    more = {"num_labels": 3} if task in LABELLED else FAMILIES[family].tasks[task].required
    config = transformers.AutoConfig.for_model(family, **{**SIZES[family], **more, **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, FAMILIES[family].class_prefix + task)(config)
        for parameter in model.parameters():
            parameter.data.add_(0.15 * torch.randn_like(parameter))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others do not take double precision
    return model.to(dtype).eval()


def twins(family: str, task: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """Ours, wrapped, and theirs."""
    other = theirs(family, task, dtype, **options)
    return hub.wrap(from_transformers(copy.deepcopy(other))), other  # which share their weights


def texts(rows: int = 3, length: int = T) -> torch.Tensor:
    """Ids [rows, length] without special tokens, the last of each row 2."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, V, (rows, length), generator=generator)
    ids[:, -1] = 2
    return ids
