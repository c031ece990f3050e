"""A training step: what is timed, and what its forward pass keeps."""

import torch

from polyformer.models.presets import create_model
from polyformer_lab.measures.compute import step
from polyformer_lab.measures.time_and_memory import Size, kept_mib

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


def test_a_reversible_forward_pass_keeps_two_tensors_for_any_depth():
    """Also what the end of the stack keeps: the mean, its norm and the loss."""
    kept = {
        (block, layers): kept_mib(Size(block, layers, 8, 2, 64, 0.1))
        for block in ("pre", "reversible")
        for layers in (2, 12)
    }
    assert kept["reversible", 12] == kept["reversible", 2] > 0
    assert kept["pre", 12] > 4 * kept["pre", 2]
