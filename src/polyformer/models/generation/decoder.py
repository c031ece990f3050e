"""Reading for generation, shared by decoders and encoder-decoders: first the input, then token by token."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ops.linear import JointProducts
from polyformer.core.sequence.tokens import expected_ids
from polyformer.core.state import State, StateOfStates
from polyformer.models.generation.compiled_step import CompiledSteps, capacity, captures_by_default
from polyformer.models.generation.packed_weights import (
    SMALL_WEIGHT,
    PackedCopies,
    PackedWeights,
    packed_copies,
)
from polyformer.models.generation.prefill import read_in_chunks, reads_in_chunks, with_state
from polyformer.models.generation.processors import Dola
from polyformer.models.outputs import ModelOutput, ModelState
from polyformer.nn.cache import CachePolicy
from polyformer.nn.depth import full_depth
from polyformer.nn.stack import Stack
from polyformer.nn.stack.last_feedforward import LastFeedForwardInput

# Weights are packed if at least this many tokens may be generated; fewer would not repay the copies.
PACK_FOR_STEPS = 16

# Inputs that every new token of a decoder-only model copies from the last prompt token.
# The state continues positions, documents and segments.
COPIED_INPUTS = "token_type_ids", "langs"

S = TypeVar("S", bound=State)


class GenerativeModel(Protocol):
    """The interface that generation requires of a model; `architectures.Transformer` implements it."""

    encoder: Stack | None
    decoder: Stack | None

    @property
    def config(self) -> Any:
        """The model's `ModelConfig`."""

    @property
    def head(self) -> Any:
        """The model's `Head`; it must predict the next token."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield the module and all submodules, as an `nn.Module` does."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters, as an `nn.Module` does."""
        ...

    @property
    def encode(self) -> Callable[..., ModelState]:
        """The function that encodes the source of an encoder-decoder to the initial state of decoding."""
        ...

    def predictions(self, hidden: Tensor) -> Tensor:
        """Return the head's logits [B, T, V] of hidden states [B, T, E]."""
        ...

    def following(self, ids: Tensor, state: Any, **inputs: Tensor) -> tuple[Tensor, Any]:
        """Return the hidden states [B, T, E] of tokens [B, T] after `state`, and the next state."""
        ...

    def new_state(self, reserve: int, cache: CachePolicy | None = None) -> ModelState:
        """Return the state before the first token, with space for `reserve` tokens and a cache policy."""
        ...

    def logits_at(self, output: ModelOutput, places: slice, neighbour_ids: Tensor | None) -> Tensor:
        """Return the logits [B, K, V] of the next tokens at these places, given their neighbours' ids."""
        ...

    def __call__(self, *arguments: Any, **named: Any) -> ModelOutput: ...


@dataclasses.dataclass(frozen=True, eq=False)
class DecodingStart(Generic[S]):
    """The state after reading the input, before generating."""

    logits: Tensor  # [B, V], of the first new token
    state: S
    # [B, T], the text that the new tokens continue, padding as -1; an encoder-decoder's is its start token
    history: Tensor


@dataclasses.dataclass(frozen=True)
class DecodingState(StateOfStates):
    """The model's state during generation."""

    model: ModelState
    names: tuple[str, ...] = ()  # of arguments with the same value for every new token
    numbers: tuple[Tensor, ...] = ()  # their values, [N, 1]
    retrieval: ModelState | None = None  # of the model that finds neighbours

    def reorder_beams(self, index: Tensor) -> "DecodingState":
        """Reorder as `reorder_`, for an index among rows of the same input, which share their numbers."""
        retrieval_state = None if self.retrieval is None else self.retrieval.reorder_beams(index)
        return dataclasses.replace(self, model=self.model.reorder_beams(index), retrieval=retrieval_state)


Mixture = Callable[[Tensor, Tensor], Tensor]
"""The model's logits [N, K, V] and the input of its last feed-forward, [N, K, E] -> log p [N, K, V] to
generate from.

Used for nearest neighbours (`polyformer.applications.retrieval.Mixture`).
"""


class Retrieval(Protocol):
    """A source of neighbours for a head that reads them: `polyformer.applications.retrieval.Retrieval`."""

    def start(
        self, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
    ) -> tuple[Tensor, ModelState]:
        """Return the neighbours [N, 1, k] of a prompt's last token, and a state that has read the prompt."""
        ...

    def read(self, tokens: Tensor, state: ModelState, last: int) -> tuple[Tensor, ModelState]:
        """Return the neighbours [N, last, k] of the `last` tokens of [N, T], and the next state."""
        ...


