"""What a forward pass keeps for the backward pass, by wiring and depth."""

from polyformer_lab.measures.time_and_memory import Size, kept_mib


def test_a_reversible_forward_pass_keeps_two_tensors_for_any_depth():
    """Also what the end of the stack keeps: the mean, its norm and the loss."""
    kept = {
        (block, layers): kept_mib(Size(block, layers, 8, 2, 64, 0.1))
        for block in ("pre", "reversible")
        for layers in (2, 12)
    }
    assert kept["reversible", 12] == kept["reversible", 2] > 0
    assert kept["pre", 12] > 4 * kept["pre", 2]
