"""The conversion of a trained model to another attention: matching weights are copied, positions repeated,
the rest new.

The attention matrix of a sparse pattern is the dense matrix with entries removed, so it has the same weights:
if the pattern covers the whole text the outputs are unchanged, also with more positions, and also if only the
old attention has its own scale. Learned positions are repeated from their start, the range of relative
distances is unchanged, and the projections of global tokens start as copies of the ordinary projections:
Beltagy et al. 2020 (Longformer), section 5. Weights of mechanisms beyond queries, keys and values (for
example Linformer's projections) are newly initialized. A new memory changes almost nothing at first
(`Memory.init_added`). Rotary positions have no table; an `extension` lowers their frequencies for texts
longer than in training.
"""

import dataclasses
from typing import Any

import torch

from polyformer.attention.mechanisms import AlternateConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Pattern
from polyformer.attention.patterns.composition import as_pattern
from polyformer.attention.patterns.global_tokens import reads_marks
from polyformer.attention.positions.rope import RopeConfig
from polyformer.attention.positions.rope_extensions import RopeExtensionConfig
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer, VisionConfig
from polyformer.models.architectures.weights import load_weights
from polyformer.models.checkpoints.transfer import Report, keep_scores, transfer, with_score_options
from polyformer.models.config import ModelConfig
from polyformer.nn.depth import DepthConfig
from polyformer.nn.memory import MemoryConfig
from polyformer.nn.stack import StackConfig, copy_local_projections


