"""The chunked cross-entropy against torch's on whole logits: value, gradients, memory, half precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pairwise import pairwise
from polyformer.core.ops import cross_entropy
from polyformer.core.ops.cross_entropy import linear_cross_entropy

VOCAB, WIDTH = 13, 2


def inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64) for shape in ((tokens, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    )
    labels = torch.randint(VOCAB, (tokens,))
    labels[::3] = -100
    tensors = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    return tensors[0], tensors[1], tensors[2], labels


@pytest.fixture(autouse=True)
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks for any number of logits, or with `BOTH_FORMS` all logits at once too."""
    monkeypatch.setattr(cross_entropy, "FEW", getattr(request, "param", 0))


BOTH_FORMS = pytest.mark.parametrize("few", [0, 1 << 18], ids=["chunks", "at once"], indirect=True)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Four tokens a chunk."""
    monkeypatch.setattr(cross_entropy, "CHUNK_ENTRIES", 4 * VOCAB + 3)
    return 4


@BOTH_FORMS
@pytest.mark.parametrize(
    ("smoothing", "biased", "tokens"), pairwise([0.0, 0.1], [False, True], [1, 2, 5, 6, 7, 17])
)
def test_the_loss_equals_torchs_cross_entropy(tokens: int, biased: bool, smoothing: float, small_chunks: int):
    hidden, weight, bias, labels = inputs(tokens)
    wanted = [hidden, weight, *([bias] if biased else [])]
    loss = linear_cross_entropy(hidden, weight, bias if biased else None, labels, smoothing)
    logits = F.linear(hidden, weight, bias if biased else None)
    count = (labels != -100).sum().clamp_min(1)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum") / count
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(3 * loss, wanted), torch.autograd.grad(3 * expected, wanted)):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@BOTH_FORMS
@pytest.mark.parametrize("fixed", [0, 1, 2])
def test_only_what_learns_gets_a_gradient(fixed: int):
    tensors = list(inputs(7))
    tensors[fixed] = tensors[fixed].detach()
    linear_cross_entropy(tensors[0], tensors[1], tensors[2], tensors[3]).backward()
    for i, tensor in enumerate(tensors[:3]):
        assert (tensor.grad is None) == (i == fixed)


@BOTH_FORMS
def test_a_graph_that_is_kept_gives_its_gradients_again():
    hidden, weight, bias, labels = inputs(7)
    wanted = [hidden, weight, bias]
    loss = 3 * linear_cross_entropy(hidden, weight, bias, labels)
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(loss, wanted)
    for gradient, copy, again in zip(first, copies, second):
        assert torch.equal(gradient, copy)
        assert torch.equal(again, copy)


@BOTH_FORMS
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_second_order_gradients_are_those_of_torch(dtype: torch.dtype, smoothing: float, small_chunks: int):
    hidden, weight, bias, labels = inputs(9, dtype)
    count, wanted = (labels != -100).sum(), [hidden, weight, bias]

    def expected(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        logits = F.linear(hidden, weight, bias)
        return F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum") / count

    seconds = []
    for function in (linear_cross_entropy, expected):
        loss = function(hidden, weight * hidden.square().mean(), bias, labels, smoothing)
        (first,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), wanted))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for mine, theirs in zip(*seconds):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@BOTH_FORMS
def test_without_labels_the_loss_is_zero_and_so_are_gradients():
    hidden, weight, bias, labels = inputs(5)
    loss = linear_cross_entropy(hidden, weight, bias, torch.full_like(labels, -100), 0.1)
    assert loss == 0
    assert all(grad.abs().max() == 0 for grad in torch.autograd.grad(loss, [weight, bias]))


@pytest.mark.parametrize("tokens", [150, 192, 97])  # 100, 128 and 64 of them are labelled
def test_rows_that_fill_up_a_step_count_for_nothing(tokens: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ENTRIES", 70 * VOCAB)
    hidden, weight, bias, labels = inputs(tokens)
    with torch.no_grad():
        hidden[labels == -100] = torch.nan  # nor do tokens without a label
    loss = linear_cross_entropy(hidden, weight, bias, labels, 0.1)
    expected = F.cross_entropy(
        F.linear(hidden[labels != -100], weight, bias), labels[labels != -100], label_smoothing=0.1
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    wanted = [hidden, weight, bias]
    for mine, theirs in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted)):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@BOTH_FORMS
def test_a_token_without_a_label_has_no_effect_even_if_it_is_not_finite():
    hidden, weight, bias, labels = inputs(7)
    loss = linear_cross_entropy(hidden, weight, bias, labels)
    expected = torch.autograd.grad(loss, [hidden, weight, bias])
    with torch.no_grad():
        hidden[0] = torch.nan
    again = linear_cross_entropy(hidden, weight, bias, labels)
    assert labels[0] == -100
    assert torch.equal(again, loss)
    for mine, before in zip(torch.autograd.grad(again, [hidden, weight, bias]), expected):
        assert torch.equal(mine, before)


@BOTH_FORMS
def test_unlikely_labels_keep_their_loss():
    """A probability that rounds to zero has a logarithm all the same."""
    logits = torch.tensor([[0.0, 500.0, -500.0], [-3e4, 3e4, 0.0]], requires_grad=True)
    labels = torch.tensor([2, 0])
    loss = linear_cross_entropy(logits, torch.eye(3), None, labels)
    assert loss == (1000 + 6e4) / 2
    expected = torch.autograd.grad(F.cross_entropy(logits, labels), logits)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected)


@BOTH_FORMS
def test_leading_axes_are_kept_out_of_it():
    hidden, weight, _, labels = inputs(12)
    loss = linear_cross_entropy(hidden.view(3, 4, WIDTH), weight, None, labels.view(3, 4))
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, None, labels))


@BOTH_FORMS
def test_the_gradient_passes_gradcheck(small_chunks: int):
    hidden, weight, bias, labels = inputs(9)
    assert torch.autograd.gradcheck(
        lambda *tensors: linear_cross_entropy(*tensors, labels, 0.1), (hidden, weight, bias)
    )


class Sizes(TorchDispatchMode):
    """The number of entries of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


