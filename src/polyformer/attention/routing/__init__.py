"""Routing Transformer: a token attends to the tokens of its own cluster, found by k-means over content."""

from polyformer.attention.routing.routing import RoutingConfig

__all__ = ["RoutingConfig"]
