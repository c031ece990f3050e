"""Parts that predict further tokens, which the model then verifies: drafts without a second model.

h_t is the decoder's output for token x_t. The head predicts x_(t+1) from it, and the parts predict x_(t+1+k):

    medusa        p_k = softmax(W_k (h_t + SiLU(A_k h_t)))                  k = 1 .. K
                  loss = head's + weight sum_k decay^k mean_t -log p_k(x_(t+1+k))
    multi_token   h^k_t = layer_k(M_k [norm(h^(k-1)_t); norm(e(x_(t+k)))])  k = 1 .. D, h^0 = h
                  p_k = head(h^k_t)
                  loss = head's + weight / D sum_k mean_t -log p_k(x_(t+1+k))

Medusa's heads read only h_t, so that all drafts come from one state at the cost of K matrices W_k [V, E]. The
modules of multi-token prediction read one another and the tokens between, with a layer of the decoder each
and the model's own table e and head. A_k is 0 at first. Of a text of T tokens the last k + 1 have no label.

`generate(draft="self")` proposes the likeliest token of each p_k (`models/generation/self_drafts.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import next_labels
from polyformer.core.ops.cross_entropy import linear_cross_entropy
from polyformer.core.ops.linear import Linear
from polyformer.core.ranges import NonNegativeFloat, PositiveInt, PositiveShare
from polyformer.core.sequence.tokens import Tokens
from polyformer.nn.depth import FixedConfig
from polyformer.nn.memory import NoMemoryConfig
from polyformer.nn.stack import LayerState, StackConfig, build_stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftingShape:
    """The model for which the parts are built: E, V, the width of a token vector, and its decoder.

    reads_source: whether the decoder has an encoder.
    """

    hidden_size: int
    vocab_size: int
    table_size: int
    max_positions: int
    decoder: StackConfig
    reads_source: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftingConfig(Config):
    """Family of parts that predict further tokens: `build(shape)` makes the module.

    `weight`: of their loss next to the head's. `alone`: train only these parts, and leave the model as it is.
    """

    weight: NonNegativeFloat = 1.0
    alone: bool = False

    option: ClassVar[str] = "model.drafting"

    def build(self, shape: DraftingShape) -> "Drafting":
        """Return the module with new weights."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class DraftingInput:
    """What the parts read in training.

    hidden: [B, T, E], the decoder's output. tokens: of the same T tokens. ids: [B, T], or None if the model
    read vectors. embed: ids to token vectors. loss: of the model's head for hidden states and labels.
    """

    hidden: Tensor
    tokens: Tokens
    ids: Tensor | None
    embed: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


class Drafting(nn.Module):
    """Base of parts that predict `count` further tokens."""

    count: int

    def loss(self, call: DraftingInput, labels: Tensor) -> Tensor:
        """Return the weighted loss; labels [B, T] are of the head, already shifted by one token."""
        raise NotImplementedError

    def start_from(self, output: Tensor) -> None:
        """Set new weights to begin with, for a trained model with the output matrix [V, E]."""


