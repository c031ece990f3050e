"""The log-probabilities of a text that a model reads through KV caches with a policy."""

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.retrieval.readers import ContextReader, OwnReader
from polyformer.applications.retrieval.windows import Window
from polyformer.core.errors import InputError
from polyformer.core.evaluation_mode import evaluating
from polyformer.nn.cache import CachePolicy


def cache_policy(reader: ContextReader, text: str, option: str) -> CachePolicy:
    """Return the policy `text` of `option`; raises `InputError` if the reader's model has no such caches."""
    if not isinstance(reader, OwnReader):
        raise InputError(
            f"{option}: not available for {reader.folder}, which transformers runs; leave it out"
        )
    policy = CachePolicy.from_dict(text, "cache")
    reader.model.new_state(cache=policy)  # refuses a model without such caches
    return policy


@torch.no_grad()
def cached_log_p(reader: ContextReader, window: Window, policy: CachePolicy) -> Tensor:
    """Return log p of the targets [n] of a window; the context before them is the prompt, and a call."""
    model, ids = reader.model, torch.from_numpy(window.ids.astype(np.int64)).unsqueeze(0)
    ids = ids.to(next(model.parameters()).device)
    state = model.new_state(cache=policy)
    with evaluating(model):
        if window.carried:
            state = model(ids[:, : window.carried], state=state).state
        logits = model(ids[:, window.carried : -1], state=state).logits[0]
    targets = ids[0, window.carried + 1 :].unsqueeze(1)
    return logits.float().log_softmax(-1).gather(1, targets).squeeze(1).cpu()
