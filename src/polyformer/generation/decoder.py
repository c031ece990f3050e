"""What decoders and encoder-decoders have in common for generation: read the input, then token by token."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.state import State
from polyformer.depth import whole_depth
from polyformer.generation.dola import Dola
from polyformer.ops.packed_weights import Copies, PackedWeights, kept_copies
from polyformer.outputs import ModelOutput, ModelState
from polyformer.stack import Stack
from polyformer.stack.last_feedforward import LastFeedForwardInput

PACK_FOR_STEPS = 16
"""Weights are packed where so many tokens may be written: fewer would not earn back the copying."""


GOING_ON = "token_type_ids", "langs"
"""What every new token of a decoder alone has as the last of the prompt had it. Of positions, documents and
segments the state knows how they go on."""


S = TypeVar("S", bound=State)


class Writer(Protocol):
    """What generation asks of a model: `polyformer.model.Transformer` has it."""

    encoder: Stack | None
    decoder: Stack | None

    @property
    def config(self) -> Any:
        """A `ModelConfig`."""

    @property
    def head(self) -> Any:
        """A `Head`; it must predict the next token."""

    def modules(self) -> Iterator[nn.Module]:
        """Of an `nn.Module`: itself and all below it."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of an `nn.Module`."""
        ...

    @property
    def encode(self) -> Callable[..., ModelState]:
        """An encoder-decoder's source to the state that decoding starts from."""
        ...

    def predictions(self, hidden: Tensor) -> Tensor:
        """The head's logits [B, T, V] of hidden states [B, T, E]."""
        ...

    def new_state(self, reserve: int) -> ModelState:
        """The state before the first token, with room for `reserve` tokens."""
        ...

    def logits_at(self, output: ModelOutput, places: slice, neighbour_ids: Tensor | None) -> Tensor:
        """The logits [B, K, V] of what follows the tokens at these places, whose neighbours are these."""
        ...

    def __call__(self, *arguments: Any, **named: Any) -> ModelOutput: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Start(Generic[S]):
    """Everything read, nothing written.

    logits: [B, V], of the first new token. history: [B, T], the text that the new tokens continue, padding
    as -1; of an encoder-decoder, whose source is another text, the token that its output starts from.
    """

    logits: Tensor
    state: S
    history: Tensor


@dataclasses.dataclass(frozen=True)
class Progress(State):
    """The model's state, what every token to come says of itself: numbers [N, 1] by argument; and the state
    of the model that finds neighbours."""

    model: ModelState
    names: tuple[str, ...] = ()
    numbers: tuple[Tensor, ...] = ()
    retrieval: ModelState | None = None

    def truncated_(self, count: int) -> "Progress | None":
        """As for every state."""
        return self._parts_truncated(count)

    def reorder_beams(self, index: Tensor) -> "Progress":
        """As `reorder_`, for an index among rows of one input each, whose numbers are the same."""
        finding = None if self.retrieval is None else self.retrieval.reorder_beams(index)
        return dataclasses.replace(self, model=self.model.reorder_beams(index), retrieval=finding)


Mixture = Callable[[Tensor, Tensor], Tensor]
"""The model's logits [N, K, V], and what its last feed-forward read, [N, K, E] -> log p [N, K, V] of what is
written: nearest neighbours (`polyformer.datastore.Mixture`)."""


class Retrieval(Protocol):
    """What finds neighbours for a head that reads them: `polyformer.datastore.Retrieval`."""

    def start(self, input_ids: Tensor, attention_mask: Tensor | None, room: int) -> tuple[Tensor, ModelState]:
        """Those of the last token of a prompt [N, T], [N, 1, k], and a state that has read it."""
        ...

    def read(self, tokens: Tensor, state: ModelState, last: int) -> tuple[Tensor, ModelState]:
        """Those of the last of the tokens [N, T] that follow, [N, last, k], and the next state."""
        ...


