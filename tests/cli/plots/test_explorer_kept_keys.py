"""What the explorer shows of a cache policy: the keys that each head keeps, and the weights on them."""

from pathlib import Path

import pytest
import torch
from tests.nn.cache.policies import decoder
from torch import Tensor

from polyformer.cli.main import main
from polyformer.cli.plots.explorer.calls import MeasuredCall, measure_call
from polyformer.cli.plots.explorer.reading import PolyformerTexts, Reading, only_kept
from polyformer.cli.plots.explorer.record import recorded_calls
from polyformer.core.errors import InputError
from polyformer.nn import CompressedCache

PROMPT, NEW = 30, 6
IDS = torch.randint(5, 50, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
POLICIES = ["snapkv(budget=8, window=3, kernel=3)", "h2o(budget=9)", "expected(budget=8, sinks=2)"]
POLICIES += ["h2o(budget=32)"]  # which drops no key of the prompt


def measured(reading: Reading) -> list[MeasuredCall]:
    with only_kept(reading.model, reading.kept):
        return [measure_call(call) for call in recorded_calls(reading.model, reading.inputs)]


@pytest.mark.parametrize("policy", POLICIES)
def test_generated_tokens_see_the_keys_that_the_heads_keep(policy: str):
    model = decoder()
    reading = PolyformerTexts("model", model).of_ids(IDS, generate=NEW, cache=policy)
    ids = reading.inputs["input_ids"]
    state = model.new_state(cache=policy)
    weights = [site.weights() for site in measured(reading)]
    with torch.no_grad():
        state = model(ids[:, :PROMPT], state=state).state
        for at in range(PROMPT, ids.shape[1]):
            for layer, seen in zip(state.layers, weights, strict=True):
                assert isinstance(layer.self_attention, CompressedCache)
                slots = layer.self_attention.slots
                slots = torch.arange(at).expand(2, -1) if slots is None else slots[0]
                slots = slots.repeat_interleave(2, 0)  # of each query head
                kept = torch.zeros(4, ids.shape[1], dtype=torch.bool).scatter_(1, slots, True)
                kept[:, at] = True
                assert torch.equal(seen[:, at] > 0, kept)
            state = model(ids[:, at : at + 1], state=state).state


@pytest.mark.parametrize("policy", POLICIES)
def test_the_pass_with_masked_keys_predicts_the_generated_tokens(policy: str):
    model = decoder()
    texts = PolyformerTexts("model", model)
    reading = texts.of_ids(IDS, generate=NEW, cache=policy)
    ids = reading.inputs["input_ids"]
    with torch.no_grad(), only_kept(model, reading.kept):
        masked: Tensor = model(ids).logits[0, PROMPT - 1 : -1]
    assert torch.equal(masked.argmax(-1), ids[0, PROMPT:])
    with torch.no_grad():  # the limits end with the context
        torch.testing.assert_close(model(ids).logits[0, 0], model(ids[:, :1]).logits[0, 0])
        assert not torch.allclose(model(ids).logits[0, PROMPT:-1], masked[1:])


def test_layers_of_a_group_keep_their_own_keys():
    model = decoder(num_hidden_layers=3, num_hidden_groups=1)
    reading = PolyformerTexts("model", model).of_ids(IDS, generate=NEW, cache=POLICIES[0])
    seen = [site.weights()[:, PROMPT] > 0 for site in measured(reading)]
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[1])


def test_layers_with_a_window_are_not_limited():
    reading = PolyformerTexts("model", decoder(attention="PerLayer([Window(4), Full()])")).of_ids(
        IDS, generate=NEW, cache=POLICIES[0]
    )
    assert reading.kept[0] is None
    assert reading.kept[1] is not None


def test_a_policy_needs_generated_text():
    texts = PolyformerTexts("model", decoder())
    with pytest.raises(InputError, match="cache: only for text that a decoder generates; add generate"):
        texts.of_ids(IDS, cache=POLICIES[0])
    with pytest.raises(
        InputError, match="cache: expected a policy that drops keys, without int8, got 'int8'"
    ):
        texts.of_ids(IDS, generate=NEW, cache="int8")


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    words = ["explore", "decoder-tiny", "a text of some words", "--generate", "4", "--out", str(page)]
    assert main([*words, "--cache", "snapkv(budget=6, window=2, kernel=3)"]) == 0
    limited = page.read_text()
    assert main(words) == 0
    assert limited != page.read_text()
