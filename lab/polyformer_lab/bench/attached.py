"""A model of transformers compared with itself with a pattern attached: random BERT, a long text."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from polyformer.attention.patterns.base import Pattern
from polyformer.models.attached.attach import attach
from polyformer_lab.bench.models import EncoderBench
from polyformer_lab.bench.passes import PASSES, Pair, cases
from polyformer_lab.bench.rows import Case, Row
from polyformer_lab.bench.running import runner


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachedBench(EncoderBench):
    """BERT of transformers, without dropout; the forward pass only, and with the backward pass."""

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


run = runner(AttachedBench)
