"""Losses across several heads or models.

    contrastive (ETC)        mean_n -log( exp(p_n . e_n / temperature) / sum_m exp(p_n . e_m / temperature) )
    detection (ELECTRA)      L_generator + weight * L_discriminator
    distillation             soft * T^2 * KL(softmax(t / T) || softmax(s / T)) + hard * labels' loss
      (DistilBERT)             + cosine * (1 - cos(h, g))
    preference (DPO)         mean_n -log sigmoid(margin_n)

**Contrastive.** The global token of a masked sentence identifies this sentence among others. p_n is the
output at the global token of a sentence with all tokens masked, so that only its context is visible; e_n is
the output at a global token that attends only to the same sentence, unmasked. The other e_m, of the whole
batch, are the negatives. Ainslie et al. 2020, section 3 (Contrastive Predictive Coding after Oord et al.
2018, with their noise-contrastive loss); gradients flow into both, since the paper stops none.

A row contains the document and, packed behind it as separate documents, its hidden sentences without context,
so that one pass gives p and e:

    row = hide_sentences(sentences, generator, mask_id=4, global_id=1, global_tokens=256)
    batch = Collate(pad_id)([row, ...])
    pairs = batch.pop("pair_ids")
    loss = contrastive_loss(*pairs_of(model(**batch).last_hidden_state, pairs))

The task `cpc` does this, with masked language modelling in the same rows, as the paper does.

**Detection.** A share M of the tokens x (15 %) is masked. The generator, a small masked language model,
predicts them: L_generator = -mean_{t in M} log p(x_t). The discriminator's input has a token y_t drawn from p
at each of these places, and L_discriminator is the binary cross-entropy, over all real tokens, of classifying
y_t as replaced or original; a token that the generator predicted right counts as original. The weight is 50.
No gradient flows through the sampling, so the training is not adversarial. Clark et al. 2020, section 2.

**Distillation.** A student learns its teacher's predictions, the labels, and its hidden states. s and t [N,
classes] are logits of student and teacher for the same items (texts, or tokens), h and g [M, E] their last
hidden states at the same real tokens, each term a mean over its items. T is the temperature, and T^2 keeps
the scale of the first term's gradient at T = 1 (Hinton et al. 2015, section 2). No gradient flows into the
teacher. Sanh et al. 2019, section 3; its released training has the default weights. The student has the
teacher's widths and fewer layers, and is initialized with the weights of some of the teacher's layers; or its
weights are new (`fresh`), as in Hinton et al. 2015.

**Preference.** Of two replies to the same prompt x, y_w is preferred to y_l. The margin of a pair is

    beta (log pi(y_w|x) / ref(y_w|x) - log pi(y_l|x) / ref(y_l|x))

of the model pi and a frozen reference ref. Rafailov et al. 2023, equation 7.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Gt
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, check_range
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(Config):
    """The teacher, and the weights of the three terms."""

    teacher: str  # the folder of its run
    temperature: PositiveFloat = 2.0
    soft: NonNegativeFloat = 5.0  # weight of the teacher's predictions
    hard: NonNegativeFloat = 2.0  # weight of the labels
    cosine: NonNegativeFloat = 1.0  # weight of the angle between the last hidden states
    # New weights instead of weights of the teacher's layers; if `cosine` is 0 the student may have any size.
    fresh: bool = False

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in ("soft", "hard", "cosine")}
        if not sum(weights.values()):
            listed = ", ".join(f"{name} {value:g}" for name, value in weights.items())
            raise InputError(f"soft, hard, cosine: expected a weight above 0, got {listed}")

    @classmethod
    def examples(cls) -> tuple["DistillationConfig", ...]:
        """Return a configuration with a finished run as the teacher."""
        return (cls(teacher="runs/teacher"),)


def soft_loss(student: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """Return the first term without its weight, for logits [N, classes]; 0 if there is no item.

    Raises `InputError` for shapes that differ and a temperature that is not above 0.
    """
    check_range("temperature", temperature, Gt(0))
    _check(student, teacher, "logits [items, classes]")
    targets = F.log_softmax(teacher.detach().float() / temperature, -1)
    predictions = F.log_softmax(student.float() / temperature, -1)
    total = F.kl_div(predictions, targets, reduction="sum", log_target=True)
    return total * (temperature**2 / max(len(student), 1))


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the last term without its weight, for hidden states [M, E]; 0 if there is none."""
    _check(student, teacher, "hidden states [tokens, width]")
    if not len(student):
        return student.sum()
    return 1 - F.cosine_similarity(student.float(), teacher.detach().float(), dim=-1).mean()


def distillation_loss(
    config: DistillationConfig,
    labels_loss: Tensor,
    logits: tuple[Tensor, Tensor],
    hidden: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the sum of the weighted terms; `logits` and `hidden` are pairs of student and teacher."""
    loss = config.hard * labels_loss
    if config.soft:
        loss = loss + config.soft * soft_loss(*logits, config.temperature)
    if config.cosine:
        loss = loss + config.cosine * hidden_loss(*hidden)
    return loss


def preference_margins(policy: Sequence[Tensor], reference: Sequence[Tensor], beta: float = 0.1) -> Tensor:
    """Return the margin [N] of each pair.

    Args:
        policy: log pi of the chosen and of the rejected replies, [N] each.
        reference: log ref of the same, without gradient.
        beta: how strongly pi is held to ref.

    Raises:
        InputError: shapes that differ, and a beta that is not above 0.
    """
    check_range("beta", beta, Gt(0))
    shapes = [tuple(x.shape) for x in (*policy, *reference)]
    if len(shapes) != 4 or len({*shapes}) > 1 or len(shapes[0]) != 1:
        raise InputError(
            f"policy, reference: expected chosen and rejected of one shape [pairs], got {shapes}"
        )
    chosen, rejected = (pi - ref.detach() for pi, ref in zip(policy, reference))
    return beta * (chosen - rejected)


def preference_loss(margins: Tensor) -> Tensor:
    """Return the mean of -log sigmoid(margin) over pairs [N], N of 1 or more."""
    return -F.logsigmoid(margins).mean()


def chosen_layers(teacher: int, student: int) -> list[int]:
    """Return the teacher's layers that initialize a smaller student: first and last, the others evenly
    spread.

    6 of 12 are 0, 2, 4, 7, 9, 11, as in the release of DistilBERT ("one layer out of two", section 2).
    """
    if not 1 <= student <= teacher:
        raise InputError(f"layers: expected 1 to {teacher}, as many as the teacher has, got {student}")
    gaps = max(student - 1, 1)
    return [(2 * i * (teacher - 1) + gaps) // (2 * gaps) for i in range(student)]


def _check(student: Tensor, teacher: Tensor, what: str) -> None:
    if student.shape != teacher.shape or student.dim() != 2:
        raise InputError(
            f"student, teacher: expected {what} of one shape, "
            f"got {tuple(student.shape)} and {tuple(teacher.shape)}"
        )
