"""The policy int4 equals attention over rounded keys and values; its error, memory, searches and errors."""

import copy
import math
from typing import Any

import pytest
import torch
from tests.nn.cache.policies import decoder
from tests.nn.cache.test_policies import ids, masks, read
from torch import Tensor

import polyformer
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import Mechanism, PositionTerms
from polyformer.core.errors import InputError
from polyformer.core.int4_cache import Int4Cache, packed, unpacked
from polyformer.core.kv_cache import Int8Cache, KeyValueCache
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, load_state, save_state

GROUP, WINDOW = 4, 6
POLICY = f"int4(group={GROUP}, window={WINDOW})"
MODELS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": {"position": "learned"},
    "alibi": {"position": "alibi"},
    "shaw": {"position": "shaw"},
    "strided": {"attention": "Strided(4)"},
}


def levels(numbers: Tensor) -> Tensor:
    """Return numbers rounded to the nearest of 16 levels from their least to their greatest."""
    low, high = float(numbers.min()), float(numbers.max())
    steps = low + (high - low) / 15 * torch.arange(16, dtype=numbers.dtype)
    return steps[(numbers.unsqueeze(-1) - steps).abs().argmin(-1)]


def rounded(keys: Tensor, values: Tensor, group: int = GROUP, window: int = WINDOW) -> tuple[Tensor, Tensor]:
    """Return keys and values after a call: those of full groups before the window are rounded."""
    keys, values = keys.clone(), values.clone()
    for row in range(len(keys)):
        for head in range(keys.shape[1]):
            for start in range(0, keys.shape[2] - window - group + 1, group):
                tokens = slice(start, start + group)
                for channel in range(keys.shape[3]):
                    keys[row, head, tokens, channel] = levels(keys[row, head, tokens, channel])
                for token in range(start, start + group):
                    values[row, head, token] = levels(values[row, head, token])
    return keys, values


class Grouped(Mechanism):
    """A mechanism whose cache has rounded keys and values after each call."""

    def __init__(self, mechanism: Mechanism):
        super().__init__()
        self.mechanism, self.before = mechanism, []

    def new_state(self, reserve: int) -> State | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        exact = [torch.cat([*old, new], 2) for old, new in zip(self.before or ([], []), (k, v))]
        cache = KeyValueCache()
        if self.before:
            done = [torch.cat(old, 2) for old in self.before]
            _, _, cache = cache.append(*rounded(done[0], done[1]))
        self.before = [[x] for x in exact]
        y, _ = self.mechanism(q, k, v, context, cache, position)
        return y, KeyValueCache().append(*exact)[2]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_attention_over_rounded_keys_and_values(name: str, padded: bool):
    model, mask = decoder(**MODELS[name]), masks() if padded else None
    plain = copy.deepcopy(model)
    assert plain.decoder is not None
    for layer in plain.decoder.sequence:
        layer.attention.mechanism = Grouped(layer.attention.mechanism)
    logits, state = read(model, model.new_state(cache=POLICY), mask)
    expected, _ = read(plain, polyformer.ModelState(model.new_state().tokens, model.new_state().layers), mask)
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
    cache = state.layers[1].self_attention
    assert isinstance(cache, Int4Cache)
    assert (cache.integers.held, cache.recent.held) == (24, 9)
    usual, _ = read(model, model.new_state(), mask)
    assert 1e-4 < float((logits - usual).abs().mean()) < 0.5 * float(usual.std())


def chunk(length: int, seed: int, widths: tuple[int, int] = (5, 7)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([1.0, 30.0, 0.1, 0.0, 5.0, 2.0, 1.0])  # of channels: some large, one of zeros
    keys, values = (
        torch.randn(2, 3, length, width, generator=generator, dtype=torch.float64) * sizes[:width]
        for width in widths
    )
    return keys, values


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(1,) * 14, (5, 1, 70, 1), (3, 2)], ids=str)
def test_groups_that_leave_the_window_are_rounded_once(lengths: tuple[int, ...]):
    chunks = [chunk(length, seed) for seed, length in enumerate(lengths)]
    cache = Int4Cache.empty(0, GROUP, WINDOW)
    for number, pair in enumerate(chunks, 1):
        parts = [(x,) for x in pair] if number == 1 else list(zip(cache.pairs(), pair))
        keys, values, cache = cache.append(*pair)
        assert torch.equal(keys, torch.cat(parts[0], 2)), "queries read the new keys as they are"
        assert torch.equal(values, torch.cat(parts[1], 2))
        exact = [torch.cat(x, 2) for x in zip(*chunks[:number])]
        for own, expected in zip(cache.pairs(), rounded(exact[0], exact[1])):
            torch.testing.assert_close(own, expected, atol=1e-12, rtol=0)
        assert cache.held == exact[0].shape[2]
        assert cache.recent.held < WINDOW + GROUP


