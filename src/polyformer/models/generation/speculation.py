"""Speculative decoding: tokens are proposed cheaply, and the model reads several of them in one pass.

A drafter is a look-up in the text, a small model, or parts of the model itself (`self_drafts.py`); the
argument `draft` of `generate` selects it.

    greedy       a draft is accepted if it is the token that the model would generate
    sampling     a draft drawn from q is accepted with probability min(1, p / q); the first rejected draft is
                 replaced by a token drawn from max(0, p - q), normalised

p is the distribution of the model and q the distribution of the drafter, both after the processors. Texts
follow the model's distribution, for any proposals. A draft that was not drawn, for example from a look-up,
has q = 1; drawing from p and comparing the result with the draft is then equivalent, and a seed gives the
same text as without drafts. Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.

The search is not aware of speculation: `Speculator` answers its steps, token by token, from the pass that
read the drafts, as long as the search chooses the drafts. So ends, stop strings, processors and streamers see
each token as usual. Tokens that were read in vain are then removed (`State.truncated_`). A state of sums
cannot remove tokens, so the accepted tokens are read again with the next drafts, from the state before the
pass.

The rows of a batch advance together, by the number of drafts that the worst row accepts: with a share a of
correct drafts in each of B rows, a pass over k drafts generates (1 - a^(B(k+1))) / (1 - a^B) tokens per row.

Products of several tokens are rounded differently from products of a single token. If the two most likely
tokens differ only in the last bits, greedy search may choose the other token, and the texts differ from there
on.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self, TypeAlias, cast

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.tokens import MARGIN
from polyformer.core.state import State
from polyformer.models.generation.config import GenerationConfig, SpeculationConfig
from polyformer.models.generation.constraints import Processor
from polyformer.models.generation.decoder import (
    Decoder,
    DecodingStart,
    DecodingState,
    GenerativeModel,
    check_inputs,
)
from polyformer.models.generation.processors import process
from polyformer.models.generation.results import DraftStatistics
from polyformer.models.generation.search import Choose, distribution


@dataclasses.dataclass(frozen=True)
class Drafts(State):
    """Tokens [N, K] that may follow the texts, the same number for every row.

    probabilities: [N, K, V], the distributions from which the tokens were drawn; None if they were not drawn.
    """

    tokens: Tensor
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """The interface of drafters. Their memory is a state with one row per text."""

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
        /,
    ) -> State:
        """Read the prompt or the source and return the memory. Arguments as for `Decoder.start`."""
        ...

    def propose(self, text: Tensor, count: int, memory: Any) -> tuple[Drafts, State]:
        """Propose at most `count` tokens that may follow the texts [N, T], and return the next memory too.

        The texts begin with the prompt, padding as -1, or with the start token of an encoder-decoder's
        output. This is called before every pass of the model: earlier drafts that are now in the texts were
        accepted, all others were rejected, and the last token of each text was chosen by the model.
        """
        ...


# The least number of tokens that must occur earlier in the text.
SHORTEST = 2


@dataclasses.dataclass(frozen=True)
class SourceTokens(State):
    """Tokens before the texts that may be copied: [N, S], padding as -1."""

    tokens: Tensor


class Lookup:
    """Prompt look-up: if the last tokens of a text occurred in it before, their continuation may occur again.

    The last n tokens, for n from `ngram` down to 2, are searched in the text so far, for an encoder-decoder
    (`has_source`) also in its source; the continuation of the last occurrence is proposed. A proposal that
    reaches the end of the text continues periodically: it repeats from its own beginning. It costs
    comparisons of T numbers per pass and no model. Saxena 2023, "Prompt lookup decoding". Deviations: the
    last occurrence instead of the first; no proposal from a single token; drafts past the end.
    """

    def __init__(self, ngram: int, has_source: bool):
        self.ngram, self.has_source = ngram, has_source

    def start(self, input_ids: Tensor, attention_mask: Tensor | None, *_: Any) -> SourceTokens:
        """Return the source of an encoder-decoder; a decoder's texts begin with the prompt themselves."""
        if not self.has_source:
            return SourceTokens(input_ids[:, :0])
        return SourceTokens(
            input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, -1)
        )

    def propose(self, text: Tensor, count: int, memory: SourceTokens) -> tuple[Drafts, State]:
        """Propose `count` tokens if the last tokens of every row occurred before, else none."""
        text = torch.cat([memory.tokens, text], 1)
        back = self.repeats(text)
        if not count or not len(back) or not bool(back.all()):
            return Drafts(text[:, :0]), memory
        ahead = torch.arange(count, device=text.device) % back.unsqueeze(1)
        drafts = text.gather(1, text.shape[1] - back.unsqueeze(1) + ahead)
        return Drafts(drafts.clamp_min(0)), memory  # padding behind a source

    def repeats(self, text: Tensor) -> Tensor:
        """Return the distance [N] from the end of each row [N, T] to the previous occurrence of its last
        tokens.

        The distance is 0 if there is no earlier occurrence.
        """
        length = text.shape[1]
        back = text.new_zeros(len(text))
        for size in range(min(self.ngram, length - 1), SHORTEST - 1, -1):
            last = text[:, -size:]
            same = (text[:, :-1].unfold(1, size, 1) == last.unsqueeze(1)).all(-1) & (last >= 0).all(1, True)
            ends = torch.arange(size, length, device=text.device)
            nearest = length - (same * ends).amax(1)
            back = torch.where((back == 0) & (nearest < length), nearest, back)
        return back