def test_all_logits_never_stand_in_memory(monkeypatch: pytest.MonkeyPatch):
    """Neither forward nor backward makes a tensor of tokens x vocabulary, nor is one kept in between."""
    tokens, vocab, width = 256, 64, 4
    monkeypatch.setattr(cross_entropy, "CHUNK_ENTRIES", 8 * vocab)
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(tokens, width, requires_grad=True),
        torch.randn(vocab, width, requires_grad=True),
    )
    labels, kept = torch.randint(vocab, (tokens,)), []
    with (
        Sizes() as sizes,
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x
        ),
    ):
        linear_cross_entropy(hidden, weight, None, labels).backward()
    assert sizes.largest <= tokens * width < tokens * vocab
    assert max(kept) <= tokens * width


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near(dtype: torch.dtype):
    hidden, weight, bias, labels = inputs(17, dtype)
    loss = linear_cross_entropy(hidden, weight, bias, labels)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = F.cross_entropy(F.linear(*exact), labels)
    assert loss.dtype == torch.float32
    assert (loss.detach().double() - expected.detach()).abs() < 8 * torch.finfo(dtype).eps
    loss.backward()
    expected.backward()
    for mine, theirs in zip((hidden, weight, bias), exact):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == dtype
        assert (mine.grad.double() - theirs.grad).norm() < 8 * torch.finfo(dtype).eps * theirs.grad.norm()


