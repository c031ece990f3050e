"""Unpadding: the non-padding tokens of a batch as one row of documents, and back.

    [B, T] with N non-padding tokens  ->  [1, N], a document for each row (or for each document of each row)

Documents do not see one another and count their positions from 0, so the result does not change; every
product then has N rows instead of B T.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.sequence.tokens import ModelInputs

WORTH_TOKENS, WORTH_SHARE = 128, 0.1
"""The least number of padding tokens, and their least share of the batch, for which unpadding pays off."""


@dataclasses.dataclass(frozen=True, eq=False)
class Unpadding:
    """index [N]: the indices of the non-padding tokens in the flattened rows [B, T], in order."""

    index: Tensor
    rows: int
    length: int

    def pack(self, x: Tensor) -> Tensor:
        """Return x [B, T, ...] as [1, N, ...]."""
        return x.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def unpack(self, x: Tensor) -> Tensor:
        """Return x [1, N, E] as [B, T, E], with zeros at the padding."""
        whole = x.new_zeros(self.rows * self.length, x.shape[2])
        return whole.index_copy(0, self.index, x[0]).view(self.rows, self.length, -1)

    def pack_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Return inputs [B, T] as [1, N] without a mask; rows (or documents of a row) become documents."""
        shape = self.rows, self.length
        documents = torch.arange(self.rows, device=self.index.device).unsqueeze(1).expand(shape)
        if inputs.document_ids is not None:
            documents = documents * (inputs.document_ids.max() + 1) + inputs.document_ids
        positions = None if inputs.position_ids is None else inputs.position_ids.expand(shape)
        fields = {
            **vars(inputs),
            "attention_mask": None,
            "document_ids": documents,
            "position_ids": positions,
        }
        return ModelInputs(
            **{name: None if tensor is None else self.pack(tensor) for name, tensor in fields.items()}
        )


def unpadding(inputs: ModelInputs) -> Unpadding | None:
    """Return an unpadding; None if it does not pay off, or for a mask on a GPU.

    A GPU would compile FlexAttention for every number of tokens; rounded up to a few numbers, still for each
    of them. Pack texts instead: see docs/results/gpu.md.
    """
    ids, mask = inputs.input_ids, inputs.attention_mask
    if mask is None or ids is None or mask.is_cuda or mask.shape != ids.shape:
        return None
    if inputs.relation_ids is not None or torch.compiler.is_compiling():
        return None
    padding = mask.numel() - int(mask.count_nonzero())
    if padding < WORTH_TOKENS or padding < WORTH_SHARE * mask.numel() or padding == mask.numel():
        return None
    return Unpadding(mask.flatten().nonzero().squeeze(1), *mask.shape)
