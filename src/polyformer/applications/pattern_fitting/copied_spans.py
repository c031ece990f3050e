"""Copies of earlier spans at the end of a text, which a model predicts by finding the spans.

The loss of plain text hardly depends on far tokens, so heads that retrieve look useless in it. A copied span
can only be predicted from the span, any distance before it. DuoAttention (Xiao et al. 2024) tells such heads
apart by synthetic passkeys; copies of the text itself need no language and no template.
"""

import dataclasses
from collections.abc import Sequence

import torch

from polyformer.core.host_values import IGNORED

SPAN = 32
"""Tokens of a copy."""

CUE = 8
"""First tokens of a copy, without labels: they name the span, and nothing predicts them."""

MOST = 16
"""The most copies in a text."""


@dataclasses.dataclass(frozen=True)
class TextWithCopies:
    """Token ids, which are copies of earlier ones from `start` on, and their labels for a decoder."""

    ids: list[int]
    labels: list[int]
    start: int


def number_of_copies(length: int) -> int:
    """Return the number of copies for a text of `length` tokens, at most an eighth of it."""
    return min(MOST, length // (8 * SPAN))


def with_copies(ids: Sequence[int], copies: int) -> TextWithCopies:
    """Return `ids` with the last tokens replaced by `copies` copies of spans, spread over the tokens before.

    The copies are in a random order, the same for all texts, so that their distances vary.
    """
    start = len(ids) - copies * SPAN
    order = torch.randperm(copies, generator=torch.Generator().manual_seed(0)).tolist()
    text = list(ids[:start])
    labels = [*text]
    for number in order:
        first = (2 * number + 1) * (start - SPAN) // (2 * copies)
        span = ids[first : first + SPAN]
        text += span
        labels += [*[IGNORED] * CUE, *span[CUE:]]
    return TextWithCopies(text, labels, start)
