"""Norms against their equations, and batch norm with its statistics."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyformer
from polyformer.core.errors import InputError
from polyformer.core.ops.norms import (
    BatchNorm,
    BatchNormConfig,
    DynamicTanhConfig,
    LayerNormConfig,
    NormConfig,
    RMSNormConfig,
)
from polyformer.models.architectures import Transformer


def randomized(config: NormConfig) -> torch.nn.Module:
    torch.manual_seed(0)
    norm = config.build(5).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(bias: bool):
    norm = randomized(LayerNormConfig(eps=0.1, bias=bias))
    x = torch.randn(3, 5, dtype=torch.float64)
    centered = x - x.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected + norm.bias if bias else expected, rtol=1e-12, atol=1e-12)
    assert (norm.bias is not None) == bias


def test_layer_norm_of_equal_numbers_has_finite_gradients_in_float16():
    torch.manual_seed(0)
    x, slope = torch.randn(3, 8), torch.randn(3, 8)
    x[1] = 0  # as at padding, where the loss reads nothing
    slope[1] = 0
    results = []
    for dtype in (torch.float16, torch.float32):
        norm, leaf = LayerNormConfig(eps=1e-12).build(8).to(dtype), x.to(dtype).requires_grad_()
        leaves = [leaf, *norm.parameters()]
        results.append(torch.autograd.grad((norm(leaf) * slope.to(dtype)).sum(), leaves))
    for half, exact in zip(*results):
        torch.testing.assert_close(half.float(), exact, rtol=1e-2, atol=1e-2)


def test_rms_norm():
    norm = randomized(RMSNormConfig(eps=0.1))
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan")])
def test_eps_is_checked(eps: float):
    with pytest.raises(InputError, match="eps: expected a number above 0, got"):
        RMSNormConfig(eps=eps)


@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 7, 5), (0, 5)])
def test_rms_norm_without_gradients_is_torchs(shape: tuple[int, ...]):
    norm = randomized(RMSNormConfig(eps=0.1)).float()
    for scale in (1e-3, 1.0, 1e3):
        x = scale * torch.randn(shape)
        kept = x.clone()
        with torch.no_grad():
            torch.testing.assert_close(norm(x), torch.rms_norm(x, (5,), norm.weight, 0.1))
        assert torch.equal(x, kept)
        assert norm(x).requires_grad


def test_dynamic_tanh_and_its_gradients():
    """The derivatives are by hand: tanh' = 1 - tanh^2."""
    norm = randomized(DynamicTanhConfig())
    x = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(3, 7, 5, dtype=torch.float64)
    y, alpha, scaled = norm(x), norm.alpha.item(), norm.alpha.item() * x.detach().numpy()
    squashed = (np.exp(scaled) - np.exp(-scaled)) / (np.exp(scaled) + np.exp(-scaled))
    weight, upstream = norm.weight.detach().numpy(), slope.numpy()
    through = upstream * weight * (1 - squashed**2)
    expected = {
        "y": squashed * weight + norm.bias.detach().numpy(),
        "x": alpha * through,
        "alpha": np.array([(x.detach().numpy() * through).sum()]),
        "weight": (upstream * squashed).sum((0, 1)),
        "bias": upstream.sum((0, 1)),
    }
    slopes = torch.autograd.grad((y * slope).sum(), [x, norm.alpha, norm.weight, norm.bias])
    for actual, (name, exact) in zip((y.detach(), *slopes), expected.items(), strict=True):
        np.testing.assert_allclose(actual.numpy(), exact, rtol=1e-11, atol=1e-12, err_msg=name)


def test_a_new_dynamic_tanh_bounds_each_channel_by_itself():
    norm = DynamicTanhConfig(alpha=0.25).build(3).double()
    x = torch.tensor([1e-6, 4.0, -1e6], dtype=torch.float64)
    torch.testing.assert_close(norm(x).tolist(), [2.5e-7, 0.7615941559557649, -1.0])
    assert norm(x.float()).dtype == torch.float64
    with pytest.raises(InputError, match="alpha: expected a number above 0, got 0"):
        DynamicTanhConfig(alpha=0.0)


def built(width: int = 5, **options: float) -> BatchNorm:
    torch.manual_seed(0)
    norm = BatchNorm(width, BatchNormConfig(**options)).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def torchs(norm: BatchNorm) -> nn.BatchNorm1d:
    other = nn.BatchNorm1d(len(norm.weight), eps=norm.eps, momentum=norm.momentum).double()
    other.load_state_dict(norm.state_dict(), strict=False)
    return other


