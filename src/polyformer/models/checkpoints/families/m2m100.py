"""M2M-100, and NLLB, which has the same format: BART's layers in pre-norm order. Fan et al. 2021.

Positions are counted from the padding token's id + 1, over the tokens that are not padding.
"""

from typing import Any, ClassVar

from polyformer.models.checkpoints.config_mapping import Option, activation, both, option, with_defaults
from polyformer.models.checkpoints.families.bart import (
    LM_HEAD,
    SHARED,
    TABLES,
    TIED,
    Bart,
    layer,
    stack_tables,
)
from polyformer.models.checkpoints.families.bart import OPTIONS as BART_OPTIONS
from polyformer.models.checkpoints.family import Task, register
from polyformer.models.checkpoints.key_mapping import Converter, layered
from polyformer.models.presets import model_config
from polyformer.nn.heads import EmbedConfig, LanguageModelConfig


def stack(side: str, norms: int) -> dict[str, str | Converter]:
    """Return the tensors of a stack that are not shared."""
    return {
        f"{side}.layer_norm": f"{side}.final_norm",
        **layered(f"{side}.layers.{{i}}", f"{side}.layers.{{i}}", layer(norms)),
    }


def _position(pad: Any) -> Any:
    return None if pad is None else pad + 1


def _padding(offset: Any) -> Any:
    return None if offset is None else offset - 1


OWN = (
    option("vocab_size", 128112, "vocab_size"),
    activation("activation_function", "relu", *both("feedforward.activation")),
    option("attention_dropout", 0.1, *both("attention.mechanism.dropout")),
    option("encoder_layerdrop", 0.05, "encoder.layerdrop"),
    option("decoder_layerdrop", 0.05, "decoder.layerdrop"),
    option("scale_embedding", True, "embedding.scaled"),
    Option("pad_token_id", 1, both("position.offset"), _position, _padding),
    option("pad_token_id", 1, "special.pad"),
)
"""The options that differ from BART's: in defaults, and in the first position."""


@register
class M2M100(Bart):
    """An encoder-decoder for translation, with the output language forced as its first token."""

    model_type = "m2m_100"
    class_prefix = "M2M100"
    paper = "Fan et al. 2021"
    objective = "translation in all directions"
    template = model_config("m2m100-418m")
    config_mapping = (*with_defaults(BART_OPTIONS, {}, *(option.theirs for option in OWN)), *OWN)
    required: ClassVar = {}
    ignored_options = ("bos_token_id", "chunk_size_feed_forward", "is_encoder_decoder", "use_cache")
    key_mapping: ClassVar = {**TABLES, **stack("encoder", 2), **stack("decoder", 3)}
    ignored_keys = ("*coder.embed_tokens.weight", "*coder.version", "*coder.embed_positions.*")
    head_dropouts = ()
    tasks: ClassVar = {
        "ForConditionalGeneration": Task(LanguageModelConfig(), LM_HEAD, tied_keys=TIED, unused_keys=SHARED),
        "Model": Task(
            EmbedConfig(normalize=False), tied_keys=stack_tables(""), prefixed=False, unused_keys=SHARED
        ),
    }
    sizes = ("m2m100-418m", "m2m100-1.2b")