@dataclasses.dataclass(frozen=True)
class DraftState(State):
    """The state after reading the first `length` tokens of every text.

    before: an earlier reading, for a `state` that cannot remove tokens (`State.truncated_`); the accepted
    tokens after it are then read again.
    """

    state: DecodingState
    length: int
    before: "DraftState | None" = None

    @classmethod
    def of(cls, state: DecodingState, length: int, before: "DraftState | None" = None) -> Self:
        """Return a reading that keeps `before` only if it may be needed, as it holds another state."""
        few = before is None or length - before.length <= MARGIN
        return cls(state, length, None if few and state.truncated_(0) is not None else before)

    def truncated_to(self, length: int) -> "DraftState":
        """Return a reading of at most the first `length` tokens; this reading must not be used afterwards."""
        if length >= self.length:
            return dataclasses.replace(self, before=None)
        shorter = self.state.truncated_(self.length - length)
        if shorter is not None:
            return DraftState(shorter, length)
        assert self.before is not None, "what is proposed is read after a reading that is right"
        return self.before.truncated_to(length)


class DraftModel:
    """A drafter that generates with a small `model`, with the same `processors` and `choose` as the text.

    It costs a pass of the small model for every token proposed. samples: `choose` draws, and the drafts
    include their distributions. Leviathan et al. 2023, section 2; Chen et al. 2023, section 2.
    """

    def __init__(
        self,
        model: GenerativeModel,
        max_new_tokens: int,
        processors: Sequence[Processor],
        choose: Choose,
        samples: bool,
    ):
        self.decoder = Decoder(model, max_new_tokens)
        self.processors, self.choose, self.samples = processors, choose, samples

    def start(self, *reads: Any) -> DraftState:
        """Read the prompt or the source."""
        start = self.decoder.start(*reads)
        return DraftState.of(start.state, start.history.shape[1])

    def propose(self, text: Tensor, count: int, memory: DraftState) -> tuple[Drafts, DraftState]:
        """Propose `count` tokens, one after another."""
        width, probabilities = text.shape[1], []
        # The last token was chosen by the model and is not read yet.
        memory, sure = memory.truncated_to(width - 1), None
        for _ in range(count):
            logits, state = self.decoder.read(text[:, memory.length :], memory.state, 1)
            memory = DraftState.of(state, text.shape[1], sure)
            # The state before any of these drafts.
            sure = sure or memory
            logits = process(self.processors, logits.squeeze(1), text)
            token = self.choose(logits)
            if self.samples:
                probabilities.append(distribution(logits))
            text = torch.cat([text, token.unsqueeze(1)], 1)
        drawn = torch.stack(probabilities, 1) if probabilities else None
        return Drafts(text[:, width:], drawn), memory


# The most tokens that a pass reads again together with drafts; more are read in a separate pass.
MAX_REREAD_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Speculation(State):
    """The state of speculative decoding."""

    text: Tensor  # [N, T]
    reading: DraftState  # of the model, for a part of the text
    logits: Tensor  # [N, K + 1, V], of the model after the text and after each draft
    drafts: Drafts
    place: int  # the next token uses the logits here
    memory: State  # the drafter's


