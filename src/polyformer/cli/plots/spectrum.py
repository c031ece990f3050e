"""The singular values of attention: the share of each matrix in its greatest singular values.

    P = U S W^T,  s_1 >= s_2 >= ... >= s_n        share(i) = (s_1 + ... + s_i) / (s_1 + ... + s_n)

for the attention matrix P [n, n] of every layer and head, the mean over texts, in float64. A curve that rises
early means that a matrix of low rank is a good approximation; a straight line, that all ranks count the same.
Wang et al. 2020 (Linformer), section 3 and figure 1, which reads it at n / 4. Cost: n^3 per matrix.

A causal matrix is triangular, and its diagonal has each token's weight on its own value, so its rank is n
wherever all of these are above zero: compare decoders with decoders.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.architectures import Transformer

LEAST = 4
"""The number of tokens of the shortest text: a quarter of it is one singular value."""


@dataclasses.dataclass(frozen=True, eq=False)
class Spectrum:
    """The spectrum: `curves` [layers, H, n], float64: share(1), ..., share(n), means over `texts` texts."""

    curves: Tensor
    texts: int

    @property
    def length(self) -> int:
        """The number of tokens n of each text."""
        return self.curves.shape[-1]

    @property
    def quarter(self) -> int:
        """The number of singular values n / 4, rounded down."""
        return self.length // 4

    @property
    def at_quarter(self) -> Tensor:
        """The share at n / 4, [layers, H]."""
        return self.curves[..., self.quarter - 1]


def shares(matrices: Tensor) -> Tensor:
    """Return share(1), ..., share(n) [..., n] of matrices [..., n, n]; all 1 for a matrix of zeros."""
    sums = torch.linalg.svdvals(matrices.double()).cumsum(-1)
    total = sums[..., -1:]
    return torch.where(total > 0, sums / total, 1.0)


def spectrum(texts: Iterable[Sequence[Tensor]]) -> Spectrum:
    """Return the spectrum of `texts`, which yields for every text a matrix [H, n, n] of each layer."""
    return _mean([_curves(layers) for layers in texts])


def spectra(model: Transformer, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Spectrum]:
    """Return the spectrum of self-attention in each stack of `model`: "encoder", "decoder".

    rows: for each text the input of `model`, ids [1, n] without padding, of one length. Dropout is off.
    Raises `InputError` for fewer than 4 tokens, and for mechanisms without a matrix of tokens by tokens.
    """
    check(model)
    for ids in (ids for row in rows for ids in row.values()):
        if ids.shape[-1] < LEAST:
            raise InputError(f"length: expected {LEAST} tokens or more, got {ids.shape[-1]}")
    training = model.training
    model.eval()
    try:
        by_text = [{side: _curves(layers) for side, layers in matrices(model, row).items()} for row in rows]
    finally:
        model.train(training)
    sides = by_text[0] if by_text else {}
    return {side: _mean([curves[side] for curves in by_text]) for side in sides}


def check(model: Transformer) -> None:
    """Raise `InputError` for a layer without an attention matrix of tokens by tokens."""
    for stack in (model.encoder, model.decoder):
        for layer in range(0 if stack is None else len(stack.groups)):
            assert stack is not None
            mechanism = stack.mechanism.for_layer(layer)
            if not mechanism.pairs:
                members = [
                    kind for kind in MechanismConfig.kinds.values() if issubclass(kind, MechanismConfig)
                ]
                able = sorted(quote(member.kind) for member in members if member.pairs)
                raise InputError(
                    f"mechanism {quote(mechanism.kind)} has no attention matrix of tokens by tokens; "
                    f"these have one: {', '.join(able)}"
                )


@torch.no_grad()
def matrices(model: Transformer, row: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the self-attention [H, n, n] of every layer on one text, by stack."""
    output = model(**row, output_attentions=True)
    own = "encoder" if model.decoder is None else "decoder"
    attentions = {"encoder": output.encoder_attentions, own: output.attentions}
    return {side: [layer[0] for layer in layers] for side, layers in attentions.items() if layers is not None}


def _curves(layers: Sequence[Tensor]) -> Tensor:
    return torch.stack([shares(matrix).cpu() for matrix in layers])


def _mean(curves: list[Tensor]) -> Spectrum:
    if not curves:
        raise InputError("texts: expected 1 text or more, got none")
    return Spectrum(torch.stack(curves).mean(0), len(curves))
