"""The calls of `polyformer.attach` in a checkpoint that transformers saved, as parts of this library's model.

`attach` puts a pattern or a memory into the layers of a model of transformers, and `save_pretrained` records
the calls in config.json. This library's model of the same checkpoint has parts that compute the same:

    attach(model, "Window(64)")               the pattern of the layer, with the family's own
    attach(model, memory="sinks(length=60)")  the memory of the stack

The last call for a layer counts. What has no equal part is refused by name: a memory in some layers only,
names of layers, position schemes, functions and cache policies, which are options of generation here.
"""

from typing import Any

from polyformer.attention.patterns import Causal, Full, PerLayer
from polyformer.attention.patterns.base import Pattern
from polyformer.core.errors import InputError, quote
from polyformer.models.architectures import Transformer
from polyformer.models.attached.attach_settings import SAVED, AttachSettings, saved_calls
from polyformer.models.checkpoints.convert import converted_side, with_parts


def with_attachments(model: Transformer, hub: dict[str, Any]) -> Transformer:
    """Return the model of a checkpoint with the attachments in its config.json `hub`.

    Raises `InputError` for attachments that no part of this library's models equals.
    """
    if hub.get(SAVED) is None:
        return model
    calls = saved_calls(hub[SAVED])
    if not isinstance(model, Transformer) or (model.encoder is not None and model.decoder is not None):
        raise refused("attachments of an encoder-decoder or of a model of images")
    stack: Any = model.encoder if model.decoder is None else model.decoder
    count = getattr(model.config, converted_side(model.config)).num_hidden_layers
    last: list[AttachSettings | None] = [None] * count
    for call in calls:
        check_supported(call)
        for layer in numbers_of(call, count):
            last[layer] = call
    memories = {None if call is None else call.memory for call in last}
    if len(memories) > 1:
        raise refused("a memory in some of the layers")
    patterns = [None if call is None or call.pattern is None else call.pattern for call in last]
    if not any(patterns):
        return with_parts(model, memory=memories.pop())
    dense = Full() if model.decoder is None else Causal()
    whole: list[Pattern] = []
    for number, pattern in enumerate(patterns):
        own = getattr(stack.mechanism.for_layer(number), "pattern", None)
        parts = [part for part in (own, None if pattern is None else pattern.layer_pattern(number)) if part]
        whole.append(dense if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1])
    attention = whole[0] if len(set(whole)) == 1 else PerLayer(tuple(whole))
    return with_parts(model, attention, memories.pop())


def check_supported(call: AttachSettings) -> None:
    """Raise `InputError` for a setting that this library's models have no part for."""
    if call.position is not None:
        raise refused(f"position={quote(call.position.kind)}")
    if call.cache is not None:
        kind = call.cache.kind
        raise refused(f"cache={quote(kind)}", f" and generate with the policy: --cache {kind}(...)")


def numbers_of(call: AttachSettings, count: int) -> list[int]:
    """Return the numbers of the layers of a call.

    Raises `InputError` for names, and for numbers beyond `count`.
    """
    if call.layers is None:
        return [*range(count)]
    for layer in call.layers:
        if not isinstance(layer, int) or not -count <= layer < count:
            raise refused(f"layers={quote(layer)}, where numbers up to {count - 1} are expected")
    return [int(layer) % count for layer in call.layers]


def refused(what: str, more: str = "") -> InputError:
    """Return the error for attachments that only transformers computes."""
    return InputError(
        f"config.json: {SAVED} has {what}, which this library's model of the checkpoint cannot have; load it "
        f"with transformers and polyformer.models.transformers_attention, or set {SAVED} to null{more}"
    )
