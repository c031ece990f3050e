"""The time of a training step."""

import torch

from polyformer.models.presets import create_model
from polyformer_lab.measures.compute import step

SIZES = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 300}


def test_a_step_computes_the_gradients_of_one_batch():
    model = create_model("encoder-tiny", **SIZES, dropout=0.0, head="masked")
    run = step(model, rows=2, length=16, masked=0.5)
    gradients = []
    for _ in range(2):
        run()
        gradients.append(torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None]))
    assert gradients[0].any()
    assert torch.equal(*gradients)
