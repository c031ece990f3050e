"""Biases by distance for the keys that a policy kept, which are at other places in each head.

    score_ij = q_i . k_j * scale + bias_h[slot(i) - slot_h(j)]

Elsewhere all heads share the keys, and the biases of a diagonal are equal (`Relative`). Here each entry is
looked up by the tokens that a head kept, which is cheap for the few queries of a step of decoding.
"""

import dataclasses

from torch import Tensor

from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.positions import BoundPosition
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class KeptDistances:
    """The bias of a scheme such as ALiBi, in the form the mechanism uses (`PositionTerms`).

    slots: [B, Hkv, Tk], the tokens of the text that the keys of a call belong to. length: tokens of the text,
    with the call's.
    """

    terms: BoundPosition
    slots: Tensor
    length: int

    farthest = None
    is_plain = False

    def parts(self, q: Tensor, k: Tensor, context: Context) -> tuple[RotatedPart, ...]:
        """Return no sets: all pairs have the same terms."""
        return ()

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Return None: keys of one index have different distances in different heads."""
        return None

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod:
        """Return a function that adds bias_h[slot(i) - slot_h(j)] to the scores of q [B, H, Tq, D]."""
        # Without padding and documents: distances count slots. All layers share this context's biases.
        text = context.once(
            ("text", self.length), lambda: Context(context.q_len, self.length, causal=context.causal)
        )
        relative = self.terms.relative(q, k, text)
        assert relative is not None
        assert relative.bias is not None
        bias, groups = relative.bias.expand(q.shape[1], -1), q.shape[1] // self.slots.shape[1]

        @broadcasts
        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = q_idx + text.offset - self.slots[b, h // groups, kv_idx]
            return score + bias[h, relative.entry(distance)]

        return add
