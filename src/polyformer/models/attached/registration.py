"""The registration with transformers, once, when this module is imported.

Attachments in a config.json are restored while a model is built, at the end of its constructor, where
transformers calls `post_init`: its own hook for this belongs to the class, so the method of all classes is
wrapped.
"""

import functools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from polyformer.models.attached.attach_settings import restore
from polyformer.models.attached.attention import forward
from polyformer.models.attached.layer import NAME
from polyformer.models.attached.mask import create_mask
from polyformer.models.attached.rotary import QUERIES_ONLY, read_queries

AttentionInterface.register(NAME, forward)
AttentionInterface.register(QUERIES_ONLY, read_queries)
AttentionMaskInterface.register(NAME, create_mask)


def _restoring(post_init: Any) -> Any:
    """Return `PreTrainedModel.post_init`, wrapped to restore the configuration's attachments first."""

    @functools.wraps(post_init)
    def wrapped(self: PreTrainedModel) -> None:
        restore(self)
        post_init(self)

    return wrapped


PreTrainedModel.post_init = _restoring(PreTrainedModel.post_init)
