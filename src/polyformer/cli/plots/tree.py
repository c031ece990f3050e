"""A model's parts as an indented list, with their parameters; equal layers are shown once."""

from collections.abc import Iterator

from torch import nn

from polyformer.core.ops.quantized import QuantizedWeight

LEFT_OUT = (nn.Dropout, nn.Identity)


def tree(model: nn.Module) -> str:
    """Return a line per part: its place, class and parameters (tied parameters at their owner)."""
    lines = list(_lines("", model, 0))
    width = max(len(text) for text, _ in lines)
    return "\n".join(f"{text:<{width}}  {number:>14,}" if number else text for text, number in lines)


def parameters(module: nn.Module) -> int:
    """Return the number of entries in parameters and quantized weights, tied ones once."""
    rounded = sum(
        part.outputs * part.inputs for part in module.modules() if isinstance(part, QuantizedWeight)
    )
    return rounded + sum(parameter.numel() for parameter in module.parameters())


def _lines(name: str, module: nn.Module, depth: int, times: int = 1) -> Iterator[tuple[str, int]]:
    many = f"{times} x " if times > 1 else ""
    yield (
        f"{'  ' * depth}{name + ' ' if name else ''}{many}{type(module).__name__}",
        parameters(module) * times,
    )
    for child, part, count in _children(module):
        yield from _lines(child, part, depth + 1, count)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the children to show; a run of equal members of a list is a single child."""
    for name, child in module.named_children():
        if not isinstance(child, nn.ModuleList):
            if not isinstance(child, LEFT_OUT):
                yield name, child, 1
            continue
        members = list(child)
        start = 0
        for stop in range(1, len(members) + 1):
            if stop == len(members) or repr(members[stop]) != repr(members[start]):
                yield name, members[start], stop - start
                start = stop
