"""The options of public configurations by their names: their allowed values, and their places in ours.

Families use the same names for the same things, so their places are stated once, in `PLACES`; a family lists
its options with its defaults (`options`). Values are checked by name for all families, so that they compute
with valid numbers. An option that no family reads is not checked.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import LAYERS, SIZE
from polyformer.models.checkpoints.config_mapping import Option, Tree, activation


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of an option: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]

    def __or__(self, other: "Values") -> "Values":
        return Values(f"{self.words} or {other.words}", lambda value: self.holds(value) or other.holds(value))


def _integer(low: int, high: int) -> Values:
    # `type`, because True is an instance of int
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
    # bounded before anything is repeated: [["global"], 10**9] is 20 bytes in a file
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
POSITIVE_NUMBER = Values("a number above 0", lambda value: _is_number(value) and value > 0)
NUMBER = Values("a number", _is_number)
OPTIONS = Values("an object of options", lambda value: isinstance(value, dict))
LABELS = Values("an object of numbers to names", _are_labels)
REPEATS = Values("a list of pairs, kinds of layers and how often they come", _are_repeats)

# Places in our configuration, with the values and the names of their options.
#
# A family's stacks replace `{stack}`. The first name of a size is the usual name.
PLACES = (
    ("vocab_size", POSITIVE, "vocab_size"),
    ("hidden_size", POSITIVE, "hidden_size d_model dim emb_dim n_embd"),
    ("max_position_embeddings", POSITIVE, "max_position_embeddings n_positions max_sequence_length"),
    ("initializer_range", SMALL, "initializer_range init_std"),
    ("embedding.type_vocab_size", COUNT, "type_vocab_size"),
    ("embedding.embedding_dropout", RATE, "embd_pdrop embed_dropout embedding_dropout"),
    ("embedding.scaled", FLAG, "scale_embedding rescale_embeddings"),
    ("embedding.tied", FLAG, "tie_word_embeddings weight_tying"),
    ("special.pad", TOKEN, "pad_token_id"),
    ("special.bos", TOKEN, "bos_token_id"),
    ("special.eos", TOKEN, "eos_token_id"),
    ("special.mask", TOKEN, "mask_token_id"),
    ("{stack}.num_hidden_layers", LAYER, "num_hidden_layers n_layer n_layers num_layers"),
    (
        "{stack}.attention.num_attention_heads",
        POSITIVE,
        "num_attention_heads n_head n_heads num_heads attention_heads",
    ),
    ("{stack}.attention.num_key_value_heads", POSITIVE | NULL, "num_key_value_heads n_kv_heads"),
    ("{stack}.attention.head_size", POSITIVE, "attention_head_size d_head d_kv"),
    (
        "{stack}.attention.mechanism.dropout",
        RATE,
        "attention_dropout attention_probs_dropout_prob attn_pdrop dropatt",
    ),
    (
        "{stack}.feedforward.intermediate_size",
        POSITIVE,
        "d_ff d_inner dff feed_forward_size hidden_dim mlp_hidden_size",
    ),
    ("{stack}.feedforward.intermediate_size", POSITIVE | NULL, "intermediate_size n_inner"),
    ("{stack}.feedforward.activation", NAME, "hidden_act hidden_activation activation activation_function"),
    ("{stack}.feedforward.inner_dropout", RATE, "activation_dropout mlp_dropout"),
    (
        "{stack}.dropout",
        RATE,
        "dropout hidden_dropout hidden_dropout_prob resid_dropout resid_pdrop residual_dropout",
    ),
    ("{stack}.norm.eps", SMALL, "layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon rms_norm_eps"),
    ("{stack}.position.num_buckets", POSITIVE, "relative_attention_num_buckets"),
    ("{stack}.position.max_distance", POSITIVE, "relative_attention_max_distance"),
    ("encoder.num_hidden_layers", LAYER, "encoder_layers"),
    ("decoder.num_hidden_layers", LAYER, "decoder_layers"),
    ("encoder.feedforward.intermediate_size", POSITIVE, "encoder_ffn_dim"),
    ("decoder.feedforward.intermediate_size", POSITIVE, "decoder_ffn_dim"),
    ("encoder.attention.num_attention_heads", POSITIVE, "encoder_attention_heads"),
    ("decoder.attention.num_attention_heads", POSITIVE, "decoder_attention_heads"),
    ("encoder.layerdrop", RATE, "encoder_layerdrop"),
    ("decoder.layerdrop", RATE, "decoder_layerdrop"),
)

# The values of the options that only one family has, or that have no fixed place.
OTHERS = (
    (LAYER, "inner_group_num num_hidden_groups"),
    (LAYER | NULL, "num_decoder_layers"),
    (
        POSITIVE,
        "act_dim block_size d_embed div_val embedding_size global_attn_every_n_layers",
    ),
    (POSITIVE, "local_attention local_attn_chunk_length lsh_attn_chunk_length max_ep_len n_langs"),
    (POSITIVE, "decoder_sparse_step full_attention_interval linear_conv_kernel_dim linear_key_head_dim"),
    (POSITIVE, "linear_num_key_heads linear_num_value_heads linear_value_head_dim moe_intermediate_size"),
    (POSITIVE, "num_experts_per_tok num_local_experts shared_expert_intermediate_size"),
    (COUNT, "num_experts"),
    (_listed(COUNT) | NULL, "full_attn_idxs mlp_only_layers"),
    (POSITIVE, "mamba_head_dim mamba_num_heads moe_shared_expert_intermediate_size ssm_state_size"),
    (NAMES | NULL, "layers_block_type"),
    (NAME | NULL, "hybrid_override_pattern"),
    (NAME, "mlp_hidden_act"),
    (NUMBER, "time_step_min"),
    (POSITIVE_NUMBER, "attention_in_multiplier attention_out_multiplier key_multiplier lm_head_multiplier"),
    (POSITIVE_NUMBER, "ssm_in_multiplier ssm_out_multiplier"),
    (_listed(POSITIVE_NUMBER) | NULL, "mlp_multipliers ssm_multipliers"),
    (POSITIVE | NULL, "mamba_d_ssm"),
    (FLAG, "mamba_norm_before_gate mamba_rms_norm projectors_bias"),
    (POSITIVE, "block_multiple_of conv_L_cache"),
    (POSITIVE_NUMBER | NULL, "block_ffn_dim_multiplier"),
    (FLAG, "block_auto_adjust_ff_dim"),
    (SMALL, "partial_rotary_factor router_aux_loss_coef rotary_pct router_jitter_noise"),
    (POSITIVE, "conv_kernel expand n_groups num_heads state_size"),
    (POSITIVE, "num_channels num_hashes num_labels original_max_position_embeddings pooler_hidden_size"),
    (POSITIVE, "query_pre_attn_scalar state_dim window_size"),
    (POSITIVE | NULL, "head_dim pooler_output_size sliding_window"),
    (POSITIVE, "kv_lora_rank moe_intermediate_size n_routed_experts n_shared_experts"),
    (POSITIVE, "qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    (POSITIVE | NULL, "n_group num_experts_per_tok q_lora_rank topk_group"),
    (COUNT, "first_k_dense_replace"),
    (NUMBER, "routed_scaling_factor"),
    (FLAG, "norm_topk_prob rope_interleave"),
    (NAME, "topk_method"),
    (COUNT, "conv_kernel_size local_num_chunks_before lsh_num_chunks_before mem_len"),
    (COUNT, "num_random_blocks"),
    (COUNT | NULL, "rotary_dim"),
    (OPEN, "clamp_len sample_softmax"),
    (OPEN | NULL, "max_relative_positions position_buckets"),
    (TOKEN, "decoder_start_token_id sep_token_id"),
    (RATE, "dropout_rate local_attention_probs_dropout_prob qa_dropout seq_classif_dropout"),
    (RATE, "summary_first_dropout"),
    (RATE | NULL, "classifier_dropout classifier_dropout_prob"),
    (NUMBER, "global_rope_theta local_rope_theta rope_local_base_freq rope_theta swiglu_alpha swiglu_limit"),
    (FLAG, "action_tanh add_pooling_layer attention_bias axial_pos_embds causal classifier_bias"),
    (FLAG, "decoder_bias gelu_activation is_decoder mlp_bias norm_bias position_biased_input pre_lnorm"),
    (FLAG, "norm_topk_prob proj_share_all_but_first qkv_bias relative_attention same_length"),
    (FLAG, "scale_attn_by_inverse_layer_idx scale_attn_weights scale_decoder_outputs share_att_key untie_r"),
    (FLAG, "use_bias use_conv_bias use_lang_emb use_parallel_residual use_qkv_bias use_sliding_window"),
    (FLAG | NULL, "emb_layer_norm_before is_gated_act token_dropout"),
    (NAME, "afn attention_type classifier_activation classifier_pooling conv_act feed_forward_proj"),
    (NAME, "model_type norm_rel_ebd pooler_act pooler_hidden_act"),
    (NAME | NULL, "dense_act_fn problem_type"),
    (NAMES, "attn_layers"),
    (NAMES | NULL, "architectures attention_layers layer_types"),
    (NAME | NAMES | NULL, "pos_att_type"),
    (POSITIVE | _listed(POSITIVE), "attention_window image_size patch_size"),
    (POSITIVE | _listed(POSITIVE) | NULL, "num_buckets"),
    (LABELS | NULL, "id2label"),
    (COUNT | NULL, "num_ln_in_parallel_attn"),
    (POSITIVE | NULL, "ffn_hidden_size num_kv_heads word_embed_proj_dim"),
    (POSITIVE, "ffn_dim max_seq_len no_rope_layer_interval"),
    (_listed(SMALL) | NULL, "no_rope_layers"),
    (POSITIVE_NUMBER | NULL, "logit_scale"),
    (POSITIVE_NUMBER, "attention_multiplier embedding_multiplier logits_scaling residual_multiplier"),
    (POSITIVE_NUMBER | NULL, "attn_logit_softcapping final_logit_softcapping"),
    (COUNT, "max_window_layers sliding_window_pattern"),
    (FLAG, "alibi bias do_layer_norm_before enable_bias multi_query new_decoder_architecture parallel_attn"),
    (RATE, "drop_path_rate layerdrop"),
    (NUMBER, "layer_scale_init_value layerscale_value"),
    (FLAG, "use_absolute_position_embeddings use_mean_pooling use_relative_position_bias use_swiglu_ffn"),
    (FLAG, "use_shared_relative_position_bias"),
    (POSITIVE, "max_decoder_position_embeddings max_encoder_position_embeddings mlp_ratio projection_dim"),
    (POSITIVE | NULL, "projection_size"),
    (NUMBER, "logit_scale_init_value"),
    (OPTIONS | NULL, "text_config vision_config"),
    (POSITIVE, "mamba_d_conv mamba_d_state mamba_expand mamba_n_groups mamba_n_heads"),
    (_listed(COUNT) | NULL, "attn_layer_indices"),
    (FLAG, "mamba_conv_bias"),
    (OPTIONS | NULL, "attn_config"),
    (REPEATS | NULL, "attention_types"),
    (OPTIONS | NULL, "rope_parameters rope_scaling"),
    (_listed(POSITIVE), "axial_pos_embds_dim axial_pos_shape cutoffs"),
    (_listed(NUMBER), "image_mean image_std"),
    (_listed(FLAG) | NULL, "tie_projs"),
)

VALUES = {
    name: values for values, names in (*((row[1:]) for row in PLACES), *OTHERS) for name in names.split()
}
PATHS = {name: path for path, _, names in PLACES for name in names.split()}
SIZES = (
    *("hidden_size", "max_position_embeddings"),
    *("{stack}.num_hidden_layers", "{stack}.attention.num_attention_heads"),
)
# The usual names of sizes that some families name otherwise.
USUAL = {name: names.split()[0] for path, _, names in PLACES if path in SIZES for name in names.split()[1:]}


def options(stacks: str, *entries: Mapping[str, Any] | Option) -> tuple[Option, ...]:
    """Return a family's options: tables of names with their defaults, and single options.

    stacks: the stacks of the family, such as "encoder decoder"; an option of both sets both.
    """
    mapping: list[Option] = []
    for entry in entries:
        if isinstance(entry, Option):
            mapping.append(entry)
            continue
        for name, default in entry.items():
            paths = tuple(dict.fromkeys(PATHS[name].format(stack=stack) for stack in stacks.split()))
            named = PATHS[name].endswith(".activation")
            mapping.append(activation(name, default, *paths) if named else Option(name, default, paths))
    return tuple(mapping)


def special(
    pad: int | None = None, bos: int | None = None, eos: int | None = None, *, tied: bool = True
) -> Tree:
    """Return the defaults of the ids of special tokens, and of tied embeddings."""
    return {"pad_token_id": pad, "bos_token_id": bos, "eos_token_id": eos, "tie_word_embeddings": tied}


def usual_aliases(mapping: tuple[Option, ...]) -> dict[str, str]:
    """Return the usual names of the sizes that a family names otherwise: transformers accepts both."""
    return {USUAL[option.theirs]: option.theirs for option in mapping if option.theirs in USUAL}


def check_values(hub: Tree) -> None:
    """Raise `InputError` for an option with a value of another type, or outside its range."""
    for name, value in hub.items():
        if name in VALUES and not VALUES[name].holds(value):
            raise InputError(f"config.json: {name} is {quote(value)}, expected {VALUES[name].words}")
