"""Texts that a model of polyformer or of transformers reads, as readings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.cli.plots.explorer.kept_keys import KeptKeys, kept_keys
from polyformer.cli.plots.explorer.reading import Reading, shown
from polyformer.core.errors import InputError
from polyformer.core.evaluation_mode import evaluating
from polyformer.data import Tokenizer
from polyformer.models.architectures import Transformer

NEW_TOKENS = 32
"""The default maximum of tokens that an encoder-decoder generates."""


@dataclasses.dataclass(frozen=True, eq=False)
class PolyformerTexts:
    """A reader of texts with `model`; without a `tokenizer` tokens are shown as their ids."""

    name: str
    model: Transformer
    tokenizer: Tokenizer | None = None

    @property
    def both(self) -> bool:
        """Return whether the model is an encoder-decoder."""
        return self.model.encoder is not None and self.model.decoder is not None

    def of_text(
        self,
        text: str,
        target: str | None = None,
        generate: int | None = None,
        segment: int | None = None,
        cache: str | None = None,
    ) -> Reading:
        """Return the reading of `text`.

        target: the input of an encoder-decoder's decoder, by default the generated text. generate: the
        largest number of generated tokens. segment: a model with a memory reads the text in segments of this
        number of tokens; the page shows the last segment. cache: a cache policy for generation, as in
        `generate`; the page shows which keys each head keeps.
        """
        if self.tokenizer is None:
            raise InputError("tokenizer: a text requires a tokenizer; pass tokenizer=...")
        ids = self.tokenizer.encode_for_model(text)[0]
        if self.model.decoder is not None and not self.both:
            ids = [*_present(self.tokenizer.bos_id), *self.tokenizer.encode(text)]
        goal = None if target is None else [*self._begin, *self.tokenizer.encode(target)]
        return self.of_ids(ids, goal, generate, segment, cache)

    def of_ids(
        self,
        ids: Sequence[int],
        target: Sequence[int] | None = None,
        generate: int | None = None,
        segment: int | None = None,
        cache: str | None = None,
    ) -> Reading:
        """Return the reading of token ids."""
        if cache is not None and (generate is None or self.both):
            raise InputError("cache: only for text that a decoder generates; add generate, or leave it out")
        if segment is not None:
            self._check_segment(segment, target is None and generate is None)
            return self._last_segment(ids, segment)
        if target is not None and not self.both:
            raise InputError("target: only for encoder-decoder models; leave it out")
        if generate is not None and self.model.decoder is None:
            raise InputError("generate: an encoder cannot generate; leave it out")
        place, prompt = next(self.model.parameters()).device, None
        kept: tuple[KeptKeys | None, ...] = ()
        inputs: dict[str, Any] = {"input_ids": torch.tensor([[*ids]], device=place)}
        own = "decoder_input_ids" if self.both else "input_ids"
        if target is not None:
            inputs[own] = torch.tensor([[*target]], device=place)
        elif self.both or generate is not None:
            count = generate or NEW_TOKENS
            output = self.model.generate(inputs["input_ids"], max_new_tokens=count, cache=cache)
            start = self._begin if self.both else [*ids]
            prompt = len(start)
            row = [*start, *output.new_tokens()[0][:-1]]  # the last token was not an input
            inputs[own] = torch.tensor([row], device=place)
            if cache is not None:
                kept = kept_keys(self.model, inputs[own], prompt, cache)
        rows = {"encoder" if self.model.encoder is not None else "decoder": inputs["input_ids"]}
        if self.both:
            rows["decoder"] = inputs[own]
        return Reading(
            name=self.name,
            model=self.model,
            inputs=inputs,
            tokens=shown(rows, self.token),
            prompt=prompt,
            kept=kept,
        )

    def _check_segment(self, segment: int, alone: bool) -> None:
        decoder = self.model.decoder
        if decoder is None or self.both or decoder.memory is None:
            raise InputError("segment: only for decoders with a memory; leave it out")
        if not alone or segment < 1:
            raise InputError(f"segment: expected 1 token or more, without target and generate, got {segment}")

    def _last_segment(self, ids: Sequence[int], segment: int) -> Reading:
        place, state = next(self.model.parameters()).device, None
        *earlier, last = [ids[start : start + segment] for start in range(0, len(ids), segment)]
        with torch.no_grad(), evaluating(self.model):
            for part in earlier:
                state = self.model(torch.tensor([[*part]], device=place), state=state, use_cache=True).state
        inputs: dict[str, Any] = {"input_ids": torch.tensor([[*last]], device=place)}
        before, compressed, stored = list[str](), 0, list[str]()
        memory = None if self.model.decoder is None else self.model.decoder.memory
        if memory is not None and memory.has_store:
            sinks = getattr(memory, "sinks", 0)
            stored = [self.token(number) for part in earlier for number in part[sinks:]]
        if state is not None:
            inputs["state"], compressed = state, state.tokens.merged
            read = ids[: len(ids) - len(last)]
            kept = read[len(read) - (state.tokens.length - compressed) :]
            before = [f"compressed {i + 1}" for i in range(compressed)] + [*map(self.token, kept)]
        return Reading(
            name=self.name,
            model=self.model,
            inputs=inputs,
            tokens=shown({"decoder": inputs["input_ids"]}, self.token),
            before=before,
            compressed=compressed,
            stored=stored,
        )

    def token(self, number: int) -> str:
        """Return the text of a token; a preset's vocabulary may be larger than its tokenizer of bytes."""
        if self.tokenizer is None or number >= len(self.tokenizer):
            return f"[{number}]"
        return self.tokenizer.decode([number], keep_special=True)

    @property
    def _begin(self) -> list[int]:
        return _present(self.model.config.special.bos)


def _present(token: int | None) -> list[int]:
    """Return a special token, if there is one."""
    return [] if token is None else [token]


@dataclasses.dataclass(frozen=True, eq=False)
class TransformersTexts:
    """A reader of texts with a `model` of transformers; without its `tokenizer` tokens are shown as ids."""

    name: str
    model: Any
    tokenizer: Any = None

    def of_text(self, text: str, target: str | None = None) -> Reading:
        """Return the reading of `text`; target: the decoder's input of an encoder-decoder, else `text`."""
        if self.tokenizer is None:
            raise InputError("tokenizer: a text requires a tokenizer; pass tokenizer=...")
        inputs = dict(self.tokenizer(text, return_tensors="pt", return_attention_mask=False))
        goal = self.tokenizer(target, return_tensors="pt").input_ids if target is not None else None
        return self._reading(inputs, goal)

    def of_ids(self, ids: Sequence[int], target: Sequence[int] | None = None) -> Reading:
        """Return the reading of token ids."""
        goal = None if target is None else torch.tensor([[*target]])
        return self._reading({"input_ids": torch.tensor([[*ids]])}, goal)

    def _reading(self, inputs: dict[str, Tensor], target: Tensor | None) -> Reading:
        ids = inputs["input_ids"]
        rows = {"encoder": ids, "decoder": ids}
        if self.model.config.is_encoder_decoder:
            rows["decoder"] = inputs["decoder_input_ids"] = ids if target is None else target
        elif target is not None:
            raise InputError("target: only for encoder-decoder models; leave it out")
        device = next(self.model.parameters()).device
        inputs = {name: value.to(device) for name, value in inputs.items()}
        return Reading(name=self.name, model=self.model, inputs=inputs, tokens=shown(rows, self._token))

    def _token(self, number: int) -> str:
        return f"[{number}]" if self.tokenizer is None else self.tokenizer.decode([number])
