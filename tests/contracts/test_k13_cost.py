"""K13 cost: how the multiplications of a forward pass grow with the length, counted and not timed.

A mechanism or a pattern promises an exponent e, n^e multiplications for n tokens; from n to 4 n they must
grow by 4^e. Counted are the matrix products that torch sees (not those inside its fused kernels, so that
softmax runs in tiles), and with them the keys that a layout takes in. Every mechanism and pattern of the
package has an entry; a member of one's own need not. `polyformer show` counts every member and preset
without any numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from members import Case, distinct, shrunk
from selection import cases
from torch.utils.flop_counter import FlopCounterMode

from polyformer.attention.functional.backends.tiled.run import TILES
from polyformer.attention.mechanisms import (
    AdaptiveSpanConfig,
    AlternateConfig,
    CopeConfig,
    CosineConfig,
    DeltaConfig,
    DifferentialConfig,
    DynamicSpanConfig,
    ForgettingConfig,
    GatedDeltaConfig,
    GLAConfig,
    KDAConfig,
    LinearAttentionConfig,
    LinformerConfig,
    LSHConfig,
    MemoryCompressedConfig,
    MobaConfig,
    NSAConfig,
    PerformerConfig,
    PersistentConfig,
    RetentionConfig,
    RFAConfig,
    RoutingConfig,
    RWKV7Config,
    SelectiveConfig,
    SigmoidConfig,
    SinkhornConfig,
    SoftmaxConfig,
    SortCutConfig,
    SSDConfig,
    TalkingHeadsConfig,
    TopBlocksConfig,
)
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import (
    ETC,
    Aligned,
    BlockDiffusion,
    BlockWindow,
    Blockwise,
    Causal,
    Fixed,
    Full,
    Global,
    GlobalEnd,
    Links,
    Local1D,
    Local2D,
    Neighbourhood,
    Pattern,
    PerHead,
    PerLayer,
    Prefix,
    Random,
    Strided,
    Summary,
    WaitK,
    Whole,
    Window,
)
from polyformer.cli.commands import show
from polyformer.cli.plots.model import Cost, cost
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.presets import MODELS
from registered import registered

HEADS, WIDTH = 2, 8
LENGTHS, SHORT = (2048, 8192), (512, 2048)
OVER, UNDER = 0.06, 0.25
"""How far the exponent may be off. Tiles at the edges that are not full weigh less in longer sequences."""


def side(length: int) -> int:
    """The square root, where a width of such size costs least."""
    return math.isqrt(length)


def ring(length: int) -> Links:
    """Every block and the one before it."""
    count = length // 64
    return Links(64, tuple((block, (block - 1) % count) for block in range(count)))


MECHANISMS: dict[str, tuple[Callable[[int], MechanismConfig], float]] = {
    "adaptive_span": (lambda n: AdaptiveSpanConfig(max_span=100, initial=0.5), 1),
    "alternate": (lambda n: AlternateConfig(mechanisms=(SoftmaxConfig(pattern=Window(64)),)), 1),
    "cope": (lambda n: CopeConfig(max_position=8), 2),
    "cosine": (lambda n: CosineConfig(backend="tiled"), 2),
    "delta": (lambda n: DeltaConfig(), 1),
    "differential": (lambda n: DifferentialConfig(backend="tiled"), 2),
    "dynamic_span": (lambda n: DynamicSpanConfig(max_span=100, initial=0.0), 1),
    "forgetting": (lambda n: ForgettingConfig(backend="tiled"), 2),
    "gated_delta": (lambda n: GatedDeltaConfig(), 1),
    "gla": (lambda n: GLAConfig(), 1),
    "kda": (lambda n: KDAConfig(), 1),
    "linear": (lambda n: LinearAttentionConfig(), 1),
    "linformer": (lambda n: LinformerConfig(max_length=n, k=64, backend="tiled"), 1),
    "lsh": (lambda n: LSHConfig(rounds=2, buckets=32, window=64), 1),
    "memory_compressed": (lambda n: MemoryCompressedConfig(backend="tiled"), 2),
    "moba": (lambda n: MobaConfig(block_size=side(n)), 1.5),
    "nsa": (lambda n: NSAConfig(block_size=side(n), top_k=2, window=side(n)), 1.5),
    "performer": (lambda n: PerformerConfig(features=32), 1),
    "persistent": (lambda n: PersistentConfig(vectors=16, backend="tiled"), 2),
    "retention": (lambda n: RetentionConfig(), 1),
    "rfa": (lambda n: RFAConfig(features=16, gated=True), 1),
    "routing": (lambda n: RoutingConfig(clusters=side(n), window=side(n), local_heads=0), 1.5),
    "rwkv7": (lambda n: RWKV7Config(), 1),
    "selective": (lambda n: SelectiveConfig(), 2),
    "sigmoid": (lambda n: SigmoidConfig(), 2),
    "sinkhorn": (lambda n: SinkhornConfig(block_size=side(n), max_length=n), 1.5),
    "softmax": (lambda n: SoftmaxConfig(backend="tiled"), 2),
    "sort_cut": (lambda n: SortCutConfig(block_size=64, max_length=n), 1),
    "ssd": (lambda n: SSDConfig(), 1),
    "talking_heads": (lambda n: TalkingHeadsConfig(), 2),
    "top_blocks": (lambda n: TopBlocksConfig(block_size=side(n), keep=4, local=1), 1.5),
}
"""For n tokens, and the exponent."""

PATTERNS: dict[str, tuple[Callable[[int], Pattern], float]] = {
    "Aligned": (lambda n: Aligned(1.0, 64, 64), 1),
    "BlockDiffusion": (lambda n: BlockDiffusion(64), 2),
    "BlockWindow": (lambda n: BlockWindow(64, before=1, after=0), 1),
    "Blockwise": (lambda n: Blockwise(128, (1, 0)), 1),
    "Causal": (lambda n: Causal(), 2),
    "ETC": (lambda n: ETC(64, 64), 1),
    "Fixed": (lambda n: Fixed(side(n)), 1.5),
    "Full": (lambda n: Full(), 2),
    "Global": (lambda n: Global(16) & Window(n, n) | Window(64), 1),
    "GlobalEnd": (lambda n: GlobalEnd(16), 1),
    "Links": (ring, 1),
    "Local1D": (lambda n: Local1D(64, 64), 1),
    "Local2D": (lambda n: Local2D((n // 32, 32), (8, 8), (4, 4, 4)), 1),
    "Neighbourhood": (lambda n: Neighbourhood((n // 32, 4, 8), 3), 1),
    "PerHead": (lambda n: PerHead((Window(64), Window(32))), 1),
    "PerLayer": (lambda n: PerLayer((Window(64), Full())), 1),
    "Prefix": (lambda n: Prefix(64), 2),
    "Random": (lambda n: Random(2, 64), 1),
    "Strided": (lambda n: Strided(side(n)), 1.5),
    "Summary": (lambda n: Summary(side(n)), 1.5),
    "WaitK": (lambda n: WaitK(64), 2),
    "Whole": (lambda n: Whole(100) | Window(64), 1),
    "Window": (lambda n: Window(64), 1),
}
"""For n tokens, and the exponent."""

UNCOUNTED = {
    "Documents": "costs what the lengths of a batch's documents cost",
    "Marked": "costs what the marked tokens of a batch cost",
    "Padding": "costs what the real tokens of a batch cost",
    "SourceSpans": "costs what the spans of a batch cost",
    "gated_convolution": "its products are by channels, as many for each token as its width",
    "svd": "its decomposition is no matrix product, and it claims to save nothing",
}


@pytest.fixture(autouse=True)
def fixed_tiles() -> Iterator[None]:
    """How many queries a tile has is the machine's choice, and with it how many masked pairs are computed."""
    with TILES.using(TILES.fixed):
        yield


