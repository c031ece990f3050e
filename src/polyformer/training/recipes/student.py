"""The student of a teacher: the same model with fewer layers, which are copied from the teacher."""

import dataclasses

from torch import Tensor, nn

from polyformer.attention.mechanisms import AlternateConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.feedforward import AlternateFeedForwardConfig
from polyformer.nn.stack import StackConfig
from polyformer.training.objectives.distillation import chosen_layers

SIDES = ("encoder", "decoder")


def student_config(teacher: ModelConfig, layers: int | None = None) -> ModelConfig:
    """Return `teacher` with `layers` layers (per stack), by default half of the teacher's."""
    stacks = {side: getattr(teacher, side) for side in SIDES}
    return dataclasses.replace(
        teacher, **{side: _shorter(stack, layers) for side, stack in stacks.items() if stack is not None}
    )


def _shorter(stack: StackConfig, layers: int | None) -> StackConfig:
    """Return the stack with fewer layers, which keep their attention and feed-forward."""
    size = stack.layers_per_group
    count = layers or max(1, stack.num_hidden_layers // size // 2) * size
    chosen = chosen_layers(stack.num_hidden_layers, count)
    mechanism, feedforward = stack.attention.mechanism, stack.feedforward
    mechanisms = tuple(mechanism.for_layer(i) for i in chosen)
    if any(mechanism.for_layer(j) != own for j, own in enumerate(mechanisms)):
        mechanism = AlternateConfig(mechanisms=mechanisms)
    feedforwards = tuple(feedforward.for_layer(i) for i in chosen)
    if any(feedforward.for_layer(j) != own for j, own in enumerate(feedforwards)):
        feedforward = AlternateFeedForwardConfig(feedforwards=feedforwards)
    groups = stack.num_hidden_groups
    return dataclasses.replace(
        stack,
        num_hidden_layers=count,
        num_hidden_groups=None if groups is None else min(groups, max(1, count // size)),
        attention=dataclasses.replace(stack.attention, mechanism=mechanism),
        feedforward=feedforward,
    )


def copy_teacher_layers(student: Transformer, teacher: Transformer) -> None:
    """Copy the weights of the teacher into the student, with the layers of `chosen_layers`.

    Raises `InputError` if the two differ in more than the number of layers.
    """
    theirs = teacher.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, own in student.state_dict().items():
        source = _source(name, student, teacher)
        if source not in theirs:
            raise InputError(
                f"student: its {quote(name)} is none of the teacher's; change nothing but the layers"
            )
        tensor = _rows(name, theirs[source], own, student, teacher)
        if tensor.shape != own.shape:
            raise InputError(
                f"student: {quote(name)} has shape {tuple(own.shape)}, the teacher's {tuple(tensor.shape)}; "
                "change nothing but the layers"
            )
        tensors[name] = tensor
    student.load_state_dict(tensors)


def _source(name: str, student: nn.Module, teacher: nn.Module) -> str:
    """Return the teacher's name of a tensor, with indices of shortened lists mapped to chosen layers."""
    own = name.split(".")
    words = list(own)
    for place, word in enumerate(own):
        if word.isdigit():
            mine = len(student.get_submodule(".".join(own[:place])))  # type: ignore[arg-type]
            theirs = len(teacher.get_submodule(".".join(words[:place])))  # type: ignore[arg-type]
            if mine < theirs:
                words[place] = str(chosen_layers(theirs, mine)[int(word)])
    return ".".join(words)


def _rows(name: str, tensor: Tensor, own: Tensor, student: Transformer, teacher: Transformer) -> Tensor:
    """Return the rows of the chosen layers of a position table with a row per layer; otherwise `tensor`."""
    side, part = name.split(".")[:2] if name.count(".") else (name, "")
    if side not in SIDES or part != "position" or tensor.shape == own.shape:
        return tensor
    counts = [len(model.get_submodule(side).groups) for model in (student, teacher)]  # type: ignore[arg-type]
    if [len(own), len(tensor)] != counts:
        return tensor
    return tensor[chosen_layers(counts[1], counts[0])]
