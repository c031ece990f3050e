"""Masks of rows as they are served: anew in every epoch, or drawn once for all."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data.masking import check_masking, mask_tokens
from polyformer.data.tokenizer import Tokenizer
from polyformer.data.words import word_starts

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskingConfig(Config):
    """Which tokens are to be guessed: see `mask_tokens`. By default as in BERT, with RoBERTa's dynamic masks.

    Whole words: unit="word"; ALBERT's n-grams: unit="word", longest=3; BERT's static masks: static_copies=10.
    """

    share: float = 0.15  # of the tokens of a row
    random_share: float = 0.1  # of these, how many become a random token
    kept_share: float = 0.1  # of these, how many stay as they are
    unit: Literal["token", "word"] = "token"  # what is hidden as a whole
    longest: int = 1  # units in a row that may be hidden together
    static_copies: int = 0  # masks of a row, all of them in every epoch; 0: always new ones

    def __post_init__(self) -> None:
        check_masking(self.share, self.random_share, self.kept_share, self.longest)
        if self.static_copies < 0:
            raise InputError(f"static_copies: expected 0 or more, got {self.static_copies}")


class Masking:
    """`corrupt` hides tokens of a row; `copies` makes rows ready for it.

    Static masks, BERT's as Liu et al. 2019 tell it in section 4.1: each row is there `static_copies` times,
    and each copy is masked in its own way, a function of its ids. Forty epochs over rows masked in ten ways
    are four over the copies.
    """

    def __init__(self, config: MaskingConfig, tokenizer: Tokenizer, mask_id: int):
        self.config, self.mask_id, self.ordinary_ids = config, mask_id, tokenizer.ordinary_ids
        self.starts = word_starts(tokenizer) if config.unit == "word" else None

    def copies(self, rows: Sequence[Row]) -> list[Row]:
        """Every row as often as it has masks."""
        if not self.config.static_copies:
            return list(rows)
        return [{**row, "copy": copy} for copy in range(self.config.static_copies) for row in rows]

    def corrupt(self, row: Row, generator: np.random.Generator) -> Row:
        """`row` with `input_ids` corrupted and with `labels`; of a static copy the generator is its own."""
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