class Decoder:
    """Reads and writes with `model`; `room` is how many tokens will be written at most.

    Where there is a `mixture` everything happens inside `watched`. hidden: [N, T, E], the last states of the
    tokens of the latest pass. With `dola` its contrasts take the place of the model's logits.

    Packed copies of its weights, as much memory again (up to `PACKED_LIMIT`), stay for the next decoder as
    long as the model lives; not where it is in training mode now, and about to change.
    """

    def __init__(
        self,
        model: Writer,
        room: int,
        mixture: Mixture | None = None,
        retrieval: Retrieval | None = None,
        dola: Dola | None = None,
    ):
        self.model, self.room, self.mixture, self.retrieval = model, room, mixture, retrieval
        if retrieval is not None and (model.encoder is not None or not model.head.reads_neighbours):
            raise InputError("retrieval: it is for a decoder alone with the head 'semiparametric'")
        self.dola = dola
        self.last: LastFeedForwardInput | None = None
        if mixture is not None and model.decoder is not None:
            self.last = LastFeedForwardInput(model.decoder)
        self.keeper = model if isinstance(model, nn.Module) and not model.training else None
        self.packed = PackedWeights(None)

    def watched(self) -> contextlib.AbstractContextManager[object]:
        """Around all passes: what the mixture reads of them is seen."""
        return contextlib.nullcontext() if self.last is None else self.last

    def start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        first: int | None,
        inputs: Mapping[str, Tensor],
    ) -> "Start[Progress]":
        """Read the prompt, or the source and the token `first` that every output starts from; `inputs` are
        what the model reads beside its ids, by argument."""
        if self.room >= PACK_FOR_STEPS:
            self.packed = PackedWeights(Copies() if self.keeper is None else kept_copies(self.keeper))
        if self.model.encoder is None:
            state = self.model.new_state(input_ids.shape[1] + self.room)
            near, finding = None, None
            if self.retrieval is not None:
                near, finding = self.retrieval.start(input_ids, attention_mask, self.room)
            with self.packed, whole_depth():  # what all that follows is read from
                output = self._run(input_ids=input_ids, attention_mask=attention_mask, state=state, **inputs)
                logits, state = self._next(output, near)
            history = input_ids
            if attention_mask is not None:
                history = input_ids.masked_fill(attention_mask == 0, -1)
            going_on = {name: numbers[:, -1:] for name, numbers in inputs.items() if name in GOING_ON}
            progress = Progress(state, tuple(going_on), tuple(going_on.values()), finding)
            return Start(logits, progress, history)
        assert first is not None, "check_inputs asks for it"
        state = self.model.encode(input_ids, attention_mask, self.room, **inputs)
        history = input_ids.new_full((len(input_ids), 1), first)
        with self.packed:
            logits, state = self._next(self._run(decoder_input_ids=history, state=state))
        return Start(logits, Progress(state), history)

    def step(self, tokens: Tensor, state: Progress) -> tuple[Tensor, Progress]:
        """Read tokens [N] after `state`: the logits [N, V] of the next, and the next state."""
        logits, after = self.read(tokens.unsqueeze(1), state, 1)
        return logits.squeeze(1), after

    def read(self, tokens: Tensor, state: Progress, last: int) -> tuple[Tensor, Progress]:
        """Read tokens [N, T] after `state`: logits [N, K, V] of what follows each of the `last` K, and the
        next state."""
        name = "input_ids" if self.model.encoder is None else "decoder_input_ids"
        going_on = {name: numbers.expand(tokens.shape) for name, numbers in zip(state.names, state.numbers)}
        near, finding = None, None
        if self.retrieval is not None and state.retrieval is not None:
            near, finding = self.retrieval.read(tokens, state.retrieval, last)
        with self.packed:
            output = self._run(**{name: tokens}, state=state.model, **going_on)
            logits, after = self._checked(output, last, near)
        return logits, dataclasses.replace(state, model=after, retrieval=finding)

    def _run(self, **inputs: Any) -> ModelOutput:
        """A pass of the model, with all layers' states where they are contrasted."""
        if self.dola is None:
            return self.model(**inputs)
        return self.model(**inputs, output_hidden_states=True)

    def _next(self, output: ModelOutput, near: Tensor | None = None) -> tuple[Tensor, ModelState]:
        """The logits [N, V] of what follows everything read, and the state."""
        logits, state = self._checked(output, 1, near)
        return logits.squeeze(1), state

    def _checked(self, output: ModelOutput, last: int, near: Tensor | None) -> tuple[Tensor, ModelState]:
        assert output.state is not None, "a model that was given a state returns one"
        self.hidden = output.last_hidden_state
        logits = self.model.logits_at(output, slice(-last, None), near)
        if bool(logits.amax().isnan()):  # a maximum with a NaN is NaN, and needs no second tensor
            raise InputError(
                "generate: the model's scores are NaN, so no token can be chosen; its weights are "
                "damaged, or overflow in this precision: take float32 or bfloat16"
            )
        if self.dola is not None and output.hidden_states is not None:
            logits = self.dola(logits, output.hidden_states)
        if self.mixture is not None and self.last is not None:
            logits = self.mixture(logits, self.last.value[:, -last:])
        return logits, output.state


def begun(model: Writer, input_ids: Tensor | None, first: int | None) -> Tensor:
    """`input_ids`, or where there are none the token `first` that a decoder alone begins a text with."""
    if input_ids is not None:
        return input_ids
    if model.encoder is not None:
        raise InputError("input_ids: expected the source [batch, length], got None")
    if first is None:
        raise InputError(
            "input_ids: expected token ids [batch, length], got None; a text with nothing before it begins "
            "with special.bos, which this model has not: set it in the config, or give start=ID"
        )
    return torch.full((1, 1), first, device=next(model.parameters()).device)


def check_shape(model: Writer, input_ids: Tensor) -> None:
    """Raises `InputError` for a model that does not write and for ids that are no batch."""
    if model.decoder is None or not model.head.predicts_next:
        raise InputError(
            "generate: needs a decoder with a language-model head; this model predicts no next token"
        )
    if input_ids.dim() != 2 or not input_ids.numel():
        raise InputError(
            f"input_ids: expected [batch, length] with a token or more, got {tuple(input_ids.shape)}"
        )


def check_inputs(
    model: Writer, input_ids: Tensor, attention_mask: Tensor | None, first: int | None, max_new_tokens: int
) -> None:
    """Raises `InputError` for inputs that the model cannot continue.

    first: the token that an encoder-decoder's output starts from.
    """
    assert model.decoder is not None
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        expected, shape = tuple(input_ids.shape), tuple(attention_mask.shape)
        raise InputError(f"attention_mask: expected the shape of input_ids {expected}, got {shape}")
    prompt = 0
    if model.encoder is None:
        prompt = input_ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
        if attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise InputError(
                "attention_mask: a row ends in padding; pad on the left, so that its text can go on"
            )
    elif first is None:
        raise InputError(
            "special.bos: this model does not know what its output starts from; set it in the config, or "
            "special.start of the generation"
        )
    limit = model.decoder.position.max_positions
    if limit is not None and prompt + max_new_tokens > limit:
        raise InputError(
            f"max_new_tokens: {prompt} tokens of prompt and {max_new_tokens} new ones are more than the "
            f"{limit} learned positions (max_position_embeddings); shorten the prompt or ask for at most "
            f"{max(limit - prompt, 0)}"
        )
