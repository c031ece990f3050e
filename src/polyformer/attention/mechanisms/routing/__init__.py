"""Routing attention: a token attends to the tokens of the same cluster, assigned by k-means over content.

Read `definition` (the equation over all pairs), then `routing` (configuration and module) and `centroids`.
The fast form: `interval_tiles` (the keys of each query in the order of clusters, as tiles) and
`interval_attention` (forward and backward).
"""

from polyformer.attention.mechanisms.routing.routing import RoutingConfig

__all__ = ["RoutingConfig"]
