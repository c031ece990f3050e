"""Costs against counts by hand, and the tree of parts."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polyformer.attention.mechanisms import Mechanism, MechanismConfig
from polyformer.cli.main import main
from polyformer.cli.plots.model import cost, image_cost, parameters, tree
from polyformer.core.ops.product_kernels import ONEDNN, PRODUCTS, ProductKernels
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.presets import create_model, model_config


def on_meta(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def test_flops_of_a_decoder_by_hand():
    model = on_meta(model_config("decoder-tiny"))
    n, width, inner, vocab = 96, 128, 512, 512
    layer = 2 * n * (4 * width * width + 2 * width * inner) + 4 * n * n * width
    assert cost(model, n).flops == 2 * layer + 2 * n * width * vocab


def test_flops_of_an_image_by_hand():
    with torch.device("meta"):
        model: Any = create_model("vit-mini")
    n, width, inner = 65, 96, 192
    layer = 2 * n * (4 * width * width + 2 * width * inner) + 4 * n * n * width
    assert image_cost(model).flops == 2 * 64 * 48 * width + 6 * layer + 2 * width * 10
    assert (image_cost(model).length, image_cost(model).cache) == (n, None)


@pytest.mark.parametrize("length", [64, 200])
def test_cache_of_a_decoder_by_hand(length: int):
    assert cost(on_meta(model_config("decoder-tiny")), length).cache == 2 * 2 * length * 128 * 4


def test_an_encoder_decoder_caches_its_source_too():
    model = on_meta(model_config("transformer-tiny"))
    assert cost(model, 80).cache == 2 * 2 * 80 * 32 * 4


def test_an_encoder_has_no_cache_and_activations_grow_with_length():
    model = on_meta(model_config("encoder-small"))
    short, long = cost(model, 128), cost(model, 256)
    assert short.cache is None
    assert long.activations == pytest.approx(2 * short.activations, rel=1e-3)
    eight_tensors_a_layer = 2 * 8 * 128 * 128 * 4
    assert short.activations > eight_tensors_a_layer


def test_windows_over_long_texts_are_counted_without_numbers_to_look_at():
    model = on_meta(model_config("decoder-tiny").override("attention", "Window(256)"))
    dense = on_meta(model_config("decoder-tiny"))
    assert cost(model, 8192).flops < cost(dense, 8192).flops / 4


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": {"kind": "lsh", "rounds": 2, "buckets": 8, "window": 16}},
        {"attention": "performer"},
        {"attention": "rfa"},
        {"attention": {"kind": "routing", "local_heads": 0, "clusters": 4, "window": 200}},
        {"feedforward": {"kind": "experts", "experts": 4, "top_k": 2}, "attention": "rfa"},
    ],
    ids=str,
)
def test_parts_that_read_numbers_count_as_they_compute(changes: dict[str, Any]):
    """In float64, of which all products are torch's. Clusters of a routing layer have other sizes here."""
    config = model_config("decoder-tiny", changes)
    model, ids = Transformer(config).double().eval(), torch.zeros(1, 192, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        _ = model.forward(ids.random_(500)).logits
    near = 0.1 if "routing" in str(changes) else 0
    assert cost(on_meta(config), 192).flops == pytest.approx(counter.get_total_flops(), rel=near)


def test_a_model_whose_parts_read_numbers_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["show", "decoder-tiny", "--model.attention", "lsh", "--model.feedforward", "experts"]) == 0
    assert "mechanism LSHAttention" in capsys.readouterr().out


def test_equal_layers_are_shown_once():
    model = on_meta(model_config("decoder-small"))
    text = tree(model)
    assert text.count("layers 4 x Layer") == text.count("mechanism SoftmaxAttention") == 1
    assert f"{parameters(model):,}" in text.split("\n")[0]
    assert "Dropout" not in text


@pytest.mark.parametrize("reads_numbers", [False, True])
def test_an_own_mechanism_without_a_cache_is_counted(
    reads_numbers: bool, own_mechanism: type[Any], capsys: pytest.CaptureFixture[str]
):
    """On the meta device, or in a real pass if its operations read numbers."""
    own_mechanism.reads_numbers = reads_numbers
    with PRODUCTS.using(ProductKernels(forward={"1x1x1": ONEDNN})):  # as measured on some processors
        command = ["show", "decoder-tiny", "--model.attention", "unscaled", "--model.position", "rope"]
        assert main(command) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip()[:1].isdigit()]
    lengths, width, inner, vocab = [128, 256, 512, 1024], 128, 512, 512
    assert [int(row[0]) for row in rows][:4] == lengths
    for n, row in zip(lengths, rows):
        layer = 2 * n * (4 * width * width + 2 * width * inner) + 4 * n * n * width
        assert float(row[1]) == pytest.approx(2 * layer + 2 * n * width * vocab, rel=2e-3)
        assert len(row) == 4, "tokens, FLOPs, activations and their unit: no cache"
    assert "no cache: generation computes the whole text again for each token" in printed
    assert ("measured in real passes" in printed) == reads_numbers
    assert (len(rows) == 4) == reads_numbers


@pytest.fixture
def own_mechanism() -> Iterator[type[Any]]:
    """Weights are the scores themselves; nothing is declared but what it lacks."""

    class Unscaled(Mechanism):
        def forward(self, q: Any, k: Any, v: Any, context: Any, state: Any, position: Any) -> Any:
            if UnscaledConfig.reads_numbers:
                q = q / max(q.abs().max().item(), 1)
            return (q @ k.mT).tril() @ v, None

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class UnscaledConfig(MechanismConfig):
        kind: ClassVar[str] = "unscaled"
        reads_numbers: ClassVar[bool] = False
        supports_packing: ClassVar[bool] = False
        supports_kv_cache: ClassVar[bool] = False
        supports_score_bias: ClassVar[bool] = False

        def build(self, num_heads: int, head_size: int) -> Mechanism:
            return Unscaled()

    yield UnscaledConfig
    del MechanismConfig.kinds["unscaled"]
