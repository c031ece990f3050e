"""Persistent vectors beside one softmax over the keys of the text and the learned keys, side by side."""

import pytest
import torch
from torch import Tensor

from polyformer import create_model
from polyformer.attention.mechanisms import MechanismConfig, SoftmaxConfig
from polyformer.attention.mechanisms.softmax_attention import Persistent, PersistentConfig
from polyformer.attention.patterns import Causal, Full, Window
from polyformer.attention.positions import AlibiConfig, BoundPosition, Shape, Site
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context

HEADS, GROUPS, WIDTH, LENGTH, COUNT = 4, 2, 3, 7, 5


def built(**options: object) -> Persistent:
    torch.manual_seed(0)
    return PersistentConfig(vectors=COUNT, **options).build(HEADS, WIDTH).double()  # type: ignore[arg-type]


def heads(queries: int = LENGTH, keys: int = LENGTH) -> list[Tensor]:
    shapes = (HEADS, queries), (GROUPS, keys), (GROUPS, keys)
    return [torch.randn(2, *shape, WIDTH, dtype=torch.float64, requires_grad=True) for shape in shapes]


def side_by_side(
    module: Persistent, qkv: list[Tensor], allowed: Tensor, bias: Tensor, scale: float
) -> Tensor:
    """Softmax([q k^T + bias, q K^T]) [v; V]; of the text only the `allowed` [T, T] pairs."""
    q, k, v = qkv
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    own_keys, own_values = module.keys * WIDTH**0.5, module.values * COUNT**0.5
    of_text = (q @ k.mT * scale + bias).masked_fill(~allowed, -torch.inf)
    learned = torch.einsum("bhid,hnd->bhin", q, own_keys) * scale
    weights = torch.cat([of_text, learned], -1).softmax(-1)
    text, persistent = weights.split([k.shape[2], COUNT], -1)
    return text @ v + torch.einsum("bhin,hnd->bhid", persistent, own_values)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("pattern", [None, Causal(), Window(2, 0)])
def test_one_softmax_is_over_the_text_and_the_learned_keys(pattern, scale: float | None, biased: bool):
    """Outputs and gradients, with fewer heads of keys than of queries."""
    module, qkv = built(pattern=pattern, scale=scale), heads()
    shape = Shape(hidden_size=HEADS * WIDTH, num_heads=HEADS, head_size=WIDTH)
    alibi = AlibiConfig().build(shape)
    terms = BoundPosition(alibi, Site(0, lambda x: x, lambda x: x)) if biased else None
    slots = torch.arange(LENGTH)
    distance = slots[:, None] - slots
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)], dtype=torch.float64)
    bias = -slopes.view(-1, 1, 1) * distance.abs() * biased
    allowed = distance >= 0
    if isinstance(pattern, Window):
        allowed = allowed & (distance <= 2)
    context, learned = Context(LENGTH, LENGTH, causal=True), [*qkv, *module.parameters()]
    results = []
    for y in (
        module(*qkv, context, None, terms)[0],
        side_by_side(module, qkv, allowed, bias, scale or WIDTH**-0.5),
    ):
        weight = torch.arange(y.numel()).view_as(y).cos()
        results.append((y, *torch.autograd.grad((y * weight).sum(), learned)))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_keys_that_no_query_reads_leave_softmax_attention():
    module, qkv, context = built(), heads(), Context(LENGTH, LENGTH, causal=True)
    with torch.no_grad():
        qkv[0][..., 0] = 1.0
        module.keys.zero_()[..., 0] = -1e4
        expected, _ = SoftmaxConfig().build(HEADS, WIDTH)(*qkv, context, None, None)
        torch.testing.assert_close(module(*qkv, context, None, None)[0], expected)


def test_learned_vectors_without_a_text_are_a_feed_forward():
    """Section 3.1: V^T softmax(K q), with weights that sum to 1; the score of the only key is far below."""
    module, (q, k, v), context = built(), heads(1, 1), Context(1, 1, causal=True)
    with torch.no_grad():
        q[..., 0], k[...] = 1.0, 0.0
        k[..., 0] = -1e4
        got, _ = module(q, k, v, context, None, None)
        inner = torch.einsum("bhid,hnd->bhin", q, module.keys).softmax(-1)
        expected = torch.einsum("bhin,hnd->bhid", inner, module.values) * COUNT**0.5
    torch.testing.assert_close(got, expected)


def test_recorded_weights_are_the_share_of_the_text():
    module, qkv, context = built(pattern=Full()), heads(), Context(LENGTH, LENGTH, causal=False)
    with torch.no_grad(), recorded() as records:
        module(*qkv, context, None, None)
    (weights,) = records
    q, k, _ = (x.detach() for x in qkv)
    k = k.repeat_interleave(HEADS // GROUPS, 1)
    learned = torch.einsum("bhid,hnd->bhin", q, module.keys.detach() * WIDTH**0.5)
    expected = (torch.cat([q @ k.mT, learned], -1) * WIDTH**-0.5).softmax(-1)[..., :LENGTH]
    torch.testing.assert_close(weights, expected)


def test_first_vectors_have_variance_one_as_the_authors_scale_them():
    module = PersistentConfig(vectors=512).build(4, 16)
    assert 0.9 < float((module.keys.detach() * 16**0.5).var()) < 1.1
    assert 0.9 < float((module.values.detach() * 512**0.5).var()) < 1.1


def test_a_layer_of_attention_alone_generates_as_it_reads():
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "hidden_size": 12, "num_attention_heads": 2, "initializer_range": 0.5}
    attention = MechanismConfig.from_dict("persistent(vectors=6)")
    model = create_model("decoder-tiny", **sizes, attention=attention, feedforward="none").double().eval()
    ids = torch.randint(13, (2, 5))
    texts = model.generate(ids, max_new_tokens=6, eos=()).sequences
    for end in range(5, 11):
        assert torch.equal(model(texts[:, :end]).logits[:, -1].argmax(-1), texts[:, end])