class Speculator:
    """A reader that answers the steps of a search from passes of `decoder` over drafts of `drafter`.

    most: drafts per pass. choose: chooses tokens at places without a drawn draft; other tokens are drawn with
    `generator`. drafted: the statistics so far.
    """

    def __init__(
        self,
        decoder: Decoder,
        drafter: Drafter,
        max_drafts: int,
        choose: Choose,
        generator: torch.Generator | None = None,
    ):
        self.decoder, self.drafter, self.max_drafts = decoder, drafter, max_drafts
        self.fallback, self.generator = choose, generator
        self.end = 0
        self.proposed: tuple[Tensor, Tensor] | None = None
        self.drafted = DraftStatistics()

    def start(self, *reads: Any) -> DecodingStart[Speculation]:
        """Read the inputs as `Decoder.start` does."""
        start = self.decoder.start(*reads)
        memory = self.drafter.start(*reads)
        width = start.history.shape[1]
        self.end = width + self.decoder.max_new_tokens
        drafts = Drafts(start.history[:, :0])
        reading = DraftState(start.state, width)
        state = Speculation(start.history, reading, start.logits.unsqueeze(1), drafts, 0, memory)
        return DecodingStart(start.logits, state, start.history)

    def step(self, tokens: Tensor, state: Speculation) -> tuple[Tensor, Speculation]:
        """Read tokens as `Decoder.step` does."""
        text, drafts, place = torch.cat([state.text, tokens.unsqueeze(1)], 1), state.drafts, state.place
        if place < drafts.tokens.shape[1] and torch.equal(tokens, drafts.tokens[:, place]):
            self.drafted = self.drafted.add(accepted=len(tokens))
            state = dataclasses.replace(state, text=text, place=place + 1)
        else:
            state = self._pass(text, state)
        drafts, place = state.drafts, state.place
        self.proposed = None
        if drafts.probabilities is not None and place < drafts.tokens.shape[1]:
            self.proposed = drafts.tokens[:, place], drafts.probabilities[:, place]
        return state.logits[:, place], state

    def choose(self, logits: Tensor) -> Tensor:
        """Return one token per row [N] for the processed logits [N, V] of the last step."""
        if self.proposed is None:
            return self.fallback(logits)
        return accept_or_resample(distribution(logits), *self.proposed, self.generator)

    def _pass(self, text: Tensor, state: Speculation) -> Speculation:
        """Propose drafts, and read the unread part of the texts and the drafts."""
        reading, width = state.reading.truncated_to(text.shape[1] - 1), text.shape[1]
        # The last token of a text needs no draft after it.
        count = min(self.max_drafts, self.end - width - 1)
        # The next pass only catches up.
        if width - reading.length > MAX_REREAD_TOKENS:
            count = 0
        drafts, memory = self.drafter.propose(text, count, state.memory)
        count = drafts.tokens.shape[1]
        unread = torch.cat([text[:, reading.length :], drafts.tokens], 1)
        logits, after = self.decoder.read(unread, reading.state, count + 1)
        self.drafted = self.drafted.add(proposed=drafts.tokens.numel(), passes=1)
        return Speculation(text, DraftState.of(after, width + count, reading), logits, drafts, 0, memory)


