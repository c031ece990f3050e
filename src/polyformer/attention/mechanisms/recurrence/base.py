"""The common parts of linear recurrences: state, documents, padding and directions.

    q, k, v = silu(D * q), silu(D * k), silu(D * v)        with short convolutions D (`short_convolution`)
    y = scan(q, k, v, gates)                                see `scan`
    y = RMSNorm(y) silu(z)                                  per head, for members with an output gate z

A decoder scans from the first token to the last. An encoder scans in both directions and adds the outputs;
the token itself counts once if nothing is erased. Gates are projected from the input of the layer
(`MechanismConfig.gate_sizes`).
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.plan import refuse_recording
from polyformer.attention.mechanisms.base import (
    Mechanism,
    MechanismBackend,
    MechanismConfig,
    PositionTerms,
    check_head_size,
)
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs, chunked_scan, recurrence
from polyformer.core.errors import InputError
from polyformer.core.ops.depthwise_convolution import depthwise_convolution
from polyformer.core.ops.norms import RMSNorm
from polyformer.core.ops.precision import at_least_float32, without_autocast
from polyformer.core.ops.softmax import record, recording
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrenceConfig(MechanismConfig):
    """Options of all members. `short_convolution`: tokens that the short convolutions of q, k and v read;
    null for none.

    Class attributes: `gates`, the names of gates with a number per head; `output_gate`, whether z exists;
    `output_norm`, whether heads are normed.
    """

    short_convolution: PositiveInt | None = None
    backend: MechanismBackend = "auto"  # "definition": token by token

    supports_score_bias: ClassVar[bool] = False
    reasons: ClassVar[Mapping[str, str]] = {
        "supports_score_bias": "its state sums keys before queries read them, so single scores do not exist"
    }
    gates: ClassVar[tuple[str, ...]] = ()
    output_gate: ClassVar[bool] = False
    output_norm: ClassVar[bool] = True

    def gate_sizes(self, num_heads: int, head_size: int) -> dict[str, int]:
        """See `MechanismConfig.gate_sizes`."""
        sizes = dict.fromkeys(self.gates, num_heads)
        return sizes | ({"output": num_heads * head_size} if self.output_gate else {})


@dataclasses.dataclass(frozen=True)
class RecurrentState(State):
    """What a recurrence keeps of earlier tokens.

    matrix: S [B, H, D, Dv] in at least float32; None before the first token. tokens: the last tokens before
    the short convolutions, [B, M, C]. docs: their documents [B, M], None for a single document.
    """

    matrix: Tensor | None = None
    tokens: Tensor | None = None
    docs: Tensor | None = None


class Recurrence(Mechanism):
    """A linear recurrence. A member defines `inputs`: the keys, values and gates of the scan."""

    config: RecurrenceConfig

    def __init__(self, config: RecurrenceConfig, num_heads: int, head_size: int):
        super().__init__()
        check_head_size(head_size)
        self.config, self.num_heads, self.head_size = config, num_heads, head_size
        if config.short_convolution is not None:
            # Key heads are repeated for the query heads, so every head has taps of its keys.
            self.taps = nn.Parameter(torch.empty(config.short_convolution, 3, num_heads, head_size))
            nn.init.uniform_(self.taps, -(config.short_convolution**-0.5), config.short_convolution**-0.5)
        self.norm = RMSNorm(head_size, eps=1e-5) if config.output_norm else None

    def new_state(self, reserve: int) -> State:
        """Return the state before the first token; its size does not grow with the number of tokens."""
        return RecurrentState()

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return the inputs of the scan from q, k, v [B, H, T, D] and gates [B, T, C]."""
        raise NotImplementedError

    def output(self, y: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Return the output of the heads [B, H, T, D], given the scan's y and the values."""
        if self.norm is not None:
            y = F.rms_norm(y, (self.head_size,), self.norm.weight.to(y.dtype), self.norm.eps)
        return self.gated(y, gates)

    def gated(self, y: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Return y silu(z), or y without an output gate."""
        return y * F.silu(self.per_head(gates["output"])) if "output" in gates else y

    @guarded
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: PositionTerms,
        gates: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        """See `Mechanism.forward`. gates: [B, T, `gate_width`], from the layer's input.

        By default gates are 0, and the output has no gate.
        """
        assert isinstance(state, RecurrentState | None)
        past, dtype, queries = state or RecurrentState(), q.dtype, q.shape[2]
        with without_autocast(q):
            # Keys without queries get queries of zeros, and their outputs are dropped.
            q = F.pad(at_least_float32(q), (0, 0, k.shape[2] - queries, 0))
            k, v = (at_least_float32(x).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            table = self._gates(k, gates)
            q, k, v, tokens, docs = self._convolved(q, k, v, context, past)
            scan = self._masked(self.inputs(q, k, v, table), context, past)
            if recording():
                self._record(scan, context, past, queries)
            y, matrix = self._scan(scan, context, past.matrix)
            y = self.output(y, v, table)[:, :, -queries:].to(dtype)
            if context.kv_valid is not None:
                y = y.masked_fill(~context.kv_valid[:, None, -queries:, None].bool(), 0)
        return y, None if state is None else RecurrentState(matrix, tokens, docs)

    def per_head(self, gate: Tensor) -> Tensor:
        """Return a gate [B, T, H c] by heads, [B, H, T, c]."""
        return gate.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def weights(self, scan: ScanInputs, context: Context) -> Tensor:
        """Return the weight of every token's value in every output of the scan, [B, H, T, T]."""
        # Outputs are linear in the values: those of unit vectors are the weights.
        units = torch.eye(scan.v.shape[2], dtype=scan.v.dtype, device=scan.v.device)
        return self._scan(
            dataclasses.replace(scan, v=units.expand(*scan.v.shape[:2], -1, -1)), context, None
        )[0]

    def _record(self, scan: ScanInputs, context: Context, past: RecurrentState, queries: int) -> None:
        """Record the weights of a call without a past."""
        refuse_recording(context)
        if past.matrix is not None:
            raise InputError(
                "output_attentions: the state of a recurrence has no weights of single tokens; "
                "pass the whole input at once"
            )
        record(self.weights(scan, context)[:, :, -queries:])

    def _gates(self, k: Tensor, gates: Tensor | None) -> dict[str, Tensor]:
        """Return each gate [B, T, C] in the precision of the keys."""
        sizes = self.config.gate_sizes(self.num_heads, self.head_size)
        if gates is None:
            sizes.pop("output", None)
            gates = k.new_zeros(len(k), k.shape[2], sum(sizes.values()))
        parts = gates.to(k.dtype).split(list(sizes.values()), -1) if sizes else ()
        return dict(zip(sizes, parts))

    def _convolved(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, past: RecurrentState
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return q, k and v after the short convolutions, and the tokens and documents for the next call."""
        if self.config.short_convolution is None:
            return q, k, v, None, None
        taps, length = self.taps.to(q.dtype).flatten(1), q.shape[2]
        x = torch.stack([q, k, v], 1).permute(0, 3, 1, 2, 4).flatten(2)  # [B, T, 3 H D]
        valid, doc = (None if x is None else x[:, -length:] for x in (context.kv_valid, context.kv_doc))
        y, tokens, docs = depthwise_convolution(x, taps, context.causal, valid, doc, past.tokens, past.docs)
        y = F.silu(y).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return y[0], y[1], y[2], tokens, docs

    def _masked(self, scan: ScanInputs, context: Context, past: RecurrentState) -> ScanInputs:
        """Return the inputs with padding that changes no state, and with the starts of documents."""
        length = scan.k.shape[2]
        if context.kv_valid is not None:
            padding = ~context.kv_valid[:, None, -length:, None].bool()
            names = "k", "v", "decay", "erase"
            tables = {name: x for name in names if (x := getattr(scan, name)) is not None}
            scan = dataclasses.replace(scan, **{n: x.masked_fill(padding, 0) for n, x in tables.items()})
        if context.kv_doc is None:
            return scan
        # The first token continues the document of the last token before it.
        doc = context.kv_doc.expand(len(scan.k), -1)
        before = doc[:, -length - 1 : -length] if context.kv_len > length else doc[:, :1]
        starts = torch.cat([before, doc[:, -length:]], 1).diff(dim=1) != 0
        return dataclasses.replace(scan, starts=starts)

    def _scan(self, scan: ScanInputs, context: Context, matrix: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, H, T, Dv] and the next matrix; in an encoder of both directions."""
        run = recurrence if self.config.backend == "definition" else chunked_scan
        empty = scan.k.new_zeros(*scan.k.shape[:2], scan.k.shape[3], scan.v.shape[3])
        y, matrix = run(scan, empty if matrix is None else matrix)
        if not context.causal:
            back, _ = run(scan.reversed(), empty)
            y = y + back.flip(2)
            if scan.erase is None:
                y = y - (scan.q * scan.k).sum(-1, keepdim=True) * scan.v
        return y, matrix


def inverse_softplus(x: Tensor) -> Tensor:
    """Return y with softplus(y) = x, for a bias with a chosen initial step."""
    return x + torch.log(-torch.expm1(-x))