def test_a_scaled_loss_keeps_small_gradients_in_float16():
    """The scale must come before the division by the number of tokens: below 6e-8 there is only zero."""
    torch.manual_seed(0)
    tokens, vocab = 4096, 2048
    hidden = torch.randn(tokens, 4).half().requires_grad_()
    weight = torch.randn(vocab, 4).half().requires_grad_()
    labels = torch.randint(vocab, (tokens,))
    scale = 2.0**16
    grads = torch.autograd.grad(scale * linear_cross_entropy(hidden, weight, None, labels), [hidden, weight])
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels), exact)
    for mine, theirs in zip(grads, expected):
        assert (mine.double() / scale - theirs).norm() < 4e-3 * theirs.norm()


def test_a_token_alone_with_a_large_scale_does_not_overflow():
    hidden, weight, bias, _ = inputs(1, torch.float16)
    loss = linear_cross_entropy(hidden, weight, bias, torch.tensor([2]))
    assert (2.0**17 * loss).isfinite()
    grad = torch.autograd.grad(2.0**12 * loss, weight)[0]
    assert grad.isfinite().all()


def test_factors_in_half_precision_err_by_their_rounding(monkeypatch: pytest.MonkeyPatch, small_chunks: int):
    """On a GPU under autocast the factors of the products are rounded, and nothing else is."""
    monkeypatch.setattr(cross_entropy, "_product_type", lambda hidden: torch.bfloat16)
    hidden, weight, bias, labels = inputs(17, torch.float32)
    loss = linear_cross_entropy(hidden, weight, bias, labels, 0.1)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = F.linear(exact[0], exact[1], exact[2])
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1)
    eps = torch.finfo(torch.bfloat16).eps
    assert loss.dtype == torch.float32
    assert (loss.detach().double() - expected.detach()).abs() < 2 * eps
    mine = torch.autograd.grad(loss, [hidden, weight, bias])
    for gradient, other in zip(mine, torch.autograd.grad(expected, exact)):
        assert gradient.dtype == torch.float32
        assert (gradient.double() - other).norm() < 4 * eps * other.norm()


class Products(TorchDispatchMode):
    """The types of the factors and of the result of each product made inside, and the other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[tuple[torch.dtype, torch.dtype]] = []
        self.others: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.types.append((args[0].dtype, out.dtype))
        else:
            self.others.add(str(func.overloadpacket))
        return out


def test_on_a_gpu_products_have_the_type_of_autocast_and_no_chunk_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cross_entropy, "_on_gpu", lambda x: True)
    monkeypatch.setattr(cross_entropy, "CHUNK_ENTRIES", 4 * VOCAB)
    half, full = torch.bfloat16, torch.float32
    # Meta tensors have no numbers to wait for.
    hidden, weight, bias = (
        torch.empty(shape, device="meta") for shape in ((8, WIDTH), (VOCAB, WIDTH), VOCAB)
    )
    labels = torch.zeros(8, dtype=torch.long, device="meta")
    with Products() as products:
        loss, gradients = cross_entropy._chunks(
            hidden, weight, bias, labels, 0.1, [True, True, True], None, 8, half
        )
    assert products.types == 2 * [(half, full), (half, half), (half, full)]
    assert loss.dtype == full
    assert [x.dtype for x in gradients if x is not None] == 3 * [full]
    assert [x.shape for x in gradients if x is not None] == [hidden.shape, weight.shape, bias.shape]
    assert not products.others & {"aten.nonzero", "aten.item", "aten._local_scalar_dense"}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_that_align_the_vocabulary_count_for_nothing(
    smoothing: float, small_chunks: int, monkeypatch: pytest.MonkeyPatch
):
    hidden, weight, bias, labels = inputs(9)
    losses = [linear_cross_entropy(hidden, weight, bias, labels, smoothing)]
    monkeypatch.setattr(cross_entropy, "_on_gpu", lambda x: True)
    losses += [linear_cross_entropy(hidden, weight, bias, labels, smoothing)]
    mine, theirs = (torch.autograd.grad(loss, [hidden, weight, bias]) for loss in losses)
    for x, y in zip((losses[0], *mine), (losses[1], *theirs)):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
