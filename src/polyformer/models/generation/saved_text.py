"""The state of a decoder after a text, in a file: a long prompt is read once, and continued many times.

    text = KeptText(model)
    text.read(ids)
    save_state(text, "book.safetensors")
    text = load_state("book.safetensors", model)
    text.generate([*ids, *question], config)             reads only the question

The file (`core.state`) names its owner: a digest of the model's weights, the kinds of its parts, the
cache policy and the tokens. It is no trusted input. All that it says is compared with a state that the model
itself computes for two tokens, and sizes with the number of tokens, before the state is used.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_tensors, save_tensors, write_output
from polyformer.core.int4_cache import Int4Cache
from polyformer.core.kv_cache import Int8Cache, KeyValueCache
from polyformer.core.state import State, state_of, state_tensors
from polyformer.models.generation.decoder import DecodingState, GenerativeModel
from polyformer.models.generation.kept_text import KeptText
from polyformer.models.outputs import ModelState
from polyformer.nn.cache import CachePolicy, CompressedCache, HeadsCache

EXACT = "group", "window", "widths", "alpha"
"""Fields of caches that do not depend on the text."""

Cache = KeyValueCache | Int8Cache | Int4Cache | CompressedCache


@dataclasses.dataclass(frozen=True)
class TextState(State):
    """The state of a model after tokens ids [1, n]; cache: the policy, as data. weights: their digest."""

    ids: Tensor
    model: ModelState
    cache: dict[str, Any] | None
    weights: str


def save_state(text: KeptText, path: str | Path) -> None:
    """Write a text that a decoder has read, and its state after it, as one safetensors file.

    Raises `InputError` before the first token, and for a model with other states than KV caches.
    """
    if text.state is None:
        raise InputError("text: expected a text that was read, got none; call read(ids) first")
    for number, layer in enumerate(text.state.model.layers):
        if not isinstance(layer.self_attention, Cache):
            raise InputError(
                f"text: expected KV caches, which can be saved, but layer {number} has "
                f"{quote(type(layer.self_attention).__name__)}; read the prompt each time"
            )
    policy = None if text.policy is None else text.policy.to_dict()
    state = TextState(torch.tensor([text.ids]), text.state.model, policy, digest(text.model))
    write_output(path, lambda partial: save_tensors(partial, state_tensors(state)))


def load_state(path: str | Path, model: GenerativeModel) -> KeptText:
    """Return the text that `save_state` wrote, for the same model, on its device.

    Raises `InputError` for a file of another model and for a damaged file.
    """
    state = state_of(read_tensors(path), path)
    if not isinstance(state, TextState):
        raise InputError(f"{path}: expected the state of a text, got a {type(state).__name__}")
    if state.weights != digest(model):
        raise InputError(
            f"{path}: the state is of another model, with other weights; load the model that wrote it, or "
            "read the prompt again"
        )
    text = KeptText(model)
    text.policy = None if state.cache is None else CachePolicy.from_dict(state.cache, f"{path}: cache")
    try:
        _check(state, text)
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: damaged: {type(error).__name__} {error}") from error
    device = next(iter(model.parameters())).device
    text.ids = state.ids[0].tolist()
    text.state = DecodingState(state.model.map(lambda tensor: tensor.to(device)))
    return text


def digest(model: GenerativeModel) -> str:
    """Return a digest of the names, types, shapes and numbers of a model's weights."""
    assert isinstance(model, nn.Module)
    result = hashlib.blake2b(digest_size=32)
    for name, tensor in model.state_dict().items():
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        result.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return result.hexdigest()


