"""`torch.export` and `torch.onnx.export`: graphs give the model's logits at other batches and lengths."""

import onnxruntime
import pytest
import torch
from torch import Tensor

import polyformer
from registered import EVERYTHING

SMALL_BLOCKS = "Whole(12) | BlockWindow(2) | Global(2) | GlobalEnd(2) | Random(1, 2)"
"""BigBird's pattern; texts longer than 12 tokens are not seen whole."""
FEW_ROWS = {
    "kind": "deberta",
    "max_relative_positions": 40,
    "buckets": 16,
    "share_projections": True,
    "norm_embeddings": True,
}
"""DeBERTa's second form with fewer rows than the longest text has distances, and more than the shortest."""
PRESETS = {
    "decoder-tiny": {},
    "bert-base": {},
    "deberta-base": {},
    "deberta-v3-small": {"position": FEW_ROWS},
    "bigbird-base": {"attention": SMALL_BLOCKS},
}
SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 50}

WITH_TABLES = ["deberta-v3-small"]
"""Tables of distances have sizes of their own. The rest is exported every night."""


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:# The axis name.*shares the same shape constraints:UserWarning")
@pytest.mark.parametrize("preset", PRESETS if EVERYTHING else WITH_TABLES)
def test_exported_graphs_give_our_logits(preset: str) -> None:
    torch.manual_seed(0)
    model = polyformer.create_model(preset, **SIZES, **PRESETS[preset]).eval()
    inputs = padded(2, 9)
    rows, length = torch.export.Dim("rows", min=2, max=64), torch.export.Dim("length", min=2, max=40)
    shapes = {name: {0: rows, 1: length} for name in inputs}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    program = torch.onnx.export(exported, dynamo=True, verbose=False)
    assert program is not None
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    graph = exported.module()
    for batch, tokens in (3, 13), (5, 40), (2, 2):
        inputs = padded(batch, tokens)
        keep = inputs["attention_mask"].bool()
        logits = model(**inputs).logits[keep]
        torch.testing.assert_close(graph(**inputs).logits[keep], logits, rtol=1e-4, atol=1e-4)
        (outputs, *_) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
        torch.testing.assert_close(torch.from_numpy(outputs)[keep], logits, rtol=1e-4, atol=1e-4)


def padded(batch: int, tokens: int) -> dict[str, Tensor]:
    """Random ids; the first row ends in padding."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[0, tokens // 2 + 1 :] = 0
    return {"input_ids": torch.randint(3, 50, (batch, tokens)), "attention_mask": mask}
