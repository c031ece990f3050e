"""One family's model in transformers and ours, loaded from its files: all that both compute, compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import polyformer
from polyformer.models.checkpoints import FAMILIES
from polyformer.models.checkpoints.load import names_in_files
from polyformer.models.checkpoints.save import to_hub_tensors
from tolerances import assert_rounded

Inputs = dict[str, Tensor]


def shaken(model: nn.Module, scale: float = 0.2) -> nn.Module:
    """In float64 and evaluation, with weights that are all away from their special initial values."""
    torch.manual_seed(0)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return model


def loaded(theirs: Any, folder: Path, **options: Any) -> Any:
    """Our model of the files that transformers saves."""
    theirs.save_pretrained(folder)
    return polyformer.from_pretrained(folder, **options)


def texts(vocab: int, lengths: tuple[int, ...] = (11, 8, 3), pad: int = 0, side: str = "right") -> Inputs:
    """Rows of these lengths, padded on one side with `pad`, which stands nowhere else."""
    torch.manual_seed(1)
    width = max(lengths)
    order = torch.arange(width)
    left = side == "left"
    mask = torch.stack([(order >= width - length) if left else (order < length) for length in lengths])
    ids = torch.randint(max(pad + 1, 3), vocab, mask.shape).masked_fill(~mask, pad)
    return {"input_ids": ids, "attention_mask": mask.long()}


def counted(mask: Tensor) -> Tensor:
    """Positions of real tokens counted from 0: the `position_ids` that transformers needs."""
    return (mask.cumsum(1) - 1).clamp_min(0)


def predictions(output: Any) -> list[Tensor]:
    """What a model of transformers predicts, in the order of ours."""
    if "start_logits" in output:
        return [torch.stack([output.start_logits, output.end_logits], -1)]
    for names in (
        ("prediction_logits", "seq_relationship_logits"),
        ("prediction_logits", "sop_logits"),
        ("logits",),
        ("text_embeds",),
        ("image_embeds",),
        ("pooler_output",),
        ("last_hidden_state",),
    ):
        if all(name in output for name in names):
            return [output[name] for name in names]
    raise AssertionError(f"no predictions among {list(output)}")


def same(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def at_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """The rows [.., ..] of real tokens; all of what has no tokens."""
    return x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x


def verify(
    theirs: nn.Module,
    inputs: Inputs,
    folder: Path,
    *,
    labels: Inputs | None = None,
    their_labels: Inputs | None = None,
    only_theirs: Inputs | None = None,
    mask: Tensor | None = None,
    hidden: bool = True,
    gradients: bool = True,
    dead: tuple[str, ...] = (),
) -> Any:
    """Load what `theirs` saved and compare predictions, loss, all gradients and the way back.

    labels: for our forward, without which gradients are of the sum of squares of what is predicted;
    their_labels: for theirs, the same by default. only_theirs: inputs that their side alone is given
    (positions, say). mask: [B, T], the tokens that are compared; by default the input's attention mask.
    hidden, gradients: whether hidden states of all layers and gradients are compared. dead: parameters that
    take part in nothing.
    """
    model = shaken(theirs)
    ours = loaded(model, folder / "theirs")
    mask = inputs.get("attention_mask") if mask is None else mask
    mine = ours(**inputs, **(labels or {}), output_hidden_states=hidden)
    wanted = labels if their_labels is None else their_labels
    other = model(**inputs, **(wanted or {}), **(only_theirs or {}), output_hidden_states=hidden)
    losses = compare(mine, other, mask)
    if labels:
        losses = mine.loss, other.loss
        same(*losses)
    if gradients:
        compare_gradients(ours, losses[0], model, losses[1], dead)
    back(ours, model, folder)
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in inputs.items()}
    exact = [expected for _, expected in pairs(mine, other, mask)]
    with torch.no_grad():
        single = pairs(ours.float()(**inputs), model.float()(**inputs, **(only_theirs or {})), mask)
    for (actual, expected), double in zip(single, exact, strict=True):
        assert_rounded(actual, expected, double)
    return ours


def compare(mine: Any, other: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compare predictions and hidden states; return the sums of squares of what is predicted."""
    predicted = pairs(mine, other, mask)
    for actual, expected in predicted:
        same(actual, expected)
    if mine.hidden_states is not None:
        name = "hidden_states" if "hidden_states" in other else "decoder_hidden_states"
        for a, b in zip(mine.hidden_states, other[name], strict=True):
            same(at_real(a, mask), at_real(b, mask))
    actual, expected = zip(*predicted)
    return squares(actual), squares(expected)


def pairs(mine: Any, other: Any, mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Our predictions and theirs, of real tokens."""
    expected = predictions(other)
    actual = [mine.logits] if len(expected) == 1 else [mine.logits, mine.sentence_logits]
    if expected[0] is getattr(other, "last_hidden_state", None):  # a trunk alone, which pools nothing
        actual = [mine.last_hidden_state]
    return [(at_real(a, mask), at_real(b, mask)) for a, b in zip(actual, expected, strict=True)]


def squares(items: Sequence[Tensor]) -> Tensor:
    return torch.stack([item.square().sum() for item in items]).sum()


def compare_gradients(
    ours: Any, loss: Tensor, theirs: nn.Module, other: Tensor, dead: tuple[str, ...] = ()
) -> None:
    """Of all parameters, by the names of transformers' files."""
    loss.backward()
    other.backward()
    family = FAMILIES[ours.config.origin.model_type]
    mine = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in ours.named_parameters()
    }
    task = family.task_of(ours.config)
    assert task is not None
    actual = to_hub_tensors(family, ours.config, task, mine)
    tied = getattr(theirs.config, "tie_word_embeddings", False)
    copies = family.tasks[task].tied_keys if tied else ()
    named = theirs.named_parameters(remove_duplicate=False)
    slopes = {name: p.grad for name, p in named if p.grad is not None and name not in copies}
    expected = {family.usual_key(name): x for name, x in names_in_files(theirs, slopes).items()}
    for name in (expected.keys() | actual.keys()) - set(dead):
        own = expected.get(name)
        assert name in actual or own is None or not own.any(), f"{name}: no gradient here"
        if name in actual:
            same(actual[name], torch.zeros_like(actual[name]) if own is None else own)


def back(ours: Any, theirs: nn.Module, folder: Path) -> None:
    """Saved in both formats and read again, by transformers and by us: bitwise the same, and nothing lost."""
    equal(read_by_theirs(ours, theirs, folder / "hub", dtype=torch.float64), theirs.state_dict())
    for form in ("hub", "polyformer"):
        ours.save_pretrained(folder / form, format=form)
        copy = polyformer.from_pretrained(folder / form)
        assert copy.config == ours.config
        equal(copy.state_dict(), ours.state_dict())


def read_by_theirs(ours: Any, theirs: nn.Module, folder: Path, **options: Any) -> dict[str, Tensor]:
    """What transformers reads of what we wrote, without a word of something missing or too much."""
    kind: Any = type(theirs)
    ours.save_pretrained(folder, format="hub")
    again, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return again.state_dict()


def equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
