"""A mechanism of which only the weights are defined: with those of softmax it is softmax attention."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from polyformer import create_model
from polyformer.attention.mechanisms import MechanismConfig, PairWeights, PairWeightsConfig
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer

VOCAB = 17


class Shares(PairWeights):
    """The softmax, with a learned factor of 1."""

    def __init__(self, config: PairWeightsConfig):
        super().__init__(config)
        self.factor = nn.Parameter(torch.ones(()))

    def weights(self, scores: Tensor, allowed: Tensor) -> Tensor:
        assert scores.shape == allowed.shape
        return (scores * self.factor).softmax(-1)


@pytest.fixture(autouse=True)
def _shares() -> Iterator[None]:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class SharesConfig(PairWeightsConfig):
        kind: ClassVar[str] = "shares"

        def build(self, num_heads: int, head_size: int) -> Shares:
            return Shares(self)

    yield
    del MechanismConfig.kinds["shares"]


def twins(preset: str, pattern: str | None, **options: Any) -> list[Transformer]:
    """A model with softmax attention, and the same weights with the mechanism of this file."""
    models: list[Transformer] = []
    for kind in ("softmax", "shares"):
        torch.manual_seed(0)
        attention = kind if pattern is None else f"{kind}(pattern={pattern})"
        sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 24, "num_attention_heads": 4}
        model = create_model(preset, attention=attention, initializer_range=0.5, **sizes, **options)
        models.append(model.double().eval())
    missing = models[1].load_state_dict(models[0].state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("factor") for name in missing.missing_keys)
    return models


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, a mask with padding on the left and an empty row, and document numbers, [3, 13]."""
    torch.manual_seed(1)
    mask = torch.ones(3, 13, dtype=torch.long)
    mask[1, :4], mask[2] = 0, 0
    return torch.randint(3, VOCAB, (3, 13)), mask, (torch.arange(13) > 6).long().expand(3, -1)


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        (None, {"position": "sinusoidal"}),
        ("Window(3, 0) | Global(1)", {"position": "rope"}),
        ("PerHead([Window(2, 0), Window(4, 0), Causal(), Strided(3)])", {"position": "alibi"}),
        ("PerLayer([Window(2, 0), Causal()])", {"position": "t5"}),
        (None, {"position": "shaw"}),
        (None, {"position": "transformer_xl", "memory": "recurrent(length=6)"}),
        ("Window(5, 0)", {"position": "none", "num_key_value_heads": 2}),
    ],
    ids=str,
)
def test_the_weights_of_softmax_make_softmax_attention(pattern: str | None, options: dict[str, Any]):
    """With padding and documents, token by token, and in the gradients."""
    ids, mask, documents = batch()
    softmax, own = twins("decoder-tiny", pattern, **options)
    for inputs in ({}, {"attention_mask": mask}, {"document_ids": documents}):
        expected, actual = (model(ids, **inputs).logits for model in (softmax, own))
        torch.testing.assert_close(actual, expected)
    generated = [m.generate(ids[:2], mask[:2], max_new_tokens=9, eos=[]).sequences for m in (softmax, own)]
    assert torch.equal(*generated)
    grads = []
    for model in (softmax, own):
        model(ids, attention_mask=mask).logits[mask.bool()].square().sum().backward()
        grads.append(dict(model.named_parameters()))
    for name, parameter in grads[0].items():
        torch.testing.assert_close(grads[1][name].grad, parameter.grad)
    assert all(p.grad is None or p.grad.isfinite().all() for p in grads[1].values()), "also of the factor"


def test_an_encoder_decoder_reads_its_source_by_the_own_weights():
    ids, mask, _ = batch()
    softmax, own = twins("transformer-tiny", None)
    own_parts = [type(module) for module in own.modules() if isinstance(module, PairWeights)]
    assert len(own_parts) == 3 * len(own.decoder.layers), "encoder, decoder, and between them"
    expected, actual = (
        model(ids[:2], mask[:2], decoder_input_ids=ids[:2, :5]).logits for model in (softmax, own)
    )
    torch.testing.assert_close(actual, expected)


def test_weights_are_recorded_and_dropped():
    ids, mask, _ = batch()
    softmax, own = twins("encoder-tiny", None)
    expected, actual = (model(ids, mask, output_attentions=True).attentions for model in (softmax, own))
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    own = MechanismConfig.from_dict("shares(dropout=0.5)").build(2, 4)
    q, context = torch.randn(1, 2, 9, 4), Context(9, 9)
    first, second = (own.train()(q, q, q, context, None, None)[0] for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (own.eval()(q, q, q, context, None, None)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_computed_in_single_precision(dtype: torch.dtype):
    """Also in autocast, which would compute products in half precision."""
    seen: list[torch.dtype] = []
    model = create_model("encoder-tiny", attention="shares")
    for module in model.modules():
        if isinstance(module, Shares):
            rule = module.weights
            module.weights = lambda scores, allowed, rule=rule: (  # type: ignore[method-assign]
                seen.append(scores.dtype) or rule(scores, allowed)
            )
    model.to(dtype)(batch()[0])
    with torch.autocast("cpu", dtype):
        model.float()(batch()[0])
    assert set(seen) == {torch.float32}
