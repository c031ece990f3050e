"""What the explorer records: exact weights of every mechanism and pattern, in what the page is given."""

import numpy as np
import pytest
import torch
from torch import Tensor

from polyformer import InputError, create_model
from polyformer.cli.plots.explorer.calls import CELLS, TYPES, Buffers, distance_edges, measure_call
from polyformer.cli.plots.explorer.explore import planned, size, written
from polyformer.cli.plots.explorer.record import recorded_calls

LENGTH = 23
IDS = torch.randint(5, 60, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def decoder(attention: str = "Full()", **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return create_model("decoder-tiny", vocab_size=64, attention=attention, **options).eval()


@pytest.mark.parametrize(
    "attention",
    [
        "Full()",
        "Window(5) | Global(1)",
        "PerHead([Window(3), Full()])",
        "Strided(4)",
        "Window(4, dilation=2)",
    ],
)
@pytest.mark.parametrize("position", ["rope", "alibi", "transformer_xl"])
def test_weights_of_patterns_are_those_of_the_model(attention: str, position: str):
    model = decoder(attention, position=position, num_attention_heads=2)
    with torch.no_grad():
        expected = model(IDS, output_attentions=True).attentions
    calls = recorded_calls(model, {"input_ids": IDS})
    assert [(call.name, call.cross) for call in calls] == [
        (f"decoder layer {i + 1}, self-attention", False) for i in range(len(expected))
    ]
    for call, weights in zip(calls, expected):
        torch.testing.assert_close(measure_call(call).weights(), weights[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "attention", ["lsh(buckets=4, window=6)", "routing(clusters=2, window=8)", "performer(features=16)"]
)
def test_the_matrix_of_a_mechanism_takes_values_to_outputs(attention: str):
    model = decoder(attention, position="rope")
    outputs: list[tuple[Tensor, Tensor]] = []
    mechanism = model.decoder.layers[0].attention.mechanism
    handle = mechanism.register_forward_hook(lambda _, arguments, out: outputs.append((arguments[2], out[0])))
    calls = recorded_calls(model, {"input_ids": IDS})
    handle.remove()
    values, y = outputs[0]
    site = measure_call(calls[0])
    torch.testing.assert_close(site.weights() @ values[0], y[0], atol=1e-5, rtol=1e-4)
    assert calls[0].mechanism == attention.split("(")[0]
    assert site.weights().triu(1).abs().max() == 0


def test_an_encoder_decoder_has_three_kinds_of_calls():
    torch.manual_seed(0)
    model = create_model("transformer-tiny", vocab_size=64).eval()
    calls = recorded_calls(model, {"input_ids": IDS, "decoder_input_ids": IDS[:, :7]})
    assert {(call.stack, call.keys) for call in calls} == {
        ("encoder", "encoder"),
        ("decoder", "decoder"),
        ("decoder", "encoder"),
    }
    cross = next(measure_call(call) for call in calls if call.cross)
    assert cross.shape[1:] == (7, LENGTH)
    torch.testing.assert_close(cross.weights().sum(-1), torch.ones(cross.shape[:2]))


def array(reference: dict, buffers: Buffers) -> np.ndarray:
    """What a page reads."""
    content = b"".join(buffers.parts)[reference["at"] :]
    count = int(np.prod(reference["shape"]))
    return np.frombuffer(content, reference["dtype"], count).reshape(reference["shape"])


@pytest.mark.parametrize(("precision", "error"), [("float32", 1e-6), ("float16", 2e-3), ("int8", 3e-2)])
def test_a_page_can_compute_the_weights(precision: str, error: float):
    model = decoder("Window(6)", position="alibi", num_attention_heads=4, num_key_value_heads=2)
    site = measure_call(recorded_calls(model, {"input_ids": IDS})[0])
    buffers = Buffers()
    detail = written(site, precision, buffers)
    assert (detail["kind"], detail["changes"]) == ("pairs", [])
    assert size(site, precision) <= buffers.size <= size(site, precision) + 4096  # the biases besides

    def vectors(name: str) -> np.ndarray:
        x, scales = array(detail[name], buffers).astype("f4"), detail[f"{name}_scales"]
        return x if scales is None else x * array(scales, buffers)[..., None]

    q, k = vectors("q"), vectors("k").repeat(2, 0)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    bias = array(detail["bias"], buffers)
    entry = np.clip(distance - detail["first"], 0, bias.shape[1] - 1)
    scores = q @ k.swapaxes(1, 2) * detail["scale"] + bias[:, entry]
    weights = np.exp(scores - array(detail["lse"], buffers)[..., None])
    assert site.allowed is not None
    allowed = site.allowed.written(buffers, 4)
    assert allowed["allowed_of_head"] == [0, 0, 0, 0]
    offsets, starts, stops = (
        array(allowed["allowed"][0][name], buffers) for name in ("offsets", "starts", "stops")
    )
    mask = np.zeros((LENGTH, LENGTH), bool)
    for i in range(LENGTH):
        for place in range(offsets[i], offsets[i + 1]):
            mask[i, starts[place] : stops[place]] = True
    np.testing.assert_array_equal(mask, (distance >= 0) & (distance <= 6))
    np.testing.assert_allclose(weights * mask, site.weights(), atol=error)


def test_room_decides_on_precision_and_then_on_layers():
    sites = [measure_call(call) for call in recorded_calls(decoder(num_hidden_layers=4), {"input_ids": IDS})]
    sizes = {precision: sum(size(site, precision) for site in sites) for precision in ("float32", "int8")}
    assert planned(sites, sizes["float32"]) == ("float32", [0, 1, 2, 3])
    assert planned(sites, sizes["float32"] - 1)[0] == "float16"
    assert planned(sites, sizes["int8"] - 1) == ("int8", [0, 1, 2])
    assert planned(sites, sizes["int8"] // 2) == ("int8", [0, 2])
    assert planned(sites, 0) == ("int8", [])


def test_summaries_are_of_the_exact_weights():
    site = measure_call(recorded_calls(decoder("Window(4)"), {"input_ids": IDS})[0])
    weights = site.weights()
    assert site.summaries.cells.shape[1:] == (LENGTH, LENGTH)
    torch.testing.assert_close(site.summaries.cells, weights)  # a cell for each weight of a short text
    edges = site.summaries.edges
    assert edges == distance_edges(LENGTH) == [0, 1, 2, 3, 5, 9, 17]
    distance = (torch.arange(LENGTH).view(-1, 1) - torch.arange(LENGTH)).abs()
    near = (weights * (distance == 1)).sum((1, 2)) / weights.sum((1, 2))
    np.testing.assert_allclose(site.summaries.distance[:, 1], near, rtol=1e-5)
    np.testing.assert_allclose(site.summaries.distance.sum(1), 1, rtol=1e-5)
    assert CELLS < 200
    long = measure_call(recorded_calls(decoder("Window(4)"), {"input_ids": IDS.repeat(1, 5)})[0])
    assert long.summaries.thumbnails.shape[1:] == (CELLS, CELLS)


def test_arrays_lie_aligned():
    buffers = Buffers()
    references = [buffers.add(np.arange(3).astype(name)) for name in TYPES]
    assert all(reference["at"] % 8 == 0 for reference in references)
    for reference, name in zip(references, TYPES):
        np.testing.assert_array_equal(array(reference, buffers), np.arange(3).astype(name))


def test_models_of_transformers_are_seen_and_left_as_they_were():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertModel._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(IDS, output_attentions=True).attentions
    calls = recorded_calls(model, {"input_ids": IDS})
    assert [(call.stack, call.layer) for call in calls] == [("encoder", 0), ("encoder", 1)]
    for call, weights in zip(calls, expected):
        torch.testing.assert_close(measure_call(call).weights(), weights[0], atol=1e-5, rtol=1e-4)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(InputError, match="no layer of Linear dispatches through transformers'"):
        recorded_calls(torch.nn.Linear(2, 2), {"input": torch.zeros(1, 2)})
