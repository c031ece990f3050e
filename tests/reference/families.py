"""One family's model in transformers and ours, loaded from its files: all that both compute, compared."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import polyformer
from polyformer.checkpoints import FAMILIES
from polyformer.checkpoints.save import to_hub_tensors
from polyformer.model import Transformer

Inputs = dict[str, Tensor]


def shaken(model: nn.Module, scale: float = 0.2) -> nn.Module:
    """In float64 and evaluation, with weights that are all away from their special initial values."""
    torch.manual_seed(0)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
    return model


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
    only_ours: Inputs | None = None,
    mask: Tensor | None = None,
    float32: float = 1e-5,
    hidden: bool = True,
    dead: tuple[str, ...] = (),
    tolerance: float = 1e-10,
) -> Transformer:
    """Loads what `theirs` saved and compares predictions, loss, all gradients and the way back.

    labels: for our forward; their_labels: for theirs, the same by default. only_theirs, only_ours: inputs
    that one side alone is given (positions, say). mask: [B, T], the tokens that are compared; by default the
    decoder's or the input's attention mask. float32: the tolerance there. hidden:
    whether the hidden states of all layers are compared. dead: parameters that take part in nothing.
    tolerance: in float64, larger where theirs computes a part in float32.
    """
    model = shaken(theirs)
    model.save_pretrained(folder / "theirs")
    ours = polyformer.from_pretrained(folder / "theirs")
    if mask is None:
        mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
        mask = None if "decoder_input_ids" in inputs and "decoder_attention_mask" not in inputs else mask
    mine = ours(**inputs, **(labels or {}), **(only_ours or {}), output_hidden_states=hidden)
    wanted = labels if their_labels is None else their_labels
    other = model(**inputs, **(wanted or {}), **(only_theirs or {}), output_hidden_states=hidden)
    compare(mine, other, mask, tolerance)
    if labels:
        same(mine.loss, other.loss, tolerance)
        compare_gradients(ours, mine.loss, model, other.loss, dead, tolerance)
    back(ours, model, folder)
    with torch.no_grad():
        mine, other = (
            ours.float()(**inputs, **(only_ours or {})),
            model.float()(**inputs, **(only_theirs or {})),
        )
    compare(mine, other, mask, float32)
    return ours


def compare(mine: Any, other: Any, mask: Tensor | None, tolerance: float = 1e-10) -> None:
    expected = predictions(other)
    actual = [mine.logits] if len(expected) == 1 else [mine.logits, mine.sentence_logits]
    if expected[0] is getattr(other, "last_hidden_state", None):  # a trunk alone, which pools nothing
        actual = [mine.last_hidden_state]
    if mine.hidden_states is not None:
        name = "hidden_states" if "hidden_states" in other else "decoder_hidden_states"
        actual, expected = [*actual, *mine.hidden_states], [*expected, *other[name]]
    for a, b in zip(actual, expected, strict=True):
        same(at_real(a, mask), at_real(b, mask), tolerance)


def compare_gradients(
    ours: Transformer,
    loss: Tensor,
    theirs: nn.Module,
    other: Tensor,
    dead: tuple[str, ...],
    tolerance: float = 1e-10,
) -> None:
    loss.backward()
    other.backward()
    origin = ours.config.origin
    assert origin is not None
    family = FAMILIES[origin.model_type]
    mine = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in ours.named_parameters()
    }
    task = family.task_of(ours.config)
    actual = to_hub_tensors(family, ours.config, task, mine)
    copies = family.tasks[task].tied_keys if ours.config.embedding.tied else ()
    expected = {
        name: parameter.grad
        for name, parameter in theirs.named_parameters(remove_duplicate=False)
        if parameter.grad is not None and name not in copies
    }
    for name in (expected.keys() | actual.keys()) - set(dead):
        own = expected.get(name)
        assert name in actual or own is None or not own.any(), f"{name}: no gradient here"
        if name in actual:
            same(actual[name], torch.zeros_like(actual[name]) if own is None else own, tolerance)


def back(ours: Transformer, theirs: nn.Module, folder: Path) -> None:
    """Saved in both formats and read again, by transformers and by us: bitwise the same."""
    ours.save_pretrained(folder / "hub", format="hub")
    again = type(theirs).from_pretrained(folder / "hub", dtype=torch.float64)  # type: ignore[attr-defined]
    expected, actual = theirs.state_dict(), again.state_dict()
    assert expected.keys() == actual.keys()
    for name, item in expected.items():
        assert torch.equal(actual[name], item), name
    for path, form in (("hub", "hub"), ("own", "polyformer")):
        ours.save_pretrained(folder / path, format=form)
        copy = polyformer.from_pretrained(folder / path)
        assert copy.config == ours.config
        state = copy.state_dict()
        for name, tensor in ours.state_dict().items():
            assert torch.equal(state[name], tensor), name
