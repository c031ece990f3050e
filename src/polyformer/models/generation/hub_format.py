"""Generation settings in the format of the Hugging Face hub: generation_config.json, or fields of
config.json.

`from_hub` applies every field that changes the generated text, or refuses it by name. Fields that cannot
change it (caches, additional outputs, exact speculation) are ignored. Defaults follow transformers
5.23: 20 new tokens, and 50 for `top_k` when sampling.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyformer.core.errors import InputError, quote, unknown
from polyformer.models.generation.config import GenerationConfig
from polyformer.models.generation.constraints import ConstraintConfig

LENGTHS = ("max_length", "max_new_tokens", "min_length", "min_new_tokens")
SPECIAL = {"decoder_start_token_id": "start", "eos_token_id": "eos", "pad_token_id": "pad"}
CONSTRAINTS = tuple(field.name for field in dataclasses.fields(ConstraintConfig))
# Options of sampling, with the hub's value for no limit.
NO_LIMIT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}

SUPPORTED_FIELDS = {
    *LENGTHS,
    *SPECIAL,
    *CONSTRAINTS,
    *NO_LIMIT,
    *("do_sample", "temperature", "num_beams", "num_beam_groups", "diversity_penalty", "penalty_alpha"),
    *("dola_layers", "early_stopping", "length_penalty", "num_return_sequences", "repetition_penalty"),
    *("stop_strings",),
}

# Fields that would change the generated text, with the values (besides null) that do not.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("constraints", "exponential_decay_length_penalty", "force_words_ids", "max_time"), ()),
    **dict.fromkeys(("prefill_chunk_size", "sequence_bias", "top_h", "watermarking_config"), ()),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits", "token_healing"), (False,)),
}

IGNORED_FIELDS = {
    *("_commit_hash", "_from_model_config", "_original_object_hash", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "bos_token_id"),
    *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config"),
    *("disable_compile", "is_assistant", "low_memory", "max_cache_len", "max_matching_ngram_size"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions", "output_hidden_states"),
    *("output_logits", "output_scores", "prompt_lookup_num_tokens", "return_dict_in_generate"),
    *("speculation_type", "target_lookbehind", "transformers_version", "use_cache", "use_mtp"),
}


def from_hub(data: Mapping[str, Any]) -> GenerationConfig:
    """Return the settings that `data` describes.

    Args:
        data: the content of generation_config.json, or of a config.json, with other fields for the model.

    Raises:
        InputError: a field that would change the result and has no counterpart here; an unknown field;
            values that do not fit.
    """
    fields = _fields(data)
    for name, harmless in UNSUPPORTED_FIELDS.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise InputError(f"{name}: polyformer has no counterpart for {quote(value)}; set it to null")
    if fields.get("cache_implementation") == "quantized":
        raise InputError("cache_implementation: 'quantized' changes the numbers; set it to null")
    beams = fields.get("num_beams", 1)
    return GenerationConfig.from_dict(
        {
            **_lengths(fields),
            "num_return_sequences": fields.get("num_return_sequences", 1),
            "repetition_penalty": fields.get("repetition_penalty", 1.0),
            "constraints": {name: _plural(name, fields[name]) for name in CONSTRAINTS if name in fields},
            "stop": _plural("stop_strings", fields.get("stop_strings", ())),
            "special": {
                our: _plural(their, fields[their]) for their, our in SPECIAL.items() if their in fields
            },
            "sampling": _sampling(fields) if fields.get("do_sample") else {},
            "beam": {}
            if beams == 1 and fields.get("num_beam_groups", 1) == 1
            else {
                "num_beams": beams,
                "normalization": "length",
                "length_penalty": fields.get("length_penalty", 1.0),
                "early_stopping": fields.get("early_stopping", False),
                "num_beam_groups": fields.get("num_beam_groups", 1),
                "diversity_penalty": fields.get("diversity_penalty", 0.0),
            },
            "contrastive": _contrastive(fields),
            "dola": {"dola_layers": fields.get("dola_layers")},
        }
    )


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known fields of generation that are not null."""
    of_model = "model_type" in data or "architectures" in data
    fields = dict(data)
    known = SUPPORTED_FIELDS | UNSUPPORTED_FIELDS.keys() | IGNORED_FIELDS
    for name in fields:
        if name not in known and not of_model:
            raise unknown("field of generation_config.json", name, known)
    # The former name, in config.json of BART.
    if of_model and fields.get("force_bos_token_to_be_generated"):
        fields.setdefault("forced_bos_token_id", fields.get("bos_token_id"))
    return {name: value for name, value in fields.items() if name in known and value is not None}


def _lengths(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lengths: new tokens take precedence over whole lengths, and a missing length is no limit."""
    most, whole = fields.get("max_new_tokens"), fields.get("max_length")
    if most is not None:
        whole = None
    elif whole is None:
        most = 20
    # As in transformers, new tokens take precedence.
    least_new, least = fields.get("min_new_tokens", 0), fields.get("min_length", 0)
    return {
        "max_new_tokens": most,
        "min_new_tokens": least_new,
        "whole": {"max_length": whole, "min_length": 0 if least_new else least},
    }


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    # Transformers' default when it samples.
    values = {"top_k": 50, **fields}
    limits = {name: values[name] for name, none in NO_LIMIT.items() if values.get(name, none) != none}
    return {"do_sample": True, "temperature": fields.get("temperature", 1.0), **limits}


def _contrastive(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of contrastive search; the hub's `top_k` is the number of candidates."""
    alpha = fields.get("penalty_alpha", 0.0)
    return {"penalty_alpha": alpha, "candidates": fields.get("top_k", 50)} if alpha else {}


def _plural(name: str, value: Any) -> Any:
    """Return a single id or text as a list if the field may have several."""
    several = name in ("eos_token_id", "forced_eos_token_id", "stop_strings")
    return [value] if several and isinstance(value, int | str) else value
