"""Drafts by the model itself, `generate(draft="self")`, from the parts of `nn/heads/drafting.py`.

A pass of the model leaves the hidden states h of the tokens that it read. Let the texts have W tokens; the
last is chosen by the model and not read yet. Medusa's head k proposes token W + k - 1 from h_(W-2), the
state of the last token that was read and accepted. Module k of multi-token prediction reads h^(k-1)_j and
the token at j + k for all j up to W - 2, and its last output proposes the same token.

The modules keep the keys of their layers. Module k reads k - 1 drafts in its last places, so after each
proposal the keys from place W - D on are forgotten, and read again when the tokens are known; with D = 1 none
is. Cost per pass: K products with a matrix [V, E]; or D layers over the new tokens, and D products.
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs, Tokens
from polyformer.core.state import State
from polyformer.models.generation.decoder import Decoder
from polyformer.models.generation.processors import blockwise_argmax
from polyformer.models.generation.speculation import Drafts, Speculation, Speculator
from polyformer.nn.heads.drafting import Drafting, Medusa, MultiToken, TokenModule
from polyformer.nn.stack import LayerState


@dataclasses.dataclass(frozen=True)
class SelfMemory(State):
    """The hidden states and caches from which a model makes its next drafts.

    hidden: [N, T, E], of the places from `first` on. end: the place after the last that the next pass reads.
    tokens: of the texts that the modules have seen. layers: the states of each module, of all places before
    `first`.
    """

    hidden: Tensor
    first: int
    end: int
    tokens: Tokens = NO_TOKENS
    layers: tuple[tuple[LayerState, ...], ...] = ()

    def after_pass(self, hidden: Tensor) -> "SelfMemory":
        """Return the memory with the hidden states [N, T, E] of the pass that read up to place `end`."""
        start = self.end - hidden.shape[1]
        # A pass may read accepted tokens again.
        new = hidden[:, max(self.first - start, 0) :]
        kept = self.hidden[:, : max(start - self.first, 0)]
        return dataclasses.replace(self, hidden=torch.cat([kept, new], 1) if kept.shape[1] else new)


class SelfDrafter:
    """Base of drafters that propose from the hidden states of `decoder`."""

    def __init__(self, decoder: Decoder):
        self.decoder, self.model = decoder, decoder.model

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
    ) -> SelfMemory:
        """Return the memory after `decoder` has read the prompt or the source."""
        hidden = self.decoder.hidden
        return SelfMemory(hidden, 0, hidden.shape[1])

    def propose(self, text: Tensor, count: int, memory: SelfMemory) -> tuple[Drafts, SelfMemory]:
        """Propose at most `count` tokens after the texts [N, W]."""
        raise NotImplementedError


class MedusaDrafter(SelfDrafter):
    """Proposes the likeliest token of each of Medusa's heads."""

    def propose(self, text: Tensor, count: int, memory: SelfMemory) -> tuple[Drafts, SelfMemory]:
        heads: Medusa = self.model.drafting
        width, count = text.shape[1], min(count, heads.count)
        last = memory.hidden[:, width - 2 - memory.first].unsqueeze(1)
        drafts = text[:, :0]
        if count:
            logits = heads(last).squeeze(2)[:count]  # [count, N, V]
            drafts = blockwise_argmax(logits.flatten(0, 1)).view(count, -1).T
        return Drafts(drafts), SelfMemory(last[:, :0], width - 1, width + count)


class MultiTokenDrafter(SelfDrafter):
    """Proposes a token from each module of multi-token prediction, one after another."""

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
    ) -> SelfMemory:
        memory = super().start(input_ids, attention_mask, first, inputs)
        numbers = {field.name for field in dataclasses.fields(ModelInputs)} - {"relation_ids"}
        own = {name: x for name, x in inputs.items() if name in numbers}
        prompt = ModelInputs(input_ids, attention_mask, **own).with_all_rows()
        reserve = input_ids.shape[1] + self.decoder.max_new_tokens
        layers = tuple(part.stack.new_states(reserve) for part in self.model.drafting.parts)
        return dataclasses.replace(memory, tokens=NO_TOKENS.extended(prompt), layers=layers)

    def propose(self, text: Tensor, count: int, memory: SelfMemory) -> tuple[Drafts, SelfMemory]:
        modules: MultiToken = self.model.drafting
        width, known = text.shape[1], memory.tokens
        if width - 1 > known.length:
            known = known.extended(ModelInputs(text[:, known.length : width - 1]))
        # All modules know the tokens of the places before `sure`.
        start, sure = memory.first, max(width - modules.count, memory.first)
        hidden, layers = memory.hidden[:, : width - 1 - start], []
        follows = text.clamp_min(0)  # padding is read, and no other token sees it
        for ahead, (part, states) in enumerate(zip(modules.parts, memory.layers), 1):
            assert isinstance(part, TokenModule)
            vectors = self.model.tokens(follows[:, start + ahead : width - 1 + ahead])
            hidden, states = _read(part, hidden, vectors, (known, start, sure), states)
            layers.append(states)
            logits = self.model.predictions(hidden[:, -1:]).squeeze(1)
            follows = torch.cat([follows, blockwise_argmax(logits).unsqueeze(1)], 1)
        count = min(count, modules.count)
        kept = memory.hidden[:, sure - start : width - 1 - start]
        drafts = Drafts(follows[:, width : width + count])
        return drafts, SelfMemory(kept, sure, width + count, known, tuple(layers))


def _read(
    part: TokenModule,
    hidden: Tensor,
    vectors: Tensor,
    places: tuple[Tokens, int, int],
    states: tuple[LayerState, ...],
) -> tuple[Tensor, tuple[LayerState, ...]]:
    """Return the outputs of a module [N, T, E], and its states after the places before `sure`.

    hidden, vectors: its inputs [N, T, E] at the places from `start` on. places: all tokens, `start`, `sure`.
    """
    tokens, start, sure = places
    outputs, after = [], states
    if sure > start:
        before = tokens.truncated_(tokens.length - sure)
        assert before is not None
        count = sure - start
        y, new = part(hidden[:, :count], vectors[:, :count], before, states)
        outputs.append(y)
        after = new
    if start + hidden.shape[1] > sure:
        count = sure - start
        y, new = part(hidden[:, count:], vectors[:, count:], tokens, after)
        outputs.append(y)
        # What was read of drafts is forgotten; a state of sums is a value, and `after` is still valid.
        unsure = hidden.shape[1] - count
        shorter = [state.truncated_(unsure) for state in new]
        if all(state is not None for state in shorter):
            after = tuple(state for state in shorter if state is not None)
    return torch.cat(outputs, 1), after


class SelfSpeculator(Speculator):
    """A `Speculator` that hands the hidden states of each pass to a `SelfDrafter`."""

    def _pass(self, text: Tensor, state: Speculation) -> Speculation:
        after = super()._pass(text, state)
        assert isinstance(after.memory, SelfMemory)
        return dataclasses.replace(after, memory=after.memory.after_pass(self.decoder.hidden))


DRAFTERS: dict[type[Drafting], type[SelfDrafter]] = {Medusa: MedusaDrafter, MultiToken: MultiTokenDrafter}


def self_drafter(decoder: Decoder) -> SelfDrafter:
    """Return the drafter for the parts of the decoder's model."""
    return DRAFTERS[type(decoder.model.drafting)](decoder)