def accept_or_resample(p: Tensor, drafts: Tensor, q: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return tokens [N] distributed as p [N, V], using the `drafts` [N] drawn from q [N, V] if accepted."""
    index = drafts.unsqueeze(1)
    chance = torch.rand(index.shape, generator=generator, dtype=p.dtype, device=p.device)
    # Chance < min(1, p / q), without a division by 0.
    stays = chance * q.gather(1, index) < p.gather(1, index)
    rest = (p - q).clamp_min(0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)  # equal distributions: every draft is accepted
    return torch.where(stays, index, torch.multinomial(rest, 1, generator=generator)).squeeze(1)


Draft: TypeAlias = GenerativeModel | Drafter | Literal["lookup", "self"]


def make_drafter(
    draft: Draft,
    model: GenerativeModel,
    max_new_tokens: int,
    processors: Sequence[Processor],
    choose: Choose,
    config: GenerationConfig,
) -> Drafter:
    """Return the drafter for `draft`, for texts of `model` with these processors and this choice."""
    if draft == "lookup":
        return Lookup(config.speculation.lookup_ngram, model.encoder is not None)
    if isinstance(draft, nn.Module):
        return DraftModel(
            cast(GenerativeModel, draft), max_new_tokens, processors, choose, config.method == "sample"
        )
    return cast(Drafter, draft)


def check_draft(
    draft: Draft | None,
    config: GenerationConfig,
    model: GenerativeModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    first: int | None,
    *,
    max_new_tokens: int,
) -> None:
    """Raise `InputError` for a draft that does not fit `model` or the settings, or cannot generate that many
    tokens.

    The inputs are the same as in `check_inputs`.
    """
    if draft is None:
        if config.speculation != SpeculationConfig():
            raise InputError(
                "draft_tokens and lookup_ngram: only a draft uses them; give draft='lookup' or a model"
            )
        return
    options = {"beam": "num_beams", "contrastive": "penalty_alpha"}
    if config.method in options:
        raise InputError(
            f"draft: speculative decoding does not support {config.method} search; leave the draft or "
            f"{options[config.method]} out"
        )
    if config.dola.dola_layers is not None and isinstance(draft, nn.Module):
        raise InputError("draft: a draft model does not support dola_layers; leave one of them out")
    if config.cache is not None and not config.cache.basis.supports_drafts:
        change = "drops" if config.cache.drops_keys else "rounds"
        raise InputError(
            f"draft: the cache policy {quote(config.cache.kind)} {change} keys after every pass, so drafts "
            "would change the text; leave one of them out, or use 'snapkv'"
        )
    _check_memory(model, input_ids.shape[1] + max_new_tokens)
    if not isinstance(draft, nn.Module):
        return _check_kind(draft, model)
    _check_model(draft, model)
    try:
        check_inputs(cast(GenerativeModel, draft), input_ids, attention_mask, first, max_new_tokens)
    except InputError as error:
        raise InputError(f"draft: of the draft model, {error}") from error


def _check_kind(draft: object, model: GenerativeModel) -> None:
    """Raise `InputError` for a draft that is no model, no name and no `Drafter`."""
    if draft == "self" and getattr(model, "drafting", None) is None:
        raise InputError(
            "draft: 'self' needs parts that predict further tokens, and this model has none; train it with "
            "drafting='medusa' or 'multi_token', or use draft='lookup'"
        )
    if draft not in ("lookup", "self") and not hasattr(draft, "propose"):
        raise InputError(f"draft: expected a model, 'lookup', 'self' or a Drafter, got {quote(draft)}")


def _check_memory(model: GenerativeModel, tokens: int) -> None:
    """Raise `InputError` if a text would depend on how many tokens are read in one pass.

    Tokens read together all see the whole memory, and so reach farther than single tokens would.
    """
    memory = None if model.decoder is None else model.decoder.memory
    if memory is None or tokens <= memory.length:
        return
    pattern = getattr(model.decoder.mechanism, "pattern", None) if model.decoder else None
    reach = None if pattern is None else pattern.structure.distances
    if memory.has_store or reach is None or reach[1] > memory.length:
        raise InputError(
            f"draft: {tokens} tokens are more than the memory of {memory.length}, and a text would depend on "
            "how many are read at once; make the memory longer, attend within it (Window), or leave it out"
        )


def _check_model(draft: nn.Module, model: GenerativeModel) -> None:
    if not hasattr(draft, "logits_at"):
        raise InputError(f"draft: expected a polyformer Transformer, got {type(draft).__name__}")
    draft_model = cast(GenerativeModel, draft)
    if draft_model.decoder is None or not draft_model.head.predicts_next:
        raise InputError(
            "draft: needs a decoder with a language-model head; this model predicts no next token"
        )
    if (draft_model.encoder is None) != (model.encoder is None):
        names = [
            "a decoder-only model" if part.encoder is None else "an encoder-decoder"
            for part in (model, draft_model)
        ]
        raise InputError(f"draft: expected {names[0]}, as the model is, got {names[1]}")
    sizes = [part.config.vocab_size for part in (model, draft_model)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"draft: expected a model of the same vocabulary of {sizes[0]} tokens, got one of {sizes[1]}; "
            "use one with the same tokenizer, or draft='lookup'"
        )
    devices = [next(part.parameters()).device for part in (model, draft_model)]
    if devices[0] != devices[1]:
        raise InputError(f"draft: expected a model on {devices[0]}, as the other is, got one on {devices[1]}")
