"""The architectures of transformers that are tested with our attention, each as a model of two small layers.

The tests compare each with transformers' own attention; docs/transformers.md shows the same table.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["decoder", "encoder", "encoder-decoder", "image", "audio", "image and text", "speech to text"]

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "pad_token_id": 0}
GROUPED: dict[str, Any] = {**HEADS, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
BART: dict[str, Any] = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None},
}
T5: dict[str, Any] = {
    **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "dropout_rate": 0.0},
}
IMAGE: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 4},
}
AUDIO: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4)},
    **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
    **{"feat_extract_norm": "group", "mask_time_prob": 0.0, "hidden_dropout": 0.0, "layerdrop": 0.0},
}
TWO_SIDES: dict[str, Any] = {
    "text_config": {**HEADS, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": IMAGE,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8}  # the scale is 1 / sqrt of the latter, not of head_dim
GPT: dict[str, Any] = {**HEADS, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
MARKS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
DISTILBERT = {
    **{"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "max_position_embeddings": 64,
}
WHISPER: dict[str, Any] = {
    **{"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32},
    **{"suppress_tokens": None, "begin_suppress_tokens": None},  # the defaults exceed this vocabulary
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model of transformers to test: its class, its kind and a small configuration."""

    model: str
    kind: Kind
    config: Mapping[str, Any]
    window: Mapping[str, Any] | None = None  # options for a sliding window of 4 tokens, if it has windows
    features: str = ""  # of its attention, beyond a mask

    @property
    def name(self) -> str:
        """The class without its task, for example "Llama"."""
        return self.model.partition("For")[0].partition("LMHead")[0].removesuffix("Model")


def _decoder(model: str, features: str = "", window: Any = None, **more: Any) -> Architecture:
    return _row(model, "decoder", GROUPED, features, window, **more)


def _encoder(model: str, features: str = "", window: Any = None, **more: Any) -> Architecture:
    return _row(model, "encoder", {**HEADS, "max_position_embeddings": 64}, features, window, **more)


def _row(
    model: str, kind: Kind, config: Mapping[str, Any], features: str = "", window: Any = None, **more: Any
) -> Architecture:
    config = {**config, **more}
    return Architecture(model=model, kind=kind, config=config, window=window, features=features)


SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ALL_SLIDING = {"sliding_window": 4}
QWEN = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

# All tested architectures.
ARCHITECTURES: tuple[Architecture, ...] = (
    _decoder("LlamaForCausalLM", "grouped queries"),
    _decoder("MistralForCausalLM", "grouped queries", ALL_SLIDING, sliding_window=None),
    _decoder("MixtralForCausalLM", "grouped queries, experts", ALL_SLIDING, sliding_window=None, **EXPERTS),
    _decoder("Qwen2ForCausalLM", "grouped queries", QWEN),
    _decoder("Qwen3ForCausalLM", "grouped queries", QWEN, head_dim=8),
    _decoder("Qwen3MoeForCausalLM", "experts", head_dim=8, **QWEN_EXPERTS),
    _decoder("GemmaForCausalLM", "grouped queries", head_dim=8),
    _decoder("Gemma2ForCausalLM", "soft caps", SLIDING, **GEMMA, attn_logit_softcapping=2.0),
    _decoder("Gemma3ForCausalLM", "grouped queries", SLIDING, **GEMMA),
    _decoder("PhiForCausalLM"),
    _decoder("Phi3ForCausalLM", "", ALL_SLIDING),
    _decoder("OlmoForCausalLM"),
    _decoder("Olmo2ForCausalLM"),
    _decoder("Olmo3ForCausalLM", "", SLIDING),
    _decoder("StableLmForCausalLM"),
    _decoder("CohereForCausalLM"),
    _decoder("Cohere2ForCausalLM", "", SLIDING),
    _decoder("GraniteForCausalLM"),
    _decoder("Starcoder2ForCausalLM", "", ALL_SLIDING, sliding_window=None),
    _decoder("GptOssForCausalLM", "sinks, experts", SLIDING, head_dim=8, **EXPERTS),
    _decoder("HeliumForCausalLM", head_dim=8),
    _decoder("SmolLM3ForCausalLM", "layers without positions"),
    _decoder("GlmForCausalLM", head_dim=8),
    _decoder("Glm4ForCausalLM", head_dim=8),
    _decoder("NemotronForCausalLM"),
    _decoder("PersimmonForCausalLM"),
    _decoder("ArceeForCausalLM"),
    _decoder("Ernie4_5ForCausalLM"),
    _decoder("Exaone4ForCausalLM", "", {**SLIDING, "sliding_window_pattern": "LG"}),
    _decoder("SeedOssForCausalLM", head_dim=8),
    _decoder("ApertusForCausalLM"),
    _decoder("DeepseekV3ForCausalLM", "keys wider than values", **DEEPSEEK),
    _decoder("GPTNeoXForCausalLM"),
    _decoder("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
    _decoder("BioGptForCausalLM", max_position_embeddings=64),
    _row("GPT2LMHeadModel", "decoder", GPT),
    _row("GPTBigCodeForCausalLM", "decoder", GPT, "one key head"),
    _encoder("BertModel"),
    _encoder("RobertaModel"),
    _encoder("ElectraModel", embedding_size=32),
    _encoder("AlbertModel", "shared layers", embedding_size=16),
    _encoder("CamembertModel"),
    _encoder("XLMRobertaModel"),
    _encoder("Data2VecTextModel"),
    _encoder("ErnieModel"),
    _row("DistilBertModel", "encoder", DISTILBERT),
    _encoder("ModernBertModel", "", {"local_attention": 8, "layer_types": SLIDING["layer_types"]}, **MARKS),
    _row("BartForConditionalGeneration", "encoder-decoder", BART),
    _row("MBartForConditionalGeneration", "encoder-decoder", BART),
    _row("MarianMTModel", "encoder-decoder", BART, decoder_start_token_id=0),
    _row("PegasusForConditionalGeneration", "encoder-decoder", BART, decoder_start_token_id=0),
    _row("BlenderbotForConditionalGeneration", "encoder-decoder", BART),
    _row("M2M100ForConditionalGeneration", "encoder-decoder", BART),
    _row("T5ForConditionalGeneration", "encoder-decoder", T5, "biases by distance"),
    _row("MT5ForConditionalGeneration", "encoder-decoder", T5, "biases by distance"),
    _row("LongT5ForConditionalGeneration", "encoder-decoder", T5, "biases by distance"),
    _row("UMT5ForConditionalGeneration", "encoder-decoder", T5, "biases by distance"),
    _row("WhisperForConditionalGeneration", "speech to text", BART | WHISPER),
    _row("ViTModel", "image", IMAGE),
    _row("DeiTModel", "image", IMAGE),
    _row("Dinov2Model", "image", IMAGE),
    _row("SiglipVisionModel", "image", IMAGE),
    _row("CLIPModel", "image and text", TWO_SIDES, projection_dim=16),
    _row("SiglipModel", "image and text", TWO_SIDES),
    _row("Wav2Vec2Model", "audio", AUDIO),
    _row("HubertModel", "audio", AUDIO),
)
