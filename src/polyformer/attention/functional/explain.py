"""`explain`: the plan by which `attend` would run a call."""

from torch import Tensor

from polyformer.attention.functional.plan import Plan, plan
from polyformer.attention.functional.recalled import recall_key
from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import check_dense, prepare
from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod, Where
from polyformer.core.sequence.context import Context


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | MaskMod | str | None = None,
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
    """Return the plan by which `attend` would run this call now, which can be printed.

    A simple call is a single run of a backend: `.backend` is its name, and `.reasons` contains the reasons
    against the backends before it. A split call has `.leaves` of this form, and prints as a tree.
    """
    key = recall_key(
        q, k, v, pattern, mask_mod, score_mod, relative, context, scale, dropout, backend, return_lse
    )
    check_dense(q, k, v)
    request = prepare(q, k, v, pattern, mask_mod, layout, score_mod, relative, context, scale, dropout)
    return plan(request, backend, return_lse, repeated=key is not None)
