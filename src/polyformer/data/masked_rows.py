"""Masks of rows at serving time: new in every epoch, or drawn once."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from polyformer.core.config import Config
from polyformer.core.ranges import NonNegativeInt
from polyformer.data.masking import check_masking, mask_tokens
from polyformer.data.tokenizer import Tokenizer
from polyformer.data.word_boundaries import word_starts

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskingConfig(Config):
    """Options of masked language modelling: see `mask_tokens`.

    The defaults are BERT's, with RoBERTa's dynamic masks. Whole words: unit="word"; ALBERT's n-grams:
    unit="word", longest=3; BERT's static masks: static_copies=10.
    """

    share: float = 0.15  # of the tokens in a row
    random_share: float = 0.1  # share of these replaced by a random token
    kept_share: float = 0.1  # share of these left unchanged
    unit: Literal["token", "word"] = "token"  # masked as a whole
    longest: int = 1  # most consecutive units that may be masked together
    static_copies: NonNegativeInt = 0  # masks per row, all of them in every epoch; 0: always new masks

    def __post_init__(self) -> None:
        check_masking(self.share, self.random_share, self.kept_share, self.longest)


class Masking:
    """Masking of rows: `copies` prepares rows, and `corrupt` masks tokens of a row.

    Static masks, BERT's as described by Liu et al. 2019, section 4.1: each row occurs `static_copies` times,
    and each copy has its own mask, a function of its ids. Forty epochs over rows masked in ten ways are four
    epochs over the copies.
    """

    def __init__(self, config: MaskingConfig, tokenizer: Tokenizer, mask_id: int):
        self.config, self.mask_id, self.ordinary_ids = config, mask_id, tokenizer.ordinary_ids
        self.starts = word_starts(tokenizer) if config.unit == "word" else None

    def copies(self, rows: Sequence[Row]) -> list[Row]:
        """Return every row once per static mask."""
        if not self.config.static_copies:
            return list(rows)
        return [{**row, "copy": copy} for copy in range(self.config.static_copies) for row in rows]

    def corrupt(self, row: Row, generator: np.random.Generator) -> Row:
        """Return `row` with corrupted `input_ids` and with `labels`; static copies ignore `generator`."""
        rest = dict(row)
        copy, ids = rest.pop("copy", None), np.asarray(row["input_ids"])
        if copy is not None:
            generator = np.random.default_rng([copy, zlib.crc32(ids.astype(np.int64).tobytes())])
        config = self.config
        corrupted, labels = mask_tokens(
            ids,
            generator,
            mask_id=self.mask_id,
            ordinary_ids=self.ordinary_ids,
            share=config.share,
            random_share=config.random_share,
            kept_share=config.kept_share,
            starts=self.starts,
            longest=config.longest,
        )
        return {**rest, "input_ids": corrupted, "labels": labels}
