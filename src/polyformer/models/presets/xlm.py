"""XLM: BERT's layout without token types, with a vector for each language. Conneau and Lample 2019."""

import dataclasses

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register_sizes, size_options
from polyformer.nn.heads import LanguageModelConfig

SIZES = {  # layers, width, heads, vocabulary, languages, causal
    "xlm-mlm-en-2048": ((12, 2048, 16, 30145), "encoder of English", ", 667M parameters", ""),
    "xlm-clm-ende-1024": (
        (6, 1024, 8, 64699, 2, True),
        "language model, English and German",
        "",
        ", section 5.1",
    ),
    "xlm-mlm-tlm-xnli15-1024": ((12, 1024, 8, 95000, 15), "encoder of 15 languages", ", 249M parameters", ""),
}


@register_sizes("XLM {}: {layers} layers of {width}{} (Conneau and Lample 2019{}).", SIZES)
def xlm(
    layers: int, width: int, heads: int, vocab: int, languages: int = 0, causal: bool = False
) -> ModelConfig:
    """Return section 5.1: GELU, learned positions, dropout of 0.1; only a decoder if `causal`."""
    options = {"vocab_size": vocab, "type_vocab_size": 0, "pad": 2, "bos": 0, "eos": 1}
    config = model_config("bert-base", {**size_options(layers, width, heads), **options})
    return dataclasses.replace(
        config,
        embedding=dataclasses.replace(config.embedding, num_languages=languages),
        encoder=None if causal else config.encoder,
        decoder=config.encoder if causal else None,
        head=LanguageModelConfig(bias=True),
    )
