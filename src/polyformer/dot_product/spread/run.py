"""`attend` over processes: keys come to the queries, which are computed in parts and joined by log-sum-exp.

Three ways, of which the first is the definition:

    all      every process gets all keys: an all-gather
    needed   every process gets the keys that the layout of the pattern names for its queries: an all-to-all
    ring     the keys of every process pass from process to process while the last ones are computed with
"""

import torch
from torch import Tensor

from polyformer.dot_product.request import Request
from polyformer.dot_product.splits.by_residue_class import join_by_lse
from polyformer.dot_product.spread.exchange import anchored, exchange
from polyformer.dot_product.spread.needs import Needs, find_needs
from polyformer.dot_product.spread.parts import Compute, keys_at, nothing_seen, numbered, part_request


def run_exchanged(request: Request, needs: Needs, compute: Compute) -> tuple[Tensor, Tensor]:
    """Output [B, H, T, Dv] and log-sum-exp [B, H, T] of this process's queries, its keys exchanged first."""
    rank, width = needs.share.rank, request.k.shape[3]
    kv = exchange(request.k, request.v, needs)
    results = [nothing_seen(request, 0)]
    for first, part in numbered(needs.parts[rank]):
        outs, lses = [], []
        for span in part.spans():
            here = keys_at(kv, needs.keys[rank], span)
            out, lse = compute(part_request(request, first, part, span, here[..., :width], here[..., width:]))
            outs.append(out)
            lses.append(lse)
        joined = join_by_lse(outs, lses) if outs else nothing_seen(request, part.queries[1] - part.queries[0])
        results.append(joined)
    outs, lses = zip(*results)
    return anchored(torch.cat(outs, 2), kv), torch.cat(lses, 2)


def choose_way(request: Request) -> tuple[Needs, str, str]:
    """What the processes need of one another, how they get it, and why so."""
    context, pattern = request.context, request.pattern
    share, whole = context.share, context.whole
    assert share is not None
    assert whole is not None

    def needs() -> Needs:
        return find_needs(pattern, whole, share, every=share.way == "all")

    static = pattern is None or pattern.is_static()
    needed = whole.once(("needs", pattern, share), needs) if static else needs()
    if share.way != "auto":
        return needed, share.way, "asked for"
    return needed, "needed", "only what the layout names"


WAYS = {"all": run_exchanged, "needed": run_exchanged}
