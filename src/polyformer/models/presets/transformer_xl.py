"""Transformer-XL: post-norm decoders with recurrence over segments. Dai et al. 2019, and their scripts.

The paper's tables give numbers of parameters; widths and lengths are those of the authors' code
(`run_*_base.sh`, `tf/sota/*.sh`). The memory here is the one of evaluation, longer than in training:
`memory.length` may be changed. The 18-layer model of 88M parameters on enwik8 has no published widths.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import TransformerXLConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register
from polyformer.nn.block import PostNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import AdaptiveSoftmaxConfig, HeadConfig
from polyformer.nn.memory import RecurrentConfig
from polyformer.nn.stack import AdaptiveConfig, AttentionConfig, EmbeddingConfig, StackConfig

WIKITEXT_103 = 267735, (20000, 40000, 200000)
ENWIK8 = 204, ()
ONE_BILLION_WORDS = 793471, (60000, 100000, 640000)
"""Tokens and cut-offs of each vocabulary."""


def transformer_xl(
    layers: int,
    width: int,
    heads: tuple[int, int],
    inner: int,
    vocabulary: tuple[int, tuple[int, ...]],
    *,
    memory: int,
    farthest: int | None,
    div_val: int = 1,
    untied: bool = True,
    head: HeadConfig | None = None,
) -> ModelConfig:
    """`heads`: how many, and their width. Every token sees `memory` tokens, itself among them; those farther
    than `farthest` count as that far. `untied`: whether each layer has global queries of its own."""
    words, cutoffs = vocabulary
    return ModelConfig(
        vocab_size=words,
        hidden_size=width,
        embedding=EmbeddingConfig(
            scaled=True, adaptive=AdaptiveConfig(cutoffs=cutoffs, div_val=div_val, d_embed=width)
        ),
        decoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(
                num_attention_heads=heads[0],
                head_size=heads[1],
                bias=False,
                mechanism=SoftmaxConfig(pattern=Window(memory - 1, 0)),
            ),
            feedforward=DenseConfig(intermediate_size=inner, inner_dropout=0.1),
            position=TransformerXLConfig(
                shared_biases=not untied, clamp_distance=farthest, waves_dropout=0.1
            ),
            memory=RecurrentConfig(length=memory),
            block=PostNormConfig(),
            norm=LayerNormConfig(eps=1e-5),
            dropout=0.1,
            final_dropout=0.1,
        ),
        head=head or AdaptiveSoftmaxConfig(),
        special=SpecialTokens(eos=0),
        initializer_range=0.02,
    )


@register("transformer-xl-base")
def wikitext_103_base() -> ModelConfig:
    """Transformer-XL for WikiText-103, standard: 16 layers of 410, 151M parameters (Dai et al. 2019, table
    1).
    """
    return transformer_xl(16, 410, (10, 41), 2100, WIKITEXT_103, memory=640, farthest=400, untied=False)


@register("transformer-xl-large")
def wikitext_103_large() -> ModelConfig:
    """Transformer-XL for WikiText-103, large: 18 layers of 1024, 285M parameters (Dai et al. 2019, table 1).

    The table says 257M; the authors' file, `transfo-xl-wt103` on the hub, has 285M.
    """
    return transformer_xl(18, 1024, (16, 64), 4096, WIKITEXT_103, memory=1600, farthest=1000, div_val=4)


@register("transformer-xl-enwik8-12")
def enwik8_12() -> ModelConfig:
    """Transformer-XL for enwik8's bytes: 12 layers of 512, 41M parameters (Dai et al. 2019, table 2)."""
    return transformer_xl(12, 512, (8, 64), 2048, ENWIK8, memory=2100, farthest=820, untied=False)


@register("transformer-xl-enwik8-24")
def enwik8_24() -> ModelConfig:
    """Transformer-XL for enwik8's bytes: 24 layers of 1024, 277M parameters (Dai et al. 2019, table 2)."""
    return transformer_xl(24, 1024, (8, 128), 3072, ENWIK8, memory=3800, farthest=1000, untied=False)


@register("transformer-xl-1b-large")
def one_billion_large() -> ModelConfig:
    """Transformer-XL for One Billion Word, large: 24 layers of 1280 (Dai et al. 2019, table 4)."""
    return transformer_xl(
        24,
        1280,
        (16, 80),
        8192,
        ONE_BILLION_WORDS,
        memory=128,
        farthest=None,
        div_val=4,
        head=AdaptiveSoftmaxConfig(tie_projs=(False,) * 4),
    )
