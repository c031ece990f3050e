"""A text that a recurrence reads at once or in parts, with gates, documents and padding on the left."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from polyformer.attention.mechanisms.recurrence.base import Recurrence, RecurrenceConfig
from polyformer.core.sequence.context import Context


class Text:
    """The tables q, k, v [2, H, T, D] of a text, for a mechanism in a layer of 7 heads of width 1."""

    def __init__(self, config: RecurrenceConfig, tables: Sequence[Tensor]):
        self.tables, length = tables, tables[0].shape[2]
        self.gates = torch.randn(2, length, sum(config.gate_sizes(7, 1).values()), dtype=torch.float64)
        self.valid = torch.arange(length) >= torch.tensor([[0], [5]])
        self.doc = torch.arange(length).div(15, rounding_mode="floor").expand(2, -1)

    def read(self, module: Recurrence, *cuts: int) -> Tensor:
        """The outputs of the parts between `cuts`; without cuts the text is read at once, without a state."""
        edges, outputs = (0, *cuts, self.doc.shape[1]), []
        state = module.new_state(0) if cuts else None
        for start, stop in itertools.pairwise(edges):
            tokens = (x[:, :, start:stop] for x in self.tables)
            y, state = module(*tokens, self._context(start, stop), state, None, self.gates[:, start:stop])
            outputs.append(y)
        return torch.cat(outputs, 2)

    def _context(self, start: int, stop: int) -> Context:
        own, docs = self.doc[:, start:stop], self.doc[:, :stop]
        return Context(stop - start, stop, causal=True, kv_valid=self.valid[:, :stop], q_doc=own, kv_doc=docs)


def slopes_of_equal(
    actual: Tensor, expected: Tensor, module: Recurrence, plain: Recurrence, inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Assert that outputs and gradients of both forms are equal; return the gradients of `module`."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    leaves = [*inputs, *module.parameters()], [*inputs, *plain.parameters()]
    slopes = [torch.autograd.grad(y.square().sum(), x) for y, x in zip((actual, expected), leaves)]
    torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-8)
    return slopes[0]
