"""Exported decoders: a graph with the cache as input and output continues texts like the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyformer
from polyformer.core.errors import InputError
from polyformer.models.export import ExportedModel, export_model

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("gpt2", {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}),
    "rope and grouped heads": (
        "smollm2-135m",
        {"num_hidden_layers": 2, "hidden_size": 72, "intermediate_size": 64},
    ),
    "window and global tokens": (
        "decoder-tiny",
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "attention": "Window(5, 0) | Global(2)",
        },
    ),
}


def small_decoder(name: str) -> polyformer.Transformer:
    torch.manual_seed(0)
    preset, options = DECODERS[name]
    return polyformer.create_model(preset, **options, vocab_size=50).eval()


def empty_caches(model: polyformer.Transformer, exported: ExportedModel, rows: int) -> list[Tensor]:
    assert model.decoder is not None
    attention = model.decoder.sequence[0].attention
    return [torch.zeros(rows, attention.config.kv_heads, 0, attention.head_size)] * len(exported.inputs[2:])


@pytest.mark.parametrize("name", DECODERS)
def test_a_graph_continues_padded_texts_of_any_length(name: str, tmp_path: Path) -> None:
    model = small_decoder(name)
    exported = export_model(model, tmp_path, "torch")
    graph = torch.export.load(exported.file).module()
    for rows, lengths in (3, (9, 1, 4)), (1, (1, 2)), (2, (30, 7)):
        ids = torch.randint(3, 50, (rows, sum(lengths)))
        mask = torch.ones_like(ids)
        mask[0, : min(3, lengths[0] - 1)] = 0  # padding before the text
        expected = model(ids, mask).logits
        caches, stop = empty_caches(model, exported, rows), 0
        for new in lengths:
            start, stop = stop, stop + new
            logits, *caches = graph(ids[:, start:stop], mask[:, :stop], *caches)
            real = mask[:, start:stop].bool()
            torch.testing.assert_close(logits[real], expected[:, start:stop][real], rtol=1e-4, atol=1e-5)
            assert caches[0].shape[2] == stop


def test_onnxruntime_decodes_the_same_tokens(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = small_decoder("rope and grouped heads")
    session = onnxruntime.InferenceSession(export_model(model, tmp_path).file)
    inputs, outputs = session.get_inputs(), [output.name for output in session.get_outputs()]
    assert [axis.shape for axis in inputs[:3]] == [
        ["batch", "length"],
        ["batch", "total"],
        ["batch", 3, "past", 8],
    ]
    assert outputs[1] == "present.0.key"
    prompt = torch.randint(3, 50, (1, 7))
    text = prompt.numpy()
    caches = {x.name: torch.zeros(1, x.shape[1], 0, x.shape[3]).numpy() for x in inputs[2:]}
    new = text
    for _ in range(64):
        feed = {"input_ids": new, "attention_mask": text * 0 + 1, **caches}
        logits, *present = session.run(None, feed)
        caches = dict(zip(caches, present))
        new = logits[:, -1:].argmax(-1)
        text = torch.cat([torch.from_numpy(text), torch.from_numpy(new)], 1).numpy()
    assert text.tolist() == model.generate(prompt, max_new_tokens=64).sequences.tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_graph_has_the_bounds_that_memory_planning_needs(rows: int, tmp_path: Path) -> None:
    model = small_decoder("rope and grouped heads")
    exported = export_model(model, tmp_path, "torch", max_tokens=20, max_rows=rows)
    assert exported.longest == 20
    assert all(limits.upper <= 40 for limits in exported.program.range_constraints.values())
    graph = torch.export.load(exported.file).module()
    ids = torch.randint(3, 50, (rows, 7))
    logits, *_ = graph(ids, torch.ones_like(ids), *empty_caches(model, exported, rows))
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    ids = torch.randint(3, 50, (rows, 21))
    with pytest.raises((AssertionError, RuntimeError)):
        graph(ids, torch.ones_like(ids), *empty_caches(model, exported, rows))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_tokens": 9000}, "max_tokens: expected 1 to 1,024"),
        ({"max_rows": 0}, "max_rows: expected 1 or more"),
    ],
)
def test_bounds_outside_the_model_are_refused(bounds: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        export_model(small_decoder("learned positions"), tmp_path, "torch", **bounds)


def test_models_without_such_a_graph_are_refused(tmp_path: Path) -> None:
    image = polyformer.create_model("vit-mini")
    with pytest.raises(InputError, match="model: expected a Transformer that reads texts, got Vision"):
        export_model(image, tmp_path)
    memory = polyformer.create_model(
        "decoder-tiny", vocab_size=50, memory="recurrent", position="transformer_xl"
    )
    with pytest.raises(
        InputError, match=r"cache: .*a memory or a depth policy .* export it with cache=False"
    ):
        export_model(memory, tmp_path)
    with pytest.raises(InputError, match="format: expected 'onnx' or 'torch', got 'tflite'"):
        export_model(memory, tmp_path, "tflite")  # type: ignore[arg-type]