def test_two_integers_are_a_byte():
    integers = torch.randint(0, 16, (2, 3, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert packed(integers).shape == (2, 3, 4)
    assert torch.equal(unpacked(packed(integers), 7), integers)


@torch.no_grad()
def test_the_error_of_an_output_is_bounded():
    """Scores are off by e = scale |q|_1 max s / 2 at most, and weights by a factor of exp(2 e)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 64, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    q = q[:, :, :1] / 4
    mechanism, context = SoftmaxConfig().build(4, 16), Context(1, 65, causal=True)
    new = k[:, :, :1], v[:, :, :1]
    exact, _ = mechanism(q, *new, context, KeyValueCache().append(k, v)[2], None)
    y, _ = mechanism(q, *new, context, Int4Cache.empty(0, 16, 0).append(k, v)[2], None)
    groups = k.unflatten(2, (-1, 16))
    steps = ((groups.amax(3) - groups.amin(3)) / 15).amax((-1, -2), keepdim=True)
    value_step = ((v.amax(3) - v.amin(3)) / 15).amax(-1)[..., None, None]
    off = q.abs().sum(-1, keepdim=True) / math.sqrt(16) * steps / 2
    bound = (off.mul(2).exp() - 1) * v.abs().amax((-1, -2), keepdim=True) + value_step / 2
    error = (y - exact).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-3


@torch.no_grad()
def test_a_channel_of_large_keys_costs_the_others_nothing():
    """Rounding by token, as int8 does with more levels, would lose the small channels."""
    keys, values = chunk(64, 0)
    own, _ = Int4Cache.empty(0, 16, 0).append(keys, values)[2].pairs()
    error = (own - keys).abs().amax((0, 1, 2))
    assert error[2] < 0.05
    assert error[1] > 1.0
    by_token = torch.stack([levels(x) for x in keys.flatten(0, 2)]).view_as(keys)
    assert (by_token - keys).abs().amax((0, 1, 2))[2] > 0.5


@torch.no_grad()
@pytest.mark.parametrize(("group", "share"), [(32, 1 / 8 + 1 / 32 + 1 / 64), (64, 1 / 8 + 1 / 64 + 1 / 64)])
def test_its_memory_is_a_sixth_of_float32(group: int, share: float):
    keys, values = (x.float() for x in chunk_of(1024))
    size = lambda cache: sum(x.numel() * x.element_size() for x in cache.compact().tensors())  # noqa: E731
    full = size(KeyValueCache().append(keys, values)[2])
    own = size(Int4Cache.empty(0, group, 0).append(keys, values)[2])
    assert own / full == pytest.approx(share, rel=1e-6)
    with_window = size(Int4Cache.empty(0, group, 128).append(keys, values)[2])
    assert with_window / full == pytest.approx((share * 896 + 128) / 1024, rel=1e-6)
    assert own < 0.7 * size(Int8Cache.empty(0).append(keys, values)[2])


def chunk_of(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, length, 64, generator=generator) for _ in range(2))
    return keys, values


@torch.no_grad()
def test_a_fork_changes_neither_branch_nor_trunk():
    trunk = Int4Cache.empty(40, GROUP, WINDOW).append(*chunk(13, 0))[2]
    held = [x.clone() for x in trunk.pairs()]
    left, right = trunk.append(*chunk(9, 1))[2], trunk.append(*chunk(2, 2))[2]
    for cache, more in ((left, chunk(9, 1)), (right, chunk(2, 2))):
        whole = [torch.cat(x, 2) for x in zip(chunk(13, 0), more)]
        for own, expected in zip(cache.pairs(), rounded(whole[0], whole[1])):
            torch.testing.assert_close(own, expected, atol=1e-12, rtol=0)
    assert all(map(torch.equal, trunk.pairs(), held))


@torch.no_grad()
def test_tokens_of_the_window_are_removed_and_no_others():
    cache = Int4Cache.empty(0, GROUP, WINDOW).append(*chunk(17, 0))[2]  # 8 rounded, 9 as they are
    assert cache.truncated_(4) is None
    shorter = cache.truncated_(3)
    assert shorter is not None
    assert shorter.held == 14
    exact = [x[:, :, :14] for x in chunk(17, 0)]
    for own, expected in zip(shorter.pairs(), rounded(exact[0], exact[1])):
        torch.testing.assert_close(own, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"penalty_alpha": 0.5}], ids=str)
def test_searches_follow_their_own_keys(options: dict[str, Any]):
    model, sizes = decoder(), {"cache": POLICY, "max_new_tokens": 30, **options}
    prompt = ids(2, 20)
    both = model.generate(prompt, **sizes).sequences
    for row in range(2):
        assert torch.equal(model.generate(prompt[row : row + 1], **sizes).sequences[0], both[row])
    assert not torch.equal(both, model.generate(prompt, **{**sizes, "cache": None}).sequences)


def test_a_saved_state_goes_on(tmp_path: Any):
    model = decoder()
    state = read(model, model.new_state(cache=POLICY))[1]
    save_state(state, tmp_path / "state")
    again, token = load_state(tmp_path / "state"), ids()[:, :1]
    with torch.no_grad():
        assert torch.equal(model(token, state=again).logits, model(token, state=state).logits)
    assert polyformer.explain(state).lines["layer 1"] == "33 tokens in int4"


def test_a_short_text_changes_no_bit_and_half_precision_keeps_its_type():
    model = decoder().float()
    usual = read(model, model.new_state())[0]
    assert torch.equal(read(model, model.new_state(cache="int4"))[0], usual)
    logits, state = read(decoder().bfloat16(), decoder().bfloat16().new_state(cache=POLICY))
    assert logits.dtype == torch.bfloat16
    cache: Any = state.layers[0].self_attention
    assert (cache.recent.keys.dtype, cache.key_levels.keys.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"attention": "performer"}, {}, "cache: 'int4' .*softmax.*leave the cache out"),
        ({"attention": "Window(8)"}, {}, "cache: 'int4' .*window.*leave the cache out"),
        ({}, {"draft": "lookup"}, "draft: the cache policy 'int4' rounds keys after every pass"),
        ({}, {"compile": True}, "compile: with .* or int4, leave it out"),
    ],
)
def test_what_has_no_such_keys_is_refused(options: Any, call: Any, message: str):
    with pytest.raises(InputError, match=message):
        decoder(**options).generate(ids(1, 60), cache="int4", **call)
