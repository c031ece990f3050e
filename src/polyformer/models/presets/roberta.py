"""RoBERTa and XLM-RoBERTa: BERT's layout, one token type, positions behind padding's id."""

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register, sizes


def roberta(layers: int, width: int, heads: int, vocab: int) -> ModelConfig:
    """Liu et al. 2019, section 3: texts of 512 tokens; two rows of the position table are no position's."""
    own = {"vocab_size": vocab, "type_vocab_size": 1, "offset": 2, "eps": 1e-5, "pad": 1, "bos": 0, "eos": 2}
    return model_config("bert-base", {**sizes(layers, width, heads), **own})


@register("roberta-base")
def roberta_base() -> ModelConfig:
    """RoBERTa encoder for masked tokens: 12 layers of 768, 125M parameters (Liu et al. 2019, section 3)."""
    return roberta(12, 768, 12, 50265)


@register("roberta-large")
def roberta_large() -> ModelConfig:
    """RoBERTa encoder for masked tokens: 24 layers of 1024, 355M parameters (Liu et al. 2019, section 5)."""
    return roberta(24, 1024, 16, 50265)


@register("xlm-roberta-base")
def xlm_roberta_base() -> ModelConfig:
    """XLM-RoBERTa, 100 languages: 12 layers of 768, 278M parameters (Conneau et al. 2020, section 3).

    The paper says 270M parameters.
    """
    return roberta(12, 768, 12, 250002)


@register("xlm-roberta-large")
def xlm_roberta_large() -> ModelConfig:
    """XLM-RoBERTa, 100 languages: 24 layers of 1024, 560M parameters (Conneau et al. 2020, section 3).

    The paper says 550M parameters.
    """
    return roberta(24, 1024, 16, 250002)
