"""XLM: BERT's layout without token types, with a vector for each language. Conneau and Lample 2019."""

import dataclasses

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register, sizes
from polyformer.nn.heads import LanguageModelConfig


def xlm(
    layers: int, width: int, heads: int, vocab: int, languages: int = 0, causal: bool = False
) -> ModelConfig:
    """Section 5.1: GELU, learned positions, dropout of 0.1; a decoder alone if `causal`."""
    own = {"vocab_size": vocab, "type_vocab_size": 0, "pad": 2, "bos": 0, "eos": 1}
    config = model_config("bert-base", {**sizes(layers, width, heads), **own})
    return dataclasses.replace(
        config,
        embedding=dataclasses.replace(config.embedding, num_languages=languages),
        encoder=None if causal else config.encoder,
        decoder=config.encoder if causal else None,
        head=LanguageModelConfig(bias=True),
    )


@register("xlm-mlm-en-2048")
def xlm_mlm_en() -> ModelConfig:
    """XLM encoder of English: 12 layers of 2048, 667M parameters (Conneau and Lample 2019)."""
    return xlm(12, 2048, 16, 30145)


@register("xlm-clm-ende-1024")
def xlm_clm_ende() -> ModelConfig:
    """XLM language model, English and German: 6 layers of 1024 (Conneau and Lample 2019, section 5.1)."""
    return xlm(6, 1024, 8, 64699, languages=2, causal=True)


@register("xlm-mlm-tlm-xnli15-1024")
def xlm_mlm_tlm_xnli15() -> ModelConfig:
    """XLM encoder of 15 languages: 12 layers of 1024, 249M parameters (Conneau and Lample 2019)."""
    return xlm(12, 1024, 8, 95000, languages=15)
