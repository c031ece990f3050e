"""`torch.onnx.export`: onnxruntime computes what the model does, at another batch and length."""

import io

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

import polyformer

PRESETS = "decoder-tiny", "bert-base", "deberta-base"


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:# The axis name.*shares the same shape constraints:UserWarning")
@pytest.mark.parametrize("preset", PRESETS)
def test_onnxruntime_gives_our_logits(preset: str) -> None:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 50}
    model = polyformer.create_model(preset, **sizes).eval()
    inputs = {"input_ids": torch.randint(3, 50, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    rows, length = torch.export.Dim("rows", min=2, max=64), torch.export.Dim("length", min=2, max=30)
    program = torch.onnx.export(
        model,
        kwargs=inputs,
        dynamic_shapes={name: {0: rows, 1: length} for name in inputs},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    file = io.BytesIO()
    program.save(file)
    other = {
        "input_ids": torch.randint(3, 50, (3, 13)),
        "attention_mask": torch.ones(3, 13, dtype=torch.long),
    }
    other["attention_mask"][0, 8:] = 0
    logits = torch.from_numpy(run(file.getvalue(), other))
    keep = other["attention_mask"].bool()
    torch.testing.assert_close(logits[keep], model(**other).logits[keep], rtol=1e-4, atol=1e-4)


def run(content: bytes, inputs: dict[str, Tensor]) -> np.ndarray:
    """The first output.

    onnxruntime 1.31's MatMulScaleFusion loses a product that two nodes read, as DeBERTa's scaled queries are.
    """
    session = onnxruntime.InferenceSession(
        content, providers=["CPUExecutionProvider"], disabled_optimizers=["MatMulScaleFusion"]
    )
    return session.run(None, {name: x.numpy() for name, x in inputs.items()})[0]
