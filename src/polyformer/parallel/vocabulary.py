"""Token tables and output matrices divided by rows over processes that read the same batches.

    embedding   x_t = sum over processes of W[t], which is 0 in those that do not have the row
    loss        log sum_v exp l_v - l_label, of logits l of which each process has its own alone: what they
                exchange are the largest, the sum of exponentials and the label's, three numbers a token
    logits      gathered, where somebody asks for them

Each process has ceil(V / n) rows, the last fewer where V does not divide, and as much of the bias. So no
process has logits, a gradient or an optimizer's moments of more than its rows. Shoeybi et al. 2019
(Megatron-LM), section 3, with the loss in chunks of tokens (`polyformer.ops.cross_entropy`).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from polyformer.core.errors import quote
from polyformer.heads.vocabulary import Output, VocabularyHead
from polyformer.model import Transformer
from polyformer.ops.cross_entropy import linear_cross_entropy
from polyformer.ops.int8_layers import Int8Weight, as_matrix
from polyformer.ops.linear import linear
from polyformer.parallel.parts import divided, part, shown, summed


def divide_vocabulary(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Divide the token tables and output matrices in `model` over `mesh`, [tensor].

    Returns notes of what stays whole in every process, as what reads it needs all rows.
    """
    transformers = [module for module in model.modules() if isinstance(module, Transformer)]
    whole: dict[int, str] = {}
    for transformer in transformers:  # of which several may share a table
        rows = Rows(mesh, transformer.config.vocab_size)
        for table in _tables(transformer):
            if (reason := _why_whole(transformer, table, rows)) is not None:
                whole[id(table)] = reason
    own: dict[int, nn.Parameter] = {}
    for transformer in transformers:
        rows = Rows(mesh, transformer.config.vocab_size)
        for table in _tables(transformer):
            if id(table) not in whole:
                _divide(table, "weight", mesh, own)
                table.__class__ = OwnRows
                table.__dict__["rows"] = rows
        tied = id(transformer._output_table()) not in whole
        for head in transformer.head.modules():
            if isinstance(head, VocabularyHead) and head.divides and _has_rows(head, tied, rows):
                _divide(head, "weight", mesh, own)
                _divide(head, "bias", mesh, own)
                head.output = DividedOutput(rows)
    reasons = dict.fromkeys(whole.values())
    return [f"tensor: a token table is whole in every process: {reason}" for reason in reasons]


class Rows:
    """Which of the rows 0 .. vocab - 1 this process of `mesh` has: at most `most`, from `first` on."""

    def __init__(self, mesh: DeviceMesh, vocab: int) -> None:
        self.mesh, self.vocab = mesh, vocab
        self.most = -(-vocab // mesh.size())
        self.first = mesh.get_local_rank() * self.most
        self.everywhere = self.most * (mesh.size() - 1) < vocab  # whether each process has one or more

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where among its rows each of `ids` lies, 0 where it does not, and whether it does."""
        places = ids - self.first
        here = (places >= 0) & (places < self.most)
        return places.masked_fill(~here, 0), here

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all processes' x, number by number, in the memory of x."""
        dist.all_reduce(x, dist.ReduceOp.MAX, self.mesh.get_group())
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum of all processes' x, in the memory of x."""
        dist.all_reduce(x, group=self.mesh.get_group())
        return x


class OwnRows(nn.Embedding):
    """Some of the rows of a token table: ids [...] -> vectors [..., E] of all of them."""

    rows: Rows

    def forward(self, input: Tensor) -> Tensor:
        """Own rows where they are asked for, summed over processes."""
        places, here = self.rows.places(input)
        vectors = F.embedding(places, part(self.weight))
        return summed(vectors.masked_fill(~here.unsqueeze(-1), 0), self.rows.mesh)


class DividedOutput(Output):
    """The loss and the logits of a matrix and a bias of which each process has `rows`."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor | Int8Weight,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
    ) -> Tensor:
        """`linear_cross_entropy` of own logits."""
        own = part(as_matrix(weight))
        return linear_cross_entropy(hidden, own, self._bias(bias, own), labels, smoothing, self.rows)

    def logits(self, hidden: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
        """[..., V], those of all processes gathered."""
        own, mesh = part(as_matrix(weight)), self.rows.mesh
        logits = linear(shown(hidden, mesh), own, self._bias(bias, own))
        shape = (*logits.shape[:-1], self.rows.vocab)
        strides = torch.empty(shape, device="meta").stride()
        last = [Shard(logits.dim() - 1)]
        whole = DTensor.from_local(
            logits, mesh, last, run_check=False, shape=torch.Size(shape), stride=strides
        )
        return whole.redistribute(mesh, [Replicate()]).to_local()

    def _bias(self, bias: Tensor | None, own: Tensor) -> Tensor | None:
        """This process's part of a bias; one that is not trained is no parameter, and whole."""
        if bias is None or isinstance(bias, DTensor):
            return None if bias is None else part(bias)
        return bias[self.rows.first : self.rows.first + len(own)]


def _tables(transformer: Transformer) -> list[nn.Module]:
    return [table for table in (transformer.tokens, transformer.decoder_tokens) if table is not None]


def _why_whole(transformer: Transformer, table: nn.Module, rows: Rows) -> str | None:
    """Why each process needs all of a table; None where some rows are enough."""
    if not isinstance(table, nn.Embedding):
        return "it is one of clusters (embedding.adaptive), or int8"
    if not rows.everywhere:
        return f"its {rows.vocab} rows leave one of {rows.mesh.size()} processes none"
    if table is transformer._output_table() and not transformer.head.divides:
        return f"the head {quote(transformer.config.head.kind)} reads all of it"
    return None


def _has_rows(head: VocabularyHead, tied: bool, rows: Rows) -> bool:
    """Whether the matrix that a head reads is one of which each process can have some rows; tied: whether
    the token table is."""
    return tied if head.weight is None else isinstance(head.weight, nn.Parameter) and rows.everywhere


def _divide(module: nn.Module, name: str, mesh: DeviceMesh, own: dict[int, nn.Parameter]) -> None:
    """Leave this process's rows of a parameter in `module`; `own` has those of parameters seen before."""
    whole = module._parameters.get(name)
    if whole is not None and not isinstance(whole, DTensor):
        module.register_parameter(name, own.setdefault(id(whole), divided(whole, mesh, Shard(0))))
