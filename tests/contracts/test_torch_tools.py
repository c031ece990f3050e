"""Torch's own tools: pytrees, pickle, `torch.export`, `torch.jit.trace`, `torch.func`, quantisation."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import polyformer
from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Window
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer

PRESETS = "decoder-tiny", "gpt2", "bert-base", "transformer-base", "t5-base", "deberta-base"


def tiny_model(preset: str) -> Transformer:
    torch.manual_seed(0)
    model = polyformer.create_model(
        preset, num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=50
    )
    return model.eval()


def batch(model: Transformer, rows: int = 2, more: int = 0) -> dict[str, Tensor]:
    ids = {"input_ids": torch.randint(3, 50, (rows, 9 + more))}
    if model.encoder is not None and model.decoder is not None:
        ids["decoder_input_ids"] = torch.randint(3, 50, (rows, 5 + more))
    return ids


@pytest.mark.parametrize("preset", ["decoder-tiny", "transformer-base"])
def test_an_output_is_a_pytree_and_can_be_pickled(preset: str) -> None:
    model = tiny_model(preset)
    output = model(**batch(model), output_hidden_states=True)
    double = tree_map(lambda x: 2 * x if isinstance(x, Tensor) else x, output)
    assert isinstance(double, polyformer.ModelOutput)
    assert torch.equal(double.logits, 2 * output.logits)
    assert torch.equal(double.hidden_states[0], 2 * output.hidden_states[0])
    assert double.state is output.state
    again = pickle.loads(pickle.dumps(output))
    assert torch.equal(again.logits, output.logits)
    assert torch.equal(again.last_hidden_state, output.last_hidden_state)
    assert isinstance(again.state, type(output.state))


@pytest.mark.parametrize("preset", ["decoder-tiny", "transformer-base"])
@pytest.mark.parametrize("learning", [True, False])
def test_a_copy_of_an_output_has_its_values_without_a_graph(preset: str, learning: bool) -> None:
    model = tiny_model(preset)
    ids = batch(model)
    with torch.set_grad_enabled(learning):
        output = model(**ids, labels=list(ids.values())[-1], output_hidden_states=True, use_cache=True)
    copied = copy.deepcopy(output)
    pairs = zip(tree_leaves(copied), tree_leaves(output), strict=True)
    for mine, theirs in (pair for pair in pairs if isinstance(pair[1], Tensor)):
        assert torch.equal(mine, theirs)
        assert mine is not theirs
        assert not mine.requires_grad
    assert torch.equal(copied.logits, output.logits)
    assert output.loss.requires_grad == learning
    step = {name: value[:, -1:] for name, value in ids.items() if name != "input_ids" or len(ids) == 1}
    expected = model(**step, state=output.state).logits
    assert torch.equal(model(**step, state=copied.state).logits, expected)


def test_a_loss_alone_computes_no_predictions() -> None:
    model = tiny_model("decoder-tiny")
    ids = batch(model)
    output = model(**ids, labels=ids["input_ids"])
    assert not any(x.shape[-1] == 50 for x in tree_leaves(output) if isinstance(x, Tensor) and x.dim())
    same = tree_map(lambda x: x, output)
    assert torch.equal(same.logits, output.logits)


@pytest.mark.parametrize("preset", ["decoder-tiny", "transformer-base"])
def test_export_with_any_batch_and_length(preset: str) -> None:
    """Encoders are exported by test_onnx.py."""
    model = tiny_model(preset)
    rows = torch.export.Dim("rows", min=2, max=64)
    ids = batch(model)
    shapes = {name: {0: rows, 1: torch.export.Dim(name, min=2, max=30)} for name in ids}
    exported = torch.export.export(model, (), ids, dynamic_shapes=shapes, strict=False)
    other = batch(model, rows=3, more=4)
    ours = exported.module()(**other)
    torch.testing.assert_close(ours.logits, model(**other).logits, rtol=1e-4, atol=1e-5)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()(**other)
    torch.testing.assert_close(loaded.logits, ours.logits)


class Logits(nn.Module):
    """A model for `torch.jit.trace`, which takes tensors in turn and gives tensors."""

    def __init__(self, model: Transformer, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *ids: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, ids))).logits


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is (deprecated|not supported):DeprecationWarning")
@pytest.mark.parametrize("preset", PRESETS)
def test_jit_trace(preset: str) -> None:
    model = tiny_model(preset)
    ids = batch(model)
    traced: Any = torch.jit.trace(Logits(model, list(ids)), tuple(ids.values()), check_trace=False)
    other = batch(model)
    torch.testing.assert_close(traced(*other.values()), model(**other).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_functional_calls_differentiate(preset: str) -> None:
    model = tiny_model(preset)
    ids, weights = batch(model), dict(model.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (), ids).logits.square().mean()

    grads = torch.func.grad(loss)(weights)
    model(**ids).logits.square().mean().backward()
    for name, weight in weights.items():
        expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(grads[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own jvp
def test_torch_func_over_attention_has_the_gradients_of_autograd() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 2, 70, 8, dtype=torch.float64)
    function = lambda x: attend(x, x, x, pattern=Window(3), score_mod=lambda s, b, h, i, j: s - h).sin().sum()  # noqa: E731
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sum(function(row) for row in leaf), leaf)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(function))(x), expected)
    value, slope = torch.func.jvp(function, (x[0],), (x[1],))
    torch.testing.assert_close(value, function(x[0]))
    torch.testing.assert_close(slope, (expected[0] * x[1]).sum())


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_tiled_says_what_torch_func_can_use(transform: Any) -> None:
    function = lambda x: attend(x, x, x, backend="tiled").sum()  # noqa: E731
    with pytest.raises(InputError, match=r"backend 'tiled' cannot take this call: torch\.func .* use 'auto'"):
        transform(function)(
            torch.randn(2, 1, 2, 9, 8) if transform is torch.func.vmap else torch.randn(1, 2, 9, 8)
        )


def quantized(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.(ao.quantization|quantize_per_tensor).* deprecated")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def test_quantising_our_linear_layers_warns_with_the_way_out() -> None:
    model = tiny_model("decoder-tiny")
    with pytest.warns(UserWarning, match="Linear is not quantised as a torch.nn.Linear.*as_torch"):
        quantized(model)
    ids = batch(model)
    expected = model(**ids).logits
    plain = polyformer.nn.as_torch(model)
    torch.testing.assert_close(plain(**ids).logits, expected, rtol=1e-4, atol=1e-5)
    small = quantized(plain)
    assert any("quantized" in type(module).__module__ for module in small.modules())
    error = (small(**ids).logits - expected).abs().max()
    assert 0 < error < 0.1 * expected.abs().max()
