"""Linformer: keys and values are projected along the sequence, from n tokens to k rows, before attention.

    y_h = softmax(q_h (E_h k_h)^T / sqrt(D)) (F_h v_h)        E_h, F_h [k, n]; n = max_length

E and F have a column for every position: each token is multiplied by the column of its position, padding is
left out, and inputs shorter than n use the first columns. Each row mixes tokens of the whole sequence, so
there is no causal form. Instead of a matrix, E and F may take the mean, the maximum or a convolution of
windows of n / k positions; windows without tokens are masked. Wang et al. 2020, section 4, equation 7.

Cost: 2 k T (D + Dv) products per head for the projections and the same for the attention: linear in T; memory
k (D + Dv) plus, in training, the tensors saved by attention. E and F have n k parameters each. With context
parallelism each process projects the tokens that it has, and the rows are summed over the processes.

Deviations: the paper does not define padding, shorter inputs and the initialization of E and F: here they are
drawn with variance 1 / n. float16 and bfloat16 inputs are computed in float32, since rounding the projected
keys again would change the scores.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.key_exchange import anchored
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig, PositionTerms, check_head_size
from polyformer.attention.mechanisms.length_projections import (
    PROJECTIONS,
    KeyColumns,
    LengthProjection,
)
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.host_values import tensor_on
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ops.softmax import record, recorded, recording
from polyformer.core.ranges import PositiveInt, Probability
from polyformer.core.sequence.context import Context
from polyformer.core.state import State

SHARING = "none", "head", "key-value", "layer"
Ranks = int | tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinformerConfig(MechanismConfig):
    """Linformer attention: keys and values are projected along the sequence to a fixed length.

    `k`: the number of rows: an integer for all layers, (an integer per layer), or ((an integer per head), per
    layer). Shorter tuples repeat over the layers or heads.

    `sharing`: "none": each head has its own E and F; "head": the heads of a layer share E and F; "key-value":
    E and F are also the same; "layer": all layers share a single E = F. The projections "mean" and "max" have
    no parameters to share.
    """

    max_length: PositiveInt = 512  # the maximum number of positions (n in the paper)
    k: Ranks = 128
    sharing: str = "head"
    projection: str = "linear"  # or "mean", "max", "convolution"
    dropout: Probability = 0.0  # of attention weights
    backend: str = "auto"

    kind: ClassVar[str] = "linformer"
    paper: ClassVar[str] = "Wang et al. 2020, section 4"
    causal: ClassVar[bool] = False
    supports_packing: ClassVar[bool] = False
    supports_kv_cache: ClassVar[bool] = False
    supports_score_bias: ClassVar[bool] = False
    pairs: ClassVar[bool] = False
    reads_any_sequence: ClassVar[bool] = True  # of at most `max_length` tokens
    supports_context_parallel: ClassVar[bool] = True
    instead: ClassVar[str] = "'softmax' with a sparse pattern such as Window(256)"

    def __post_init__(self) -> None:
        if self.backend == "definition":
            object.__setattr__(self, "supports_context_parallel", False)
        if self.sharing not in SHARING:
            raise unknown("sharing", self.sharing, SHARING)
        if self.projection not in PROJECTIONS:
            raise unknown("projection", self.projection, PROJECTIONS)
        if not self.layers or not all(self.layers):
            raise InputError(f"k: expected a number for each layer or head, got {quote(self.k)}")
        self._check_rows()
        if self.projection not in ("mean", "max"):
            self._check_shared()

    def _check_rows(self) -> None:
        """Raise `InputError` for numbers of rows that the projection cannot have."""
        for k in (k for layer in self.layers for k in layer):
            if not 1 <= k <= self.max_length:
                raise InputError(f"k: expected 1 to max_length {self.max_length} rows, got {k}")
            if self.projection != "linear" and self.max_length % k:
                raise InputError(
                    f"k: {quote(self.projection)} takes windows of max_length / k positions, expected a "
                    f"divisor of {self.max_length}, got {k}"
                )

    def _check_shared(self) -> None:
        """Raise `InputError` for different numbers of rows of a shared projection."""
        if self.sharing != "none" and any(len(set(layer)) > 1 for layer in self.layers):
            raise InputError(
                f"k: heads that share a projection have one k, got {quote(self.k)}; use sharing 'none'"
            )
        if self.sharing == "layer" and len({k for layer in self.layers for k in layer}) > 1:
            raise InputError(
                f"k: layers that share a projection have one k, got {quote(self.k)}; use another sharing"
            )

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The number of rows per head, for each layer, before the tuples are repeated."""
        layers = (self.k,) if isinstance(self.k, int) else self.k
        return tuple((ranks,) if isinstance(ranks, int) else tuple(ranks) for ranks in layers)

    def for_layer(self, layer: int) -> "LinformerConfig":
        """Return the config with the ranks of layer `layer` only."""
        return dataclasses.replace(self, k=(self.layers[layer % len(self.layers)],))

    def build(self, num_heads: int, head_size: int) -> "Linformer":
        """Return the module with separate projections; `share_parameters` shares them with another layer."""
        return Linformer(self, num_heads, head_size)

    def all_gathered_elements(self, heads: int, kv_heads: int, width: int, length: int, causal: bool) -> int:
        """Return the number of elements in the projected keys and values, which processes exchange."""
        ranks = self.layers[0]
        repeated = self.sharing == "none" or len({*ranks}) > 1
        head_ranks = [ranks[head % len(ranks)] for head in range(heads if repeated else kv_heads)]
        if self.projection == "linear":
            return 2 * width * sum(head_ranks)
        return (
            2 * width * sum(-(-length // (self.max_length // k)) for k in head_ranks)
        )  # windows with tokens

    @classmethod
    def examples(cls) -> tuple["LinformerConfig", ...]:
        """Return configs that cover all projections and all sharings."""
        return (
            cls(max_length=72, k=8),
            cls(max_length=70, k=((5, 9), (7,)), sharing="none"),
            cls(max_length=72, k=(12, 8), sharing="key-value", projection="convolution"),
            cls(max_length=72, k=36, sharing="layer"),
            cls(max_length=72, k=((24, 36),), projection="mean"),
            cls(max_length=72, k=24, projection="max"),
        )


class Linformer(Mechanism):
    """Attention to projected keys and values.

    Heads with the same k are computed together: `heads` maps each k to its heads, `keys` and `values` contain
    the projections E and F of each k in the same order.
    """

    def __init__(self, config: LinformerConfig, num_heads: int, head_size: int):
        super().__init__()
        check_head_size(head_size)
        self.config, ranks = config, config.layers[0]
        head_ranks = [ranks[head % len(ranks)] for head in range(num_heads)]
        self.heads = {
            k: [h for h in range(num_heads) if head_ranks[h] == k] for k in dict.fromkeys(head_ranks)
        }
        self.keys, self.values = nn.ModuleList(), nn.ModuleList()
        for k, heads in self.heads.items():
            own = len(heads) if config.sharing == "none" else 1
            projection = PROJECTIONS[config.projection]
            self.keys.append(projection(config.max_length, k, own, head_size))
            shared = config.sharing in ("key-value", "layer")
            self.values.append(self.keys[-1] if shared else projection(config.max_length, k, own, head_size))

    def share_parameters(self, first: Mechanism) -> None:
        """Use the projections of the first layer if `sharing` is "layer"."""
        if self.config.sharing == "layer":
            assert isinstance(first, Linformer)
            self.keys, self.values = first.keys, first.values

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Attend to the rows E k and F v, separately for each k."""
        columns = KeyColumns.of(context, self.config.max_length, k.device)
        dtype, (q, k, v) = q.dtype, (at_least_float32(x) for x in (q, k, v))
        groups = q.shape[1] // k.shape[1]
        # Query heads of one group may have different k or projections, so they cannot share projected keys.
        if groups > 1 and (len(self.heads) > 1 or self.config.sharing == "none"):
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if len(self.heads) == 1:
            return self._attend(0, q, k, v, columns).to(dtype), state
        return self._attend_by_rank(q, k, v, columns).to(dtype), state

    def _attend_by_rank(self, q: Tensor, k: Tensor, v: Tensor, columns: KeyColumns) -> Tensor:
        """Compute the heads of each k separately and restore their order, also of recorded weights."""
        is_recording, parts, weights = recording(), [], []
        for index, heads in enumerate(self.heads.values()):
            mine = q[:, heads], k[:, heads], v[:, heads]
            if not is_recording:
                parts.append(self._attend(index, *mine, columns))
                continue
            with recorded() as records:
                parts.append(self._attend(index, *mine, columns))
            # Heads with fewer rows get weights of 0, so that the records have one shape.
            weights.append(nn.functional.pad(records[0], (0, max(self.heads) - records[0].shape[-1])))
        order = tensor_on([head for heads in self.heads.values() for head in heads], q.device).argsort()
        if is_recording:
            record(torch.cat(weights, 1)[:, order])
        return torch.cat(parts, 1)[:, order]

    def _attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, columns: KeyColumns) -> Tensor:
        """Return the attention output of the heads with the k number `index`."""
        key_projection, value_projection = self.keys[index], self.values[index]
        if self.config.backend == "definition":
            assert isinstance(key_projection, LengthProjection)
            assert isinstance(value_projection, LengthProjection)
            k, seen = key_projection.definition(k, columns)
            v, _ = value_projection.definition(v, columns)
        else:
            k, seen = key_projection(k, columns)
            v, _ = value_projection(v, columns)
        seen = None if seen is None else seen.expand(len(q), -1)
        out = attend(
            q,
            k,
            v,
            context=Context(q.shape[2], k.shape[2], kv_valid=seen),
            dropout=self.config.dropout if self.training else 0.0,
            backend=self.config.backend,
        )
        if columns.shard is None:
            return out
        # A process without queries must still take part in the all-gather of the backward pass.
        return anchored(anchored(out, k), v)
