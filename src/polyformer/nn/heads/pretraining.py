"""Heads of pre-training: masked tokens, a second task for the text as a whole, and replaced tokens.

Two parallel heads: for the tokens, and for the text as a whole or the choice among several texts.

    loss = tokens' loss + sentence's loss

BERT's pre-training predicts masked tokens and whether the second sentence follows the first (Devlin
et al. 2019, section 3.1); ALBERT's predicts whether two sentences are in order (Lan et al. 2020, section
3.1). GPT predicts the next tokens of several texts while it chooses among them (Radford et al. 2018, section
3.2).

Replaced-token detection: classify which tokens were replaced. Clark et al. 2020 (ELECTRA), section 2.

    logit_t = w . act(W h_t + b) + c;    the loss is the binary cross-entropy of sigmoid(logit_t)

The mean is over all real tokens, while masked language modelling learns only from 15 % of them.
"""

import dataclasses
from functools import partial
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.positions import Learned
from polyformer.core.host_values import IGNORED, check_labels
from polyformer.core.ops.layers import ActivationName, activation
from polyformer.core.ops.linear import ExactLinear, Linear
from polyformer.core.ops.norms import LayerNorm
from polyformer.core.ranges import PositiveInt, Wording
from polyformer.nn.heads.base import Head, HeadConfig, HeadInput, HeadOutput, HeadShape
from polyformer.nn.heads.vocabulary import VocabularyConfig, VocabularyHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedConfig(VocabularyConfig):
    """Masked-language-model head: logits over the vocabulary for masked tokens.

    It applies BERT's transform (dense, activation, norm) before the vocabulary matrix.
    """

    activation: ActivationName = "gelu"
    eps: float = 1e-12  # of the norm
    dense_bias: bool = True
    norm_bias: bool = True
    bias: bool = True  # of the vocabulary

    kind: ClassVar[str] = "masked"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1, task 1"

    def reusable_modules(self) -> dict[str, str]:
        """Return the whole head as the part that predicts masked tokens."""
        return {"tokens": ""}

    @classmethod
    def examples(cls) -> "tuple[MaskedConfig, ...]":
        return cls(), cls(dense_bias=False, norm_bias=False, bias=False)

    def build(self, shape: HeadShape) -> "MaskedHead":
        return MaskedHead(shape, self)


