"""Corruptions of token ids for self-supervised objectives: pure functions of the ids and a generator."""

import numpy as np

from polyformer.core.errors import InputError

IGNORED = -100


def mask_tokens(
    ids: np.ndarray,
    generator: np.random.Generator,
    *,
    mask_id: int,
    ordinary_ids: np.ndarray,
    share: float = 0.15,
    random_share: float = 0.1,
    kept_share: float = 0.1,
) -> tuple[np.ndarray, np.ndarray]:
    """Masked language modelling: `(input_ids, labels)`, both shaped as `ids` [T].

    Chosen are `share` of the tokens among `ordinary_ids` (rounded, at least one if there is any); special
    tokens, which are not among them, never. Of the chosen, `random_share` become a random ordinary token,
    `kept_share` stay, the others become `mask_id`. `labels` are the original ids where chosen and -100
    elsewhere. A generator seeded by the row alone gives static masking, by row and epoch dynamic masking.

    Source: BERT (Devlin et al. 2019), section 3.1 and appendix A.1; dynamic: RoBERTa (Liu et al. 2019),
    section 4.1.
    """
    if not 0 < share <= 1:
        raise InputError(f"share: expected a share of the tokens in (0, 1], got {share}")
    if random_share < 0 or kept_share < 0 or random_share + kept_share > 1:
        raise InputError(
            f"random_share, kept_share: expected a sum of at most 1, got {random_share} and {kept_share}"
        )
    ids = np.asarray(ids)
    candidates = np.flatnonzero(np.isin(ids, ordinary_ids))
    count = min(len(candidates), max(1, round(share * len(candidates))))
    chosen = generator.permutation(candidates)[:count]
    fate = generator.random(count)
    randomised = fate < random_share
    masked = fate >= random_share + kept_share
    corrupted = ids.copy()
    corrupted[chosen[masked]] = mask_id
    corrupted[chosen[randomised]] = generator.choice(ordinary_ids, int(randomised.sum()))
    labels = np.full_like(ids, IGNORED)
    labels[chosen] = ids[chosen]
    return corrupted, labels
