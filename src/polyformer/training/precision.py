"""The precision of matrix products in training: the type of autocast, and TF32 for float32 products."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from polyformer.core.errors import InputError

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(precision: str, device: torch.device) -> str:
    """Return the configured precision; for "auto" bf16 on a GPU that supports it, otherwise "no".

    Raises `InputError` for fp16 without a GPU.
    """
    if precision == "fp16" and device.type != "cuda":
        raise InputError("precision: 'fp16' needs a CUDA device; on the CPU use 'bf16' or 'no'")
    if precision != "auto":
        return precision
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "no"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass in a precision chosen by `choose_precision`."""
    if precision == "no":
        return nullcontext()
    return torch.autocast(device.type, dtype=HALVES[precision])


@contextmanager
def tensor_float32(precision: str, device: torch.device) -> Iterator[None]:
    """Let a GPU round the factors of the remaining float32 products to 10 bits, if `autocast` rounds others.

    bfloat16 has 7 bits. A lower precision that was already set remains.
    """
    if device.type != "cuda" or precision == "no":
        yield
        return
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
