"""The allowed values of a public config.json: type and range of every option that is read, by its name.

The tables of the families define the meaning of an option; this table defines its values, in one place for
all families, so that they compute with valid numbers. An option that no family reads is not checked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.limits import LAYERS, SIZE
from polyformer.models.checkpoints.config_mapping import Tree


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of an option: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]

    def __or__(self, other: "Values") -> "Values":
        return Values(f"{self.words} or {other.words}", lambda value: self.holds(value) or other.holds(value))


def _integer(low: int, high: int) -> Values:
    return Values(
        f"an integer from {low} to {high}", lambda value: type(value) is int and low <= value <= high
    )


def _listed(values: Values) -> Values:
    def holds(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) <= LAYERS and all(map(values.holds, value))

    return Values(f"a list, each {values.words}", holds)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_labels(value: Any) -> bool:
    return isinstance(value, dict) and all(str(key).isdecimal() and len(str(key)) < 10 for key in value)


def _are_repeats(value: Any) -> bool:
    pairs = isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and NAMES.holds(pair[0]) and LAYER.holds(pair[1])
        for pair in value
    )
    return pairs and sum(len(kinds) * times for kinds, times in value) <= LAYERS


NULL = Values("null", lambda value: value is None)
FLAG = Values("true or false", lambda value: isinstance(value, bool))
NAME = Values("a text", lambda value: isinstance(value, str))
NAMES = _listed(NAME)
POSITIVE, COUNT, LAYER = _integer(1, SIZE), _integer(0, SIZE), _integer(1, LAYERS)
OPEN = _integer(-1, SIZE)  # -1: without a limit
TOKEN = _integer(-(2**31), 2**31 - 1) | NULL
RATE = Values("a number from 0 up to, not including, 1", lambda value: _is_number(value) and 0 <= value < 1)
SMALL = Values("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
NUMBER = Values("a number", _is_number)
OPTIONS = Values("an object of options", lambda value: isinstance(value, dict))
LABELS = Values("an object of numbers to names", _are_labels)
REPEATS = Values("a list of pairs, kinds of layers and how often they come", _are_repeats)

VALUES: dict[str, Values] = {
    **dict.fromkeys(
        (
            "n_layer",
            "n_layers",
            "num_layers",
            "num_hidden_layers",
            "num_hidden_groups",
            "inner_group_num",
            "encoder_layers",
            "decoder_layers",
        ),
        LAYER,
    ),
    **dict.fromkeys(
        (
            "act_dim",
            "attention_head_size",
            "block_size",
            "d_embed",
            "d_ff",
            "d_head",
            "d_inner",
            "d_kv",
            "d_model",
            "decoder_attention_heads",
            "decoder_ffn_dim",
            "dff",
            "dim",
            "div_val",
            "emb_dim",
            "embedding_size",
            "global_attn_every_n_layers",
            "local_attention",
            "encoder_attention_heads",
            "encoder_ffn_dim",
            "feed_forward_size",
            "hidden_dim",
            "hidden_size",
            "local_attn_chunk_length",
            "lsh_attn_chunk_length",
            "max_ep_len",
            "max_position_embeddings",
            "n_embd",
            "n_head",
            "n_heads",
            "n_langs",
            "n_positions",
            "num_attention_heads",
            "num_channels",
            "num_hashes",
            "num_heads",
            "original_max_position_embeddings",
            "pooler_hidden_size",
            "relative_attention_max_distance",
            "relative_attention_num_buckets",
            "state_dim",
            "vocab_size",
            "window_size",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        (
            "conv_kernel_size",
            "local_num_chunks_before",
            "lsh_num_chunks_before",
            "max_window_layers",
            "mem_len",
            "num_random_blocks",
            "type_vocab_size",
        ),
        COUNT,
    ),
    **dict.fromkeys(("max_relative_positions", "position_buckets"), OPEN | NULL),
    **dict.fromkeys(("clamp_len", "sample_softmax"), OPEN),
    **dict.fromkeys(
        (
            "head_dim",
            "intermediate_size",
            "n_inner",
            "num_key_value_heads",
            "pooler_output_size",
            "sliding_window",
        ),
        POSITIVE | NULL,
    ),
    **dict.fromkeys(
        ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id"), TOKEN
    ),
    **dict.fromkeys(
        (
            "activation_dropout",
            "attention_dropout",
            "attention_probs_dropout_prob",
            "attn_pdrop",
            "decoder_layerdrop",
            "dropatt",
            "dropout",
            "dropout_rate",
            "embd_pdrop",
            "embed_dropout",
            "embedding_dropout",
            "mlp_dropout",
            "encoder_layerdrop",
            "hidden_dropout_prob",
            "local_attention_probs_dropout_prob",
            "qa_dropout",
            "resid_dropout",
            "resid_pdrop",
            "seq_classif_dropout",
            "summary_first_dropout",
        ),
        RATE,
    ),
    **dict.fromkeys(("classifier_dropout", "classifier_dropout_prob"), RATE | NULL),
    **dict.fromkeys(
        ("init_std", "initializer_range", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rms_norm_eps"),
        SMALL,
    ),
    **dict.fromkeys(
        (
            "action_tanh",
            "add_pooling_layer",
            "attention_bias",
            "axial_pos_embds",
            "causal",
            "classifier_bias",
            "decoder_bias",
            "gelu_activation",
            "is_decoder",
            "mlp_bias",
            "norm_bias",
            "position_biased_input",
            "pre_lnorm",
            "proj_share_all_but_first",
            "qkv_bias",
            "relative_attention",
            "rescale_embeddings",
            "same_length",
            "scale_attn_by_inverse_layer_idx",
            "scale_attn_weights",
            "scale_decoder_outputs",
            "scale_embedding",
            "share_att_key",
            "tie_word_embeddings",
            "untie_r",
            "use_bias",
            "use_lang_emb",
            "use_sliding_window",
        ),
        FLAG,
    ),
    **dict.fromkeys(
        (
            "activation",
            "activation_function",
            "afn",
            "attention_type",
            "classifier_activation",
            "classifier_pooling",
            "conv_act",
            "feed_forward_proj",
            "hidden_act",
            "hidden_activation",
            "model_type",
            "norm_rel_ebd",
            "pooler_act",
            "pooler_hidden_act",
        ),
        NAME,
    ),
    "dense_act_fn": NAME | NULL,
    "is_gated_act": FLAG | NULL,
    "problem_type": NAME | NULL,
    "num_decoder_layers": LAYER | NULL,
    "rotary_dim": COUNT | NULL,
    "num_labels": POSITIVE,
    "id2label": LABELS | NULL,
    "architectures": NAMES | NULL,
    **dict.fromkeys(("attention_window", "image_size", "patch_size"), POSITIVE | _listed(POSITIVE)),
    **dict.fromkeys(("image_mean", "image_std"), _listed(NUMBER)),
    "attention_layers": NAMES | NULL,
    "attention_types": REPEATS | NULL,
    "attn_layers": NAMES,
    "cutoffs": _listed(POSITIVE),
    "tie_projs": _listed(FLAG) | NULL,
    "layer_types": NAMES | NULL,
    "rope_parameters": OPTIONS | NULL,
    "rope_scaling": OPTIONS | NULL,
    **dict.fromkeys(("rope_theta", "global_rope_theta", "local_rope_theta"), NUMBER),
    "axial_pos_shape": _listed(POSITIVE),
    "axial_pos_embds_dim": _listed(POSITIVE),
    "num_buckets": POSITIVE | _listed(POSITIVE) | NULL,
    "pos_att_type": NAME | NAMES | NULL,
}


def check_values(hub: Tree) -> None:
    """Raise `InputError` for an option with a value of another type, or outside its range."""
    for name, value in hub.items():
        if name in VALUES and not VALUES[name].holds(value):
            raise InputError(f"config.json: {name} is {quote(value)}, expected {VALUES[name].words}")
