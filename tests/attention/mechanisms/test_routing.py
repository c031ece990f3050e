"""Routing: full attention in the limit, the equation query by query, centroids that follow, known faults."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from launching import torchrun
from polyformer.attention.mechanisms import RoutingConfig
from polyformer.attention.mechanisms.routing import interval_attention, interval_tiles, routing
from polyformer.attention.mechanisms.routing.routing import Centroids, Routing
from polyformer.core.errors import InputError
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context


def inputs(length: int, rows: int = 2, heads: int = 3, width: int = 6) -> list[Tensor]:
    torch.manual_seed(length)
    shape = rows, length, heads, width
    return [
        torch.randn(shape, dtype=torch.float64).transpose(1, 2).detach().requires_grad_() for _ in range(3)
    ]


def built(**options: Any) -> Routing:
    torch.manual_seed(1)
    options = {"local_heads": 0, "clusters": 4, "window": 5, **options}
    return RoutingConfig(**options).build(3, 6).double().eval()


def call(module: Routing, tensors: list[Tensor], **limits: Any) -> Tensor:
    context = Context(tensors[0].shape[2], tensors[1].shape[2], **limits)
    return module(*tensors, context, None, None)[0]


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


@pytest.mark.parametrize("causal", [False, True])
def test_one_cluster_and_a_wide_window_are_full_attention(causal: bool):
    q, k, v = tensors = inputs(37)
    y = call(built(clusters=1, window=37), tensors, causal=causal)
    expected = F.scaled_dot_product_attention(normed(q), normed(k), v, is_causal=causal)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad(out.square().sum(), tensors) for out in (y, expected)]
    for actual, wanted in zip(*slopes):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-11)


def neighbours(of_query: int, of_keys: list[int], at: int, window: int, causal: bool) -> list[int]:
    """The keys that a query at slot `at` sees."""
    own = [j for j, cluster in enumerate(of_keys) if cluster == of_query]
    before, after = [j for j in own if j <= at], [j for j in own if j > at]
    return before[-window:] + ([] if causal else after[:window])


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_query_by_query(causal: bool, share: bool):
    """Long enough for several blocks and runs of keys of several lengths."""
    q, k, v = tensors = inputs(201, rows=1)
    if share:
        k = tensors[1] = q
    module = built(share_queries=share)
    y, centres = call(module, tensors, causal=causal), module.centroids.centres
    for head in range(3):
        of_q, of_k = ((normed(x[0, head]) @ centres[head].T).argmax(-1).tolist() for x in (q, k))
        for i in range(201):
            seen = neighbours(of_q[i], of_k, i, 5, causal)
            if share and len(seen) > 1:
                seen.remove(i)
            scores = normed(k[0, head, seen]) @ normed(q[0, head, i]) / 6**0.5
            expected = torch.softmax(scores, 0) @ v[0, head, seen]
            torch.testing.assert_close(y[0, head, i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kept", [0, 99])
@pytest.mark.parametrize("held", [1, 1 << 18])
def test_backward_in_parts_is_the_definition(held: int, kept: int, monkeypatch: pytest.MonkeyPatch):
    """Tiles that share keys, one by one or many at once; weights computed again or kept."""
    monkeypatch.setattr(interval_tiles, "BLOCK", 20)
    monkeypatch.setattr(interval_attention, "cache_capacity", lambda like: held)
    monkeypatch.setattr(routing, "cache_capacity", lambda like: held)
    monkeypatch.setattr(interval_attention, "MAX_SAVED", kept)
    config = RoutingConfig(clusters=3, window=40, local_heads=0)
    results = []
    for form in (config, config.definition()):
        torch.manual_seed(2)
        tensors = inputs(190)
        y = call(form.build(3, 6).double().eval(), tensors)
        results.append([y, *torch.autograd.grad(y.pow(3).sum(), tensors)])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_causal_routing_that_sees_the_future():
    """A fault of public code, whose clusters take the nearest tokens of the whole sequence."""
    tensors, module = inputs(150), built()
    y = call(module, tensors, causal=True)
    later = [torch.cat([x[:, :, :90], x[:, :, 90:].flip(2) * 3], 2) for x in tensors]
    for other in (later, [x[:, :, :90] for x in tensors]):
        torch.testing.assert_close(
            call(module, other, causal=True)[:, :, :90], y[:, :, :90], rtol=0, atol=1e-14
        )
    slope = torch.autograd.grad(y[:, :, :90].sum(), tensors[1:])
    assert all(grad[:, :, 90:].abs().max() == 0 for grad in slope)


def test_a_pass_uses_the_centroids_before_its_own_update():
    tensors, module = inputs(60), built(decay=0.0)
    expected = call(module, tensors, causal=True)
    y = call(module.train(), tensors, causal=True)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert not torch.equal(call(module, tensors, causal=True), expected)


def moved(module: Routing, batches: list[list[Tensor]], **limits: Any) -> Tensor:
    """The centroids after a pass over each batch."""
    for tensors in batches:
        call(module.train(), tensors, **limits).sum().backward()
    return module.centroids.centres


def test_centroids_follow_the_mean_directions():
    q, k, _ = tensors = inputs(60, rows=1)
    module = built(decay=0.75)
    before = module.centroids.centres.clone()
    after = moved(module, [tensors])
    for head in range(3):
        vectors = torch.cat([normed(q[0, head]), normed(k[0, head])]).detach()
        chosen = (vectors @ before[head].T).argmax(-1)
        for cluster in range(4):
            total = vectors[chosen == cluster].sum(0)
            expected = F.normalize(0.75 * before[head, cluster] + 0.25 * F.normalize(total, dim=0), dim=0)
            torch.testing.assert_close(after[head, cluster], expected, rtol=0, atol=1e-12)


def test_a_centroid_that_nobody_chose_stays():
    module = built(clusters=30)
    before = module.centroids.centres.clone()
    after = moved(module, [inputs(31, rows=1)])
    same = (before == after).all(-1)
    assert same.any()
    assert not same.all()


def test_evaluation_and_passes_without_gradients_move_nothing():
    tensors, module = inputs(40), built()
    before = module.centroids.centres.clone()
    call(module, tensors).sum().backward()
    with torch.no_grad():
        call(module.train(), tensors)
    assert torch.equal(module.centroids.centres, before)


def test_padding_is_not_in_the_statistics():
    tensors = inputs(60)
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[:, 40:] = False
    expected = moved(built(), [[x[:, :, :40].detach().requires_grad_() for x in tensors]])
    torch.testing.assert_close(moved(built(), [tensors], kv_valid=valid), expected, rtol=0, atol=1e-14)
    assert not torch.equal(moved(built(), [tensors]), expected)


def test_padding_is_in_no_cluster():
    tensors, module = inputs(60), built(clusters=1, window=3)
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[:, 20:50] = False
    y = call(module, tensors, causal=True, kv_valid=valid)
    alone = call(module, [x[:, :, valid[0]] for x in tensors], causal=True)
    torch.testing.assert_close(y[:, :, valid[0]], alone, rtol=0, atol=1e-14)
    assert y[:, :, 20:50].abs().max() == 0


def test_local_heads_are_a_window():
    q, k, v = tensors = inputs(50)
    y = call(built(local_heads=2, local_window=4), tensors, causal=True)
    apart = torch.arange(50).view(-1, 1) - torch.arange(50)
    local = F.scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart < 4))
    torch.testing.assert_close(y[:, :2], local[:, :2], rtol=0, atol=1e-12)
    assert (y[:, 2] - local[:, 2]).abs().max() > 0.1


def test_recorded_weights_are_those_used():
    tensors, module = inputs(20), built(local_heads=1, local_window=4)
    y = call(module, tensors, causal=True)
    with recorded() as records:
        call(module, tensors, causal=True)
    assert len(records) == 1
    torch.testing.assert_close(records[0] @ tensors[2], y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [1, 16, 21])
def test_the_nearest_centroid_the_first_of_several(count: int):
    torch.manual_seed(3)
    module = Centroids(2, count, 8, decay=0.9).double()
    module.centres[:, count // 2] = module.centres[:, -1]
    x = torch.randn(2, 2, 50, 8, dtype=torch.float64)
    x[0, :, 0] = 0
    x[1, :, 0] = torch.nan
    assert torch.equal(module(x), (x @ module.centres.mT).argmax(-1))


def test_centroids_repeat_from_a_seed_and_leave_torch_alone():
    torch.manual_seed(5)
    first = Centroids(2, 3, 4, 0.9).centres
    follows = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(Centroids(2, 3, 4, 0.9).centres, first)
    assert torch.equal(torch.rand(1), follows)
    torch.testing.assert_close(first.norm(dim=-1), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": 0}, "clusters: expected 1 or more, got 0"),
        ({"window": 0}, "window: expected 1 or more, got 0"),
        ({"local_window": 1}, "local_window: expected 2 or more, got 1"),
        ({"local_heads": -1}, "local_heads: expected 0 or more, got -1"),
        ({"local_heads": 3}, "local_heads: expected fewer than the 3 heads"),
        ({"decay": 1.0}, r"decay: expected a number in \[0, 1\), got 1.0"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        built(**options)


def test_more_clusters_than_tokens_to_learn_from():
    module = built(clusters=9).train()
    with pytest.raises(InputError, match="clusters: expected at most the 8 tokens of a training row, got 9"):
        call(module, inputs(8))
    assert call(module.eval(), inputs(8)).isfinite().all()


def parts() -> list[list[Tensor]]:
    return [inputs(length, rows=1) for length in (40, 52)]


def one_process(out: Path) -> None:
    """What each of two processes does: its own batch, then the centroids."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    module = built(decay=0.5)
    for _ in range(3):
        moved(module, [parts()[rank]])
    torch.save(module.centroids.centres, out / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_move_their_centroids_together(tmp_path: Path):
    ended = torchrun(__file__, tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert torch.equal(first, second)
    # One process whose batch is both, the shorter row padded.
    valid = torch.ones(2, 52, dtype=torch.bool)
    valid[0, 40:] = False
    both = [torch.cat([F.pad(a, (0, 0, 0, 12)), b]).detach().requires_grad_() for a, b in zip(*parts())]
    module = built(decay=0.5)
    for _ in range(3):
        moved(module, [both], kv_valid=valid)
    torch.testing.assert_close(first, module.centroids.centres, rtol=0, atol=1e-12)


if __name__ == "__main__":
    one_process(Path(sys.argv[1]))
