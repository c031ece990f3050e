"""`KeptText`: a text that is continued several times; each time, a model reads only the new tokens.

A conversation is such a text: the prompt of a turn begins with all that was said before. `generate` reads a
prompt from its start, at a cost that grows with the whole conversation.

    read before     a b c d e f
    next prompt     a b c d x y z
    kept            a b c d             the state loses e f (`State.truncated_`)
    read now                x y z

A state that cannot lose tokens, such as the sums of a linear recurrence, is kept only if the next prompt
begins with all its tokens; otherwise the prompt is read from its start. With a cache policy, keys are dropped
as in `generate` in the first call, and the tokens of later calls are read by the keys that are left.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.generation.config import GenerationConfig
from polyformer.models.generation.decoder import (
    Decoder,
    DecodingStart,
    DecodingState,
    GenerativeModel,
    check_inputs,
    check_shape,
)
from polyformer.models.generation.generate import (
    GenerationTokens,
    check_options,
    generator_for,
    special_ids,
    stopping,
)
from polyformer.models.generation.processors import blockwise_argmax, processors
from polyformer.models.generation.results import Decode, Generated
from polyformer.models.generation.search import SearchSettings, sampler, search
from polyformer.nn.cache import CachePolicy


class LatestState:
    """A decoder that remembers the state after the last of its steps, and the tokens that they read."""

    def __init__(self, decoder: Decoder, state: DecodingState, ids: list[int]):
        self.decoder, self.state, self.ids = decoder, state, ids

    def step(self, tokens: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Read tokens [1] as `Decoder.step` does."""
        logits, self.state = self.decoder.step(tokens, state)
        self.ids.append(int(tokens))
        return logits, self.state


class KeptText:
    """The tokens that `model`, a decoder, has read, and its state after them.

    ids: these tokens. state: None before the first call. read_tokens: how many tokens the model has read in
    all calls, for measurements.
    """

    def __init__(self, model: GenerativeModel):
        if model.encoder is not None:
            raise InputError("model: expected a decoder that continues a text, got an encoder-decoder")
        self.model = model
        self.ids: list[int] = []
        self.state: DecodingState | None = None
        self.policy: CachePolicy | None = None
        self.read_tokens = 0

    def generate(
        self,
        ids: Sequence[int],
        config: GenerationConfig,
        streamer: Callable[[Tensor], None] | None = None,
        decode: Decode | None = None,
    ) -> Generated:
        """Return `ids` with their continuation, the same as `generate` of the whole text.

        An interruption (Ctrl-C) leaves the tokens that were read. Raises `InputError` as `generate` does,
        and for beams and contrastive search, which have states of several texts.
        """
        if config.method not in ("greedy", "sample") or config.num_return_sequences > 1:
            raise InputError(
                "num_beams, penalty_alpha, num_return_sequences: expected a greedy or sampled continuation "
                f"of a kept text, got {config.method} search and {config.num_return_sequences} results; "
                "leave them out"
            )
        device = next(iter(self.model.parameters())).device
        prompt = torch.tensor([list(ids)], device=device)
        check_shape(self.model, prompt)
        most, special = config.lengths(len(ids))[1], special_ids(self.model, config)
        check_inputs(self.model, prompt, None, special.start, most)
        check_options(self.model, config, special, streamer, decode)
        generator = generator_for(config, None, device)
        choose = sampler(generator) if config.method == "sample" else blockwise_argmax
        self._keep(ids, config.cache)
        decoder = Decoder(self.model, most, cache=config.cache)
        with decoder.recording(), torch.no_grad():
            stops = stopping(config, special.eos, decode, streamer, prompt, None)
            active = processors(config, special.eos, len(ids), device)
            rules = SearchSettings(most, special.fill, active, stops, streamer)
            start = self._read(decoder, prompt, special)
            latest = LatestState(decoder, start.state, self.ids)
            try:
                result = search(latest, start, rules, choose, 1)
            finally:
                self.state = latest.state
                self.read_tokens += len(self.ids) - len(ids)
        sequences = torch.cat([prompt, result.tokens[:, : int(result.lengths.max())]], 1)
        return Generated(sequences, result.lengths, result.scores, len(ids))

    def read(self, ids: Sequence[int], policy: CachePolicy | None = None) -> None:
        """Read a new text, with a cache policy, without a continuation.

        Raises `InputError` as `generate` does.
        """
        self.reset()
        self.policy = policy
        prompt = torch.tensor([list(ids)], device=next(iter(self.model.parameters())).device)
        self.check_ids(prompt)
        with torch.no_grad():
            start = Decoder(self.model, 1, cache=policy).start(prompt, None, None, {})
        self.ids, self.state = list(ids), start.state
        self.read_tokens += len(self.ids)

    def check_ids(self, ids: Tensor) -> None:
        """Raise `InputError` for ids [1, T] that the model cannot read, and for too many."""
        check_shape(self.model, ids)
        check_inputs(self.model, ids, None, None, 1)

    def reset(self) -> None:
        """Forget the text."""
        self.ids, self.state = [], None

    def _keep(self, ids: Sequence[int], policy: CachePolicy | None) -> None:
        """Keep of the text what `ids` begin with, without their last token, and the state after it."""
        if policy != self.policy:
            self.reset()
        self.policy = policy
        pairs = enumerate(zip(self.ids, ids[:-1]))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(self.ids), len(ids) - 1))
        surplus = len(self.ids) - shared
        if surplus and self.state is not None:
            self.state = self.state.truncated_(surplus) if shared else None
        self.ids = self.ids[:shared]
        if self.state is None:
            self.reset()

    def _read(
        self, decoder: Decoder, prompt: Tensor, special: GenerationTokens
    ) -> DecodingStart[DecodingState]:
        """Read the rest of the prompt [1, T]."""
        new = prompt[:, len(self.ids) :]
        if self.state is None:
            start = decoder.start(prompt, None, special.start, {})
        else:
            # An error leaves no state behind that has read half of the tokens.
            state, self.state = self.state, None
            start = decoder.resume(new, state, prompt)
        self.ids, self.state = prompt[0].tolist(), start.state
        self.read_tokens += new.shape[1]
        return start
