"""Cache policies in transformers' models equal their definitions in the same model."""

from typing import Any

import pytest
import torch
from tests.models.attached.test_bounded import DROPPING, LLAMA, doubled, in_chunks
from tests.nn.cache.policies import rounded
from tests.nn.memory.kept_tokens import same, text
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import polyformer


@pytest.mark.parametrize("policy", DROPPING)
def test_a_policy_is_dense_attention_with_masked_keys(policy: str):
    """Attention of the same model, in which a mask for each layer and head hides the dropped keys."""
    ids, mask = text(), torch.ones(2, 23, dtype=torch.long)
    mask[0, :5] = 0
    with doubled("Llama", **LLAMA) as model:
        polyformer.attach(model, cache=policy)
        cache: Any = DynamicCache(config=model.config)
        hidden = []
        prompt = model(ids[:, :18], past_key_values=cache, attention_mask=mask[:, :18]).logits
        for layer in cache.layers:
            dropped = torch.ones(2, 2, 23, dtype=torch.bool)
            hidden.append(
                dropped.scatter_(-1, layer.state.slots, False).index_fill_(-1, torch.arange(18, 23), False)
            )
        step = model(ids[:, 18:19], past_key_values=cache, attention_mask=mask[:, :19]).logits
        for i, dropped in enumerate(hidden):
            polyformer.attach(
                model, lambda b, h, q, k, dropped=dropped: (q < 18) | ~dropped[b, h // 2, k], layers=i
            )
        dense = model(ids[:, :19], attention_mask=mask[:, :19]).logits
        same(torch.cat([prompt, step], 1)[mask[:, :19] > 0], dense[mask[:, :19] > 0])
        assert not torch.allclose(polyformer.detach(model)(ids[:, :19]).logits[1], dense[1], atol=1e-3)


class RoundedLayer(DynamicLayer):
    """The cache of a layer with rounded keys and values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


@pytest.mark.parametrize("name", ["GPT2", "DeepseekV3", "GptOss"])
def test_int8_is_attention_over_rounded_keys_and_values(name: str):
    """With all positions and scores of a model, a mask of all pairs, and with a pattern."""
    options = {"layer_types": ["full_attention"] * 2} if name == "GptOss" else {}
    with doubled(name, **options) as model:
        model.set_experts_implementation("eager")
        for pattern in (None, "Window(6)"):
            polyformer.attach(model, pattern)
            exact, plain = model(text()).logits, DynamicCache()
            plain.layers[:] = [RoundedLayer() for _ in range(2)]
            expected = torch.cat(
                [model(part, past_key_values=plain).logits for part in text().split(9, 1)], 1
            )
            polyformer.attach(model, pattern, cache="int8")
            same(in_chunks(model, text(), [4, 1, 1, 9, 8]), expected)
            assert 1e-6 < float((expected - exact).abs().max()) < 0.1 * float(exact.std())
        pairs = torch.ones(23, 23, dtype=torch.bool).tril()
        polyformer.attach(model, cache="int8")
        whole = model(text(), attention_mask=pairs.expand(2, 1, 23, 23)).logits
        same(in_chunks(model, text(), [4, 1, 1, 9, 8]), whole)
