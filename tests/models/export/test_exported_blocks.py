"""Exported graphs with attention in blocks give the hidden states of texts of any length and padding."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import polyformer
from polyformer.attention.functional.backends.blocks import QueryBlocks, count_blocks
from polyformer.attention.patterns import Random
from polyformer.models.export import ExportedModel, export_model
from registered import EVERYTHING

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 50}
PATTERNS = {
    "Window(3) | Marked()": "dense (its pattern has no rule for blocks)",
    "Window(5)": "blocks of 64 with 192 keys",
    "Window(7, dilation=3) | GlobalEnd(2)": "blocks of 64 with 194 keys",
    "BlockWindow(4, 1, 0) | BlockWindow(6, 0, 1)": "blocks of 60 with 180 keys",
    # BigBird's pattern, in which a text of up to 30 tokens sees itself whole.
    "Whole(30) | BlockWindow(8) | Global(8) | GlobalEnd(8) | Random(1, 8)": "blocks of 8 with 96 keys",
    "Window(300)": "dense (a block would see 896 keys, and the longest text has 600)",
}

WITH_DISTANCES = "Window(3) | Global(2)"
"""Of a model with positions by distance; the others have learned positions."""

DIFFERENT = [pattern for pattern in PATTERNS if pattern != "Window(5)" and "Random" not in pattern]
"""Every night also a plain window, and BigBird's blocks, which take as long as all the others."""


def exported_encoder(pattern: str, folder: Path, format: str) -> tuple[polyformer.Transformer, ExportedModel]:
    torch.manual_seed(0)
    position = "alibi" if pattern == WITH_DISTANCES else "learned"
    model = polyformer.create_model(
        "encoder-tiny", **SIZES, attention=pattern, position=position, max_position_embeddings=600
    ).eval()
    return model, export_model(model, folder, format)  # type: ignore[arg-type]


def padded(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Random ids; padding before the first text, after the last, and inside the second."""
    ids = torch.randint(3, 50, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, : length // 4] = mask[-1, length - length // 3 :] = 0
    mask[1:2, length // 2 : length // 2 + 2] = 0
    return ids, mask


@pytest.mark.parametrize("pattern", [*(PATTERNS if EVERYTHING else DIFFERENT), WITH_DISTANCES])
def test_a_graph_gives_the_hidden_states_of_padded_texts(pattern: str, tmp_path: Path) -> None:
    model, exported = exported_encoder(pattern, tmp_path, "torch")
    assert exported.plans == (PATTERNS.get(pattern, "blocks of 64 with 194 keys"),)
    graph = exported.program.module()
    for rows, length in (2, 9), (1, 1), (2, 131), (2, 400), (1, 600):
        ids, mask = padded(rows, length)
        expected, hidden = model(ids, mask).last_hidden_state, graph(ids, mask)[-1]
        real = mask.bool()
        torch.testing.assert_close(hidden[real], expected[real], rtol=1e-4, atol=1e-5)


def test_every_block_of_the_longest_text_has_links() -> None:
    needs = Random(1, 8).structure.blocks
    assert len(QueryBlocks.of(needs, 600).links) == count_blocks(600, 8)


def test_onnxruntime_gives_the_hidden_states(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, exported = exported_encoder("BlockWindow(8) | Global(2) | GlobalEnd(1)", tmp_path, "onnx")
    session = onnxruntime.InferenceSession(exported.file)
    for rows, length in (2, 9), (1, 131), (2, 400):
        ids, mask = padded(rows, length)
        feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        (hidden,) = session.run(["last_hidden_state"], feed)
        real = mask.bool()
        expected = model(ids, mask).last_hidden_state[real]
        torch.testing.assert_close(torch.from_numpy(hidden)[real], expected, rtol=1e-4, atol=1e-5)


def test_a_decoder_without_a_cache_reads_windows_in_blocks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {**SIZES, "attention": "Window(5, 0) | Global(1)", "max_position_embeddings": 600}
    model = polyformer.create_model("decoder-tiny", **options).eval()
    exported = export_model(model, tmp_path, "torch", cache=False)
    assert exported.plans == ("blocks of 64 with 129 keys",)
    ids, mask = padded(2, 131)
    expected, (logits, _) = model(ids, mask).logits, exported.program.module()(ids, mask)
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)
