"""Distillation in the training loop: a student with fewer layers learns from a finished run, the teacher.

The recipe names the teacher (`distillation`), so that a distilled run is trained, resumed and read like any
other run. The teacher is frozen and in evaluation mode, and is not saved with the model. See
`polyformer.training.objectives` for the loss. The student is the same model with fewer layers,
which are copied from the teacher.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms import AlternateConfig
from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import IGNORED, next_labels
from polyformer.data import Splits
from polyformer.data.rows import Batch
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.outputs import ModelOutput
from polyformer.nn.feedforward import AlternateFeedForwardConfig
from polyformer.nn.heads import ClassifyConfig, LanguageModelConfig, MaskedConfig, TagConfig
from polyformer.nn.stack import StackConfig
from polyformer.training.objectives import DistillationConfig, chosen_layers, distillation_loss
from polyformer.training.recipes.recipe import ModelChoice, Recipe
from polyformer.training.recipes.run import Run
from polyformer.training.tasks import Task, TaskWithData

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


def distillation_recipe(teacher: str | Path, layers: int | None = None) -> Recipe:
    """Return the recipe of a student of the run in `teacher`, with `layers` layers or half of the teacher's.

    All other settings are copied from the recipe of the teacher.
    """
    folder = Path(teacher).absolute()
    run = Run.open(folder)
    config = student_config(run.result("cpu").config, layers)
    return dataclasses.replace(
        run.recipe,
        model=ModelChoice(options=config.to_dict()),
        distillation=DistillationConfig(teacher=str(folder)),
    )


class DistillationTask(TaskWithData):
    """A task and its data with the distillation loss; `student` is the trained model."""

    def __init__(
        self,
        task: Task,
        splits: Splits,
        seed: int,
        student: Transformer,
        teacher: Transformer,
        config: DistillationConfig,
    ):
        check_distils(task, student.config)
        if student.supports_recurrence:
            raise InputError(
                "distillation: a student with a memory cannot be distilled; use a student without a memory"
            )
        super().__init__(task, splits, seed)
        self.student, self.config = student, config
        self.teacher = teacher.eval().requires_grad_(False)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of labels, soft labels and, if configured, hidden states."""
        output, taught = model(**batch), self._taught(batch)
        chosen = labelled(self.student.config, batch)
        logits = logits_at(self.student, output, chosen), logits_at(self.teacher, taught, chosen)
        real = real_tokens(self.student.config, batch)
        hidden = output.last_hidden_state[real], taught.last_hidden_state[real]
        return distillation_loss(self.config, output.loss, logits, hidden)

    @torch.no_grad()
    def _taught(self, batch: Batch) -> ModelOutput:
        self.teacher.to(batch["labels"].device)
        if self.teacher.encoder is not None and self.teacher.decoder is not None:
            return self.teacher(**batch)  # the decoder reads the labels
        return self.teacher(**{name: tensor for name, tensor in batch.items() if name != "labels"})


def check_distils(task: Task, config: ModelConfig) -> None:
    """Raise `InputError` for a task without soft labels, or with a loss beyond the loss of its labels."""
    head = config.head
    if not task.objective.plain or not isinstance(
        head, ClassifyConfig | TagConfig | LanguageModelConfig | MaskedConfig
    ):
        raise InputError(
            f"distillation: {type(task).__name__} with the head {quote(head.kind)} is not learnt from a "
            "teacher; classification, tagging and language modelling (masked or not) are"
        )
    if isinstance(head, ClassifyConfig) and (
        head.num_labels == 1 or head.problem not in (None, "single_label")
    ):
        raise InputError(
            "distillation: expected one of several labels for a text, got a head of another problem"
        )


def labelled(config: ModelConfig, batch: Batch) -> Tensor | None:
    """Return a mask [B, T] of tokens with a predicted label; None for labels of whole texts."""
    if isinstance(config.head, ClassifyConfig):
        return None
    labels, mask = batch["labels"], batch.get("attention_mask")
    if config.encoder is None and isinstance(config.head, LanguageModelConfig):
        labels = next_labels(labels, batch.get("document_ids"), None if mask is None else mask.bool())
    return labels != IGNORED


def logits_at(model: Transformer, output: ModelOutput, chosen: Tensor | None) -> Tensor:
    """Return the logits [N, classes] of the head, only for the `chosen` tokens."""
    if chosen is None:
        return output.logits
    head = model.config.head
    if head.reruns_last_layer or isinstance(head, TagConfig):
        return output.logits[chosen]
    # avoid logits [B, T, V]: a masked language model predicts only a seventh of the tokens
    return model.next_logits(
        dataclasses.replace(output, last_hidden_state=output.last_hidden_state[chosen, None])
    )


def real_tokens(config: ModelConfig, batch: Batch) -> Tensor:
    """Return a mask [B, T] of the last hidden states that belong to tokens instead of padding."""
    if config.encoder is not None and config.decoder is not None:
        return batch["labels"] != IGNORED
    if "attention_mask" in batch:
        return batch["attention_mask"].bool()
    return torch.ones_like(batch["input_ids"], dtype=torch.bool)
