"""Cache policies: the keys that a KV cache keeps, and in which form; each file implements a policy."""

from polyformer.core.registry import import_modules
from polyformer.nn.cache.base import CacheCall, CachePolicy, CompressedCache, DroppingPolicy
from polyformer.nn.cache.expected import ExpectedAttention
from polyformer.nn.cache.h2o import H2O
from polyformer.nn.cache.int8 import Int8Policy
from polyformer.nn.cache.snapkv import SnapKV

__all__ = [
    "H2O",
    "CacheCall",
    "CachePolicy",
    "CompressedCache",
    "DroppingPolicy",
    "ExpectedAttention",
    "Int8Policy",
    "SnapKV",
]

import_modules(__name__)
