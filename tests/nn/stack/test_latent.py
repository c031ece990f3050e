"""Latent attention: the explicit equation, the absorbed form, its cache, and what it refuses."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import polyformer
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import RopeConfig, Shape
from polyformer.attention.positions.base import Position
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.export_graphs import check_decoder
from polyformer.models.transformers import wrap
from polyformer.nn.stack import AttentionConfig, LatentAttention, LatentConfig

HEADS, WIDTH, ROTARY, VALUES = 3, 5, 4, 7


def new_attention(form: str, query_size: int | None, **options: Any) -> LatentAttention:
    torch.manual_seed(0)
    sizes = {"size": 6, "query_size": query_size, "rotary_size": ROTARY, "value_size": VALUES}
    latent = LatentConfig.from_dict({**sizes, "form": form})
    config = AttentionConfig(num_attention_heads=HEADS, head_size=WIDTH, latent=latent, **options)
    module = LatentAttention(8, config).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def equation(module: LatentAttention, x: Tensor, position: Position) -> Tensor:
    """Head by head: causal softmax of [R a; b] [R r; c U]^T / sqrt(D_r + D) times c V, projected."""
    context = Context(x.shape[1], x.shape[1], causal=True)
    turn = lambda part: position.rotate(part[:, None], part[:, None], context, module._site())[0][:, 0]  # noqa: E731
    inner = x
    if module.query_latent is not None and module.query_latent_norm is not None:
        inner = module.query_latent_norm(module.query_latent(x))
    r, c = module.latent(x)[..., :ROTARY], module.latent_norm(module.latent(x)[..., ROTARY:])
    heads = []
    for q_weight, up in zip(module.query.weight.chunk(HEADS), module.up.weight.chunk(HEADS)):
        q = inner @ q_weight.T
        if module.query.bias is not None:
            q = q + module.query.bias[len(heads) * len(q_weight) :][: len(q_weight)]
        keys, values = c @ up[:WIDTH].T, c @ up[WIDTH:].T
        scores = turn(q[..., :ROTARY]) @ turn(r).mT + q[..., ROTARY:] @ keys.mT
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        heads.append((scores / (ROTARY + WIDTH) ** 0.5).softmax(-1) @ values)
    return module.output(torch.cat(heads, -1))


@pytest.mark.parametrize("head_size", range(1, 14))
def test_rope_rotates_the_default_channels_of_any_head_size(head_size: int):
    attention = {"num_attention_heads": 2, "head_size": head_size, "latent": {}}
    model = polyformer.create_model("decoder-tiny", attention=attention, position="rope")
    assert model(torch.ones(1, 3, dtype=torch.long)).logits.isfinite().all()
    rotated = AttentionConfig.from_dict(attention).rotary_width(0)
    assert rotated == (2 if head_size < 4 else head_size // 2 // 2 * 2)


def test_an_odd_rotary_size_is_named():
    attention = {"latent": {"rotary_size": 3}}
    with pytest.raises(InputError, match=r"even number of rotated channels, got 3 .*rotary_size"):
        polyformer.create_model("decoder-tiny", attention=attention, position="rope")


@pytest.mark.parametrize("query_size", [None, 6], ids=["projected", "latent-queries"])
def test_both_forms_are_the_equation(query_size: int | None):
    """Outputs, gradients, and steps after a text."""
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    position = RopeConfig(layout="pairs").build(Shape(hidden_size=8, head_size=ROTARY))
    results = []
    for form in ("explicit", "absorbed"):
        module = new_attention(form, query_size)
        y, _ = module(x, Context(9, 9, causal=True), position)
        expected = equation(module, x, position)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        inputs = [x, *module.parameters()]
        for output in (y, expected):
            results.append(torch.autograd.grad(output.square().sum(), inputs, retain_graph=True))
        state = module.new_state(9)
        for start, stop in itertools.pairwise((0, 6, 7, 9)):
            part, state = module(x[:, start:stop], Context(stop - start, stop, causal=True), position, state)
            torch.testing.assert_close(part, y[:, start:stop], rtol=1e-10, atol=1e-10)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-10, atol=1e-10)


def test_options_of_the_scores_are_the_same_in_both_forms():
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    position = RopeConfig().build(Shape(hidden_size=8, head_size=ROTARY))
    options = SoftmaxConfig(pattern=Window(3), soft_cap=1.5, sink=True)
    outputs = [
        new_attention(form, None, mechanism=options)(x, Context(9, 9, causal=True), position)[0]
        for form in ("explicit", "absorbed")
    ]
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)


def latent_model(**options: Any) -> Any:
    torch.manual_seed(0)
    chosen = {"decoder.attention.latent": {"size": 12}, "decoder.position": "rope", **options}
    return polyformer.create_model("decoder-tiny", **chosen).double().eval()


def test_the_cache_has_latents_only():
    """12 + 4 numbers per token instead of 2 H D = 64, and beams over it equal beams in the explicit form."""
    model, explicit = latent_model(), latent_model(**{"decoder.attention.latent.form": "explicit"})
    ids, mask = torch.randint(3, model.config.vocab_size, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        state = model(input_ids=ids, attention_mask=mask, use_cache=True).state
        cache = state.layers[0].self_attention.compact()
        head = model.decoder.layers[0].attention.content
        assert cache.keys.shape == (2, 1, 9, 12 + head // 2)
        assert cache.values.numel() == 0
        texts = [
            m.generate(ids, attention_mask=mask, max_new_tokens=5, num_beams=3) for m in (model, explicit)
        ]
    assert torch.equal(texts[0].sequences, texts[1].sequences)


def test_latents_stand_next_to_layers_of_a_recurrence():
    """Read in parts, with a KV cache of latents in one layer and a state in the other."""
    heads = {"key_heads": 2, "value_heads": 2, "key_size": 6, "value_size": 5}
    mechanisms = [{"kind": "kda", "heads": heads}, {"kind": "softmax"}]
    model = latent_model(**{"decoder.attention.mechanism": {"kind": "alternate", "mechanisms": mechanisms}})
    first, second = (layer.attention for layer in model.decoder.layers[:2])
    assert not isinstance(first, LatentAttention)
    assert isinstance(second, LatentAttention)
    ids = torch.randint(3, model.config.vocab_size, (2, 9))
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state
        state, parts = None, []
        for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:]):
            output = model(input_ids=part, state=state, use_cache=True)
            state = output.state
            parts.append(output.last_hidden_state)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-10, atol=1e-10)


def attention(**options: Any) -> Callable[[], Any]:
    return lambda: AttentionConfig.from_dict({"latent": {}, **options})


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (attention(mechanism="lsh"), "latent: expected the mechanism 'softmax', got 'lsh'"),
        (
            attention(mechanism={"kind": "alternate", "mechanisms": ["softmax", "kda"]}),
            "got 'kda'; set latent to null, or alternate",
        ),
        (attention(num_key_value_heads=2), "num_key_value_heads: every query head has its own projection"),
        (attention(qk_norm="rms"), "qk_norm: latent attention has no such projections"),
        (attention(output_gate=True), "output_gate: latent attention has no such projections"),
        (attention(head_scale=True), "head_scale: latent attention has no such projections"),
        (attention(bias=["value"]), "bias: latent attention has biases of 'query', 'key' and 'output'"),
        (
            attention(latent={"norm": "batch"}),
            "norm: expected a norm of each token, such as 'rms', got 'batch'",
        ),
        (lambda: latent_model(**{"decoder.position": "shaw"}), "latent: Shaw positions compute terms"),
        (
            lambda: latent_model().generate(torch.ones(1, 2).long(), max_new_tokens=1, cache="int8"),
            "cache: 'int8' is for keys and values of heads",
        ),
        (
            lambda: wrap(latent_model())(torch.ones(1, 2).long(), past_key_values=DynamicCache()),
            "past_key_values: the state of this model has more than keys and values",
        ),
        (lambda: check_decoder(latent_model()), "latent attention caches latents instead of keys and values"),
    ],
    ids=[
        "mechanism",
        "in turn",
        "groups",
        "norm",
        "gate",
        "head-scale",
        "bias",
        "batch",
        "position",
        "policy",
        "borrowed",
        "export",
    ],
)
def test_what_is_not_supported_is_named(act: Callable[[], Any], message: str):
    with pytest.raises(InputError) as caught:
        act()
    assert message in str(caught.value)
