"""Parts that are trained alone, while the model that was trained without them stays as it is."""

from torch import nn

from polyformer.stack import Stack


def freeze_around_alone(model: nn.Module, decoder: Stack | None) -> None:
    """No gradients but for the memory or the depth of `decoder`, where one is to be trained alone."""
    parts = () if decoder is None else (decoder.memory, decoder.depth)
    alone = [part for part in parts if part is not None and part.alone]
    if alone:
        model.requires_grad_(False)
    for part in alone:
        part.requires_grad_()
