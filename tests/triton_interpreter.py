"""Triton's interpreter on a CPU: kernels run as Python over numpy, one program after another.

Import this module in a process of its own before any module with kernels. Two things are added: a driver
without a GPU, for the autotuner, and loop variables that are tensors, as they are in compiled kernels. Use
float32: the interpreter has no bfloat16.
"""

import ast
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter


class NoDevice:
    """What Triton asks of a driver before a kernel runs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """The first configuration is as good as any other."""

        def measure(run: Callable[[], object], quantiles: Any = (0.5,), **_: Any) -> list[float]:
            run()
            return [1.0] * len(quantiles)

        return measure


def tensor_range(*bounds: Any) -> Iterator[tl.tensor]:
    """A range whose numbers have the methods of a tensor."""
    numbers = [
        int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else int(bound) for bound in bounds
    ]
    for number in range(*numbers):
        yield tl.tensor(interpreter.TensorHandle(np.array([number], dtype=np.int32), tl.int32), tl.int32)


def visit_for(self: ast.NodeTransformer, node: ast.For) -> ast.For:
    self.generic_visit(node)
    if (
        isinstance(node.iter, ast.Call)
        and isinstance(node.iter.func, ast.Name)
        and node.iter.func.id == "range"
    ):
        node.iter.func.id = tensor_range.__name__
    return node


interpreter.tensor_range = tensor_range  # type: ignore[attr-defined]
interpreter.ASTTransformer.visit_For = visit_for  # type: ignore[attr-defined]
driver.set_active(NoDevice())
