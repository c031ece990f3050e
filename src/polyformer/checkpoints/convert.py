"""A trained model with another attention: what fits is copied, positions are repeated, the rest starts fresh.

The attention matrix of a sparse pattern is the dense one with entries left out, so all its weights are there
already: where the pattern covers the text nothing changes, with room for longer texts and with a scale of the
scores that the new attention has not. Learned positions are repeated from their start, the distances that are
told apart stay, and global tokens' projections begin as the ordinary ones: Beltagy et al. 2020 (Longformer),
section 5. What mechanisms have beyond queries, keys and values (Linformer's projections, say) is fresh.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from polyformer.architecture import ModelConfig
from polyformer.attention import AlternateConfig, SoftmaxConfig
from polyformer.attention.base import MechanismConfig
from polyformer.checkpoints.transfer import Report, transfer
from polyformer.core.errors import InputError, quote
from polyformer.model import Transformer
from polyformer.patterns import Pattern
from polyformer.patterns.marked import reads_marks
from polyformer.stack import MultiHeadAttention, Stack, StackConfig, copy_local_projections


def convert(
    model: Transformer,
    attention: Pattern | MechanismConfig | str | dict[str, Any] | None = None,
    *,
    max_positions: int | None = None,
    global_projections: bool = False,
) -> tuple[Transformer, Report]:
    """A new model, in evaluation mode, and what became of the weights of `model`, which stays as it is.

    Args:
        attention: a pattern or a mechanism, in any of the ways of `polyformer.presets.model_config`, for the
            encoder where there is one, else for the decoder.
        max_positions: how long a text the new one takes; learned positions are repeated.
        global_projections: give global tokens projections of their own, copied from the ordinary ones.

    Raises:
        InputError: a mechanism that the model cannot have, fewer positions than before.
    """
    if not isinstance(model, Transformer):
        raise InputError(f"convert: expected a model of texts, got a {type(model).__name__}")
    config = converted(model.config, read_attention(attention), max_positions, global_projections)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # what is fresh is the same every time
        made = Transformer(config)
    made.to(next(model.parameters()).dtype)
    report = keep_scores(model, made, transfer(model, made))
    if config.origin is not None:  # it is still of the family whose files hold them
        made.unused_tensors = dict(model.unused_tensors)
        report = dataclasses.replace(
            report, left=tuple(name for name in report.left if name not in made.unused_tensors)
        )
    if global_projections:
        copy_local_projections(made)
        same = tuple(name for name in report.fresh if ".global_attention." in name)
        report = dataclasses.replace(
            report,
            copied=tuple(sorted((*report.copied, *same))),
            fresh=tuple(name for name in report.fresh if name not in same),
        )
    return made.eval(), report


def read_attention(given: object) -> Pattern | MechanismConfig | None:
    """The pattern or the mechanism that is meant, by an expression such as `Window(256) | Global(1)` or
    `linformer(k=128)`, by a mapping or by itself; `InputError` for anything else."""
    if given is None:
        return None
    return Pattern.meant(given) or MechanismConfig.from_dict(given, "attention")


def converted(
    config: ModelConfig,
    attention: Pattern | MechanismConfig | None,
    max_positions: int | None,
    global_projections: bool,
) -> ModelConfig:
    """The configuration of the new model. With another attention it is no longer of the family that it came
    from."""
    side = side_of(config)
    stack: StackConfig = getattr(config, side)
    mechanism = stack.attention.mechanism
    if isinstance(attention, Pattern):
        mechanism = patterned(mechanism, attention)
    elif attention is not None:
        mechanism = scaled(attention, mechanism)
    inner = dataclasses.replace(
        stack.attention,
        mechanism=mechanism,
        global_projections=global_projections
        or (stack.attention.global_projections and reads_marks(mechanism)),
    )
    changes: dict[str, Any] = {side: dataclasses.replace(stack, attention=inner)}
    if changes[side] != stack:
        changes["origin"] = None
    config = dataclasses.replace(config, **changes)
    return config if max_positions is None else lengthened(config, max_positions)


def with_room(config: ModelConfig, checkpoint: ModelConfig) -> ModelConfig:
    """What a task made of the configuration of a `checkpoint`, with tables of tokens and positions that are
    no shorter than there, and the first positions as they are there."""
    before, positions = checkpoint.max_position_embeddings, config.max_position_embeddings
    vocab_size = max(config.vocab_size, checkpoint.vocab_size)  # some tables have rows to spare
    kept = dataclasses.replace(config, vocab_size=vocab_size, max_position_embeddings=before)
    return lengthened(kept, max(before, positions))


def side_of(config: ModelConfig) -> str:
    """The stack whose attention is another."""
    return "encoder" if config.encoder is not None else "decoder"


def lengthened(config: ModelConfig, positions: int) -> ModelConfig:
    """The configuration with room for longer texts, of which shorter ones see nothing."""
    if positions < config.max_position_embeddings:
        raise InputError(
            f"max_positions: expected {config.max_position_embeddings}, which the model has, or more, "
            f"got {positions}"
        )
    longer = dataclasses.replace(config, max_position_embeddings=positions)
    return same_reach(longer, config)


def same_reach(config: ModelConfig, checkpoint: ModelConfig) -> ModelConfig:
    """`config`, whose texts may be of another length than those of the `checkpoint` that it was made of, with
    the first positions as they are there: where a position scheme is the checkpoint's it tells the same
    distances apart."""
    before, after = checkpoint.max_position_embeddings, config.max_position_embeddings
    changes: dict[str, Any] = {}
    if before != after:
        changes["head"] = config.head.longer(before, after)
        for side in ("encoder", "decoder"):
            stack, known = getattr(config, side), getattr(checkpoint, side)
            if stack is not None and known is not None and stack.position == known.position:
                position = stack.position.longer(before, after)
                changes[side] = dataclasses.replace(stack, position=position)
    return dataclasses.replace(config, **changes)


def patterned(mechanism: MechanismConfig, pattern: Pattern) -> MechanismConfig:
    """`mechanism` with another pattern where it is softmax attention, else softmax attention with it."""
    if isinstance(mechanism, SoftmaxConfig):
        return dataclasses.replace(mechanism, pattern=pattern)
    if isinstance(mechanism, AlternateConfig):
        layers = tuple(patterned(one, pattern) for one in mechanism.mechanisms)
        return layers[0] if len(set(layers)) == 1 else AlternateConfig(mechanisms=layers)
    return SoftmaxConfig(pattern=pattern)


def scaled(mechanism: MechanismConfig, old: MechanismConfig) -> MechanismConfig:
    """`mechanism` with the scale of the `old` one, where that is one and this says none."""
    if isinstance(mechanism, AlternateConfig):
        return AlternateConfig(mechanisms=tuple(scaled(one, old) for one in mechanism.mechanisms))
    if isinstance(mechanism, SoftmaxConfig) and mechanism.scale is None and isinstance(old, SoftmaxConfig):
        return dataclasses.replace(mechanism, scale=old.scale)
    return mechanism


@torch.no_grad()
def keep_scores(old: Transformer, new: Transformer, report: Report) -> Report:
    """Where the old attention had a scale of its own and the new one divides by sqrt(D), the queries take it.

    Raises `InputError` where positions add to the queries, which this would not reach.
    """
    names: list[str] = []
    for side in ("encoder", "decoder"):
        if getattr(old.config, side) is not None and getattr(new.config, side) is not None:
            names += _scale_queries(side, old.get_submodule(side), new.get_submodule(side), report)
    return dataclasses.replace(
        report,
        scaled=tuple(sorted(names)),
        copied=tuple(name for name in report.copied if name not in names),
    )


def _scale_queries(side: str, old: nn.Module, new: nn.Module, report: Report) -> list[str]:
    """`keep_scores` in one stack: the names of what was multiplied."""
    assert isinstance(old, Stack)
    assert isinstance(new, Stack)
    names: list[str] = []
    for layer, module in enumerate(new.layers):
        scale = scale_of(old.mechanism.at(layer))
        if scale is None or scale_of(new.mechanism.at(layer)) is not None:
            continue
        attention = module.get_submodule("attention")
        assert isinstance(attention, MultiHeadAttention)
        factor = scale * attention.head_size**0.5
        if factor == 1:
            continue
        if new.position.adds_to_queries:
            raise InputError(
                f"attention: {quote(new.mechanism.kind)} cannot have the model's scale {scale} with "
                f"positions that add to the queries; use 'softmax'"
            )
        for name, one in attention.query.named_parameters(f"{side}.layers.{layer}.attention.query"):
            if name in report.copied:
                one.mul_(factor)
                names.append(name)
    return names


def scale_of(mechanism: MechanismConfig) -> float | None:
    """What products of queries and keys are multiplied with, where that is not 1 / sqrt(D)."""
    return mechanism.scale if isinstance(mechanism, SoftmaxConfig) else None
