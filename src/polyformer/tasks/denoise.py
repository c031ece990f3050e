"""Denoising: write a text as it was before it was spoiled. Lewis et al. 2020 (BART), section 2.2.

The encoder reads <bos> spoiled text <eos>; the decoder writes text <eos>, starting from <bos>. Documents
longer than a row are cut. The noise is drawn anew in every epoch, and once for all in held-out text.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from polyformer.data import Tokenizer
from polyformer.data.batching import Corrupt, Row
from polyformer.data.noise_config import NoiseConfig, spoil
from polyformer.data.words import sentence_ends
from polyformer.heads import HeadConfig, LanguageModelConfig
from polyformer.tasks.base import GuessingTask, Rows, TaskConfig, check_room, required
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoisingConfig(TaskConfig):
    """Write a spoiled text as it was."""

    row_length: int = 128  # tokens of a text, <bos> and <eos> included
    noise: NoiseConfig = NoiseConfig()

    needs: ClassVar[tuple[str, ...]] = ("text",)
    kind: ClassVar[str] = "denoise"
    paper: ClassVar[str] = "Lewis et al. 2020, section 2.2"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(3, row_length=self.row_length)
        check_room(self.batch_tokens, "row_length", self.row_length)

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row["text"] for row in rows)

    def build(self, tokenizer: Tokenizer) -> "Denoising":
        return Denoising(self, tokenizer)


class Denoising(GuessingTask):
    """Metrics over the tokens of the whole text and its <eos>: loss, perplexity, accuracy."""

    stacks = "encoder-decoder"
    head: HeadConfig = LanguageModelConfig()

    def __init__(self, config: DenoisingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config
        self.bos, self.eos = required(tokenizer.bos_id, "<bos>"), required(tokenizer.eos_id, "<eos>")
        self.mask = required(tokenizer.mask_id, "<mask>")
        self.ends = sentence_ends(tokenizer) if config.noise.permute else None

    @property
    def positions(self) -> int:
        return self.config.row_length

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        encoded = self.tokenizer.encode_batch([row["text"] for row in rows])
        room = self.config.row_length - 2
        return [
            {"input_ids": np.array([self.bos, *ids[start : start + room], self.eos], np.int32)}
            for ids in encoded
            for start in range(0, len(ids), room)
        ]

    @property
    def corrupt(self) -> Corrupt:
        def spoiled(row: Row, generator: np.random.Generator) -> Row:
            text = row["input_ids"][1:-1]
            found = spoil(text, generator, self.config.noise, mask_id=self.mask, end_ids=self.ends)
            # Spans of no token may make a text longer than its row: it then loses its end.
            ids = np.concatenate([[self.bos], found[: self.config.row_length - 2], [self.eos]])
            return {"input_ids": ids, "labels": row["input_ids"][1:]}

        return spoiled
