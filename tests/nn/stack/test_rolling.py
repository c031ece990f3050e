"""Rolling caches equal full caches, keep a bounded number of keys, and can remove their last tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyformer
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.sequence.tokens import BLOCK, MARGIN, Reach
from polyformer.core.state import load_state, save_state
from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelState
from polyformer.nn.stack import LayerState, Stack

LENGTH, WIDE = 400, 1 << 30
CHUNKS = {"tokens": [1] * 300, "chunks": [230, 5, *[1] * 20, 60, *[1] * 5]}
MIXED = "PerLayer([Window(5), Causal(), Window(9) | Global(2)])"
BOUNDED = [
    "Window(20)",
    "Window(9, dilation=2)",
    "Window(20) | Global(3)",
    "BlockWindow(8)",
    "BlockWindow(8) | Global(2)",
    "PerHead([Window(5), Window(30) | Global(1)])",
    "Window(30) & Window(20)",
]
SPANS = "adaptive_span(max_span=40, ramp=4, initial=0.5)", "dynamic_span(max_span=40, ramp=4, initial=0.0)"


def decoder(attention: str, position: str = "rope", **options: Any) -> Transformer:
    torch.manual_seed(0)
    options = {"vocab_size": 50, "num_hidden_layers": 3, "max_position_embeddings": LENGTH, **options}
    model = polyformer.create_model("decoder-tiny", attention=attention, position=position, **options)
    assert isinstance(model, Transformer)
    return model.eval()


def tokens(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def read(model: Transformer, ids: Tensor, split: list[int], **tables: Tensor) -> tuple[Tensor, ModelState]:
    """Return the logits of a text that is read in parts, and the state after it."""
    state, at, logits = model.new_state(), 0, []
    for new in split:
        part = {name: table[:, at : at + new] for name, table in tables.items()}
        output = model(ids[:, at : at + new], state=state, **part)
        assert output.state is not None
        state, at = output.state, at + new
        logits.append(output.logits)
    return torch.cat(logits, 1), state


class FullCaches:
    """Keeps all keys of each layer, and gives every call a copy of the keys that it reads."""

    def __init__(self) -> None:
        self.keys: list[list[Tensor]] = []

    def __call__(self, stack: Stack, states: tuple[LayerState, ...], context: Any, before: int) -> Any:
        reaches = [layer.attention.reach() for layer in stack.sequence]
        if not before:
            self.keys = [[] for _ in reaches]
        return tuple(
            self._read(state, reach, context, before, every)
            for state, reach, every in zip(states, reaches, self.keys)
        )

    def _read(
        self, state: LayerState, reach: Reach | None, context: Any, before: int, every: list[Tensor]
    ) -> LayerState:
        cache = state.self_attention
        assert isinstance(cache, KeyValueCache)
        if cache.keys is None or cache.values is None:
            return state
        new = before - sum(part.shape[2] for part in every[::2])
        every += [
            buffer[:, :, cache.length - new : cache.length].clone() for buffer in (cache.keys, cache.values)
        ]
        keys, values = torch.cat(every[::2], 2), torch.cat(every[1::2], 2)
        reach = None if reach is None else reach.in_slots(context)
        first, kept = (0, before) if reach is None else (reach.first, reach.kept(before))
        kept = min(kept, cache.held - cache.first)  # padding may reach farther, but is not read
        slots = [*range(first), *range(before - kept, before)] if first + kept < before else [*range(before)]
        whole = len(slots) == before
        keys, values = keys[:, :, slots], values[:, :, slots]
        return LayerState(KeyValueCache(keys, values, len(slots), first=0 if whole else first))


@pytest.fixture
def full_caches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that replaces rolling caches by full caches."""
    reader = FullCaches()
    return lambda: monkeypatch.setattr(Stack, "without_unread", lambda *call: reader(*call))


def check_both(
    model: Transformer, split: list[int], full_caches: Callable[[], None], **tables: Tensor
) -> ModelState:
    """Check that a rolling cache equals a full cache bit for bit, and a pass over the whole text."""
    ids = tokens()[:, : sum(split)]
    tables = {name: table[:, : sum(split)] for name, table in tables.items()}
    rolling, state = read(model, ids, split, **tables)
    with torch.no_grad():
        whole = model(ids, **tables).logits
    full_caches()
    full, _ = read(model, ids, split, **tables)
    real = tables["attention_mask"].bool() if "attention_mask" in tables else torch.ones_like(ids).bool()
    assert torch.equal(rolling[real], full[real])
    torch.testing.assert_close(rolling[real], whole[real], rtol=1e-3, atol=2e-5)
    return state


def held(state: ModelState) -> list[int]:
    caches = [layer.self_attention for layer in state.layers]
    return [cache.held if isinstance(cache, KeyValueCache) else WIDE for cache in caches]


READ = [(attention, "chunks") for attention in (*BOUNDED, MIXED, *SPANS)]
READ += [(attention, "tokens") for attention in ("BlockWindow(8) | Global(2)", MIXED, SPANS[1])]


