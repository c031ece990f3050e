"""Programs of mods are recorded once, and again if anything changes that a mod reads from outside."""

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import mods
from polyformer.attention.patterns.mods import Mod
from polyformer.core.sequence.context import Context

CPU = torch.device("cpu")
SCALE = 2.0


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the mods that were recorded."""
    names: list[str] = []
    record = mods._record

    def counted(function: Any, name: str, *rest: Any) -> Any:
        names.append(name)
        return record(function, name, *rest)

    monkeypatch.setattr(mods, "_record", counted)
    return names


def biased(table: Tensor, factor: float = 1.0) -> Callable[..., Tensor]:
    def shifted(score: Tensor, distance: Tensor) -> Tensor:
        return score + factor * SCALE * table[distance]

    return lambda s, b, h, i, j: shifted(s, (i - j).abs())


def outputs(mod: Callable[..., Tensor], grad: bool = False) -> Tensor:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    with torch.set_grad_enabled(grad):
        return attend(q, k, v, score_mod=mod, backend="definition").detach()


def test_layers_and_steps_share_a_program(records: list[str]) -> None:
    mod = biased(nn.Parameter(torch.randn(8, dtype=torch.float64)))
    for _ in range(3):
        outputs(mod)
    assert len(records) == 1
    outputs(mod, grad=True)  # a program without gradients has no graph
    assert len(records) == 2
    Mod.of(mod, "score_mod", torch.float32, CPU)
    assert len(records) == 3
    for offset in (0, 5):
        for _ in range(2):
            rule = lambda b, h, i, j: i - j < 3  # noqa: E731
            context = Context(2, 2 + offset)
            x = torch.zeros(1, 1, 2, 1), *(torch.zeros(1, 1, 2 + offset, 1) for _ in range(2))
            attend(*x, mask_mod=rule, context=context)
    assert len(records) == 5  # a new function of the same code and numbers repeats the plan


def by_rebinding(table: Tensor, mod: Any) -> None:
    (cell,) = (cell for cell in mod.__closure__ if isinstance(cell.cell_contents, types.FunctionType))
    cell.cell_contents = lambda score, distance: score - table[distance]


CHANGES: dict[str, Callable[[Tensor, Any], object]] = {
    "in place": lambda table, mod: table.mul_(2),
    "by data": lambda table, mod: table.data.mul_(2),
    "other memory": lambda table, mod: setattr(table, "data", torch.ones(8, dtype=torch.float64)),
    "closure": by_rebinding,
    "optimizer": lambda table, mod: torch.optim.SGD([table.requires_grad_()], 1.0, fused=True).step(
        lambda: setattr(table, "grad", torch.randn(8, dtype=torch.float64))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("derived", [False, True])
@torch.no_grad()
def test_a_change_is_seen(change: str, derived: bool) -> None:
    table = torch.randn(8, dtype=torch.float64)
    plain = biased(table)
    mod = (lambda s, b, h, i, j: plain(s, b, h, i, j) + table.exp()[(i - j).abs()]) if derived else plain
    outputs(mod)
    before = outputs(mod)
    CHANGES[change](table, plain)
    fresh = types.FunctionType(mod.__code__, mod.__globals__, closure=mod.__closure__)  # never recorded
    assert not torch.equal(outputs(mod), before)
    assert torch.equal(outputs(mod), outputs(fresh))


def test_changing_globals_defaults_and_objects_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"width": 2}
    holder = types.SimpleNamespace(width=2)
    masks: list[Any] = [
        lambda b, h, i, j: i - j < settings["width"],
        lambda b, h, i, j: i - j < holder.width,
        lambda b, h, i, j, width=2: i - j < width,
        lambda b, h, i, j: i - j < SCALE,
    ]
    q = torch.eye(6).view(1, 1, 6, 6)
    before = [attend(q, q, q, mask_mod=mask) for mask in masks for _ in range(2)]
    settings["width"] = holder.width = 3
    masks[2].__defaults__ = (3,)
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    after = [attend(q, q, q, mask_mod=mask) for mask in masks]
    assert all(torch.equal(x, before[0]) for x in before)
    assert all(torch.equal(x, after[0]) for x in after)
    assert not torch.equal(before[0], after[0])


def test_values_read_into_python_are_read_again() -> None:
    starts = torch.tensor([0, 3])
    numbers: list[Callable[[], list[int]]] = [starts.tolist, lambda: [int(x) for x in starts]]
    for read in numbers:

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j == read()[0]) | (j == read()[1])  # noqa: B023

        q = torch.eye(6).view(1, 1, 6, 6)
        starts[1] = 3
        before = [attend(q, q, q, mask_mod=mask) for _ in range(2)]
        starts[1] = 4
        assert torch.equal(*before)
        assert not torch.equal(attend(q, q, q, mask_mod=mask), before[0])


def test_a_cached_mod_is_freed_with_its_function() -> None:
    table = torch.randn(8, dtype=torch.float64)
    mod = biased(table)
    outputs(mod)
    assert mod in mods._kept
    ends = weakref.ref(mod), weakref.ref(table)
    del mod, table
    gc.collect()
    assert [end() for end in ends] == [None, None]


def test_a_captured_function_may_read_lists() -> None:
    lists = [1, 2]
    assert mods._captures(lambda b, h, i, j: i - j < lists[0]) is None
    assert mods._captures(lambda b, h, i, j: torch.where(i > j, i, j) < 1) is not None
    assert mods._captures(lambda b, h, i, j: getattr(i, "x") < 1) is None  # noqa: B009
