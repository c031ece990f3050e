"""The arguments of torch's `scaled_dot_product_attention` and their counterparts in `attend`."""

from collections.abc import Iterable
from typing import NoReturn

from polyformer.core.errors import InputError

COUNTERPARTS = {
    "attn_mask": (
        "pass a boolean mask [B, H, Tq, Tk] as mask_mod=lambda b, h, q_idx, kv_idx: "
        "mask[b, h, q_idx, kv_idx], and numbers to add to the scores by a score_mod"
    ),
    "is_causal": 'use pattern="Causal()", which aligns the last query with the last key',
    "dropout_p": "use dropout",
    "enable_gqa": "leave it out: the shapes of q and k say how many queries share a key",
}


def refuse_unknown(function: str, names: Iterable[str]) -> NoReturn:
    """Raise an error for keyword arguments that a function does not take.

    Raises:
        InputError: an argument of torch's function, with its counterpart.
        TypeError: any other argument.
    """
    for name in names:
        if name in COUNTERPARTS:
            raise InputError(f"{name}: no argument of {function}, only of torch's; {COUNTERPARTS[name]}")
    raise TypeError(f"{function}() got an unexpected keyword argument {next(iter(names))!r}")