@pytest.mark.parametrize(("attention", "split"), READ)
def test_a_rolling_cache_equals_a_full_cache(attention, split, full_caches):
    state = check_both(decoder(attention), CHUNKS[split], full_caches)
    dropped = [number < sum(CHUNKS[split]) for number in held(state)]
    assert dropped == ([True, False, True] if attention == MIXED else [True] * 3)


@pytest.mark.parametrize("attention", ["Window(20) | Global(3)", "Window(9, dilation=2) | Global(3)"])
@pytest.mark.parametrize("position", ["alibi", "t5", "shaw", "transformer_xl", "da", "learned", "sinusoidal"])
def test_any_position_scheme(attention, position, full_caches):
    check_both(decoder(attention, position), CHUNKS["chunks"], full_caches)


@pytest.mark.parametrize("attention", ["Window(20)", "Window(20) | Global(3)", "BlockWindow(8)", MIXED])
@pytest.mark.parametrize("where", [slice(0, 30), slice(240, 250)], ids=["left", "between"])
def test_padding(attention, where, full_caches):
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, where] = 0
    state = check_both(decoder(attention), CHUNKS["chunks"], full_caches, attention_mask=mask)
    if attention != MIXED:  # masks and positions are stored for the kept tokens only
        assert state.tokens.length < state.tokens.seen
        assert state.tokens.length == max(held(state))


@pytest.mark.parametrize("attention", ["Window(20)", "Window(20) | Global(3)", "BlockWindow(8)"])
def test_packed_documents(attention, full_caches):
    numbers = (torch.arange(LENGTH) >= 50).long() + (torch.arange(LENGTH) >= 241).long()
    check_both(decoder(attention), CHUNKS["chunks"], full_caches, document_ids=numbers.expand(2, -1))


@pytest.mark.parametrize("attention", ["Window(20)", "Window(20) | Global(3)", "BlockWindow(8)"])
def test_a_state_of_a_long_text_is_small(attention):
    """After 5,000 tokens its buffers and tables have the bytes that they had after 1,000."""
    model, sizes = decoder(attention, num_hidden_layers=2), []
    ids, state = tokens(1, 5000), model.new_state()
    mask = torch.ones(1, 5000, dtype=torch.long)
    mask[0, 0] = 0
    with torch.no_grad():
        for at in range(0, 5000, 20):
            state = model(ids[:, at : at + 20], mask[:, at : at + 20], state=state).state
            if at + 20 in (1000, 3000, 5000):
                tensors: list[Tensor] = []
                state.map(lambda x, tensors=tensors: tensors.append(x) or x)
                sizes.append(sum(x.untyped_storage().nbytes() for x in tensors))
    most = 4 * 1 * 2 * 2 * model.config.hidden_size * 2 * (50 + MARGIN + BLOCK + 20)
    assert max(sizes) < most
    assert state.tokens.seen == 5000


@pytest.mark.parametrize("attention", ["Window(20)", "Window(20) | Global(3)"])
@torch.no_grad()
def test_the_last_tokens_can_be_removed(attention):
    model, ids = decoder(attention), tokens()
    split = [*[1] * 230, MARGIN]
    _, state = read(model, ids, split)
    shorter = state.truncated_(MARGIN)
    assert shorter is not None
    expected, _ = read(model, ids, [*[1] * 230, 8])
    logits = model(ids[:, 230:238], state=shorter).logits
    torch.testing.assert_close(logits, expected[:, 230:], rtol=1e-3, atol=2e-5)
    _, state = read(model, ids, split)
    assert state.truncated_(MARGIN + 200) is None


@torch.no_grad()
def test_a_saved_state_continues(tmp_path: Path):
    model, ids = decoder("Window(20) | Global(3)"), tokens()
    _, state = read(model, ids, CHUNKS["chunks"])
    save_state(state, tmp_path / "state.safetensors")
    expected = model(ids[:, 330:331], state=state).logits
    assert torch.equal(
        model(ids[:, 330:331], state=load_state(tmp_path / "state.safetensors")).logits, expected
    )


@pytest.mark.parametrize("position", ["rope", "alibi", "transformer_xl"])
@torch.no_grad()
def test_recorded_weights_have_a_column_for_every_token(position):
    model, ids = decoder("Window(20) | Global(3)", position), tokens()
    _, state = read(model, ids, CHUNKS["chunks"])
    new = model(ids[:, 320:322], state=state, output_attentions=True).attentions
    whole = model(ids[:, :322], output_attentions=True).attentions
    for own, expected in zip(new, whole):
        torch.testing.assert_close(own, expected[:, :, 320:], rtol=1e-3, atol=1e-6)


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "lookup": {"draft": "lookup"},
    "sampled": {"do_sample": True, "seed": 3},
}


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("attention", ["Window(20)", "Window(20) | Global(3)", MIXED])
def test_generated_texts_are_the_same(attention, search, monkeypatch):
    """With left padding, compared with a state that keeps all keys."""
    model, ids = decoder(attention, num_hidden_layers=2).double(), tokens(2, 100)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    texts = []
    for _ in range(2):
        texts.append(model.generate(ids, mask, max_new_tokens=150, **search).sequences)
        monkeypatch.setattr(Stack, "without_unread", lambda stack, states, context, before: states)
    assert torch.equal(*texts)
