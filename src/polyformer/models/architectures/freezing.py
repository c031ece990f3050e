"""Training of added parts, a memory or a depth policy, while the pretrained model stays frozen."""

from torch import nn

from polyformer.nn.stack import Stack


def freeze_pretrained_parameters(model: nn.Module, decoder: Stack | None) -> None:
    """Freeze all parameters except in the memory or depth of `decoder`, if it trains separately."""
    if decoder is None:
        return
    trained = [] if decoder.memory is None else decoder.memory.trained_modules(decoder.sequence) or []
    if decoder.depth is not None and decoder.depth.trains_only_depth:
        trained.append(decoder.depth)
    if trained:
        model.requires_grad_(False)
    # Also parts that were frozen with the rest.
    for part in trained:
        part.requires_grad_()
