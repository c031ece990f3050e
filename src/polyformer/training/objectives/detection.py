"""ELECTRA's replaced-token detection: a generator replaces tokens of a text, a discriminator detects them.

    loss = L_generator + weight * L_discriminator        weight = 50

A share M of the tokens x (15 %) is masked. The generator, a small masked language model, predicts them:
L_generator = -mean_{t in M} log p(x_t). The discriminator's input has a token y_t drawn from p at each of
these places, and L_discriminator is the binary cross-entropy, over all real tokens, of classifying y_t as
replaced or original; a token that the generator predicted right counts as original. No gradient flows through
the sampling, so the training is not adversarial. Clark et al. 2020, section 2.
"""

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED


def draw(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return a token [N] drawn from softmax(logits) for each row of [N, V], with the Gumbel-max trick;
    without gradient.

    `generator`: by default torch's own, which the training loop seeds anew for every step.
    """
    logits = logits.detach().float()
    noise = torch.empty_like(logits).exponential_(generator=generator)  # -log of it is Gumbel noise
    return (logits - noise.log()).argmax(-1)


def replaced(
    input_ids: Tensor, labels: Tensor, drawn: Tensor, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the discriminator's input ids and its labels, both [B, T].

    Args:
        input_ids: [B, T], the text with some tokens masked; the ids at their places are ignored.
        labels: [B, T], the masked tokens, -100 elsewhere.
        drawn: [N], the generator's tokens for the N labelled places, row by row.
        real: [B, T] bool, False for padding; by default all are real.

    Returns:
        The ids with `drawn` at the labelled places, and labels 1 where this token differs from the text,
        0 where it is the same, -100 at padding.

    Raises:
        InputError: the numbers of drawn tokens and labels differ.
    """
    masked = labels != IGNORED
    if drawn.shape != (int(masked.sum()),):
        raise InputError(
            f"drawn: expected a token for each of {int(masked.sum())} labels, got {tuple(drawn.shape)}"
        )
    ids = input_ids.masked_scatter(masked, drawn.to(input_ids.dtype))
    is_replaced = (masked & (ids != labels)).long()
    return ids, is_replaced if real is None else is_replaced.masked_fill(~real, IGNORED)
