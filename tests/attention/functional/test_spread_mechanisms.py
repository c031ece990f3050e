"""Mechanisms over a sequence that is spread over processes: all is that of one process."""

import torch
from spread_cases import HEADS, LENGTH, assert_spread_equals_whole, random_inputs, share_of, whole_context
from torch import Tensor

from launching import launch, run_checks
from polyformer.attention.functional.key_exchange import counted_transfers
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.mechanisms.length_projections import PROJECTIONS
from polyformer.attention.mechanisms.recurrence.base import RecurrenceConfig
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.context_parallel import shard_sequence
from registered import registered


def all_mechanisms() -> None:
    """Every registered mechanism that says it can, without and with a future, documents and padding."""
    kinds = set()
    for config in (example for cls in registered(MechanismConfig.kinds) for example in cls.examples()):
        if config.supports_context_parallel:
            kinds.add(config.kind)
            check_mechanism(config, LENGTH)
    assert {"softmax", "performer", "rfa", "alternate", "adaptive_span", "linformer"} <= kinds
    assert {"linear", "retention", "gla", "ssd", "delta", "gated_delta", "kda", "rwkv7"} <= kinds


def few_tokens() -> None:
    """Processes without a token take part."""
    linformer = {"kind": "linformer", "max_length": 8, "k": 4}
    own = [{"kind": kind, "features": 4} for kind in ("performer", "rfa")]
    own += [{"kind": kind} for kind in ("linear", "gla", "gated_delta")]
    own += [{"kind": "delta", "steps": 2}, {"kind": "rwkv7"}]
    projections = [{**linformer, "projection": name} for name in PROJECTIONS]
    for config in (*own, *projections):
        check_mechanism(MechanismConfig.from_dict(config), 3)


def check_mechanism(config: MechanismConfig, length: int) -> None:
    torch.manual_seed(5)
    mechanism = config.for_layer(0).build(HEADS, 6).double().eval()
    for parameter in mechanism.parameters():
        torch.nn.init.normal_(parameter)

    def run(context: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mechanism(q, k, v, context, None, None)[0]

    for causal in (False, True) if config.causal else (False,):
        for mixed in (False, True):
            whole = whole_context(length, causal=causal, mixed=mixed)
            share = share_of("balanced" if causal == mixed else "contiguous", length, "auto")
            # A convolution of values and a norm of outputs have the width of a head; others any number.
            own = isinstance(config, RecurrenceConfig) or getattr(config, "projection", None) == "convolution"
            width = 6 if own else 5
            inputs, parameters = random_inputs(length, width), list(mechanism.parameters())
            assert_spread_equals_whole(share, whole, inputs, parameters, run)


def sums_are_as_many_for_any_length() -> None:
    """A linear mechanism sends its state, not its keys."""
    mechanism = MechanismConfig.from_dict({"kind": "performer", "features": 4}).build(HEADS, 6)
    sent = []
    for length in (64, 640):
        share, whole = share_of("contiguous", length, "auto"), Context(length, length, causal=True)
        q, k, v = (share.take(x, 2).float() for x in random_inputs(length))
        with counted_transfers() as transfers:
            mechanism(q, k, v, shard_sequence(whole, share, q.device), None, None)
        sent.append([transfer.received for transfer in transfers])
    assert sent[0] == sent[1] != []


CHECKS = {2: (all_mechanisms, few_tokens, sums_are_as_many_for_any_length), 4: (few_tokens,)}


def test_processes_compute_what_one_does():
    launch(__file__)


if __name__ == "__main__":
    run_checks(CHECKS)