def _check(state: TextState, text: KeptText) -> None:
    """Raise an error, of any type, unless the state fits the model of `text`."""
    ids, model = state.ids, text.model
    _expect(ids.dtype == torch.long and ids.ndim == 2 and ids.shape[0] == 1 and ids.numel() > 0, "ids")
    like = KeptText(model)
    like.read(ids[0, :2].tolist(), text.policy)  # refuses ids outside the vocabulary
    assert like.state is not None
    length = ids.shape[1]
    text.check_ids(ids)
    _compare(state.model, like.state.model, "state")
    _expect(state.model.owner == like.state.model.owner, "owner")
    tokens = state.model.tokens
    stored = min(tokens.length, tokens.dropped) >= 0 and not tokens.merged
    _expect(tokens.seen == length and not tokens.has_tables and stored, "tokens")
    assert model.decoder is not None
    for number, (layer, reach) in enumerate(zip(state.model.layers, model.decoder.reaches)):
        cache = layer.self_attention
        assert isinstance(cache, Cache)
        held = _held(cache)
        _expect(held == length if reach is None else 0 < held <= length, f"layer {number}: {held} tokens")


def _compare(own: Any, like: Any, place: str) -> None:
    """Raise `InputError` unless two values have the same structure, but for lengths and what is not set."""
    if isinstance(like, State | Config):
        _expect(type(own) is type(like), place)
        if isinstance(like, State):
            for field in dataclasses.fields(like):
                name = field.name
                _expect(name not in EXACT or getattr(own, name) == getattr(like, name), f"{place}.{name}")
                _compare(getattr(own, name), getattr(like, name), f"{place}.{name}")
    elif isinstance(like, tuple):
        _expect(type(own) is tuple and len(own) == len(like), place)
        for number, pair in enumerate(zip(own, like)):
            _compare(*pair, f"{place}.{number}")
    elif isinstance(like, Tensor):
        _expect(isinstance(own, Tensor) and own.dtype == like.dtype and own.ndim == like.ndim, place)
        along = 2 if like.ndim > 2 else -1  # the tokens
        sizes = [list(x.shape) for x in (own, like)]
        for size in sizes:
            size[along] = 0
        _expect(sizes[0] == sizes[1], place)
        _expect(not own.is_floating_point() or bool(own.isfinite().all()), f"{place}: finite numbers")
    elif like is not None and own is not None:
        _expect(type(own) is type(like), place)


def _held(cache: Cache) -> int:
    """Return the number of tokens of a cache; raise an error unless its parts fit together."""
    if isinstance(cache, CompressedCache):
        return _held_of_policy(cache)
    if isinstance(cache, Int8Cache):
        held = _held(cache.integers)
        _expect(_held(cache.scales) == held, "scales")
        return held
    if isinstance(cache, Int4Cache):
        held, levels = _held(cache.integers), _held(cache.value_levels)
        _expect(held == levels == _held(cache.key_levels) * cache.group, "levels")
        return held + _held(cache.recent)
    length = 0 if cache.keys is None or cache.values is None else cache.keys.shape[2]
    _expect((cache.keys is None) == (cache.values is None), "keys and values")
    _expect(cache.values is None or cache.values.shape[2] == length, "values")
    filled = cache.start == 0 and cache.length == length and cache.high_water == [length]
    _expect(filled and cache.spare == [] and 0 <= cache.first <= length, "a filled cache")
    return length


def _held_of_policy(cache: CompressedCache) -> int:
    held = _held(cache.cache)  # type: ignore[arg-type]
    kept = cache.kept
    _expect(isinstance(cache, HeadsCache) or cache.policy.budget is not None, "the budget")
    if kept is None:
        _expect(isinstance(cache, HeadsCache) <= (getattr(cache, "counts", None) is None), "counts")
        return held
    heads = cache.cache.pairs()[0].shape[:2]
    _expect(kept.dtype == torch.long and kept.shape[:2] == heads and 0 < kept.shape[-1] <= held, "kept keys")
    _expect(int(kept.min()) >= 0 and int(kept.max()) < cache.seen, "kept keys")
    _expect(cache.seen >= kept.shape[-1], "seen")
    if isinstance(cache, HeadsCache):
        counts = cache.counts
        assert counts is not None
        fits = counts.shape == heads and int(counts.min()) >= 0 and int(counts.max()) <= kept.shape[-1]
        _expect(fits and counts.dtype == torch.long, "counts")
    _expect(cache.scores is None or cache.scores.shape == (*heads, held), "scores")
    return held + cache.dropped


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} does not fit the model and its tokens")
