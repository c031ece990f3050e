"""Cache policies: the keys that a KV cache keeps, per layer and head; each file implements a policy."""

from polyformer.core.registry import import_modules
from polyformer.nn.cache.base import CacheCall, CachePolicy, CompressedCache
from polyformer.nn.cache.expected import ExpectedAttention
from polyformer.nn.cache.h2o import H2O
from polyformer.nn.cache.snapkv import SnapKV

__all__ = ["H2O", "CacheCall", "CachePolicy", "CompressedCache", "ExpectedAttention", "SnapKV"]

import_modules(__name__)
