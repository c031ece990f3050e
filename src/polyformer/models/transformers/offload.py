"""Weights that accelerate offloads (`cpu_offload`, a device map with "disk"), loaded for a call.

accelerate loads a module's weights when the module is called and drops them afterwards. Some of our weights
are read by other modules: the token table by the head, a position scheme by attention. These stay loaded
while the model runs; linear layers, norms and convolutions, which have nearly all weights, are loaded
individually.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from polyformer.core.ops.linear import Linear

# Modules with weights that no other module reads, unless they are part of `READ`.
CALLED = (Linear, nn.LayerNorm, nn.Conv1d)

# Parts of a model with weights that other modules read.
READ = ("tokens", "decoder_tokens", "head", "encoder.position", "decoder.position")


@contextlib.contextmanager
def shared_weights_loaded(model: nn.Module) -> Iterator[None]:
    """Keep all weights of `model` that other modules read loaded within the context."""
    hooks: list[tuple[Any, Any]] = [(module, module._hf_hook) for module in _modules_to_load(model)]
    forwards = [(module, module.forward) for module, _ in hooks]
    for module, hook in hooks:
        hook.pre_forward(module)
        module.forward = module._old_forward  # its own hook would drop the weights after a call
    try:
        yield
    finally:
        for module, forward in forwards:
            module.forward = forward
        for module, hook in hooks:
            hook.post_forward(module, None)


def _modules_to_load(model: nn.Module) -> list[nn.Module]:
    """Return the modules to keep loaded, among the modules with a hook of accelerate."""
    if not any("_hf_hook" in vars(module) for module in model.modules()):
        return []
    return [
        module
        for name, module in model.named_modules()
        if getattr(getattr(module, "_hf_hook", None), "offload", False)
        and (not isinstance(module, CALLED) or name.startswith(READ) or ".router" in name)
    ]
