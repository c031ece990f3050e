"""RoBERTa and XLM-RoBERTa: BERT's layout with one token type; positions start after the padding id."""

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register_sizes, size_options

ROBERTA = {
    "roberta-base": ((12, 768, 12, 50265), "125M", 3),
    "roberta-large": ((24, 1024, 16, 50265), "355M", 5),
}
XLM_ROBERTA = {
    "xlm-roberta-base": ((12, 768, 12, 250002), "278M"),  # the paper says 270M
    "xlm-roberta-large": ((24, 1024, 16, 250002), "560M"),  # the paper says 550M
}


@register_sizes(
    "RoBERTa encoder for masked tokens: {layers} layers of {width}, {} parameters "
    "(Liu et al. 2019, section {}).",
    ROBERTA,
)
@register_sizes(
    "XLM-RoBERTa, 100 languages: {layers} layers of {width}, {} parameters (Conneau et al. 2020, section 3).",
    XLM_ROBERTA,
)
def roberta(layers: int, width: int, heads: int, vocab: int) -> ModelConfig:
    """Return texts of 512 tokens; the first two rows of the position table are unused."""
    options = {
        "vocab_size": vocab,
        "type_vocab_size": 1,
        "offset": 2,
        "eps": 1e-5,
        "pad": 1,
        "bos": 0,
        "eos": 2,
    }
    return model_config("bert-base", {**size_options(layers, width, heads), **options})
