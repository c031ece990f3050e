"""Heads with a fixed set of labels: for a text, a token or a span, or for one of several texts.

What the labels of a text are, one class, several, or numbers, and the loss of each.

| problem      | labels                          | loss, the mean over                                   |
|--------------|---------------------------------|-------------------------------------------------------|
| single_label | [...] classes, -100 for none    | labelled items, of -log softmax(logits)[label]        |
| multi_label  | [..., n], 1 for each that holds | items and labels, of the binary cross-entropy         |
| regression   | [..., n] numbers, or [...] of 1 | items and numbers, of (logit - label)^2               |

Multiple choice: a score for each of several texts, among which one answers a question.

    p(c) = softmax_c(score(text_c))

Each choice is appended to the question, and the resulting texts are scored independently. Radford
et al. 2018, section 3.3; Devlin et al. 2019, section 4.4 (SWAG).
"""

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import bounds, check_labels
from polyformer.core.ops.layers import ActivationName, Dropout, Pooling, activation, pool
from polyformer.core.ops.linear import Linear
from polyformer.core.ranges import PositiveInt, Probability
from polyformer.nn.heads.base import (
    Head,
    HeadConfig,
    HeadInput,
    HeadOutput,
    HeadShape,
    ResidualConfig,
    TransformConfig,
    build_transform,
    divide_layers,
)

Problem = Literal["single_label", "multi_label", "regression"]