@torch.no_grad()
def multiplications(config: MechanismConfig, length: int) -> int:
    """Of one forward pass over a row of `length` tokens."""
    torch.manual_seed(0)
    module = config.build(HEADS, WIDTH).double().eval()
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    context = Context(length, length, causal=config.causal)
    with FlopCounterMode(display=False) as counter:
        module(q, q if config.shares_queries else k, v, context, None, None)
    return counter.get_total_flops()


def assert_grows(config_of: Callable[[int], MechanismConfig], exponent: float) -> None:
    """Short lengths are enough for quadratic growth, and too short for the edges of sparse patterns."""
    lengths = SHORT if exponent == 2 else LENGTHS
    few, many = (multiplications(config_of(length), length) for length in lengths)
    slope = math.log(many / few) / math.log(lengths[1] / lengths[0])
    assert exponent - UNDER <= slope <= exponent + OVER, f"{few} and {many} at {lengths}"


@pytest.mark.parametrize("kind", MECHANISMS)
def test_a_mechanism_grows_as_it_promises(kind: str):
    assert_grows(*MECHANISMS[kind])


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_grows_as_it_promises(name: str):
    pattern_of, exponent = PATTERNS[name]
    assert_grows(lambda n: SoftmaxConfig(pattern=pattern_of(n).layer_pattern(0), backend="tiled"), exponent)


