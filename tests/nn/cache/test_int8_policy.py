"""The policy int8 equals attention over rounded keys and values; its error, padding, beams and errors."""

import copy
import math
from typing import Any

import pytest
import torch
from tests.nn.cache.policies import Rounded, decoder
from tests.nn.cache.test_policies import ids, masks, read
from torch import Tensor

from polyformer import create_model
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import Int8Cache, KeyValueCache
from polyformer.core.sequence.context import Context
from polyformer.core.state import load_state, save_state
from polyformer.models.architectures import Transformer

SELF_EXTEND = {
    "kind": "rope",
    "extension": {"kind": "self_extend", "factor": 2, "window": 8, "original_max_positions": 16},
}
MODELS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": {"position": "learned"},
    "alibi": {"position": "alibi"},
    "shaw": {"position": "shaw"},
    "self_extend": {"position": SELF_EXTEND},
    "strided": {"attention": "Strided(4)"},
    "windows": {"attention": "PerLayer([Window(8), Causal()])"},
    "depth": {"depth": "act"},
}


def over_rounded_keys(model: Transformer) -> Transformer:
    """Return a copy of a model; its layers without a window round keys and values."""
    plain = copy.deepcopy(model)
    assert plain.decoder is not None
    for layer in plain.decoder.sequence:
        if layer.attention.reach() is None:
            layer.attention.mechanism = Rounded(layer.attention.mechanism)
    return plain


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_attention_over_rounded_keys_and_values(name: str, padded: bool):
    model, mask = decoder(**MODELS[name]), masks() if padded else None
    plain = over_rounded_keys(model)
    logits, state = read(model, model.new_state(cache="int8"), mask)
    expected, _ = read(plain, plain.new_state(), mask)
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
    assert isinstance(state.layers[1].self_attention, Int8Cache)
    usual, _ = read(model, model.new_state(), mask)
    assert 1e-6 < float((logits - usual).abs().mean()) < 0.05 * float(usual.std())


@torch.no_grad()
def test_a_text_gives_the_same_in_one_call_in_parts_and_by_token():
    model, text = decoder(), ids(2, 40)
    results = []
    for width in (40, 16, 1):
        state, parts = model.new_state(cache="int8"), []
        for part in text.split(width, 1):
            output = model(part, state=state)
            state = output.state
            parts.append(output.logits)
        results.append(torch.cat(parts, 1))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-11, rtol=0)


def test_the_error_of_an_output_is_bounded():
    """Scores are off by e = scale |q|_1 max_j s_j / 2, so weights by a factor of exp(2 e) at most."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 30, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    mechanism = SoftmaxConfig().build(4, 16)
    context = Context(30, 30, causal=True)
    exact, _ = mechanism(q, k, v, context, KeyValueCache(), None)
    y, _ = mechanism(q, k, v, context, Int8Cache.empty(0), None)
    steps = [x.abs().amax((-1, -2), keepdim=True) / 127 for x in (k, v)]
    off = q.abs().sum(-1, keepdim=True) / math.sqrt(16) * steps[0] / 2
    bound = (off.mul(2).exp() - 1) * v.abs().amax((-1, -2), keepdim=True) + steps[1] / 2
    error = (y - exact).abs()
    assert (error <= bound).all()
    assert error.max() > 1e-4


def test_rows_of_a_batch_are_independent():
    model, mask = decoder().float(), masks()
    both = model.generate(ids()[:, :24], mask, cache="int8", max_new_tokens=12)
    for row in range(3):
        start = 24 - int(mask[row].sum())
        single = model.generate(ids()[row : row + 1, start:24], cache="int8", max_new_tokens=12)
        assert torch.equal(single.sequences[0, 24 - start :], both.sequences[row, 24:])


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"draft": "lookup"},
        {"do_sample": True, "seed": 1, "num_return_sequences": 2},
        {"penalty_alpha": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_searches_follow_the_rounded_keys(options: dict[str, Any]):
    model, sizes = decoder(), {"max_new_tokens": 30, **options}
    plain = over_rounded_keys(model)
    expected = plain.generate(ids(2, 20), **sizes)
    assert torch.equal(model.generate(ids(2, 20), cache="int8", **sizes).sequences, expected.sequences)


def test_a_saved_state_goes_on(tmp_path: Any):
    model = decoder()
    state = read(model, model.new_state(cache="int8"))[1]
    save_state(state, tmp_path / "state")
    again, token = load_state(tmp_path / "state"), ids()[:, :1]
    with torch.no_grad():
        assert torch.equal(model(token, state=again).logits, model(token, state=state).logits)


def test_half_precision_reads_keys_of_its_type():
    model = decoder().bfloat16()
    logits, state = read(model, model.new_state(cache="int8"))
    assert logits.dtype == torch.bfloat16
    cache: Any = state.layers[0].self_attention
    assert cache.scales.keys.dtype == torch.float32
    combined, _ = read(model, model.new_state(cache="snapkv(budget=8, window=3, kernel=3, int8=true)"))
    assert combined.isfinite().all()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "linear": ({"attention": "performer"}, "softmax"),
    "window": ({"attention": "Window(8)"}, "window"),
    "recurrent": ({"memory": "recurrent"}, "memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_such_keys_are_refused(name: str):
    options, words = REFUSED[name]
    with pytest.raises(InputError, match=f"^cache: 'int8' .*{words}.*leave the cache out$"):
        decoder(**options).generate(ids(1, 60), cache="int8")


def test_an_encoder_decoder_is_refused():
    model = create_model("transformer-tiny", vocab_size=50).eval()
    tokens: Tensor = ids(1, 6)
    with pytest.raises(InputError, match=r"^cache: .*decoder without an encoder.*leave the cache out$"):
        model.generate(tokens, cache="int8", start=1)
