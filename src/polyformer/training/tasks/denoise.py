"""Denoising: reconstruct corrupted text. Lewis et al. 2020 (BART), section 2.2.

The encoder reads <bos> corrupted text <eos>; the decoder generates text <eos>, starting from <bos>. Documents
longer than a row are split. The noise is redrawn in every epoch, and fixed for held-out text.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Corrupt, Row
from polyformer.data.rows.masking import sentence_ends
from polyformer.data.rows.noising import NoiseConfig, apply_noises
from polyformer.nn.heads import HeadConfig, LanguageModelConfig
from polyformer.training.tasks.masking import TokenPrediction
from polyformer.training.tasks.text import TextTaskConfig, required


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoisingConfig(TextTaskConfig):
    """Denoising (BART): reconstruct a text from a corrupted copy."""

    row_length: int = 128  # tokens of a text, including <bos> and <eos>
    noise: NoiseConfig = NoiseConfig()

    shortest: ClassVar[int] = 3
    kind: ClassVar[str] = "denoise"
    paper: ClassVar[str] = "Lewis et al. 2020, section 2.2"


class Denoising(TokenPrediction, config=DenoisingConfig):
    """Denoising, with metrics over the tokens of the whole text and its <eos>: loss, perplexity, accuracy."""

    config: DenoisingConfig
    stacks = "encoder-decoder"
    head: HeadConfig = LanguageModelConfig()

    def __init__(self, config: DenoisingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.bos, self.eos = required(tokenizer.bos_id, "<bos>"), required(tokenizer.eos_id, "<eos>")
        self.mask = required(tokenizer.mask_id, "<mask>")
        self.ends = sentence_ends(tokenizer) if config.noise.permute else None

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Return <bos> text <eos>, for every piece of `row_length` tokens."""
        encoded = self.tokenizer.encode_batch([row["text"] for row in rows])
        text_length = self.config.row_length - 2
        return [
            {"input_ids": np.array([self.bos, *ids[start : start + text_length], self.eos], np.int32)}
            for ids in encoded
            for start in range(0, len(ids), text_length)
        ]

    @property
    def corrupt(self) -> Corrupt:
        """Return a function that adds noise to the text, and uses the original text as labels."""

        def add_noise(row: Row, generator: np.random.Generator) -> Row:
            text = row["input_ids"][1:-1]
            noisy = apply_noises(text, generator, self.config.noise, mask_id=self.mask, end_ids=self.ends)
            # Empty spans may make a text longer than its row: its end is then truncated.
            ids = np.concatenate([[self.bos], noisy[: self.config.row_length - 2], [self.eos]])
            return {"input_ids": ids, "labels": row["input_ids"][1:]}

        return add_noise
