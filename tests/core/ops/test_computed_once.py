"""Compiled code computes a value before the loop that reads it, and not in each turn."""

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from polyformer.core.ops.compiled_code import computed_once, prepare_inductor, register_computed_once

ROWS = "997L"

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


@pytest.mark.parametrize("once", [False, True])
def test_the_loop_over_rows_reads_the_value(once: bool):
    prepare_inductor()
    register_computed_once()
    x, rows = torch.randn(64), torch.randn(997, 64)

    def products(x: Tensor, rows: Tensor) -> Tensor:
        size = x.abs()
        return (rows * (computed_once(size) if once else size)).sum(-1)

    torch.compiler.reset()
    y, [code] = run_and_get_code(torch.compile(products, fullgraph=True), x, rows)
    torch.testing.assert_close(y, rows @ x.abs())
    assert (code.rindex(".abs()") < code.index(ROWS)) == once
