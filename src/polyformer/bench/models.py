"""Whole models, Longformer and BigBird, beside transformers' own with the same weights."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.bench.machine import begin
from polyformer.bench.timing import in_turn, median
from polyformer.checkpoints import convert, from_transformers
from polyformer.core.config import Config
from polyformer.core.errors import InputError, unknown
from polyformer.heads import EmbedConfig
from polyformer.patterns import BlockWindow, Global, GlobalEnd, Links, Pattern, PerHead, PerLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelsBench(Config):
    """Encoders without a head, forward alone and with backward; no dropout, random weights and texts."""

    models: tuple[str, ...] = ("longformer", "bigbird")
    batch: int = 1
    length: int = 4096
    layers: int = 4
    hidden_size: int = 768
    heads: int = 12
    vocab_size: int = 1000
    window: int = 512  # Longformer: keys on both sides together
    marked: int = 1  # Longformer: global tokens, at the start
    block: int = 64  # BigBird: tokens in a block
    random: int = 3  # BigBird: random blocks
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None  # of a CPU; by default torch's own choice
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("batch", "length", "layers", "heads", "window", "marked", "block", "random", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        for kind in self.models:
            if kind not in PAIRS:
                raise unknown("model", kind, PAIRS)
        if self.window % 2:
            raise InputError(f"window: expected an even number of keys on both sides, got {self.window}")
        if self.length % self.block or self.length <= (5 + 2 * self.random) * self.block:
            least = (5 + 2 * self.random) * self.block
            raise InputError(
                f"length: expected a multiple of block {self.block} above {least}, below which transformers' "
                f"BigBird computes every pair; got {self.length}"
            )


def run(config: ModelsBench) -> dict[str, float]:
    """Median seconds by "kind pass model"; prints them, their ratios and how well the outputs agree."""
    begin(config.threads)
    print(
        f"{config.layers} layers of {config.hidden_size}, {config.batch} x {config.length} tokens, "
        f"{config.dtype}, {config.device}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    results: dict[str, float] = {}
    for kind in config.models:
        try:
            ours, theirs, inputs = PAIRS[kind](config)
        except ImportError:
            print("transformers is not installed: no comparison (pip install 'polyformer[peers]')")
            return results
        models = {"transformers": theirs, "polyformer": ours}
        print(f"{kind}: {agreement(ours, theirs, inputs):.1%} of the tokens agree to 1e-3")
        for name, call in (("forward", forward), ("forward + backward", both)):
            seconds = in_turn(
                {library: call(model, inputs) for library, model in models.items()}, config.repeats
            )
            medians = {model: median(times) for model, times in seconds.items()}
            for model, middle in medians.items():
                results[f"{kind} {name} {model}"] = middle
                print(f"{kind:10} {name:18} {model:12} {middle * 1e3:9.1f} ms")
            ratio = medians["transformers"] / medians["polyformer"]
            print(f"{kind}: {name} of polyformer is {ratio:.2f} times as fast")
    return results


def forward(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], None]:
    """One pass in evaluation."""

    def call() -> None:
        with torch.no_grad():
            model.eval()(**inputs)

    return call


def both(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], None]:
    """One pass in training and its gradients."""

    def call() -> None:
        model.zero_grad(set_to_none=True)
        model.train()(**inputs).last_hidden_state.square().mean().backward()

    return call


@torch.no_grad()
def agreement(ours: nn.Module, theirs: nn.Module, inputs: dict[str, Tensor]) -> float:
    """The share of tokens whose last hidden states agree to 1e-3, in training mode.

    Theirs has random blocks only then. At 1024, 3072 and 4096 tokens it draws for a few blocks of queries
    keys that they see already, and counts them twice; those tokens differ.
    """
    mine, other = (model.train()(**inputs).last_hidden_state for model in (ours, theirs))
    return ((mine - other).abs().amax(-1) < 1e-3).float().mean().item()


def longformer(config: ModelsBench) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """Ours, theirs and what both are called with."""
    from transformers import LongformerConfig, LongformerModel

    torch.manual_seed(0)
    theirs = LongformerModel(
        LongformerConfig(
            **_sizes(config),
            attention_window=config.window,
            max_position_embeddings=config.length + 2,
            type_vocab_size=1,
            pad_token_id=1,
            layer_norm_eps=1e-5,
            attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    )
    ours = _ours(config, theirs)
    ids = torch.randint(2, config.vocab_size, (config.batch, config.length), device=config.device)
    marks = torch.zeros_like(ids)
    marks[:, : config.marked] = 1
    return ours, _placed(theirs, config), {"input_ids": ids, "global_attention_mask": marks}


def bigbird(config: ModelsBench) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """Ours, with the random blocks that theirs draws, theirs and what both are called with."""
    from transformers import BigBirdConfig, BigBirdModel

    torch.manual_seed(0)
    theirs = BigBirdModel(
        BigBirdConfig(
            **_sizes(config),
            attention_type="block_sparse",
            block_size=config.block,
            num_random_blocks=config.random,
            max_position_embeddings=config.length,
            hidden_act="gelu",
            attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    )
    ids = torch.randint(2, config.vocab_size, (config.batch, config.length), device=config.device)
    placed = _placed(theirs, config)
    fixed = BlockWindow(config.block) | Global(config.block) | GlobalEnd(config.block)
    layers = []
    for table in drawn(placed, ids):
        rows = [((), *map(tuple, head.tolist()), ()) for head in table]
        layers.append(PerHead(tuple(fixed | Links(config.block, tuple(row)) for row in rows)))
    return _ours(config, theirs, PerLayer(tuple(layers))), placed, {"input_ids": ids}


@torch.no_grad()
def drawn(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The random blocks [H, blocks - 2, random] of every layer, watched while it runs once."""
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention as Attention

    tables: list[Tensor] = []
    gather = Attention.torch_gather_b2

    def watched(params: Tensor, indices: Tensor) -> Tensor:
        tables.append(indices[0])
        return gather(params, indices)

    Attention.torch_gather_b2 = staticmethod(watched)
    try:
        model.train()(input_ids=ids[:1])
    finally:
        Attention.torch_gather_b2 = staticmethod(gather)
    return tables[::2]  # keys and values are gathered by the same


def _sizes(config: ModelsBench) -> dict[str, Any]:
    """Weights so large that attention tells keys apart: else any two models agree."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": 4 * config.hidden_size,
        "hidden_dropout_prob": 0.0,
        "initializer_range": 1.4 / math.sqrt(config.hidden_size),
    }


def _placed(model: nn.Module, config: ModelsBench) -> nn.Module:
    return model.to(config.device, getattr(torch, config.dtype))


def _ours(config: ModelsBench, theirs: nn.Module, pattern: Pattern | None = None) -> nn.Module:
    """Their model as ours, around `pattern` where one is given."""
    model = from_transformers(theirs, EmbedConfig(normalize=False))
    return _placed(model if pattern is None else convert(model, pattern)[0], config)


PAIRS: dict[str, Callable[[ModelsBench], tuple[nn.Module, nn.Module, dict[str, Tensor]]]] = {
    "longformer": longformer,
    "bigbird": bigbird,
}
