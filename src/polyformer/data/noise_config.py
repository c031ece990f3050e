"""The combination of BART's noises: `apply_noises(ids, generator, NoiseConfig(...), ...)`.

Source: Lewis et al. 2020, section 2.2; the best is infilling of 30 % with permuted sentences, section 5.1.
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
    """Noises of a text, in the order of application. The defaults are BART's."""

    permute: bool = True  # put the sentences in random order
    rotate: bool = False  # rotate the text to begin at a random token
    delete: float = 0.0  # share of the tokens
    infill: float = 0.3  # share of the tokens in masked spans, one mask per span
    mean_span: float = 3.0  # mean of the Poisson distribution of span lengths
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
    """Return `ids` [T] with every noise of `config`; `permute` requires `end_ids`, which end sentences."""
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
