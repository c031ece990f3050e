"""Choices of the library that computes a layer's products, whatever is fastest on this machine."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from polyformer.core.ops import linear
from polyformer.core.ops.product_kernels import BLAS, ONEDNN, ONEDNN_COPIED, PRODUCTS, ProductKernels

EVERY_WAY = [BLAS, ONEDNN, ONEDNN_COPIED]


@contextlib.contextmanager
def choosing(choice: ProductKernels) -> Iterator[None]:
    """This choice holds for all sizes, also those that are too small to choose for."""
    with PRODUCTS.using(choice), mock.patch.object(linear, "SMALL", 0):
        yield


def by(way: str) -> contextlib.AbstractContextManager[None]:
    """Every pass of every size goes one way."""
    return choosing(
        ProductKernels(forward={"1x1x1": way}, grad_input={"1x1x1": way}, grad_weight={"1x1x1": way})
    )
