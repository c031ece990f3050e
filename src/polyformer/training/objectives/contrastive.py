"""ETC's contrastive objective: the global token of a masked sentence identifies this sentence among others.

    loss = mean_n -log( exp(p_n . e_n / temperature) / sum_m exp(p_n . e_m / temperature) )

p_n is the output at the global token of a sentence with all tokens masked, so that only its context is
visible; e_n is the output at a global token that attends only to the same sentence, unmasked. The other e_m,
of the whole batch, are the negatives. Ainslie et al. 2020, section 3 (Contrastive Predictive Coding after
Oord et al. 2018, with their noise-contrastive loss); gradients flow into both, since the paper stops none.

A row contains the document and, packed behind it as separate documents, its hidden sentences without context,
so that one pass gives p and e:

    row = hide_sentences(sentences, generator, mask_id=4, global_id=1, global_tokens=256)
    batch = Collate(pad_id)([row, ...])
    pairs = batch.pop("pair_ids")
    loss = contrastive_loss(*pairs_of(model(**batch).last_hidden_state, pairs))

The task `cpc` does this, with masked language modelling in the same rows, as the paper does.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.data.rows.structured import Row, structured


def contrastive_loss(
    predicted: Tensor,
    encoded: Tensor,
    *,
    temperature: float = 1.0,
    symmetric: bool = False,
) -> Tensor:
    """Return the loss above for N pairs, predicted and encoded [N, E].

    Args:
        temperature: divides the products; 1 as in Oord et al. 2018.
        symmetric: the mean of this loss and the loss that identifies the predictions by the encodings.

    Equal sentences in a batch are negatives of one another. With at most one pair there are no negatives and
    the loss is 0. Raises `InputError` for shapes that differ and a temperature that is not above 0.
    """
    if predicted.shape != encoded.shape or predicted.dim() != 2:
        raise InputError(
            f"predicted, encoded: expected the same shape [pairs, width], "
            f"got {tuple(predicted.shape)} and {tuple(encoded.shape)}"
        )
    if not temperature > 0:
        raise InputError(f"temperature: expected a number above 0, got {temperature}")
    if not len(predicted):
        return predicted.sum()  # 0, but part of the autograd graph
    products = predicted @ encoded.T / temperature
    own = torch.arange(len(products), device=products.device)
    loss = torch.nn.functional.cross_entropy(products, own)
    if symmetric:
        loss = (loss + torch.nn.functional.cross_entropy(products.T, own)) / 2
    return loss


def pairs_of(hidden: Tensor, pair_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return predictions and encodings [N, E] of all pairs in a batch, from the outputs hidden [B, T, E].

    pair_ids: [B, T], 0 at tokens without a pair; every other number occurs twice in its row, first at the
    token that predicts and then at the token that encodes. Raises `InputError` for anything else.
    """
    if pair_ids.shape != hidden.shape[:2]:
        raise InputError(
            f"pair_ids: expected the shape of the tokens {tuple(hidden.shape[:2])}, "
            f"got {tuple(pair_ids.shape)}"
        )
    row, token = pair_ids.nonzero(as_tuple=True)
    number = row * (int(pair_ids.max()) + 1) + pair_ids[row, token] if len(row) else row
    order = number.argsort(stable=True)
    number, outputs = number[order], hidden[row[order], token[order]]
    twice = len(number) % 2 == 0 and torch.equal(number[::2], number[1::2])
    if not twice or bool((number[2::2] == number[1:-1:2]).any()):
        raise InputError("pair_ids: expected every number but 0 twice in its row")
    return outputs[::2], outputs[1::2]


def hide_sentences(
    sentences: Sequence[Sequence[int]],
    generator: np.random.Generator,
    *,
    mask_id: int,
    global_id: int,
    global_tokens: int,
    share: float = 0.15,
) -> Row:
    """Return a row of a document with `share` of its sentences hidden, and of these sentences without context
    behind it.

    The row has the fields of `structured`, `document_ids` (the separate sentences are documents 1, 2, ...)
    and `pair_ids` (see `pairs_of`). The number of hidden sentences is rounded, but at least one is hidden and
    at least one is not; of a single sentence nothing is hidden. Tokens of hidden sentences all become
    `mask_id`, their global tokens stay.
    """
    if not 0 < share < 1:
        raise InputError(f"share: expected a share of the sentences in (0, 1), got {share}")
    whole = structured(sentences, global_id=global_id, global_tokens=global_tokens)
    most = len(sentences) - 1
    chosen = np.sort(
        generator.permutation(len(sentences))[: min(most, max(1, round(share * len(sentences))))]
    )
    is_long = whole["token_type_ids"] == 1
    whole["input_ids"][is_long & np.isin(whole["segment_ids"], chosen)] = mask_id
    parts = [whole]
    for number in chosen:
        alone = structured([sentences[number]], global_id=global_id, global_tokens=global_tokens)
        parts.append(alone)
    row = {name: np.concatenate([part[name] for part in parts]) for name in whole if name != "attention_mask"}
    lengths = [len(part["input_ids"]) for part in parts]
    row["document_ids"] = np.arange(len(parts)).repeat(lengths)
    row["pair_ids"] = np.zeros(sum(lengths), dtype=np.int64)
    starts = np.cumsum(lengths)[:-1]
    row["pair_ids"][chosen] = row["pair_ids"][starts] = np.arange(len(chosen)) + 1
    return row
