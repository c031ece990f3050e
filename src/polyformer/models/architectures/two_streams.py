"""Permuted language modelling: each token is predicted from the tokens before it in a random order.

    h_z(t) = Attention(Q = h_z(t), KV = h_z(1) .. h_z(t))          content: knows its own token
    g_z(t) = Attention(Q = g_z(t), KV = h_z(1) .. h_z(t - 1))      query: knows only its position
    p(x_z(t) | x_z(1) .. x_z(t - 1)) = softmax(g_z(t) W)

z is an order of the places of a text. Both streams run through the same layers of an encoder. In the first
layer h is the embedding sum, and g that of a trainable vector w in the place of every token's vector.
Tokens keep their places, so that only the weights of attention depend on the order. Yang et al. 2019 (XLNet),
sections 2.3 and 2.4 (equations 4 and 5).

`ranks` state the order: the rank of a token is its place t in it. Tokens of equal rank see each other in the
content stream and not in the query stream: the tokens that are not predicted have rank 0 together. A token
that sees no other has an attention output of zeros; transformers' XLNet would attend to all tokens there.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.attention.positions import Position, Site
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs
from polyformer.models.architectures.transformer import Transformer
from polyformer.models.outputs import ModelOutput
from polyformer.nn.heads import HeadInput
from polyformer.nn.stack import Stack

Sees = Callable[[Tensor, Tensor], Tensor]
"""Which ranks of keys a rank of a query sees: `torch.lt` or `torch.le`, of the key's and of the query's."""


ALONE = "embeds_layers", "rotates_parts"
"""What positions do that `query_stream` leaves out."""


class InOrder(Position):
    """The positions of a stack, with only the pairs in which the key comes before its query in an order.

    ranks: [B, T]. sees: whether a token sees itself too (`torch.le`) or not (`torch.lt`).
    """

    def __init__(self, position: Position, ranks: Tensor, sees: Sees):
        super().__init__()
        self.position, self.ranks, self.sees = position, ranks, sees
        self.farthest = position.farthest

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """See `Position.rotate`."""
        return self.position.rotate(q, k, context, site)

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative | None:
        """See `Position.relative`."""
        return self.position.relative(q, k, context, site)

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod:
        """Return the scheme's own function with -inf for pairs outside of the order."""
        own, ranks, sees = self.position.score_mod(q, k, context, site), self.ranks, self.sees

        @step("keys that come later in the order")
        @broadcasts
        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            score = score if own is None else own(score, b, h, q_idx, kv_idx)
            return score.masked_fill(~sees(ranks[b, kv_idx], ranks[b, q_idx]), -torch.inf)

        return add


def query_stream(stack: Stack, h: Tensor, g: Tensor, ranks: Tensor, context: Context) -> Tensor:
    """Return the output g [B, T, E] of the query stream of an encoder, given the inputs h and g of layer 1.

    ranks: [B, T].
    """
    up_to, before = (InOrder(stack.position, ranks, sees) for sees in (torch.le, torch.lt))
    for layer in stack.sequence:
        g, h = layer.rerun(g, h, context, before), layer.rerun(h, h, context, up_to)
    return stack.finish(g, context)


class TwoStreams(nn.Module):
    """An encoder with a head that predicts tokens, trained by permuted language modelling.

    query: the vector w [E of the embedding]: a parameter, or the id of a token that no text contains, such as
    <mask>, whose vector it then is. Raises `InputError` for a model without an encoder of its own, and for
    attention whose scores positions cannot change.
    """

    def __init__(self, model: Transformer, query: nn.Parameter | int):
        super().__init__()
        stack = model.encoder
        if stack is None or model.decoder is not None:
            raise InputError("model: two streams run through an encoder alone; got another model")
        if type(stack) is not Stack or any(getattr(stack.position, name) for name in ALONE):
            raise InputError(
                "model: two streams run layer by layer, expected an encoder without halting, reversible "
                "layers or positions of every layer; use a plain stack"
            )
        stack.mechanism.require("supports_score_bias")
        self.model, self.query = model, query

    def forward(
        self,
        input_ids: Tensor,
        ranks: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **inputs: Tensor | None,
    ) -> ModelOutput:
        """Return the predictions [B, T, V] of all tokens, each from the tokens of lower rank.

        ranks: [B, T] integers. labels: [B, T], the tokens that are predicted, -100
        elsewhere. inputs: further inputs of the model, with their names in `Transformer.forward`.
        """
        if ranks.shape != input_ids.shape:
            raise InputError(
                f"ranks: expected {tuple(input_ids.shape)}, as input_ids, got {tuple(ranks.shape)}"
            )
        read = ModelInputs(input_ids, attention_mask, **inputs).with_all_rows()
        runner = self.model.runner("encoder")
        tokens = NO_TOKENS.extended(read)
        length = input_ids.shape[1]
        context = tokens.context(length, False, input_ids.device)
        pos = tokens.last(length, input_ids.device)
        table = runner.tokens
        w = table(torch.full_like(input_ids, self.query)) if isinstance(self.query, int) else self.query
        contents = table(input_ids)
        h, g = (
            runner.embedding(vectors, runner.stack.position, pos, read)
            for vectors in (contents, w.expand_as(contents))
        )
        hidden = query_stream(runner.stack, h, g, ranks, context)
        head_input = HeadInput(hidden, context.q_valid, self.model._output_weight(), None, ids=input_ids)
        loss, predictions = self.model.head(head_input, labels)
        return ModelOutput(loss, hidden, predictions)