@pytest.mark.parametrize("shape", [(3, 7, 5), (1, 2, 5), (4, 1, 5)])
def test_without_padding_it_is_torchs_over_all_tokens(shape: tuple[int, ...]):
    """Outputs, gradients and running statistics over several batches, then evaluation."""
    norm = built(eps=0.1, momentum=0.3)
    other = torchs(norm)
    for _ in range(3):
        x = (torch.randn(shape, dtype=torch.float64) * 3 + 1).requires_grad_()
        weight = torch.randn(shape, dtype=torch.float64)
        actual, expected = norm(x), other(x.flatten(0, 1)).view(shape)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        gradients = (
            torch.autograd.grad((y * weight).sum(), [x, *module.parameters()])
            for y, module in ((actual, norm), (expected, other))
        )
        for own, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norm, name), getattr(other, name), rtol=1e-12, atol=1e-12)
    x = torch.randn(shape, dtype=torch.float64)
    expected = other.eval()(x.flatten(0, 1)).view(shape)
    torch.testing.assert_close(norm.eval()(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", [0.0, 1e6, float("nan")])
def test_padding_enters_no_statistics(padding: float):
    """Nor the gradients of real tokens; a row may be padding from end to end."""
    real = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]]).bool()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    x[~real] = padding
    x.requires_grad_()
    norm, alone = built(), built()
    actual, expected = norm(x, real)[real], alone(x[real])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.running_mean, alone.running_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.running_var, alone.running_var, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(actual)
    gradients = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (actual, expected))
    own, theirs = gradients
    torch.testing.assert_close(own[real], theirs[real], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", [0, 1])
def test_where_there_are_no_statistics_the_running_ones_are_used_and_stay(tokens: int):
    norm = built()
    norm(torch.randn(2, 9, 5, dtype=torch.float64))
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(1, 3, 5, dtype=torch.float64)
    actual = norm(x, torch.arange(3)[None] < tokens)
    assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())
    assert torch.equal(actual[:, :tokens], norm.eval()(x)[:, :tokens])
    assert actual.isfinite().all()


def test_momentum_is_checked():
    for momentum in (0.0, -0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match=r"momentum: expected a share in \(0, 1\], got"):
            BatchNormConfig(momentum=momentum)


def model(preset: str = "encoder-tiny", block: str = "pre", **changes: object) -> Transformer:
    torch.manual_seed(0)
    options = {"hidden_size": 16, "attention.num_attention_heads": 2, "intermediate_size": 16}
    sizes = {"num_hidden_layers": 2, "vocab_size": 50, "dropout": 0.0, "max_position_embeddings": 32}
    return polyformer.create_model(preset, norm="batch", block=block, **options, **sizes, **changes)


def statistics(trained: Transformer) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in trained.state_dict().items() if "running" in name}


@pytest.mark.parametrize("preset", ["encoder-tiny", "decoder-tiny"])
@pytest.mark.parametrize("block", ["post", "pre", "parallel", "gated"])
def test_a_models_norms_see_real_tokens_alone(block: str, preset: str):
    """In training: outputs and all running statistics, whatever stands at the padding, wherever it stands."""
    reference = model(preset, block, **{"embedding.normed": True}).double().train()
    ids = torch.randint(1, 50, (2, 6))
    expected = copy.deepcopy(reference)
    whole = expected(ids).last_hidden_state
    for filler in (0, 7):
        padded = torch.full((2, 10), filler)
        padded[0, 3:9], padded[1, :6] = ids
        mask = torch.zeros(2, 10).long()
        mask[0, 3:9], mask[1, :6] = 1, 1
        actual = copy.deepcopy(reference)
        hidden = actual(padded, attention_mask=mask).last_hidden_state[mask.bool()]
        torch.testing.assert_close(hidden, whole.flatten(0, 1), rtol=1e-9, atol=1e-9)
        for name, tensor in statistics(actual).items():
            torch.testing.assert_close(tensor, statistics(expected)[name], rtol=1e-9, atol=1e-9)


def test_running_statistics_are_saved(tmp_path: Path):
    saved = model("decoder-tiny").train()
    ids = torch.randint(0, 50, (3, 9))
    saved(ids)
    saved.eval().save_pretrained(tmp_path)
    loaded = polyformer.from_pretrained(tmp_path)
    assert statistics(loaded).keys() == statistics(saved).keys() != set()
    assert torch.equal(loaded(ids).logits, saved(ids).logits)


def test_in_training_a_decoder_sees_its_future_and_in_evaluation_not():
    """What the docstring declares."""
    decoder = model("decoder-tiny").double()
    ids = torch.randint(0, 50, (2, 8))
    other = ids.clone()
    other[:, 5:] = torch.randint(0, 50, (2, 3))
    for training in (True, False):
        decoder.train(training)
        with torch.no_grad():
            first, second = (decoder(x).last_hidden_state[:, :5] for x in (ids, other))
        assert torch.allclose(first, second, rtol=1e-12, atol=1e-12) != training


REFUSED = {
    "block": ("decoder-tiny", {"block": "reversible"}, "norm: 'batch' .*block 'reversible'"),
    "memory": (
        "decoder-tiny",
        {"memory": "recurrent", "position": "transformer_xl"},
        "norm: 'batch' .*memory 'recurrent'",
    ),
    "depth": ("decoder-tiny", {"depth": "act"}, "norm: 'batch' .*depth 'act'"),
    "head": ("encoder-tiny", {"head": "enhanced_masked"}, "encoder.norm: head 'enhanced_masked'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_norms_tokens_twice_is_refused(name: str):
    preset, changes, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        model(preset, **changes)


def test_recomputed_activations_are_refused():
    recomputing = model("decoder-tiny").train()
    recomputing.decoder.recompute = True
    with pytest.raises(InputError, match="recompute: a norm over all tokens would count every batch twice"):
        recomputing(torch.zeros(1, 4, dtype=torch.long))
