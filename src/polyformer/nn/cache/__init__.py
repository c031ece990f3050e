"""Cache policies: the keys that a KV cache keeps, and in which form; each file implements a policy."""

from polyformer.core.registry import import_modules
from polyformer.nn.cache.base import CachePolicy, CompressedCache, DroppingPolicy
from polyformer.nn.cache.budgets import Ada, HeadsCache, Pyramid
from polyformer.nn.cache.call import CacheCall
from polyformer.nn.cache.policies import H2O, ExpectedAttention, Int4Policy, Int8Policy, SnapKV

__all__ = [
    "H2O",
    "Ada",
    "CacheCall",
    "CachePolicy",
    "CompressedCache",
    "DroppingPolicy",
    "ExpectedAttention",
    "HeadsCache",
    "Int4Policy",
    "Int8Policy",
    "Pyramid",
    "SnapKV",
]

import_modules(__name__)
