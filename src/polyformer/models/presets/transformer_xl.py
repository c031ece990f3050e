"""Transformer-XL: post-norm decoders with recurrence over segments. Dai et al. 2019, and their scripts.

The paper's tables give numbers of parameters; widths and lengths are those of the authors' code
(`run_*_base.sh`, `tf/sota/*.sh`). The memory has the length of evaluation, longer than in training;
change it by `memory.length`. The 18-layer model of 88M parameters on enwik8 has no published widths.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import TransformerXLConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import PostNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import AdaptiveSoftmaxConfig
from polyformer.nn.memory import RecurrentConfig
from polyformer.nn.stack import AdaptiveConfig, AttentionConfig, EmbeddingConfig, StackConfig

WIKITEXT_103 = 267735, (20000, 40000, 200000)
ENWIK8 = 204, ()
ONE_BILLION_WORDS = 793471, (60000, 100000, 640000)
"""Tokens and cut-offs of each vocabulary."""


SIZES = {  # layers, width, heads, head size, inner width, vocabulary, memory, clamp, div_val, untied
    "transformer-xl-base": (
        (16, 410, 10, 41, 2100, WIKITEXT_103, 640, 400, 1, False),
        "WikiText-103, standard: 16 layers of 410, 151M parameters",
        1,
    ),
    # The table says 257M; the authors' file, `transfo-xl-wt103` on the hub, has 285M.
    "transformer-xl-large": (
        (18, 1024, 16, 64, 4096, WIKITEXT_103, 1600, 1000, 4, True),
        "WikiText-103, large: 18 layers of 1024, 285M parameters",
        1,
    ),
    "transformer-xl-enwik8-12": (
        (12, 512, 8, 64, 2048, ENWIK8, 2100, 820, 1, False),
        "enwik8's bytes: 12 layers of 512, 41M parameters",
        2,
    ),
    "transformer-xl-enwik8-24": (
        (24, 1024, 8, 128, 3072, ENWIK8, 3800, 1000, 1, False),
        "enwik8's bytes: 24 layers of 1024, 277M parameters",
        2,
    ),
    "transformer-xl-1b-large": (
        (24, 1280, 16, 80, 8192, ONE_BILLION_WORDS, 128, None, 4, True, (False,) * 4),
        "One Billion Word, large: 24 layers of 1280",
        4,
    ),
}


@register_sizes("Transformer-XL for {} (Dai et al. 2019, table {}).", SIZES)
def transformer_xl(
    layers: int,
    width: int,
    heads: int,
    head_size: int,
    inner: int,
    vocabulary: tuple[int, tuple[int, ...]],
    *,
    memory: int,
    clamp: int | None,
    div_val: int,
    untied: bool,
    tie_projs: tuple[bool, ...] | None = None,
) -> ModelConfig:
    """Return a post-norm decoder with recurrence.

    Args:
        vocabulary: the number of tokens and the cut-offs of their clusters.
        memory: the number of tokens that a token attends to, including itself.
        clamp: the distance at which larger distances are clamped, None for none.
        untied: whether each layer has its own global queries.
    """
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
                num_attention_heads=heads,
                head_size=head_size,
                bias=False,
                mechanism=SoftmaxConfig(pattern=Window(memory - 1, 0)),
            ),
            feedforward=DenseConfig(intermediate_size=inner, inner_dropout=0.1),
            position=TransformerXLConfig(shared_biases=not untied, clamp_distance=clamp, waves_dropout=0.1),
            memory=RecurrentConfig(length=memory),
            block=PostNormConfig(),
            norm=LayerNormConfig(eps=1e-5),
            dropout=0.1,
            final_dropout=0.1,
        ),
        head=AdaptiveSoftmaxConfig(tie_projs=tie_projs),
        special=SpecialTokens(eos=0),
        initializer_range=0.02,
    )
