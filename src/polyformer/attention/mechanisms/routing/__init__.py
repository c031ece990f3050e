"""Routing attention: a token attends to the tokens of the same cluster, assigned by k-means over content.

Read `routing` (centroids, configuration and module), then `interval_attention` (the equation over all pairs,
and its fast form, forward and backward) and `interval_tiles` (the keys of each query in the order of
clusters, as tiles).
"""

from polyformer.attention.mechanisms.routing.routing import RoutingConfig

__all__ = ["RoutingConfig"]
