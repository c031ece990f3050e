"""CUDA graphs: a launch that repeats all kernels of a function, without the time of launching each."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 2
"""Runs before the capture, in which libraries allocate their workspaces."""


class CudaGraph:
    """A function of tensors as a CUDA graph.

    inputs: copies of the inputs, which are the graph's memory. outputs: overwritten by every run.

    Args:
        function: any function of CUDA tensors that neither reads their values nor copies from the CPU. It may
            change inputs in place, if running it again on the changed inputs changes nothing.
        inputs: tensors of the forms of all calls.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]):
        self.inputs = [tensor.clone() for tensor in inputs]
        self.device = inputs[0].device
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    function(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.outputs = function(*self.inputs)

    def run(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the function of tensors; what it changes in place changes in `inputs` only."""
        for own, x in zip(self.inputs, tensors, strict=True):
            if own is not x:
                own.copy_(x)
        with torch.cuda.device(self.device):
            self.graph.replay()
        return [output.clone() for output in self.outputs]
