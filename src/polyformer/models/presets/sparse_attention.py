"""Systems with sparse attention: by place (Sparse and Image Transformer, Blockwise BERT), by content (Routing
Transformer, Sinkhorn) and by learned distance (adaptive spans).

Deviations. Sparse Transformer: initial weights are not scaled by depth (section 5.2), and all heads of a
layer see the same columns of a block. Its model for CIFAR-10 is missing: its queries and keys have half the
width of its values. Image Transformer: see `training.tasks.image`. Routing: see `mechanisms.routing`.
"""

from polyformer.attention.mechanisms import (
    AdaptiveSpanConfig,
    AlternateConfig,
    RoutingConfig,
    SinkhornConfig,
    SoftmaxConfig,
)
from polyformer.attention.patterns import (
    Blockwise,
    Fixed,
    Local1D,
    Local2D,
    Pattern,
    PerHead,
    PerLayer,
    Strided,
    Window,
)
from polyformer.attention.positions import GridConfig, ShawConfig
from polyformer.models.presets.base import register_variants, size_options


def pixels(height: int, width: int, channels: int, levels: int = 256) -> dict[str, object]:
    """Return overrides for images as sequences: a token for each level and a start token."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return {
        "vocab_size": levels + 1,
        "max_position_embeddings": height * width * channels + 1,
        "position": GridConfig(shape=shape),
        "tied": False,
    }


def blockwise(length: int, heads: tuple[int, ...]) -> Pattern:
    """Return a block for each of `heads`: `heads[s]` heads attend `s` blocks further on, cyclically."""
    return PerHead(Blockwise.heads(-(-length // len(heads)), len(heads), heads))


def routed(local: int, routed: int, clusters: int, window: int, local_heads: int) -> AlternateConfig:
    """Return `local` layers of local attention below `routed` layers, in which the other heads route."""
    near = SoftmaxConfig(pattern=Window(window - 1, 0))
    far = RoutingConfig(clusters=clusters, window=window, local_heads=local_heads, local_window=window)
    return AlternateConfig(mechanisms=(near,) * local + (far,) * routed)


def spans(longest: int) -> dict[str, object]:
    """Return overrides for adaptive spans; all layers share the vectors of distances."""
    return {
        "attention": AdaptiveSpanConfig(max_span=longest),
        "position": ShawConfig(clip=longest, values=False, shared=True),
    }


STRIDED = Window(128, 0), Strided(128)
SPARSE = {
    "sparse-transformer": (
        "decoder-small",
        {
            **size_options(30, 512, 8),
            "vocab_size": 256,
            "max_position_embeddings": 12288,
            "position": GridConfig(shape=(96, 128)),
            "attention": Fixed(128, 32),
            "dropout": 0.4,
        },
        "of enwik8's bytes, fixed pattern: 30 layers of 512, 95M parameters",
        ", table 1",
    ),
    "sparse-transformer-images": (
        "decoder-small",
        {**size_options(48, 512, 16), **pixels(64, 64, 3), "attention": PerLayer(STRIDED), "dropout": 0.01},
        "of 64 x 64 images, strided pattern: 48 layers of 512, 152M parameters",
        ", table 1",
    ),
    "sparse-transformer-small": (
        "decoder-small",
        {"attention": Fixed(32, 4)},
        "for a CPU, fixed pattern: 4 layers of 256",
    ),
    "sparse-transformer-strided-small": (
        "decoder-small",
        {"attention": PerHead((Window(16, 0), Strided(16)))},
        "for a CPU, strided pattern: 4 layers of 256",
    ),
    "sparse-transformer-images-small": (
        "decoder-tiny",
        {**pixels(8, 8, 1, 17), "attention": PerLayer((Window(8, 0), Strided(8)))},
        "of 8 x 8 images for a CPU, strided pattern: 2 layers of 128",
    ),
}
IMAGE = {
    "image-transformer": (
        "decoder-small",
        {
            **size_options(12, 512, 4),
            **pixels(32, 32, 3),
            "attention": Local1D(256, 256),
            "block": "post",
            "activation": "relu",
            "dropout": 0.3,
        },
        "of CIFAR-10, local in one dimension: 12 layers of 512",
        ", section 5.1",
    ),
    "image-transformer-small": (
        "decoder-tiny",
        {**pixels(8, 8, 1, 17), "attention": Local2D((8, 8), (2, 4), (3, 2, 2))},
        "of 8 x 8 images for a CPU, local in two dimensions: 2 layers of 128",
    ),
}
SUPER_RESOLUTION = {
    "image-transformer-super-resolution": (
        "transformer-base",
        {
            **pixels(32, 32, 3),
            "encoder.position": GridConfig(shape=(8, 8, 3)),
            "encoder.num_hidden_layers": 4,
            "decoder.num_hidden_layers": 12,
            "decoder.attention": Local1D(256, 256),
        },
        "from 8 x 8 to 32 x 32 pixels: 4 + 12 layers of 512",
        ", section 5.3",
    ),
    "image-transformer-super-resolution-small": (
        "transformer-small",
        {
            **size_options(2, 128, 4),
            **pixels(8, 8, 1, 17),
            "encoder.position": GridConfig(shape=(4, 4)),
            "decoder.attention": Local2D((8, 8), (2, 4), (3, 2, 2)),
            "dropout": 0.0,
        },
        "from 4 x 4 to 8 x 8 pixels for a CPU: 2 + 2 layers of 128",
    ),
}
BLOCKWISE = {
    "blockwise-bert": (
        "bert-base",
        {"attention": blockwise(512, (10, 2))},
        "for 512 tokens, 2 blocks: 12 layers of 768",
        ", section 4.1",
    ),
    "blockwise-bert-1024": (
        "bert-base",
        {"max_position_embeddings": 1024, "attention": blockwise(1024, (8, 2, 2))},
        "for 1024 tokens, 3 blocks: 12 layers of 768",
        ", section 4.1",
    ),
    "blockwise-bert-small": (
        "bert-base",
        {**size_options(4, 256, 8), "vocab_size": 8000, "attention": blockwise(128, (6, 2))},
        "for a CPU and 128 tokens: 4 layers of 256",
    ),
}
ROUTING = {
    "routing-transformer": (
        "decoder-small",
        {**size_options(12, 512, 8), **pixels(32, 32, 3), "attention": routed(10, 2, 6, 512, 4)},
        "of CIFAR-10: 12 layers of 512, the last two route half of the heads",
        ", table 1",
    ),
    "routing-transformer-small": (
        "decoder-small",
        {"attention": routed(2, 2, 8, 64, 4)},
        "for a CPU: 4 layers of 256, the last two route half of their heads",
    ),
}
SINKHORN = {
    "sinkhorn": (
        "decoder-small",
        {
            **size_options(6, 512, 8),
            "vocab_size": 32000,
            "attention": SinkhornConfig(block_size=32, max_length=512),
            "activation": "relu",
        },
        "in tensor2tensor's base size: 6 layers of 512, blocks of 32 tokens",
        ", section 5.2",
    ),
    "sinkhorn-small": (
        "decoder-small",
        {"attention": SinkhornConfig(block_size=16, max_length=512)},
        "for a CPU: 4 layers of 256, blocks of 16 tokens",
    ),
}
SPANS = {
    "adaptive-span": (
        "decoder-small",
        {**size_options(12, 512, 8), "vocab_size": 27, **spans(8192), "activation": "relu", "block": "post"},
        "of text8's letters: 12 layers of 512, 38M parameters",
        ", table 1",
    ),
    "adaptive-span-large": (
        "decoder-small",
        {
            **size_options(24, 768, 8),
            "intermediate_size": 4096,
            "vocab_size": 27,
            **spans(8192),
            "activation": "relu",
            "block": "post",
        },
        "of text8's letters: 24 layers of 768, 209M parameters",
        ", table 1",
    ),
    "adaptive-span-small": ("decoder-small", spans(256), "for a CPU: 4 layers of 256"),
}

register_variants("Sparse Transformer {} (Child et al. 2019{}).", SPARSE)
register_variants("Image Transformer {} (Parmar et al. 2018{}).", IMAGE)
register_variants("Image Transformer {} (Parmar et al. 2018{}).", SUPER_RESOLUTION)
register_variants("Blockwise BERT (BlockBERT) {} (Qiu et al. 2020{}).", BLOCKWISE)
register_variants("Routing Transformer {} (Roy et al. 2021{}).", ROUTING)
register_variants("Sinkhorn Transformer {} (Tay et al. 2020{}).", SINKHORN)
register_variants("Transformer with adaptive spans {} (Sukhbaatar et al. 2019{}).", SPANS)