def convert(
    model: Transformer,
    attention: Pattern | MechanismConfig | str | dict[str, Any] | None = None,
    *,
    cross_attention: Pattern | str | None = None,
    max_positions: int | None = None,
    extension: RopeExtensionConfig | str | dict[str, Any] | None = None,
    global_projections: bool = False,
    memory: MemoryConfig | str | dict[str, Any] | None = None,
    depth: DepthConfig | str | dict[str, Any] | None = None,
) -> tuple[Transformer, Report]:
    """Return a new model, in evaluation mode, and a report on the weights of `model`, which is not changed.

    Args:
        attention: a pattern or a mechanism, in any of the forms of `model_config`, for the encoder if there
            is one, else for the decoder.
        cross_attention: a pattern of a decoder's attention to its source, such as "Aligned(1.0, 16, 16)".
        max_positions: the longest text of the new model; learned positions are repeated.
        extension: of rotary positions, such as "ntk(factor=4)"; by default for `max_positions`.
        global_projections: add separate projections for global tokens, copied from the ordinary projections.
        memory: a memory of earlier segments, only for a decoder, such as `memorizing(store=8192)`.
        depth: the depth of the decoder if there is one, else of the encoder, such as `exits(layers=[4, 8])`.

    Raises `InputError` for a part that the model cannot have, and for fewer positions than before.
    """
    if not isinstance(model, Transformer):
        raise InputError(f"convert: expected a model of texts, got a {type(model).__name__}")
    if model.config.weights is not None:
        raise InputError(
            f"convert: this model has {model.config.weights} weights, but new parameters would not; "
            'convert the original model, or load this model with weights="float32"'
        )
    config = convert_config(model.config, read_attention(attention), max_positions, global_projections)
    config = with_cross_attention(config, cross_attention)
    if extension is not None:
        config = with_extension(config, extension, model.config.max_position_embeddings)
    if memory is not None:
        config = with_memory(config, MemoryConfig.from_dict(memory, "memory"))
    if depth is not None:
        config = with_depth(config, DepthConfig.from_dict(depth, "depth"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # deterministic new weights
        converted = Transformer(config).to(next(model.parameters()).dtype)
    converted.generation, converted.labels = model.generation, model.labels
    report = keep_scores(model, converted, transfer(model, converted))
    begin_additions(converted, report)
    if config.origin is not None:  # its files still belong to the family
        converted.unused_tensors = dict(model.unused_tensors)
        report = dataclasses.replace(
            report, left=tuple(name for name in report.left if name not in converted.unused_tensors)
        )
    if global_projections:
        copy_local_projections(converted)
        global_copies = tuple(name for name in report.newly_initialized if ".global_attention." in name)
        report = dataclasses.replace(
            report,
            copied=tuple(sorted((*report.copied, *global_copies))),
            newly_initialized=tuple(name for name in report.newly_initialized if name not in global_copies),
        )
    return converted.eval(), report


def with_parts(
    model: Transformer,
    attention: Pattern | MechanismConfig | str | dict[str, Any] | None = None,
    memory: MemoryConfig | str | dict[str, Any] | None = None,
) -> Transformer:
    """Return a model with another attention or memory and the tensors of `model`, in evaluation mode.

    The tensors are shared if the new parts need no others, quantized weights too. Parameters of a memory are
    new. Raises `InputError` for a model that cannot have the parts.
    """
    if attention is None and memory is None:
        return model
    if not isinstance(model, Transformer):
        name = "memory" if attention is None else "attention"
        raise InputError(f"{name}: expected a decoder of texts, got a {type(model).__name__}; leave it out")
    config = model.config
    if attention is not None:
        config = convert_config(config, read_attention(attention), None, False)
    if memory is not None:
        config = with_memory(config, MemoryConfig.from_dict(memory, "memory"))
    with torch.device("meta"):
        changed = Transformer(config)
    tensors = model.state_dict()
    if tensors.keys() == changed.state_dict().keys():
        load_weights(changed, dict(tensors), "memory" if attention is None else "attention")
    else:
        changed, _ = convert(model, attention, memory=memory)
    changed.generation, changed.folder, changed.labels = model.generation, model.folder, model.labels
    return changed.eval()


def begin_additions(model: Transformer, report: Report) -> None:
    """Initialize a new memory or new exits so that they change almost nothing."""
    for stack, name in ((model.decoder, "decoder"), (model.encoder, "encoder")):
        new = [part.removeprefix(f"{name}.").split(".")[0] for part in report.newly_initialized]
        if stack is not None and stack.memory is not None and "memory" in new:
            stack.memory.init_added()
        if stack is not None and stack.depth is not None and "depth" in new:
            stack.depth.init_added(stack.final_norm)


def read_attention(attention: object) -> Pattern | MechanismConfig | None:
    """Return a pattern or a mechanism, given as an expression such as `Window(256) | Global(1)` or
    `linformer(k=128)`, as a mapping or as an object; raises `InputError` for anything else.
    """
    if attention is None:
        return None
    return Pattern.parse(attention) or MechanismConfig.from_dict(attention, "attention")


def convert_config(
    config: ModelConfig,
    attention: Pattern | MechanismConfig | None,
    max_positions: int | None,
    global_projections: bool,
) -> ModelConfig:
    """Return the configuration of the new model. Another attention removes it from its former family."""
    side = converted_side(config)
    stack: StackConfig = getattr(config, side)
    mechanism = stack.attention.mechanism
    if isinstance(attention, Pattern):
        mechanism = with_pattern(mechanism, attention)
    elif attention is not None:
        mechanism = with_score_options(attention, mechanism)
    # Global projections stay only while a pattern marks tokens.
    inner = dataclasses.replace(
        stack.attention,
        mechanism=mechanism,
        global_projections=global_projections
        or (stack.attention.global_projections and reads_marks(mechanism)),
    )
    changes: dict[str, Any] = {side: dataclasses.replace(stack, attention=inner)}
    if changes[side] != stack:
        # No public family has it: it is saved only in this library's format.
        changes["origin"] = None
    config = dataclasses.replace(config, **changes)
    return config if max_positions is None else extend_positions(config, max_positions)


def with_cross_attention(config: ModelConfig, pattern: Pattern | str | None) -> ModelConfig:
    """Return the configuration with a pattern between target and source, which no public family has.

    pattern: None leaves the configuration unchanged.
    """
    if pattern is None:
        return config
    return dataclasses.replace(config, cross_attention=as_pattern(pattern, "cross_attention"), origin=None)


def with_extension(config: ModelConfig, extension: object, before: int) -> ModelConfig:
    """Return the configuration with rotary positions for texts longer than the `before` tokens of training.

    Raises `InputError` if no stack has rotary positions, or no factor is known.
    """
    asked = RopeExtensionConfig.expanded(extension, "extension")
    if isinstance(asked, dict):
        kind = RopeExtensionConfig.kinds.get(asked.get("kind", ""))
        if kind is not None and issubclass(kind, RopeExtensionConfig):
            asked = {**kind.options_for(before, config.max_position_embeddings, asked), **asked}
    chosen = RopeExtensionConfig.from_dict(asked, "extension")
    if not chosen.extends(before, config.max_position_embeddings):
        raise InputError("extension: its factor is 1, which changes nothing; say max_positions, or factor=4")
    changes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        stack: StackConfig | None = getattr(config, side)
        if stack is not None and isinstance(stack.position, RopeConfig):
            position = dataclasses.replace(stack.position, extension=chosen)
            changes[side] = dataclasses.replace(stack, position=position)
    if not changes:
        raise InputError("extension: only rotary positions have one, and this model has others")
    return dataclasses.replace(config, **changes)


def with_memory(config: ModelConfig, memory: MemoryConfig) -> ModelConfig:
    """Return the configuration with a memory in its decoder. It no longer belongs to its former family."""
    if config.decoder is None or config.encoder is not None:
        raise InputError(
            "memory: only a decoder-only model reads a text in segments; this model has an encoder"
        )
    stack = dataclasses.replace(config.decoder, memory=memory)
    origin = config.origin if stack == config.decoder else None
    return dataclasses.replace(config, decoder=stack, origin=origin)


def with_depth(config: ModelConfig, depth: DepthConfig) -> ModelConfig:
    """Return the configuration with another depth of its decoder, or of its encoder if it has no decoder.

    It no longer belongs to its former family.
    """
    side = "encoder" if config.decoder is None else "decoder"
    stack = dataclasses.replace(getattr(config, side), depth=depth)
    origin = config.origin if stack == getattr(config, side) else None
    return dataclasses.replace(config, **{side: stack, "origin": origin})


def fit_tables(config: Any, checkpoint: Any) -> Any:
    """Return `config`, which a task derived from a `checkpoint`'s configuration, with tables that fit the
    checkpoint.

    Tables of tokens and positions are at least as long, and the first positions are the same. Raises
    `InputError` for an image model with another image size or other channels.
    """
    if isinstance(config, VisionConfig):
        return _check_image_sizes(config, checkpoint)
    before, positions = checkpoint.max_position_embeddings, config.max_position_embeddings
    vocab_size = max(config.vocab_size, checkpoint.vocab_size)  # some tables have spare rows
    kept = dataclasses.replace(config, vocab_size=vocab_size, max_position_embeddings=before)
    return extend_positions(kept, max(before, positions))


def _check_image_sizes(config: VisionConfig, checkpoint: VisionConfig) -> VisionConfig:
    shapes = [(*each.image_size, each.num_channels) for each in (checkpoint, config)]
    if shapes[0] != shapes[1]:
        theirs, ours = (" x ".join(map(str, shape)) for shape in shapes)
        mode = "rgb" if checkpoint.num_channels == 3 else "grey"
        raise InputError(
            f"pretrained: the checkpoint takes images of {theirs}, but the data has {ours}; set "
            f"data.image_size to {list(checkpoint.image_size)} and data.image_mode to {mode}"
        )
    return config


def converted_side(config: ModelConfig) -> str:
    """Return the stack whose attention is converted: the encoder if there is one, else the decoder."""
    return "encoder" if config.encoder is not None else "decoder"


def extend_positions(config: ModelConfig, positions: int) -> ModelConfig:
    """Return the configuration for longer texts, with the same outputs for shorter texts."""
    if positions < config.max_position_embeddings:
        raise InputError(
            f"max_positions: expected at least the {config.max_position_embeddings} of the model, "
            f"got {positions}"
        )
    longer = dataclasses.replace(config, max_position_embeddings=positions)
    return keep_positions(longer, config)


def keep_positions(config: ModelConfig, checkpoint: ModelConfig) -> ModelConfig:
    """Return `config` with the first positions of the `checkpoint` that it was derived from.

    Its texts may have another length. If a position scheme is the same as in the checkpoint, it distinguishes
    the same distances.
    """
    before, after = checkpoint.max_position_embeddings, config.max_position_embeddings
    changes: dict[str, Any] = {}
    if before != after:
        changes["head"] = config.head.with_max_positions(before, after)
        for side in ("encoder", "decoder"):
            stack, known = getattr(config, side), getattr(checkpoint, side)
            if stack is not None and known is not None and stack.position == known.position:
                position = stack.position.with_max_positions(before, after)
                changes[side] = dataclasses.replace(stack, position=position)
    return dataclasses.replace(config, **changes)


def with_pattern(mechanism: MechanismConfig, pattern: Pattern) -> MechanismConfig:
    """Return `mechanism` with another pattern; a mechanism without patterns becomes softmax attention."""
    if isinstance(mechanism, SoftmaxConfig):
        return dataclasses.replace(mechanism, pattern=pattern)
    if isinstance(mechanism, AlternateConfig):
        layers = tuple(with_pattern(layer, pattern) for layer in mechanism.mechanisms)
        return layers[0] if len(set(layers)) == 1 else AlternateConfig(mechanisms=layers)
    return SoftmaxConfig(pattern=pattern)
