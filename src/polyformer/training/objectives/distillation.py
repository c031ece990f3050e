"""DistilBERT's distillation: a student learns its teacher's predictions, the labels, and its hidden states.

    loss = soft * T^2 * KL(softmax(t / T) || softmax(s / T)) + hard * labels' loss + cosine * (1 - cos(h, g))

s and t [N, classes] are logits of student and teacher for the same items (texts, or tokens), h and g [M, E]
their last hidden states at the same real tokens, each term a mean over its items. T is the temperature, and
T^2 keeps the scale of the first term's gradient at T = 1 (Hinton et al. 2015, section 2). No gradient flows
into the teacher. Sanh et al. 2019, section 3; its released training has the default weights.

The student has the teacher's widths and fewer layers, and is initialized with the weights of some of the
teacher's layers; or its weights are new (`fresh`), as in Hinton et al. 2015.
"""

import dataclasses

import torch.nn.functional as F
from annotated_types import Gt
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, check_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(Config):
    """The teacher, and the weights of the three terms."""

    teacher: str  # the folder of its run
    temperature: PositiveFloat = 2.0
    soft: NonNegativeFloat = 5.0  # weight of the teacher's predictions
    hard: NonNegativeFloat = 2.0  # weight of the labels
    cosine: NonNegativeFloat = 1.0  # weight of the angle between the last hidden states
    # New weights instead of weights of the teacher's layers; if `cosine` is 0 the student may have any size.
    fresh: bool = False

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in ("soft", "hard", "cosine")}
        if not sum(weights.values()):
            listed = ", ".join(f"{name} {value:g}" for name, value in weights.items())
            raise InputError(f"soft, hard, cosine: expected a weight above 0, got {listed}")

    @classmethod
    def examples(cls) -> tuple["DistillationConfig", ...]:
        """Return a configuration with a finished run as the teacher."""
        return (cls(teacher="runs/teacher"),)


def soft_loss(student: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """Return the first term without its weight, for logits [N, classes]; 0 if there is no item.

    Raises `InputError` for shapes that differ and a temperature that is not above 0.
    """
    check_range("temperature", temperature, Gt(0))
    _check(student, teacher, "logits [items, classes]")
    targets = F.log_softmax(teacher.detach().float() / temperature, -1)
    predictions = F.log_softmax(student.float() / temperature, -1)
    total = F.kl_div(predictions, targets, reduction="sum", log_target=True)
    return total * (temperature**2 / max(len(student), 1))


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the last term without its weight, for hidden states [M, E]; 0 if there is none."""
    _check(student, teacher, "hidden states [tokens, width]")
    if not len(student):
        return student.sum()
    return 1 - F.cosine_similarity(student.float(), teacher.detach().float(), dim=-1).mean()


def distillation_loss(
    config: DistillationConfig,
    labels_loss: Tensor,
    logits: tuple[Tensor, Tensor],
    hidden: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the sum of the weighted terms; `logits` and `hidden` are pairs of student and teacher."""
    loss = config.hard * labels_loss
    if config.soft:
        loss = loss + config.soft * soft_loss(*logits, config.temperature)
    if config.cosine:
        loss = loss + config.cosine * hidden_loss(*hidden)
    return loss


def chosen_layers(teacher: int, student: int) -> list[int]:
    """Return the teacher's layers that initialize a smaller student: first and last, the others evenly
    spread.

    6 of 12 are 0, 2, 4, 7, 9, 11, as in the release of DistilBERT ("one layer out of two", section 2).
    """
    if not 1 <= student <= teacher:
        raise InputError(f"layers: expected 1 to {teacher}, as many as the teacher has, got {student}")
    gaps = max(student - 1, 1)
    return [(2 * i * (teacher - 1) + gaps) // (2 * gaps) for i in range(student)]


def _check(student: Tensor, teacher: Tensor, what: str) -> None:
    if student.shape != teacher.shape or student.dim() != 2:
        raise InputError(
            f"student, teacher: expected {what} of one shape, "
            f"got {tuple(student.shape)} and {tuple(teacher.shape)}"
        )
