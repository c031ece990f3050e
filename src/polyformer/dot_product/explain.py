"""`explain`: how `attend` would run a call."""

from torch import Tensor

from polyformer.dot_product.plan import Plan, plan
from polyformer.dot_product.recalled import recall_key
from polyformer.dot_product.relative import Relative
from polyformer.dot_product.request import prepare
from polyformer.patterns.base import MaskMod, Pattern, ScoreMod, Where
from polyformer.sequence.context import Context


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | MaskMod | None = None,
    mask_mod: MaskMod | None = None,
    layout: Where | None = None,
    score_mod: ScoreMod | None = None,
    relative: Relative | None = None,
    context: Context | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    return_lse: bool = False,
) -> Plan:
    """The plan by which `attend` would run this call, here and now: print it.

    A simple call is one run of a backend: `.backend` names it, `.reasons` says why those asked before it do
    not take the call. One that is split has such `.leaves`, and prints as a tree.
    """
    key = recall_key(
        q, k, v, pattern, mask_mod, score_mod, relative, context, scale, dropout, backend, return_lse
    )
    request = prepare(q, k, v, pattern, mask_mod, layout, score_mod, relative, context, scale, dropout)
    return plan(request, backend, return_lse, repeated=key is not None)