def label_loss(problem: str | None, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits [..., n]. Without a `problem`, a single logit is a number, and floating-point
    labels are for several labels that can hold at once."""
    if problem is None:
        problem_of_floats = "multi_label" if labels.is_floating_point() else "single_label"
        problem = "regression" if logits.shape[-1] == 1 else problem_of_floats
    if problem == "single_label":
        return mean_cross_entropy(logits, labels)
    # Labels [...] of a single number become [..., 1], as the logits.
    if logits.shape[-1] == 1 and labels.shape == logits.shape[:-1]:
        labels = labels.unsqueeze(-1)
    if labels.shape != logits.shape:
        raise InputError(
            f"labels: expected the shape {tuple(logits.shape)} of a problem {quote(problem)}, "
            f"got {tuple(labels.shape)}"
        )
    targets = labels.to(logits.dtype)
    if problem == "regression":
        return F.mse_loss(logits, targets)
    _check_binary_labels(labels)
    return F.binary_cross_entropy_with_logits(logits, targets)


def mean_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean over the labels that are not -100, 0 if there is none; logits [..., classes]."""
    check_labels(labels, logits.shape[:-1], logits.shape[-1])
    rows, places = logits.flatten(0, -2), labels.flatten()
    total = F.cross_entropy(rows, places, reduction="sum", label_smoothing=smoothing)
    return total / (labels != -100).sum().clamp_min(1)


def random_labels(problem: str | None, rows: int, num_labels: int) -> Tensor:
    """Return labels for texts: classes [rows], or ones and zeros or numbers [rows, num_labels]."""
    if problem == "multi_label":
        return torch.randint(2, (rows, num_labels))
    if problem == "regression" or (problem is None and num_labels == 1):
        return torch.randn(rows, num_labels)
    return torch.randint(num_labels, (rows,))


def _check_binary_labels(labels: Tensor) -> None:
    """Raise `InputError` for labels outside [0, 1], if the host knows their values."""
    if (known := bounds(labels)) is None:
        return
    low, high = known
    if low < 0 or high > 1:
        raise InputError(f"labels: expected 0 or 1 for each of several labels, got {low:g} to {high:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyConfig(HeadConfig):
    """Classification head: logits over labels for a whole text or image.

    `pooling`: the "first" token (BERT's), the "last", or the "mean"; `hidden` adds a tanh layer before the
    output.

    `problem`: the kind of the labels, "single_label", "multi_label" or "regression"; by default it is
    inferred from the labels, and a single logit is a number (the table above). `end_token`: pools the last
    token with this id, as BART does with the last </s>; `pooling` is then ignored.
    """

    num_labels: PositiveInt = 2
    pooling: Pooling = "first"
    hidden: bool = True
    activation: ActivationName = "tanh"  # of that layer
    bias: bool = True  # of the last layer
    dropout: Probability = 0.1
    drops_twice: bool = False  # dropout before that layer too, as in RoBERTa
    marks_first: bool = False  # the first token is global if the caller marks none, as in Longformer
    problem: Problem | None = None
    end_token: int | None = None
    transform: TransformConfig | None = None  # instead of the tanh layer

    kind: ClassVar[str] = "classify"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.1"

    def __post_init__(self) -> None:
        if self.hidden and self.transform is not None:
            raise InputError("hidden, transform: a head has only one of them; set hidden to False")

    def reusable_modules(self) -> dict[str, str]:
        """Return the hidden layer as the pooler, except RoBERTa's, which is not pretrained."""
        return {"pooler": "dense"} if self.hidden and not self.drops_twice else {}

    @classmethod
    def examples(cls) -> tuple["ClassifyConfig", ...]:
        return (
            cls(num_labels=3, problem="multi_label"),
            cls(pooling="last", hidden=False),
            cls(pooling="mean", activation="gelu", bias=False, drops_twice=True, num_labels=1),
            cls(hidden=False, transform=TransformConfig()),
        )

    def build(self, shape: HeadShape) -> "Classify":
        return Classify(shape.hidden_size, self)

    def global_attention_mask(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return 1 at the first real token of each row if `marks_first`, else None."""
        if not self.marks_first:
            return None
        valid = torch.ones_like(ids) if mask is None else mask.long()
        # The first real token has a count of 1; padding right after it has too, hence the product.
        return (valid.cumsum(1) == 1).long() * valid

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return classes [B], or [B, num_labels] for other problems than single_label."""
        return random_labels(self.problem, rows, self.num_labels)


class Classify(Head):
    """A head with labels [B], or for other problems [B, num_labels]; predictions [B, num_labels]."""

    supports_vocabulary_parallel = True

    def __init__(self, hidden_size: int, config: ClassifyConfig):
        super().__init__()
        self.pooling, self.problem = config.pooling, config.problem
        self.drops_twice, self.end_token = config.drops_twice, config.end_token
        self.dense = Linear(hidden_size, hidden_size) if config.hidden else None
        self.activation = activation(config.activation)
        self.transform = build_transform(config.transform, hidden_size)
        self.dropout = Dropout(config.dropout)
        self.output = Linear(hidden_size, config.num_labels, bias=config.bias)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute W_o act(W pool(h)), or without `hidden` W_o pool(h), or with a `transform`."""
        if inputs.score_positions is not None:
            rows = torch.arange(inputs.hidden.shape[0], device=inputs.hidden.device)
            pooled = inputs.hidden[rows, inputs.score_positions]
        elif self.end_token is None:
            pooled = pool(inputs.hidden, inputs.mask, self.pooling)
        else:
            pooled = pool(inputs.hidden, self._end_token_mask(inputs), "last")
        if self.dense is not None:
            pooled = self.dropout(pooled) if self.drops_twice else pooled
            pooled = self.activation(self.dense(pooled))
        logits = self.output(self.dropout(self.transform(pooled)))
        return None if labels is None else label_loss(self.problem, logits, labels), lambda: logits

    def divide_logits(self, temperature: float) -> bool:
        return divide_layers(temperature, self.output)

    def _end_token_mask(self, inputs: HeadInput) -> Tensor:
        """Return the places of `end_token` in the text [B, T]."""
        shape = inputs.hidden.shape[:2]
        if inputs.ids is None or inputs.ids.shape != shape:
            raise InputError(
                f"input_ids: this head pools the last token {self.end_token} of each text and needs the ids "
                f"of all tokens, expected the shape {tuple(shape)}, got "
                f"{None if inputs.ids is None else tuple(inputs.ids.shape)}"
            )
        ends = inputs.ids == self.end_token
        if ends.device.type == "cpu" and not torch.compiler.is_compiling() and not ends.any(1).all():
            raise InputError(
                f"input_ids: a text has no token {self.end_token}, which this head pools; append it"
            )
        return ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class TagConfig(HeadConfig):
    """Tagging head: logits over labels for every token."""

    num_labels: PositiveInt = 2
    dropout: Probability = 0.1
    transform: TransformConfig | None = None

    kind: ClassVar[str] = "tag"
    paper: ClassVar[str] = "Devlin et al. 2019, section 5.3"

    @classmethod
    def examples(cls) -> tuple["TagConfig", ...]:
        return cls(), cls(transform=TransformConfig())

    def build(self, shape: HeadShape) -> "Tag":
        return Tag(shape.hidden_size, self)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return classes [B, T]."""
        return torch.randint(self.num_labels, (rows, length))


class Tag(Head):
    """A head with labels [B, T], -100 for tokens without a label; predictions [B, T, num_labels]."""

    supports_context_parallel = True
    supports_vocabulary_parallel = True

    def __init__(self, hidden_size: int, config: TagConfig):
        super().__init__()
        self.transform = build_transform(config.transform, hidden_size)
        self.dropout = Dropout(config.dropout)
        self.output = Linear(hidden_size, config.num_labels)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute logits_t = W h_t + b."""
        logits = self.output(self.dropout(self.transform(inputs.hidden)))
        return None if labels is None else mean_cross_entropy(logits, labels), lambda: logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanConfig(HeadConfig):
    """Span head: logits for the start and the end of an answer in a text.

    `separator`: the token that ends the question; all tokens of the question are global if the caller marks
    none. `question_end`: the token that ends the question, which contains no answer except at the text's
    first token: `QUESTION_PENALTY` is subtracted from the logits of its other places. `residual`: a layer
    instead of the `transform`.
    """

    separator: int | None = None
    question_end: int | None = None
    span_dropout: Probability = 0.0  # of the hidden states
    transform: TransformConfig | None = None
    residual: ResidualConfig | None = None

    kind: ClassVar[str] = "span"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.2"

    def __post_init__(self) -> None:
        if self.transform is not None and self.residual is not None:
            raise InputError("transform, residual: a head has only one of them; leave the other out")

    def build(self, shape: HeadShape) -> "Span":
        return Span(shape.hidden_size, self)

    @classmethod
    def examples(cls) -> tuple["SpanConfig", ...]:
        residual = ResidualConfig(intermediate_size=20)
        return cls(), cls(separator=2), cls(transform=TransformConfig()), cls(residual=residual)

    def global_attention_mask(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return 1 before the first `separator`; 0 everywhere in rows without a separator."""
        if self.separator is None:
            return None
        # Longformer makes the tokens of the question global: everything before its separator.
        ends = ids == self.separator
        before = (ends.cumsum(1) == 0) & ends.any(1, keepdim=True)
        return before.long() if mask is None else before.long() * mask

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return the first and last token [B, 2], in any order."""
        return torch.randint(length, (rows, 2))


QUESTION_PENALTY = 1e6
"""The number that is subtracted from the logits of a question's places."""


class Span(Head):
    """A head with labels [B, 2], first and last token or -100; predictions [B, T, 2], padding -inf."""

    supports_vocabulary_parallel = True

    def __init__(self, hidden_size: int, config: SpanConfig):
        super().__init__()
        self.question_end = config.question_end
        self.transform = build_transform(config.residual or config.transform, hidden_size)
        self.dropout = Dropout(config.span_dropout)
        self.output = Linear(hidden_size, 2)

    def logits(self, hidden: Tensor, ids: Tensor | None) -> Tensor:
        """Return logits [B, T, 2] for hidden [B, T, E] and ids [B, T], without a mask for padding."""
        logits = self.output(self.dropout(self.transform(hidden)))
        if self.question_end is None or ids is None:
            return logits
        return logits - QUESTION_PENALTY * self._question_mask(ids).unsqueeze(2).to(logits.dtype)

    def _question_mask(self, ids: Tensor) -> Tensor:
        """Return the places [B, T] up to the first `question_end` in a row, except the first place."""
        ends = ids == self.question_end
        # Up to and including the first end token, in rows that have one.
        before = (ends.cumsum(1) - ends.long() == 0) & ends.any(1, keepdim=True)
        return before & (torch.arange(ids.shape[1], device=ids.device) > 0)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute (start_t, end_t) = W h_t + b; the loss is the mean of both cross-entropies over T."""
        logits = self.logits(inputs.hidden, inputs.ids)
        if inputs.mask is not None:
            # Padding cannot be the start or the end of an answer.
            logits = logits.masked_fill(~inputs.mask.unsqueeze(-1), -torch.inf)
        return None if labels is None else mean_cross_entropy(logits.transpose(1, 2), labels), lambda: logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChooseConfig(HeadConfig):
    """Multiple-choice head: a softmax over the scores of several texts.

    `text`: the head with a single logit, 'classify', that scores a text.

    `separator`: the token that occurs twice between question and choice; all tokens of the choice are global
    if the caller marks none, as in Longformer.
    """

    text: HeadConfig = dataclasses.field(
        default_factory=partial(HeadConfig.from_dict, "classify(num_labels=1)")
    )
    separator: int | None = None

    kind: ClassVar[str] = "choose"
    paper: ClassVar[str] = "Devlin et al. 2019, section 4.4"

    def __post_init__(self) -> None:
        labels = getattr(self.text, "num_labels", None) if self.text.kind == "classify" else None
        if labels != 1:
            got = self.text.kind if labels is None else f"{labels} labels"
            raise InputError(f"text: expected the head 'classify' with num_labels=1, a score, got {got}")

    def reusable_modules(self) -> dict[str, str]:
        """Return the parts of the head that scores."""
        modules = self.text.reusable_modules()
        return {name: ".".join(filter(None, ("text", path))) for name, path in modules.items()}

    def global_attention_mask(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return 1 after the first separator and the next token; 0 in rows without a separator."""
        if self.separator is None:
            return None
        # True from the first separator on.
        after_separator = (ids == self.separator).cumsum(1) > 0
        # Shifted by two tokens, past both separators.
        in_choice = F.pad(after_separator, (2, 0))[:, : ids.shape[1]].long()
        return in_choice if mask is None else in_choice * mask

    def build(self, shape: HeadShape) -> "Choose":
        """Return the head with the head that scores, for the same model."""
        return Choose(self, shape)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return the answer [1] of a question with all rows as its choices; [0] without rows."""
        return torch.randint(max(rows, 1), (min(rows, 1),))


class Choose(Head):
    """A head with labels [B] in 0..C-1, or -100; predictions [B, C], -inf for choices without tokens."""

    reads_choices = True

    def __init__(self, config: ChooseConfig, shape: HeadShape):
        super().__init__()
        self.text = config.text.build(shape)
        self.supports_vocabulary_parallel = self.text.supports_vocabulary_parallel

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Score texts [B C, T, E] in the order of their questions; without `choices` of one question."""
        _, logits = self.text(inputs, None)
        rows = len(inputs.hidden)
        choices = max(rows, 1) if inputs.choices is None else inputs.choices
        scores = logits().view(rows // choices, choices)
        if inputs.mask is not None:
            # A choice of padding only fills up a question with fewer choices.
            scores = scores.masked_fill(~inputs.mask.any(1).view_as(scores), -torch.inf)
        return None if labels is None else mean_cross_entropy(scores, labels), lambda: scores
