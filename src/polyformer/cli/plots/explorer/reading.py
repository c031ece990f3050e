"""The input of a page: a model, its input, and the text of its tokens; and readings of texts.

With a cache policy a reading has the keys that the policy kept in one pass over the text: dense attention
with the dropped keys masked.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms.softmax_attention import SoftmaxAttention, SoftmaxConfig
from polyformer.attention.patterns.composition import MaskModPattern
from polyformer.core.errors import InputError, quote, reason_of
from polyformer.core.modules import evaluating
from polyformer.data import Tokenizer
from polyformer.models.architectures import Transformer
from polyformer.nn.cache import CachePolicy, CompressedCache, DroppingPolicy


@dataclasses.dataclass(frozen=True, eq=False)
class KeptKeys:
    """The keys that a layer's heads had when tokens after the prompt were read.

    visible: [Hkv, N, T], True for the keys of each of the last N tokens of a text of T tokens.
    """

    visible: Tensor

    def mask(self, groups: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return a `mask_mod`, for `groups` query heads per key head."""
        _, new, length = self.visible.shape
        prompt = length - new

        def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            rows = (q_idx - prompt).clamp_min(0)
            return (q_idx < prompt) | self.visible[h // groups, rows, kv_idx]

        return kept


@torch.no_grad()
def kept_keys(model: Transformer, ids: Tensor, prompt: int, policy: str) -> tuple[KeptKeys | None, ...]:
    """Return the keys that each layer of a decoder keeps of a text; None for a layer without the policy.

    ids: [1, T]; its first `prompt` tokens are read in one call, the others one by one. Raises `InputError`
    for a policy that rounds keys: the page shows the keys of the model.
    """
    config = CachePolicy.from_dict(policy, "cache")
    if not isinstance(config.basis, DroppingPolicy) or config.basis.int8:
        raise InputError(f"cache: expected a policy that drops keys, without int8, got {quote(policy)}")
    state, length = model.new_state(cache=policy), ids.shape[1]
    rows: list[list[Tensor]] = []
    with evaluating(model):
        for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, length))]:
            if start:
                rows.append([_kept(layer.self_attention, stop, length) for layer in state.layers])
            state = model(ids[:, start:stop], state=state).state
    return tuple(
        KeptKeys(torch.stack(tables, 1)) if isinstance(layer.self_attention, CompressedCache) else None
        for tables, layer in zip(zip(*rows), state.layers)
    )


def _kept(cache: object, stop: int, length: int) -> Tensor:
    """Return the keys that the token before `stop` reads: [Hkv, T], empty without a policy."""
    if not isinstance(cache, CompressedCache):
        return torch.empty(0)
    keys, slots = cache.cache.pairs()[0], cache.slots
    if slots is None:
        return (torch.arange(length, device=keys.device) < stop).expand(keys.shape[1], -1)
    kept = torch.zeros(keys.shape[1], length, dtype=torch.bool, device=keys.device)
    kept[:, stop - 1] = True
    return kept.scatter_(1, slots[0], True)


@contextlib.contextmanager
def only_kept(model: nn.Module, layers: Sequence[KeptKeys | None]) -> Iterator[None]:
    """Let each layer of a decoder see only the kept keys, in one pass over the text within the context."""
    if not layers:
        yield
        return
    assert isinstance(model, Transformer)
    assert model.decoder is not None
    tables = iter(layers)
    own: dict[SoftmaxAttention, SoftmaxConfig] = {}

    def before(mechanism: SoftmaxAttention, arguments: tuple[Tensor, ...]) -> None:
        # Layers of a group share a mechanism, which is called once for each.
        table, config = next(tables), own[mechanism]
        if table is not None:
            groups = arguments[0].shape[1] // arguments[1].shape[1]
            config = config.within(MaskModPattern(table.mask(groups)))
        mechanism.config = config

    with contextlib.ExitStack() as stack:
        for layer in dict.fromkeys(model.decoder.sequence):
            mechanism = layer.attention.mechanism
            assert isinstance(mechanism, SoftmaxAttention)
            own[mechanism] = mechanism.config
            stack.callback(setattr, mechanism, "config", mechanism.config)
            stack.enter_context(mechanism.register_forward_pre_hook(before))
        yield


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """An image with patches as tokens, in raster order.

    pixels: uint8 [H, W, 1 or 3]. patch: its height and width in pixels. first: tokens before the first patch.
    tokens: tokens per patch; 3 if each colour of a pixel is a token. patches: the size of patches by stack,
    if it differs.
    """

    pixels: np.ndarray
    patch: tuple[int, int] = (1, 1)
    first: int = 0
    tokens: int = 1
    patches: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The probability of each label by its name, the greatest first, and the right label; "" if unknown."""

    probabilities: Mapping[str, float]
    label: str = ""

    @classmethod
    def of(cls, logits: Tensor, names: Mapping[int, str]) -> Self:
        """Return the prediction of `logits` [labels]; a label without a name is LABEL_ and its number."""
        shares = logits.float().softmax(-1).tolist()
        order = sorted(range(len(shares)), key=lambda number: -shares[number])
        return cls(probabilities={names.get(number, f"LABEL_{number}"): shares[number] for number in order})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """A model and its input.

    inputs: the arguments of the model, one row: `input_ids` [1, T], and for an encoder-decoder
    `decoder_input_ids`. tokens: the text of each token, by stack ("encoder", "decoder"). prompt: the number
    of the decoder's tokens in the prompt, if the model generated the rest. before: the text of each slot in
    the memory of earlier segments, which is in the `state` among the inputs; each of the first `compressed`
    slots represents several tokens. stored: the tokens in the store of a memory, in order. kept: the keys
    that each layer of a decoder keeps, with a cache policy. picture: the image of the input. prediction: what
    a classifier predicts for it. effects: the losses of the tokens after the first [T-1], and their rises
    without each head [layers, H, T-1].
    """

    name: str
    model: nn.Module
    inputs: Mapping[str, Any]
    tokens: Mapping[str, Sequence[str]]
    prompt: int | None = None
    before: Sequence[str] = ()
    compressed: int = 0
    stored: Sequence[str] = ()
    kept: Sequence[KeptKeys | None] = ()
    picture: Picture | None = None
    prediction: Prediction | None = None
    effects: tuple[Tensor, Tensor] | None = None


def shown(rows: Mapping[str, Tensor], decode: Callable[[int], str]) -> dict[str, list[str]]:
    """Return the text of each token in each row [1, T]."""
    return {stack: [decode(number) for number in ids[0].tolist()] for stack, ids in rows.items()}


def run_alone(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    """Return the output of a model of transformers for the inputs.

    Raises `InputError` if the model requires more inputs, like models of an image and a text, or fails in any
    other way.
    """
    try:
        return model(**inputs)
    except InputError:
        raise
    except Exception as error:  # each model raises its own errors
        reason = reason_of(error)
        names = " and ".join(inputs)
        raise InputError(f"model: {type(model).__name__} cannot read {names} alone: {reason}") from error


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
