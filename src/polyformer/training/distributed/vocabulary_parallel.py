"""Token tables and output matrices divided by rows over processes that read the same batches.

    embedding   x_t = sum over processes of W[t], which is 0 in processes that do not have the row
    loss        log sum_v exp l_v - l_label, where each process has only its own part of the logits l: they
                communicate the maximum, the sum of exponentials and the logit of the label, three per token
    logits      gathered only when they are read

Each process has ceil(V / n) rows, the last fewer where V does not divide, and the same part of the bias.
Therefore no process has logits, a gradient or optimizer state of more than its rows. Shoeybi et al. 2019
(Megatron-LM), section 3, with the loss in chunks of tokens (`polyformer.core.ops.cross_entropy`).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from polyformer.core.errors import quote
from polyformer.core.ops.cross_entropy import linear_cross_entropy
from polyformer.core.ops.int8 import Int8Weight, as_matrix
from polyformer.core.ops.linear import linear
from polyformer.models.architectures import Transformer
from polyformer.nn.heads.vocabulary import VocabularyHead, VocabularyOutput
from polyformer.training.distributed.fully_sharded import (
    all_reduce,
    copy_to_group,
    local_shard,
    shard_parameter,
)


def apply_vocabulary_parallel(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Divide the token tables and output matrices in `model` over `mesh`, [tensor].

    Returns notes about tables that are replicated because a module reads all their rows.
    """
    transformers = [module for module in model.modules() if isinstance(module, Transformer)]
    whole: dict[int, str] = {}
    for transformer in transformers:  # several of them may share a table
        rows = VocabularyRows(mesh, transformer.config.vocab_size)
        for table in _token_tables(transformer):
            if (reason := _why_replicated(transformer, table, rows)) is not None:
                whole[id(table)] = reason
    own: dict[int, nn.Parameter] = {}
    for transformer in transformers:
        rows = VocabularyRows(mesh, transformer.config.vocab_size)
        for table in _token_tables(transformer):
            if id(table) not in whole:
                _shard_rows(table, "weight", mesh, own)
                table.__class__ = VocabularyParallelEmbedding
                table.__dict__["rows"] = rows
        tied = id(transformer._output_table()) not in whole
        for head in transformer.head.modules():
            if (
                isinstance(head, VocabularyHead)
                and head.supports_vocabulary_parallel
                and _has_rows(head, tied, rows)
            ):
                _shard_rows(head, "weight", mesh, own)
                _shard_rows(head, "bias", mesh, own)
                head.output = VocabularyParallelOutput(rows)
    reasons = dict.fromkeys(whole.values())
    return [f"tensor: a token table is whole in every process: {reason}" for reason in reasons]


class VocabularyRows:
    """The rows of a vocabulary in this process of `mesh`: at most `most`, starting at `first`."""

    def __init__(self, mesh: DeviceMesh, vocab: int) -> None:
        self.mesh, self.vocab = mesh, vocab
        self.most = -(-vocab // mesh.size())
        self.first = mesh.get_local_rank() * self.most
        self.every_rank_has_rows = (
            self.most * (mesh.size() - 1) < vocab
        )  # whether each process has at least one row

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local index of each of `ids`, 0 if the row is elsewhere, and whether it is local."""
        places = ids - self.first
        here = (places >= 0) & (places < self.most)
        return places.masked_fill(~here, 0), here

    def largest(self, x: Tensor) -> Tensor:
        """All-reduce x in place to the elementwise maximum over processes."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.mesh.get_group())
        return x

    def total(self, x: Tensor) -> Tensor:
        """All-reduce x in place to the sum over processes."""
        dist.all_reduce(x, group=self.mesh.get_group())
        return x


class VocabularyParallelEmbedding(nn.Embedding):
    """An embedding with some rows of a token table per process: ids [...] -> vectors [..., E]."""

    rows: VocabularyRows

    def forward(self, input: Tensor) -> Tensor:
        """Look up local rows, and all-reduce over processes."""
        places, here = self.rows.places(input)
        vectors = F.embedding(places, local_shard(self.weight))
        return all_reduce(vectors.masked_fill(~here.unsqueeze(-1), 0), self.rows.mesh)


class VocabularyParallelOutput(VocabularyOutput):
    """The loss and the logits for an output matrix and a bias divided over processes by `rows`."""

    def __init__(self, rows: VocabularyRows) -> None:
        self.rows = rows

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor | Int8Weight,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
    ) -> Tensor:
        """Return `linear_cross_entropy` of the local logits, reduced over processes."""
        own = local_shard(as_matrix(weight))
        return linear_cross_entropy(hidden, own, self._bias(bias, own), labels, smoothing, self.rows)

    def logits(self, hidden: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
        """Return logits [..., V], gathered from all processes."""
        own, mesh = local_shard(as_matrix(weight)), self.rows.mesh
        logits = linear(copy_to_group(hidden, mesh), own, self._bias(bias, own))
        shape = (*logits.shape[:-1], self.rows.vocab)
        strides = torch.empty(shape, device="meta").stride()
        last = [Shard(logits.dim() - 1)]
        whole = DTensor.from_local(
            logits, mesh, last, run_check=False, shape=torch.Size(shape), stride=strides
        )
        return whole.redistribute(mesh, [Replicate()]).to_local()

    def _bias(self, bias: Tensor | None, own: Tensor) -> Tensor | None:
        """Return the local part of a bias; an untrained bias is not a parameter, and replicated."""
        if bias is None or isinstance(bias, DTensor):
            return None if bias is None else local_shard(bias)
        return bias[self.rows.first : self.rows.first + len(own)]


def _token_tables(transformer: Transformer) -> list[nn.Module]:
    return [table for table in (transformer.tokens, transformer.decoder_tokens) if table is not None]


def _why_replicated(transformer: Transformer, table: nn.Module, rows: VocabularyRows) -> str | None:
    """Return why each process needs all of a table; None if it can be divided."""
    if not isinstance(table, nn.Embedding):
        return "it is one of clusters (embedding.adaptive), or int8"
    if not rows.every_rank_has_rows:
        return f"its {rows.vocab} rows leave one of {rows.mesh.size()} processes none"
    if table is transformer._output_table() and not transformer.head.supports_vocabulary_parallel:
        return f"the head {quote(transformer.config.head.kind)} reads all of it"
    return None


def _has_rows(head: VocabularyHead, tied: bool, rows: VocabularyRows) -> bool:
    """Return whether the matrix of a head can be divided by rows; tied: whether the token table can."""
    return tied if head.weight is None else isinstance(head.weight, nn.Parameter) and rows.every_rank_has_rows


def _shard_rows(module: nn.Module, name: str, mesh: DeviceMesh, own: dict[int, nn.Parameter]) -> None:
    """Replace a parameter in `module` by its local rows; `own` contains the parameters already divided."""
    whole = module._parameters.get(name)
    if whole is not None and not isinstance(whole, DTensor):
        module.register_parameter(name, own.setdefault(id(whole), shard_parameter(whole, mesh, Shard(0))))
