"""Routing attention: a token attends to the tokens of its own cluster, found by k-means over content.

Read `definition` (the equation over all pairs), then `routing` (configuration and module) and `centroids`.
The fast form: `intervals` (who attends to whom, once sorted by cluster), `interval_tiles` (that as tiles of
queries and keys), `interval_attention` (forward and backward), and `single_query` for decoding.
"""

from polyformer.attention.routing.routing import RoutingConfig

__all__ = ["RoutingConfig"]
