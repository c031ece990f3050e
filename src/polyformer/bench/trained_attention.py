"""What claims about the attention of checkpoints share: rows of held-out text, and fresh weights beside."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from polyformer.bench.remembering import first_tokens
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.model import Transformer
from polyformer.training.config import at_least

T = TypeVar("T")

TRAINED = "trained"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedAttention(Config):
    """The checkpoint, the text, and sizes."""

    model: str  # the folder of a checkpoint
    data: str | None = None  # WikiText-2's folder, or the file of a book; by default the default text
    texts: int = 8
    length: int = 256  # tokens of each
    seeds: tuple[int, ...] = (0, 1, 2)  # of fresh weights
    out: str

    shortest: ClassVar[int]
    """The least `length` that can be measured."""

    def __post_init__(self) -> None:
        at_least(1, texts=self.texts)
        at_least(self.shortest, length=self.length)
        if not self.seeds:
            raise InputError("seeds: expected one or more")

    def rows(self) -> list[Tensor]:
        """Rows of ids [1, length], the first of the held-out text."""
        wanted = self.texts * self.length
        file = first_tokens(self.data, Path(self.out), 1, wanted)["validation"]
        ids = load_tokenizer(self.model).encode(Path(file).read_text(encoding="utf-8"))[:wanted]
        if len(ids) < wanted:
            raise InputError(f"data: expected {wanted} tokens or more, got {len(ids)}; ask for fewer --texts")
        return list(torch.tensor(ids).view(self.texts, 1, self.length))

    def beside_fresh(self, model: Transformer, measure: Callable[[Any, list[Tensor]], T]) -> dict[str, T]:
        """What `measure` says of the checkpoint and of fresh weights of its shape, by seed."""
        rows = self.rows()
        results = {TRAINED: measure(model.eval(), rows)}
        for seed in self.seeds:
            torch.manual_seed(seed)
            results[f"fresh weights, seed {seed}"] = measure(Transformer(model.config).eval(), rows)
        return results
