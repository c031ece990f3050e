"""Whole encoders compared with transformers: models (ours, with the same weights), and attached (its own
model with our pattern).
"""

import copy
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.patterns import BlockWindow, Global, GlobalEnd, Links, PerHead, PerLayer
from polyformer.attention.patterns.base import Pattern
from polyformer.core.errors import InputError
from polyformer.models.attached import attach
from polyformer.models.checkpoints import convert, from_transformers
from polyformer.nn.heads import EmbedConfig
from polyformer_lab.bench.passes import PASSES, Batch, Pair, agreement, cases
from polyformer_lab.bench.rows import Case, DeviceBench, Row, check_names
from polyformer_lab.bench.running import runner

HIDDEN = operator.attrgetter("last_hidden_state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderBench(DeviceBench):
    """Encoders of transformers' classes with random weights, without dropout."""

    batch: int = 1
    length: int = 4096
    layers: int = 4
    hidden_size: int = 768
    heads: int = 12
    vocab_size: int = 1000
    repeats: int = 5

    def sizes(self) -> dict[str, Any]:
        """Return arguments of a configuration of transformers."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.hidden_size,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            # Weights large enough that attention distinguishes keys: otherwise any two models agree.
            "initializer_range": 1.4 / math.sqrt(self.hidden_size),
        }

    def ids(self) -> Tensor:
        """Return random tokens [B, T], without the padding token."""
        return torch.randint(2, self.vocab_size, (self.batch, self.length), device=self.device)

    def row(self, name: str, model: str, cases: Callable[[], Iterator[Case]]) -> Row:
        """Return a row of `model` at these sizes."""
        what = f"{model}, {self.layers} layers of {self.hidden_size}, {self.batch} x {self.length} tokens"
        return Row(name, what, cases, repeats=self.repeats)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelsBench(EncoderBench):
    """Whole models, Longformer and BigBird, compared with transformers, with the same weights.

    Encoders without a head.
    """

    models: tuple[str, ...] = ("longformer", "bigbird")
    passes: tuple[str, ...] = PASSES
    window: int = 512  # Longformer: keys on both sides together
    marked: int = 1  # Longformer: global tokens, at the start
    block: int = 64  # BigBird: tokens in a block
    random: int = 3  # BigBird: random blocks

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("model", self.models, PAIRS)
        check_names("pass", self.passes, PASSES)
        if self.window % 2:
            raise InputError(f"window: expected an even number of keys on both sides, got {self.window}")
        least = (5 + 2 * self.random) * self.block
        if self.length % self.block or self.length <= least:
            raise InputError(
                f"length: expected a multiple of block {self.block} above {least}, below which transformers' "
                f"BigBird computes every pair; got {self.length}"
            )

    def rows(self) -> Iterator[Row]:
        """Yield a row for each model."""
        for kind in self.models:
            yield self.row(kind, kind, functools.partial(self._cases, kind))

    def _cases(self, kind: str) -> Iterator[Case]:
        pair, inputs = PAIRS[kind](self)
        yield from cases(pair, [inputs], self.passes, lambda: agreement(pair, inputs, HIDDEN), HIDDEN)


def longformer(config: ModelsBench) -> tuple[Pair, Batch]:
    """Return our model and transformers' model, and the arguments of both calls."""
    from transformers import LongformerConfig, LongformerModel

    torch.manual_seed(0)
    shape = LongformerConfig(
        **config.sizes(),
        attention_window=config.window,
        max_position_embeddings=config.length + 2,
        type_vocab_size=1,
        pad_token_id=1,
        layer_norm_eps=1e-5,
    )
    theirs = LongformerModel(shape, add_pooling_layer=False)
    ours, ids = from_transformers(theirs, EmbedConfig(normalize=False)), config.ids()
    marks = torch.zeros_like(ids)
    marks[:, : config.marked] = 1
    return _placed(ours, theirs, config), {"input_ids": ids, "global_attention_mask": marks}


def bigbird(config: ModelsBench) -> tuple[Pair, Batch]:
    """Return our model, with the random blocks of transformers' model, transformers' model, and the arguments
    of both.
    """
    from transformers import BigBirdConfig, BigBirdModel

    torch.manual_seed(0)
    shape = BigBirdConfig(
        **config.sizes(),
        attention_type="block_sparse",
        block_size=config.block,
        num_random_blocks=config.random,
        max_position_embeddings=config.length,
        hidden_act="gelu",
    )
    theirs, ids = BigBirdModel(shape, add_pooling_layer=False), config.ids()
    fixed = BlockWindow(config.block) | Global(config.block) | GlobalEnd(config.block)
    layers = []
    for table in drawn(theirs.to(**config.place), ids):
        rows = [((), *map(tuple, head.tolist()), ()) for head in table]
        layers.append(PerHead(tuple(fixed | Links(config.block, tuple(row)) for row in rows)))
    ours, _ = convert(from_transformers(theirs, EmbedConfig(normalize=False)), PerLayer(tuple(layers)))
    return _placed(ours, theirs, config), {"input_ids": ids}


@torch.no_grad()
def drawn(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Return the random blocks [H, blocks - 2, random] of every layer, recorded during one call."""
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
    return tables[::2]  # keys and values are gathered with the same indices


def _placed(ours: nn.Module, theirs: nn.Module, config: ModelsBench) -> Pair:
    """Return both models in training mode, since BigBird of transformers has random blocks only then.

    At 1024, 3072 and 4096 tokens it draws, for a few blocks of queries, keys that they attend to already, and
    counts them twice; the outputs of these tokens differ.
    """
    return Pair(*(model.to(**config.place).train() for model in (ours, theirs)))


PAIRS: dict[str, Callable[[ModelsBench], tuple[Pair, Batch]]] = {"longformer": longformer, "bigbird": bigbird}

run_models = runner(ModelsBench)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachedBench(EncoderBench):
    """A model of transformers compared with itself with a pattern attached: random BERT, a long text.

    BERT of transformers, without dropout; the forward pass only, and with the backward pass.
    """

    pattern: Pattern = Pattern.from_text("Window(64)")
    hidden_size: int = 256  # with heads and layers: the sizes of BERT-Mini
    heads: int = 4

    def rows(self) -> Iterator[Row]:
        """Yield the only row."""
        yield self.row("attached", f"BERT with {self.pattern.to_text()} attached", self._cases)

    def _cases(self) -> Iterator[Case]:
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        shape = BertConfig(**self.sizes(), max_position_embeddings=self.length)
        plain: Any = BertModel(shape, add_pooling_layer=False).to(**self.place)  # pyright: ignore
        pair = Pair(attach(copy.deepcopy(plain), self.pattern), plain)
        yield from cases(pair, [{"input_ids": self.ids()}], PASSES)


run_attached = runner(AttachedBench)
