"""M2M-100, and NLLB, which is saved as one: BART's layers with norms before. Fan et al. 2021.

Positions are counted from the padding token's id and one, over the tokens that are not padding.
"""

from typing import Any, ClassVar

from polyformer.checkpoints.families.bart import FIELDS as BART_FIELDS
from polyformer.checkpoints.families.bart import LM_HEAD, SHARED, TABLES, TIED, Bart, copies, layer
from polyformer.checkpoints.family import Task, register
from polyformer.checkpoints.fields import Field, act, both, field
from polyformer.checkpoints.names import Part, layered
from polyformer.heads import EmbedConfig, LanguageModelConfig
from polyformer.presets import model_config


def stack(side: str, norms: int) -> dict[str, str | Part]:
    """What one of the stacks has of its own."""
    return {
        f"{side}.layer_norm": f"{side}.final_norm",
        **layered(f"{side}.layers.{{i}}", f"{side}.layers.{{i}}", layer(norms)),
    }


def _position(pad: Any) -> Any:
    return None if pad is None else pad + 1


def _padding(offset: Any) -> Any:
    return None if offset is None else offset - 1


OTHERS = (
    field("vocab_size", 128112, "vocab_size"),
    act("activation_function", "relu", *both("feedforward.activation")),
    field("attention_dropout", 0.1, *both("attention.mechanism.dropout")),
    field("encoder_layerdrop", 0.05, "encoder.layerdrop"),
    field("decoder_layerdrop", 0.05, "decoder.layerdrop"),
    field("scale_embedding", True, "embedding.scaled"),
    Field("pad_token_id", 1, both("position.offset"), _position, _padding),
    field("pad_token_id", 1, "special.pad"),
)
"""Where it differs from BART: in defaults, and in where positions begin."""


@register
class M2M100(Bart):
    """Translation, the language of the output forced as its first token."""

    model_type = "m2m_100"
    classes = "M2M100"
    paper = "Fan et al. 2021"
    objective = "translation in all directions"
    template = model_config("m2m100-418m")
    fields = (*(one for one in BART_FIELDS if one.theirs not in {other.theirs for other in OTHERS}), *OTHERS)
    fixed: ClassVar = {}
    inert = ("bos_token_id", "chunk_size_feed_forward", "is_encoder_decoder", "use_cache")
    names: ClassVar = {**TABLES, **stack("encoder", 2), **stack("decoder", 3)}
    ignored = ("*coder.embed_tokens.weight", "*coder.version", "*coder.embed_positions.*")
    dropouts = ()
    tasks: ClassVar = {
        "ForConditionalGeneration": Task(LanguageModelConfig(), LM_HEAD, copies=TIED, unused_keys=SHARED),
        "Model": Task(EmbedConfig(normalize=False), copies=copies(""), base=False, unused_keys=SHARED),
    }
    sizes = ("m2m100-418m", "m2m100-1.2b")
