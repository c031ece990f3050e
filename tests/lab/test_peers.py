"""Peers of `bench attention` compute what our members do: else their times would say nothing."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms.linformer import Linformer
from polyformer.attention.patterns import BlockWindow, Global, GlobalEnd, Links, PerHead
from polyformer_lab.bench import peers
from polyformer_lab.bench.attention import PEERS, _ours
from polyformer_lab.bench.member import Alone, Attention, BenchmarkCase
from polyformer_lab.bench.peers import PublicLinformer
from polyformer_lab.bench.rows import AbsentError


def case(text: str, peer: str | None = None, length: int = 48, **changes: bool) -> BenchmarkCase:
    return BenchmarkCase(
        text, peer, length, 2, 2, 8, **{"backward": True, **changes}, device="cpu", dtype="float64"
    )


def results(attention: Attention, length: int = 48) -> list[Tensor]:
    """The output and the gradients for inputs that are always the same."""
    generator = torch.Generator().manual_seed(length)
    shape = 2, length, 2, 8
    q, k, v, grad = (
        torch.randn(shape, dtype=torch.float64, generator=generator).transpose(1, 2) for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y = attention(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def assert_alike(peer: Attention, ours: Attention, length: int = 48, tolerance: float = 1e-10) -> None:
    for theirs, own in zip(results(peer, length), results(ours, length)):
        torch.testing.assert_close(theirs, own, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "unfused", "x-transformers"])
def test_dense_peers(name: str, causal: bool):
    if name == "x-transformers":
        pytest.importorskip("x_transformers")
    bench_case = case("Full()", name, causal=causal)
    tolerance = 1e-6 if name == "x-transformers" else 1e-10  # its softmax is in float32
    assert_alike(PEERS[name](bench_case), _ours(bench_case), tolerance=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_x_transformers_with_alibi(causal: bool):
    pytest.importorskip("x_transformers")
    bench_case = case("Full() + alibi", "x-transformers", causal=causal)
    assert_alike(PEERS["x-transformers"](bench_case), _ours(bench_case), tolerance=1e-6)


@pytest.mark.parametrize("text", ["Window(6)", "Window(12) | Global(3)", "Global(1) | Window(6, 6)"])
def test_longformer(text: str):
    pytest.importorskip("transformers")
    bench_case = case(text, "longformer")
    assert_alike(
        PEERS["longformer"](bench_case), _ours(bench_case), tolerance=1e-5
    )  # its softmax is in float32


def test_linformer_with_the_same_projections():
    pytest.importorskip("linformer")
    bench_case = case("linformer(max_length=64, k=8)", "linformer")
    theirs, ours = PEERS["linformer"](bench_case), _ours(bench_case)
    assert isinstance(theirs, PublicLinformer)
    assert isinstance(ours, Alone)
    assert isinstance(ours.mechanism, Linformer)
    with torch.no_grad():
        for mine, other in ((ours.mechanism.keys, "proj_k"), (ours.mechanism.values, "proj_v")):
            weight = mine[0].weight
            assert isinstance(weight, Tensor)
            weight[0] = getattr(theirs.layer, other).T
    assert_alike(theirs, ours)


@pytest.mark.parametrize("causal", [False, True])
def test_local_attention_is_a_window_of_blocks(causal: bool):
    pytest.importorskip("local_attention")
    bench_case = case("BlockWindow(8)", "local-attention", causal=causal)
    assert_alike(PEERS["local-attention"](bench_case), _ours(bench_case))


@pytest.mark.parametrize("causal", [False, True])
def test_performer_pytorch_is_ours_but_for_what_it_adds(causal: bool, monkeypatch: pytest.MonkeyPatch):
    """It adds 1e-4 to features and 1e-6 to sums; the first is set to nothing here."""
    module = pytest.importorskip("performer_pytorch.performer_pytorch")
    monkeypatch.setitem(module.softmax_kernel.__kwdefaults__, "eps", 0.0)
    bench_case, outputs = case("performer(features=32)", "performer-pytorch", causal=causal), []
    for make in (PEERS["performer-pytorch"], _ours):
        torch.manual_seed(0)
        outputs.append(results(make(bench_case)))
    for theirs, own in zip(*outputs):
        assert (theirs - own).norm() < (1e-2 if causal else 1e-9) * own.norm()


@pytest.mark.parametrize("causal", [False, True])
def test_reformer_pytorch_with_two_chunks_is_full_attention(causal: bool):
    """Two chunks see each other."""
    pytest.importorskip("reformer_pytorch")
    torch.manual_seed(0)
    q, v = torch.randn(2, 2, 2, 48, 8, dtype=torch.float64)
    text = "lsh(rounds=1, window=24)"
    y = PEERS["reformer-pytorch"](case(text, "reformer-pytorch", causal=causal))(q, q, v)
    scores = q @ F.normalize(q, dim=-1).mT / 8**0.5
    scores = scores.masked_fill(torch.eye(48, dtype=torch.bool), -5e4)
    if causal:
        scores = scores.masked_fill(torch.ones(48, 48, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(y, scores.softmax(-1) @ v, rtol=1e-6, atol=1e-6)


def test_the_routing_transformer_with_one_cluster_is_ours():
    """Queries and keys are normed: its scores are not."""
    pytest.importorskip("routing_transformer")
    bench_case = case("routing(local_heads=0, clusters=1, window=48)", "routing-transformer")

    def normed(attention: Attention) -> Attention:
        return lambda q, k, v: attention(*(F.layer_norm(x, (8,), eps=0.0) for x in (q, k)), v)

    peer, ours = (results(normed(make(bench_case))) for make in (PEERS["routing-transformer"], _ours))
    for theirs, own in zip(peer, ours):
        assert (theirs - own).norm() < 1e-4 * own.norm()  # it divides by 1 + 1e-5


BIGBIRD = "BlockWindow(4) | Global(4) | GlobalEnd(4) | Random(2, 4)"


def test_bigbird_with_the_blocks_that_it_draws(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    bird = PEERS["bigbird"](case(BIGBIRD, "bigbird"))
    assert isinstance(bird, peers.BigBird)
    drawn = []
    draw = bird.core._bigbird_block_rand_mask_with_head
    monkeypatch.setattr(
        bird.core,
        "_bigbird_block_rand_mask_with_head",
        lambda *args, **named: drawn.append(draw(*args, **named)) or drawn[-1],
    )
    theirs = results(bird)
    assert np.stack(drawn[0]).shape == (2, 10, 2)
    links = [Links(4, ((), *map(tuple, table.tolist()), ())) for table in drawn[0]]
    pattern = PerHead(tuple(links)) | BlockWindow(4) | Global(4) | GlobalEnd(4)
    for output, own in zip(theirs, results(lambda q, k, v: attend(q, k, v, pattern=pattern))):
        torch.testing.assert_close(output, own, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("peer", "text", "why"),
    [
        ("longformer", "Window(6, 0)", "it has no counterpart of Window"),
        ("longformer", "Window(6, dilation=2)", "it has no counterpart"),
        ("longformer", "Window(6) | Random(1, 4)", "it has no counterpart"),
        ("longformer", "Window(6) + alibi", r"it has no counterpart of Window\(6\) \+ alibi"),
        ("longformer", "Window(5)", "its length is a multiple of 10"),
        ("bigbird", "BlockWindow(4) | Global(4)", "it has BlockWindow"),
        ("bigbird", BIGBIRD.replace("Global(4)", "Global(3)"), "it has BlockWindow"),
        ("bigbird", BIGBIRD.replace("4", "8"), "its length is a multiple of 8 above 72"),
        ("local-attention", "Window(4, 2)", "it has no counterpart"),
        ("local-attention", "Window(4) | Global(1)", "it has no counterpart"),
        ("x-transformers", "Window(4)", "it has no counterpart"),
        ("x-transformers", "Full() + t5", "it has no counterpart"),
        ("linformer", "Window(4)", "it has no counterpart of Window"),
        ("linformer", "linformer(sharing='layer')", "it has one k, sharing 'head' and linear projections"),
        ("linformer", "linformer(projection='mean')", "it has one k, sharing 'head' and linear projections"),
        ("flex", "Window(4) + alibi", "it has no counterpart"),
        ("flex", "adaptive_span", "it has no counterpart"),
        ("performer-pytorch", "rfa", "it has performer with positive features"),
        ("reformer-pytorch", "Window(4)", "it has lsh"),
        ("reformer-pytorch", "lsh(window=7)", "a multiple of 14"),
        *(
            ("routing-transformer", text, "it has routing")
            for text in ("Window(4)", "routing(local_heads=1)")
        ),
    ],
)
def test_what_a_peer_has_not_is_said(peer: str, text: str, why: str):
    with pytest.raises(AbsentError, match=why):
        PEERS[peer](case(text, peer))


@pytest.mark.parametrize("peer", ["longformer", "bigbird"])
def test_encoders_have_no_causal_form(peer: str):
    text = "Window(6)" if peer == "longformer" else BIGBIRD
    with pytest.raises(AbsentError, match="it has"):
        PEERS[peer](case(text, peer, causal=True))
