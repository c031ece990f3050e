"""Padding between the tokens of a row: refused for parts that count it like tokens.

Padding before and after a text is never counted. Between two tokens of a text it is, by all parts that take
the difference of two slots for the distance of two tokens: windows, biases by distance, convolutions. Parts
that read positions, such as RoPE, or no order, such as softmax attention to all tokens, are exact there too.
"""

import torch

from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.positions import Position
from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import host_values
from polyformer.core.sequence.tokens import Tokens
from polyformer.nn.memory import NoMemoryConfig
from polyformer.nn.stack.stack_config import StackConfig


def part_that_counts_slots(config: StackConfig, position: Position, mechanism: MechanismConfig) -> str:
    """Return the name of the first part of a stack that counts padding between tokens; "" if none does."""
    layers = range(config.num_hidden_layers)
    for own in map(mechanism.for_layer, layers):
        if own.counts_slots:
            pattern = getattr(own, "pattern", None)
            return f"attention {quote(own.kind if pattern is None else pattern.to_text())}"
    if position.counts_slots:
        return f"position {quote(config.position.kind)}"
    for part in map(config.feedforward.for_layer, layers):
        if part.counts_slots:
            return f"feedforward {quote(part.kind)}"
    if not isinstance(config.memory, NoMemoryConfig):
        return f"memory {quote(config.memory.kind)}"
    return "" if config.convolution is None else "convolution"


def check_gaps(part: str, tokens: Tokens) -> None:
    """Raise `InputError` for padding between the tokens of a row; part: from `part_that_counts_slots`."""
    if part and tokens.valid is not None and has_gaps(tokens):
        raise InputError(
            f"attention_mask: {part} counts the padding between the tokens of a row; put the padding before "
            "or after all tokens of the row, those in the state too"
        )


def has_gaps(tokens: Tokens) -> bool:
    """Return whether padding lies between two tokens of a document; False if the host does not know."""
    valid = None if tokens.valid is None else host_values(tokens.valid)
    doc = None if tokens.doc is None else host_values(tokens.doc)
    if valid is None or (doc is None) != (tokens.doc is None):
        return False
    slots = torch.arange(valid.shape[1]).expand(valid.shape)
    # The last token before each slot, or -1.
    last = torch.where(valid.bool(), slots, -1).cummax(1).values.roll(1, 1)
    last[:, :1] = -1
    gap = valid.bool() & (last >= 0) & (last < slots - 1)
    return bool((gap if doc is None else gap & (doc.gather(1, last.clamp_min(0)) == doc)).any())
