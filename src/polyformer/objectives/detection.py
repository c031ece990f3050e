"""ELECTRA's replaced-token detection: a generator spoils a text, a discriminator finds what it replaced.

    loss = L_generator + weight * L_discriminator        weight = 50

Of the tokens x, those at the places M (15 %) are hidden. The generator, a small masked language model,
guesses them: L_generator = -mean_{t in M} log p(x_t). A token y_t drawn from p stands at each of these places
in what the discriminator reads, and L_discriminator is the binary cross-entropy, over all real tokens, of
telling y_t from x_t; a token that the generator guessed right counts as original. No gradient flows through
the drawing, which makes this no adversarial game. Clark et al. 2020, section 2.
"""

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.labels import IGNORED


def draw(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A token [N] from softmax(logits) for each row of [N, V], by Gumbel's maximum; without gradient.

    `generator`: by default torch's own, which the training loop seeds anew for every step.
    """
    logits = logits.detach().float()
    noise = torch.empty_like(logits).exponential_(generator=generator)  # -log of it is Gumbel's
    return (logits - noise.log()).argmax(-1)


def replaced(
    input_ids: Tensor, labels: Tensor, drawn: Tensor, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the discriminator reads, and what it should find: ids and labels, both [B, T].

    Args:
        input_ids: [B, T], the text with some tokens hidden; what stands at their places is of no account.
        labels: [B, T], the hidden tokens, -100 elsewhere.
        drawn: [N], the generator's tokens for the N labelled places, row by row.
        real: [B, T] bool, False for padding; by default all are real.

    Returns:
        The ids with `drawn` at the labelled places, and labels 1 where that is another token than the text's,
        0 where it is the text's own, -100 at padding.

    Raises:
        InputError: as many drawn tokens as labels are expected.
    """
    hidden = labels != IGNORED
    if drawn.shape != (int(hidden.sum()),):
        raise InputError(
            f"drawn: expected a token for each of {int(hidden.sum())} labels, got {tuple(drawn.shape)}"
        )
    ids = input_ids.masked_scatter(hidden, drawn.to(input_ids.dtype))
    found = (hidden & (ids != labels)).long()
    return ids, found if real is None else found.masked_fill(~real, IGNORED)