def further_labels(labels: Tensor, tokens: Tokens) -> Tensor:
    """Return labels [B, T] of one token further ahead, -100 beyond the document, the row and at padding."""
    length = labels.shape[1]
    documents = None if tokens.doc is None else tokens.doc[:, -length:]
    return next_labels(labels, documents, tokens.new_valid(length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig(DraftingConfig):
    """Medusa heads: each predicts one further token from the same hidden state.

    With `alone` the model stays as it is (Medusa-1), otherwise both are trained (Medusa-2). Deviations: the
    drafts are one chain of likeliest tokens instead of a tree, and are verified exactly, not by typical
    acceptance; the paper warms up the heads before it trains the model too.

    `heads`: the number K of further tokens. `decay`: the factor of the loss from one head to the next.
    """

    heads: PositiveInt = 4
    decay: PositiveShare = 0.8

    kind: ClassVar[str] = "medusa"
    paper: ClassVar[str] = "Cai et al. 2024 (Medusa), sections 2.1.1 and 2.2"

    @classmethod
    def examples(cls) -> tuple["MedusaConfig", ...]:
        return cls(), cls(heads=2, decay=0.5, weight=0.2, alone=True)

    def build(self, shape: DraftingShape) -> "Medusa":
        return Medusa(self, shape)


class Medusa(Drafting):
    """The module of `MedusaConfig`: `residual` [K, E, E], and an output matrix of each head."""

    def __init__(self, config: MedusaConfig, shape: DraftingShape):
        super().__init__()
        self.config, self.count = config, config.heads
        width = shape.hidden_size
        self.residual = nn.Parameter(torch.zeros(config.heads, width, width))
        self.outputs = nn.ModuleList(Linear(width, shape.vocab_size, bias=False) for _ in range(config.heads))

    def states(self, hidden: Tensor) -> Tensor:
        """Return h + SiLU(A_k h) of each head, [K, B, T, E]."""
        return hidden + F.silu(torch.einsum("kfe,bte->kbtf", self.residual.to(hidden.dtype), hidden))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of each head, [K, B, T, V]."""
        return torch.stack([output(h) for output, h in zip(self.outputs, self.states(hidden))])

    def loss(self, call: DraftingInput, labels: Tensor) -> Tensor:
        total, factor = call.hidden.new_zeros(()), self.config.weight
        for output, hidden in zip(self.outputs, self.states(call.hidden)):
            labels, factor = further_labels(labels, call.tokens), factor * self.config.decay
            # Fused with the product, as the loss of the head.
            total = total + factor * linear_cross_entropy(hidden, _weight(output), None, labels)
        return total

    @torch.no_grad()
    def start_from(self, output: Tensor) -> None:
        """Set all W_k to the model's output matrix and A_k to 0: every head predicts what the head does."""
        self.residual.zero_()
        for layer in self.outputs:
            _weight(layer).copy_(output)


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTokenConfig(DraftingConfig):
    """Multi-token prediction: modules of one layer, each reading the state of the one before and its token.

    A module has a layer as the decoder's last, with its own weights, and a norm after it where the decoder
    has one; h^k is what this norm returns, as h is for the model. Deviation: none in the equations; drafts
    are the likeliest tokens.

    `modules`: the number D of further tokens.
    """

    modules: PositiveInt = 1
    weight: NonNegativeFloat = 0.3

    kind: ClassVar[str] = "multi_token"
    paper: ClassVar[str] = "DeepSeek-AI 2024 (DeepSeek-V3), section 2.2"

    @classmethod
    def examples(cls) -> tuple["MultiTokenConfig", ...]:
        return cls(), cls(modules=3, weight=1.0, alone=True)

    def build(self, shape: DraftingShape) -> "MultiToken":
        return MultiToken(self, shape)


class MultiToken(Drafting):
    """The module of `MultiTokenConfig`."""

    def __init__(self, config: MultiTokenConfig, shape: DraftingShape):
        super().__init__()
        _check_decoder(shape)
        self.config, self.count = config, config.modules
        self.parts = nn.ModuleList(TokenModule(shape) for _ in range(config.modules))

    def loss(self, call: DraftingInput, labels: Tensor) -> Tensor:
        if call.ids is None:
            raise InputError("inputs_embeds: drafting 'multi_token' reads the ids of a text; give input_ids")
        total, hidden = call.hidden.new_zeros(()), call.hidden
        for ahead, part in enumerate(self.parts, 1):
            # The first tokens come around at the end, where there are no labels.
            hidden, _ = part(hidden, call.embed(call.ids.roll(-ahead, 1)), call.tokens, None)
            labels = further_labels(labels, call.tokens)
            total = total + call.loss(hidden, labels)
        return total * (self.config.weight / self.count)


class TokenModule(nn.Module):
    """A module of multi-token prediction: h^(k-1) [B, T, E] and token vectors [B, T, S] to h^k [B, T, E]."""

    def __init__(self, shape: DraftingShape):
        super().__init__()
        width, norm = shape.hidden_size, shape.decoder.norm
        self.hidden_norm, self.token_norm = norm.build(width), norm.build(shape.table_size)
        self.joint = Linear(width + shape.table_size, width, bias=False)
        self.stack = build_stack(last_layer(shape.decoder), width, shape.max_positions)

    def forward(
        self, hidden: Tensor, vectors: Tensor, tokens: Tokens, states: tuple[LayerState, ...] | None
    ) -> tuple[Tensor, tuple[LayerState, ...] | None]:
        """Return h^k for the last T of `tokens`, and the next states of its layer if it has `states`."""
        length, device = hidden.shape[1], hidden.device
        x = self.joint(torch.cat([self.hidden_norm(hidden), self.token_norm(vectors)], -1))
        pos = tokens.last(length, device)
        x = self.stack.position.embed(x, pos, 0)
        return self.stack.run(x, pos, tokens.context(length, True, device), None, states)


def last_layer(decoder: StackConfig) -> StackConfig:
    """Return the configuration of a stack of one layer, as the last layer of `decoder`."""
    last = decoder.num_hidden_layers - 1
    attention = decoder.attention
    parts: dict[str, Any] = {
        "attention": dataclasses.replace(attention, mechanism=attention.mechanism.for_layer(last)),
        "feedforward": decoder.feedforward.for_layer(last),
        "block": decoder.block.for_layer(last),
    }
    return dataclasses.replace(
        decoder, num_hidden_layers=1, num_hidden_groups=None, layers_per_group=1, layerdrop=0.0, **parts
    )


def _check_decoder(shape: DraftingShape) -> None:
    """Raise `InputError` for a decoder that needs more than one layer to run."""
    decoder = shape.decoder
    refused = {
        "an encoder": shape.reads_source,
        f"memory {quote(decoder.memory.kind)}": not isinstance(decoder.memory, NoMemoryConfig),
        f"depth {quote(decoder.depth.kind)}": not isinstance(decoder.depth, FixedConfig),
        f"norm {quote(decoder.norm.kind)}": not decoder.norm.tokenwise,
        "value_residual": decoder.attention.value_residual,
        f"block {quote(decoder.block.kind)}": decoder.block.width(shape.hidden_size) != shape.hidden_size,
    }
    for part, is_there in refused.items():
        if is_there:
            raise InputError(
                f"drafting: 'multi_token' runs a layer of the decoder apart, which {part} does not allow; "
                "use 'medusa'"
            )