class Decoder:
    """Runs `model` on the input, then on at most `max_new_tokens` new tokens.

    With a `mixture` all passes must happen inside `recording`. hidden: [N, T, E], the last states of the
    tokens of the latest pass. With `dola` its contrasts replace the model's logits. compile: whether steps
    are a graph; by default on CUDA, where they run one by one after a warning if there can be none. cache: a
    policy for a decoder-only model.

    Packed copies of the weights need as much memory again (up to `PACKED_LIMIT`). They remain for the next
    decoder as long as the model lives, unless the model is in training mode, where its weights are about to
    change.
    """

    def __init__(
        self,
        model: GenerativeModel,
        max_new_tokens: int,
        mixture: Mixture | None = None,
        retrieval: Retrieval | None = None,
        *,
        dola: Dola | None = None,
        compile: bool | None = None,
        cache: CachePolicy | None = None,
    ):
        self.model, self.max_new_tokens, self.cache = with_state(model), max_new_tokens, cache
        self.mixture, self.retrieval = mixture, retrieval
        if retrieval is not None and (model.encoder is not None or not model.head.reads_neighbours):
            raise InputError("retrieval: requires a decoder-only model with the head 'semiparametric'")
        self.dola = dola
        self.last: LastFeedForwardInput | None = None
        if mixture is not None and model.decoder is not None:
            self.last = LastFeedForwardInput(model.decoder)
        # Copies would be outdated after the next training step.
        self.weights_owner = model if isinstance(model, nn.Module) and not model.training else None
        grows = cache is not None and not cache.has_fixed_steps
        runs_python = (mixture or retrieval or dola) is not None or grows
        if compile and runs_python:
            raise InputError(
                "compile: with a mixture, retrieval, dola_layers, or dropped keys or int4, leave it out"
            )
        self.recomputes = self.model is not model
        if compile and self.recomputes:
            raise InputError("compile: a graph needs a KV cache, and the mechanism keeps none; leave it out")
        by_default = False
        if compile is None and not runs_python and not self.recomputes:
            device = next(model.parameters()).device
            by_default = captures_by_default(model, device, max_new_tokens)
        self.compiled = CompiledSteps(model, by_default) if compile or by_default else None
        self.packed: PackedWeights | JointProducts | None = None  # chosen by the rows of the first step
        self.bound: Stack | None = None  # the decoder, if its parts are bound

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Provide the context of all passes: it records the mixture's input, and keeps the graph."""
        try:
            with contextlib.nullcontext() if self.last is None else self.last:
                yield
        finally:
            if self.bound is not None:
                self.bound.bindings.end()
                self.bound = None
        if self.compiled is not None:
            self.compiled.close()

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
    ) -> DecodingStart[DecodingState]:
        """Read the prompt, or the source and the start token `first` of every output.

        inputs: further inputs of the model, by argument.
        """
        if self.model.encoder is None:
            # Reserved at once, because a growing cache would be copied again and again.
            state = self.model.new_state(self._reserve(input_ids.shape[1]), self.cache)
            neighbours, retrieval_state = None, None
            if self.retrieval is not None:
                neighbours, retrieval_state = self.retrieval.start(
                    input_ids, attention_mask, self.max_new_tokens
                )
            adaptive = self.model.decoder is not None and self.model.decoder.depth is not None
            with full_depth() if adaptive else contextlib.nullcontext():  # later tokens use this state
                if not inputs and reads_in_chunks(self.model.decoder, state, input_ids):
                    output = read_in_chunks(self._run, input_ids, attention_mask, state)
                else:
                    asked = {"input_ids": input_ids, "attention_mask": attention_mask, **inputs}
                    output = self._run(**asked, state=state)
                logits, state = self._last_logits(output, neighbours)
            history = input_ids
            if attention_mask is not None:
                # Processors must not count padding as text.
                history = input_ids.masked_fill(attention_mask == 0, -1)
            copied = {name: numbers[:, -1:] for name, numbers in inputs.items() if name in COPIED_INPUTS}
            progress = DecodingState(state, tuple(copied), tuple(copied.values()), retrieval_state)
            return DecodingStart(logits, progress, history)
        assert first is not None, "check_inputs asks for it"
        state = self.model.encode(input_ids, attention_mask, self._reserve(1), **inputs)
        history = input_ids.new_full((len(input_ids), 1), first)
        logits, state = self._last_logits(self._run(decoder_input_ids=history, state=state))
        return DecodingStart(logits, DecodingState(state), history)

    def resume(self, tokens: Tensor, state: DecodingState, history: Tensor) -> DecodingStart[DecodingState]:
        """Read tokens [N, T] that continue the prompt of a decoder-only model after `state`.

        history: [N, T'], the whole text with these tokens.
        """
        adaptive = self.model.decoder is not None and self.model.decoder.depth is not None
        with full_depth() if adaptive else contextlib.nullcontext():
            logits, after = self._last_logits(self._run(input_ids=tokens, state=state.model))
        return DecodingStart(logits, DecodingState(after, state.names, state.numbers), history)

    def step(self, tokens: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Read tokens [N] after `state`: return the logits [N, V] of the next token, and the next state."""
        logits, after = self.read(tokens.unsqueeze(1), state, 1)
        return logits.squeeze(1), after

    def read(self, tokens: Tensor, state: DecodingState, last: int) -> tuple[Tensor, DecodingState]:
        """Read tokens [N, T]; return the next-token logits [N, K, V] of the `last` K, and the next state."""
        name = "input_ids" if self.model.encoder is None else "decoder_input_ids"
        copied = {name: numbers.expand(tokens.shape) for name, numbers in zip(state.names, state.numbers)}
        neighbours, retrieval_state = None, None
        if self.retrieval is not None and state.retrieval is not None:
            neighbours, retrieval_state = self.retrieval.read(tokens, state.retrieval, last)
        if self.packed is None:
            self.packed = self.packing(tokens.numel())
            self._bind(tokens.numel())
        with self.packed:
            step = None
            if self.compiled is not None:
                inputs = {name: tokens, **copied}
                assert isinstance(self.packed, PackedWeights)
                step = self.compiled.read(tokens, state.model, last, inputs, self.packed.copies)
            if step is not None:
                logits, self.hidden, after = step
                logits = self._finished(logits, last)
            elif self.dola is not None or neighbours is not None:
                output = self._run(**{name: tokens, **copied}, state=state.model)
                logits, after = self._logits_and_state(output, last, neighbours)
            else:
                self.hidden, after = self.model.following(tokens, state.model, **copied)
                logits = self._finished(self.model.predictions(self.hidden[:, -last:]), last)
        return logits, DecodingState(after, state.names, state.numbers, retrieval_state)

    def _bind(self, rows: int) -> None:
        """Bind the parts of the decoder for all steps with this number of rows; a graph has none."""
        stack = self.model.decoder
        assert stack is not None
        assert self.packed is not None
        if self.compiled is None:
            with self.packed:
                self.bound = stack if stack.bind(rows) else None

    def _reserve(self, length: int) -> int:
        """Return the number of slots to reserve for `length` tokens and the new tokens."""
        most = length + self.max_new_tokens
        return most if self.compiled is None else capacity(most)

    def packing(self, rows: int) -> PackedWeights | JointProducts:
        """Return the context of steps with this number of rows: with packed weights if they repay."""
        packs = self.max_new_tokens >= PACK_FOR_STEPS and not self.recomputes and self._is_large()
        if not packs:
            return JointProducts() if self.compiled is None else PackedWeights(None, rows)
        owner = self.weights_owner
        return PackedWeights(PackedCopies() if owner is None else packed_copies(owner), rows)

    def _is_large(self) -> bool:
        """Return whether a weight is large enough for a packed copy."""
        return any(weight.numel() > SMALL_WEIGHT for weight in self.model.parameters())

    def _run(self, **inputs: Any) -> ModelOutput:
        """Run a pass of the model, with the hidden states of all layers if they are contrasted."""
        if self.dola is None:
            return self.model(**inputs)
        return self.model(**inputs, output_hidden_states=True)

    def _last_logits(
        self, output: ModelOutput, neighbours: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """Return the logits [N, V] after everything read, and the state."""
        logits, state = self._logits_and_state(output, 1, neighbours)
        return logits.squeeze(1), state

    def _logits_and_state(
        self, output: ModelOutput, last: int, neighbours: Tensor | None
    ) -> tuple[Tensor, ModelState]:
        assert output.state is not None, "a model that was given a state returns one"
        self.hidden = output.last_hidden_state
        logits = self.model.logits_at(output, slice(-last, None), neighbours)
        return self._finished(logits, last, output.hidden_states), output.state

    def _finished(self, logits: Tensor, last: int, layers: tuple[Tensor, ...] | None = None) -> Tensor:
        """Return the checked logits [N, K, V] of the `last` K tokens after the contrast and the mixture.

        layers: the hidden states of all layers, [N, T, E] each.
        """
        check_finite(logits)
        if self.dola is not None and layers is not None:
            logits = self.dola(logits, layers)
        if self.mixture is not None and self.last is not None:
            logits = self.mixture(logits, self.last.value[:, -last:])
        return logits


def check_finite(logits: Tensor) -> None:
    """Raise `InputError` if a logit is NaN."""
    if math.isnan(logits.amax().item()):  # the maximum propagates NaN without a second tensor
        raise InputError(
            "generate: the model's scores are NaN, so no token can be chosen; its weights are damaged, or "
            "overflow in this precision; use float32 or bfloat16"
        )


def prompt_or_start_token(model: GenerativeModel, input_ids: Tensor | None, first: int | None) -> Tensor:
    """Return `input_ids`, or without them the token `first` that begins a text of a decoder."""
    if input_ids is not None and not isinstance(input_ids, Tensor):
        raise expected_ids("input_ids", input_ids)
    if input_ids is not None:
        return input_ids
    if model.encoder is not None:
        raise InputError("input_ids: expected the source [batch, length], got None")
    if first is None:
        raise InputError(
            "input_ids: expected token ids [batch, length], got None; without a prompt a text begins "
            "with special.bos, which this model does not define: set it in the config, or pass start=ID"
        )
    return torch.full((1, 1), first, device=next(model.parameters()).device)


def check_shape(model: GenerativeModel, input_ids: Tensor) -> None:
    """Raise `InputError` for a model that cannot generate and for ids that are not a batch."""
    if model.decoder is None or not model.head.predicts_next:
        raise InputError(
            "generate: needs a decoder with a language-model head; this model predicts no next token"
        )
    check_batch(input_ids)


def check_batch(input_ids: Tensor) -> None:
    """Raise `InputError` for ids that are not a batch."""
    if input_ids.dim() != 2 or not input_ids.numel():
        raise InputError(
            f"input_ids: expected [batch, length] with a token or more, got {tuple(input_ids.shape)}"
        )


def check_inputs(
    model: GenerativeModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    first: int | None,
    max_new_tokens: int,
) -> None:
    """Raise `InputError` for inputs that the model cannot continue.

    first: the start token of an encoder-decoder's output.
    """
    assert model.decoder is not None
    if model.encoder is None:
        check_prompt(input_ids, attention_mask, max_new_tokens, model.decoder.position.max_positions)
        return
    check_mask(input_ids, attention_mask)
    if first is None:
        raise InputError(
            "special.bos: an encoder-decoder needs a start token for its output; set it in the config, or "
            "special.start of the generation"
        )
    check_positions(0, max_new_tokens, model.decoder.position.max_positions)


def check_mask(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Raise `InputError` for a mask with another shape than the ids."""
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        expected, shape = tuple(input_ids.shape), tuple(attention_mask.shape)
        raise InputError(f"attention_mask: expected the shape of input_ids {expected}, got {shape}")


def check_prompt(
    input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int, limit: int | None
) -> None:
    """Raise `InputError` for a prompt that cannot be continued. limit: the number of learned positions."""
    check_mask(input_ids, attention_mask)
    # Padding takes no positions.
    prompt = input_ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
    # New tokens follow the last column of every row.
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise InputError("attention_mask: a row ends in padding; pad on the left, so that its text can go on")
    check_positions(prompt, max_new_tokens, limit)


def check_positions(prompt: int, max_new_tokens: int, limit: int | None) -> None:
    """Raise `InputError` if the tokens of a prompt and the new tokens have no learned positions."""
    if limit is not None and prompt + max_new_tokens > limit:
        raise InputError(
            f"max_new_tokens: {prompt} tokens of prompt and {max_new_tokens} new ones are more than the "
            f"{limit} learned positions (max_position_embeddings); shorten the prompt or ask for at most "
            f"{max(limit - prompt, 0)}"
        )