def test_every_member_promises_something():
    own = [kind for kind, cls in MechanismConfig.kinds.items() if cls.__module__.startswith("polyformer.")]
    own += [cls.__name__ for cls in registered(Pattern.registry)]
    assert sorted([*MECHANISMS, *PATTERNS, *UNCOUNTED]) == sorted(own)


def test_a_pattern_with_a_layout_of_all_keys_is_caught():
    """The same mask with the layout that a pattern has which says nothing of its keys."""

    class Careless(Window):
        def keys(self, context: Context, start: int, stop: int) -> Any:
            return Full().keys(context, start, stop)

    with pytest.raises(AssertionError):
        assert_grows(lambda n: SoftmaxConfig(pattern=Careless(64), backend="tiled"), 1)


def presets() -> dict[str, ModelConfig]:
    """At their full size; of those that differ in sizes alone the first."""
    full = {name: config for name in MODELS if isinstance(config := MODELS[name](), ModelConfig)}
    tiny = distinct([Case(name, shrunk(config)) for name, config in full.items()])
    return {case.member: full[case.member] for case in tiny}


PRESETS = presets()


def on_meta(config: ModelConfig, length: int) -> Cost:
    with torch.device("meta"):
        model = Transformer(config)
    return cost(model, length)


@pytest.mark.parametrize("case", cases("counts"), ids=str)
def test_show_counts_every_member(case: Case):
    """At a length where layouts decide what is computed; a member for short texts says so."""
    lines = show.costs_by_length(functools.partial(on_meta, case.config), [128]).splitlines()
    assert len(lines) > 1
    assert float(lines[1].split()[1]) > 0
    if not lines[1].startswith("     128"):
        assert lines[-1].startswith("not for 128 tokens or more: ")


@pytest.mark.parametrize("name", PRESETS)
def test_show_counts_every_preset(name: str):
    """Two layers of each stack, for time; all layers of one kind are alike."""
    config = PRESETS[name]
    short = {
        side: dataclasses.replace(stack, num_hidden_layers=min(2, stack.num_hidden_layers))
        for side in ("encoder", "decoder")
        if (stack := getattr(config, side)) is not None
    }
    whole = dataclasses.replace(config, **short)
    longest = min(show.longest_text(whole), 256)
    lines = show.costs_by_length(functools.partial(on_meta, whole), [longest]).splitlines()
    assert float(lines[1].split()[1]) > 0
