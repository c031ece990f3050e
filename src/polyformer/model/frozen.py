"""Parts that are trained alone, while the model that was trained without them stays as it is."""

from torch import nn

from polyformer.stack import Stack


def freeze_around_alone(model: nn.Module, decoder: Stack | None) -> None:
    """No gradients but for what the memory or the depth of `decoder` trains, where one trains a part."""
    if decoder is None:
        return
    trained = [] if decoder.memory is None else decoder.memory.trained(decoder.sequence) or []
    if decoder.depth is not None and decoder.depth.alone:
        trained.append(decoder.depth)
    if trained:
        model.requires_grad_(False)
    for part in trained:
        part.requires_grad_()
