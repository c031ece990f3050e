"""Members for polyformer: importing this package registers them."""

from own_member import kerple, log_sparse, maxout, nystrom

__all__ = ["kerple", "log_sparse", "maxout", "nystrom"]
