"""BART's noises joined: `apply_noises(ids, generator, NoiseConfig(...), ...)`.

Source: Lewis et al. 2020, section 2.2; what is best, infilling of 30 % with permuted sentences, section 5.1.
"""

import dataclasses

import numpy as np

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data.noising import (
    check_mean,
    check_share,
    delete_some,
    infill,
    mask_some,
    permute_sentences,
    rotate,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseConfig(Config):
    """What is done to a text, in this order. By default what BART is trained with."""

    permute: bool = True  # put the sentences in random order
    rotate: bool = False  # let the text begin at a random token
    delete: float = 0.0  # share of the tokens
    infill: float = 0.3  # share of the tokens that spans hide, a mask each
    mean_span: float = 3.0  # of their lengths, by Poisson's law
    mask: float = 0.0  # share of the tokens

    def __post_init__(self) -> None:
        for name in ("delete", "infill", "mask"):
            check_share(name, getattr(self, name))
        check_mean(self.mean_span)


def apply_noises(
    ids: np.ndarray,
    generator: np.random.Generator,
    config: NoiseConfig,
    *,
    mask_id: int,
    end_ids: np.ndarray | None = None,
) -> np.ndarray:
    """`ids` [T] with every noise of `config`; `end_ids`, the tokens that end a sentence, for `permute`."""
    if config.permute:
        if end_ids is None:
            raise InputError("end_ids: expected the tokens that end sentences, which permute=True moves")
        ids = permute_sentences(ids, generator, end_ids=end_ids)
    if config.rotate:
        ids = rotate(ids, generator)
    if config.delete:
        ids = delete_some(ids, generator, share=config.delete)
    if config.infill:
        ids = infill(ids, generator, mask_id=mask_id, share=config.infill, mean_span=config.mean_span)
    if config.mask:
        ids = mask_some(ids, generator, mask_id=mask_id, share=config.mask)
    return ids