class MaskedHead(VocabularyHead):
    """A head that predicts masked tokens."""

    supports_context_parallel = True

    def __init__(self, shape: HeadShape, config: MaskedConfig):
        super().__init__(shape, bias=config.bias)
        self.activation = activation(config.activation)
        self.dense = Linear(shape.hidden_size, shape.vector_size, bias=config.dense_bias)
        self.norm = LayerNorm(shape.vector_size, eps=config.eps, bias=config.norm_bias)

    def transform(self, hidden: Tensor) -> Tensor:
        """Return norm(act(W h + b))."""
        return self.norm(self.activation(self.dense(hidden)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnhancedMaskedConfig(MaskedConfig):
    """DeBERTa's enhanced mask decoder: absolute positions are added only where masked tokens are predicted.

        z = h + P[pos];   `passes` times: z = last_layer(queries z, keys and values of h);   logits of z

    h is the input of the encoder's last layer, and all passes share the weights of this layer: the paper's n
    = 2 (section 3.2). As in the released training code the layer belongs to the encoder and remains for
    fine-tuning, but its direct output, `last_hidden_state`, is not used here; the paper's table could also
    contain other information. If a layer normalizes its input (pre-norm), it normalizes z and h as usual.
    """

    passes: Annotated[PositiveInt, Wording(fix="without any use 'masked'")] = 2
    max_position_embeddings: int = 512  # of the table P; a longer text is an error

    kind: ClassVar[str] = "enhanced_masked"
    paper: ClassVar[str] = "He et al. 2021 (DeBERTa), section 3.2"
    causal: ClassVar[bool] = False
    reruns_last_layer: ClassVar[bool] = True

    def with_max_positions(self, before: int, after: int) -> "EnhancedMaskedConfig":
        """Return the configuration with a table of at least `after` positions; it never shrinks."""
        return dataclasses.replace(self, max_position_embeddings=max(self.max_position_embeddings, after))

    def build(self, shape: HeadShape) -> "EnhancedMaskedHead":
        """Return the masked head and the table P; the last layer remains in the encoder."""
        return EnhancedMaskedHead(shape, self)


class EnhancedMaskedHead(MaskedHead):
    """A head that predicts masked tokens also from their positions."""

    supports_context_parallel = False

    def __init__(self, shape: HeadShape, config: EnhancedMaskedConfig):
        super().__init__(shape, config)
        self.passes = config.passes
        self.position = Learned([shape.hidden_size], config.max_position_embeddings)

    def states(self, inputs: HeadInput) -> Tensor:
        """Return z = h + P[pos] after `passes` times z = last_layer(z, h, h)."""
        last = inputs.last
        assert last is not None, "a model passes it to heads with reruns_last_layer"
        z = self.position.embed(last.read, last.pos, 0)
        for _ in range(self.passes):
            # Queries of z, keys and values of h: positions enter only through the queries.
            z = last.run(z)
        return z


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingConfig(HeadConfig):
    """Pre-training head: a token head and a sentence head, trained on the sum of their losses.

    `tokens` reads `labels`, `sentence` reads `sentence_labels`.
    """

    tokens: HeadConfig = dataclasses.field(default_factory=partial(HeadConfig.from_dict, "masked"))
    sentence: HeadConfig = dataclasses.field(default_factory=partial(HeadConfig.from_dict, "classify"))

    kind: ClassVar[str] = "pretraining"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1"

    @classmethod
    def examples(cls) -> tuple["PretrainingConfig", ...]:
        scored = {"kind": "classify", "num_labels": 1, "pooling": "last", "hidden": False}
        return cls(), cls(
            tokens=HeadConfig.from_dict("language_model"),
            sentence=HeadConfig.from_dict({"kind": "choose", "text": scored}),
        )

    def reusable_modules(self) -> dict[str, str]:
        """Return the parts of both heads, with the prefixes `tokens.` and `sentence.`."""
        heads = {"tokens": self.tokens, "sentence": self.sentence}
        return {
            part: ".".join(filter(None, (name, where)))
            for name, head in heads.items()
            for part, where in head.reusable_modules().items()
        }

    def with_max_positions(self, before: int, after: int) -> "PretrainingConfig":
        """Return the configuration with longer `tokens`; `sentence` does not depend on positions."""
        return dataclasses.replace(self, tokens=self.tokens.with_max_positions(before, after))

    def build(self, shape: HeadShape) -> "Pretraining":
        """Return the head of the tokens and the head of the text, for the same model."""
        return Pretraining(self, shape)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor | None:
        """Return labels for the head of the tokens, [B, T]."""
        return self.tokens.example_labels(rows, length, vocab_size)

    def example_sentence_labels(self, rows: int) -> Tensor | None:
        """Return labels for the head of the text, [B]."""
        return self.sentence.example_labels(rows, 1, 1)


class Pretraining(Head):
    """A head with a pair of predictions: for the tokens, and for the text; for B questions with C choices
    each [B C, T, V] and [B, C]."""

    predicts_sentence = True

    def __init__(self, config: PretrainingConfig, shape: HeadShape):
        super().__init__()
        self.tokens, self.sentence = config.tokens.build(shape), config.sentence.build(shape)
        self.predicts_next = self.tokens.predicts_next
        self.reads_choices = self.sentence.reads_choices
        heads = self.tokens, self.sentence
        self.supports_vocabulary_parallel = all(head.supports_vocabulary_parallel for head in heads)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Return the sum of both losses, where either may be missing, and both predictions."""
        loss, tokens = self.tokens(inputs, labels)
        other, sentence = self.sentence(inputs, inputs.sentence_labels)
        # Labels of either head may be missing; without both there is no loss.
        losses = [term for term in (loss, other) if term is not None]
        return torch.stack(losses).sum() if losses else None, lambda: (tokens(), sentence())


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectConfig(HeadConfig):
    """Replaced-token detection head: a logit for every token.

    A layer with an activation, and a logit for every token: above 0 if the token was replaced.
    """

    activation: ActivationName = "gelu"

    kind: ClassVar[str] = "detect"
    paper: ClassVar[str] = "Clark et al. 2020, section 2"

    def build(self, shape: HeadShape) -> "Detect":
        return Detect(shape.hidden_size, self)

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return zeros and ones [B, T]."""
        return torch.randint(2, (rows, length))


class Detect(Head):
    """A head with labels [B, T], 1 for replaced tokens, 0 for others, -100 for none; predictions [B, T]."""

    supports_context_parallel = True
    supports_vocabulary_parallel = True

    def __init__(self, hidden_size: int, config: DetectConfig):
        super().__init__()
        self.activation = activation(config.activation)
        self.dense = Linear(hidden_size, hidden_size)
        self.output = ExactLinear(hidden_size, 1)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute logit_t = w . act(W h_t + b) + c."""
        hidden = self.activation(self.dense(inputs.hidden))
        # A sum, as the last bits of BLAS's product with a vector depend on the vector's memory address.
        logits = (hidden * self.output.weight.squeeze(0)).sum(-1) + self.output.bias
        return None if labels is None else self._loss(logits, labels, inputs.mask), lambda: logits

    def _loss(self, logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        check_labels(labels, logits.shape, 2)
        # Original tokens have a label too, so that every token trains the model.
        labelled = labels != IGNORED if mask is None else (labels != IGNORED) & mask
        weight = labelled.to(logits.dtype)
        targets = labels.clamp_min(0).to(logits.dtype)
        total = F.binary_cross_entropy_with_logits(logits, targets, weight, reduction="sum")
        return total / weight.sum().clamp_min(1)
