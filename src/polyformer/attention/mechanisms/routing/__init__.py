"""Routing attention: a token attends to the tokens of the same cluster, assigned by k-means over content.

Read `definition` (the equation over all pairs), then `routing` (configuration and module) and `centroids`.
The fast form: `intervals` (the keys of each query, in the order of clusters), `interval_tiles` (the intervals
as tiles of queries and keys), `interval_attention` (forward and backward).
"""

from polyformer.attention.mechanisms.routing.routing import RoutingConfig

__all__ = ["RoutingConfig"]
