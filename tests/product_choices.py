"""Choices of the library that computes a layer's products, whatever is fastest on this machine."""

from polyformer.ops.product_ways import BLAS, ONEDNN, ONEDNN_COPIED, ProductWays

EVERY_WAY = [BLAS, ONEDNN, ONEDNN_COPIED]


def by(way: str) -> ProductWays:
    """Every pass of every size in one way."""
    return ProductWays(forward={"1x1x1": way}, grad_input={"1x1x1": way}, grad_weight={"1x1x1": way})
