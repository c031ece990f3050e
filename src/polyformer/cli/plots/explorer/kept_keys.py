"""Keys that a cache policy kept, in one pass over a text: dense attention with the dropped keys masked."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms.softmax_attention import SoftmaxAttention, SoftmaxConfig
from polyformer.attention.patterns.composition import MaskModPattern
from polyformer.core.errors import InputError, quote
from polyformer.core.evaluation_mode import evaluating
from polyformer.models.architectures import Transformer
from polyformer.nn.cache import CachePolicy, CompressedCache, DroppingPolicy


@dataclasses.dataclass(frozen=True, eq=False)
class KeptKeys:
    """The keys that a layer's heads had when tokens after the prompt were read.

    visible: [Hkv, N, T], True for the keys of each of the last N tokens of a text of T tokens.
    """

    visible: Tensor

    def mask(self, groups: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return a `mask_mod`, for `groups` query heads per key head."""
        _, new, length = self.visible.shape
        prompt = length - new

        def kept(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            rows = (q_idx - prompt).clamp_min(0)
            return (q_idx < prompt) | self.visible[h // groups, rows, kv_idx]

        return kept


@torch.no_grad()
def kept_keys(model: Transformer, ids: Tensor, prompt: int, policy: str) -> tuple[KeptKeys | None, ...]:
    """Return the keys that each layer of a decoder keeps of a text; None for a layer without the policy.

    ids: [1, T]; its first `prompt` tokens are read in one call, the others one by one. Raises `InputError`
    for a policy that rounds keys: the page shows the keys of the model.
    """
    config = CachePolicy.from_dict(policy, "cache")
    if not isinstance(config, DroppingPolicy) or config.int8:
        raise InputError(f"cache: expected a policy that drops keys, without int8, got {quote(policy)}")
    state, length = model.new_state(cache=policy), ids.shape[1]
    rows: list[list[Tensor]] = []
    with evaluating(model):
        for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, length))]:
            if start:
                rows.append([_kept(layer.self_attention, stop, length) for layer in state.layers])
            state = model(ids[:, start:stop], state=state).state
    return tuple(
        KeptKeys(torch.stack(tables, 1)) if isinstance(layer.self_attention, CompressedCache) else None
        for tables, layer in zip(zip(*rows), state.layers)
    )


def _kept(cache: object, stop: int, length: int) -> Tensor:
    """Return the keys that the token before `stop` reads: [Hkv, T], empty without a policy."""
    if not isinstance(cache, CompressedCache):
        return torch.empty(0)
    keys, slots = cache.cache.pairs()[0], cache.slots
    if slots is None:
        return (torch.arange(length, device=keys.device) < stop).expand(keys.shape[1], -1)
    kept = torch.zeros(keys.shape[1], length, dtype=torch.bool, device=keys.device)
    kept[:, stop - 1] = True
    return kept.scatter_(1, slots[0], True)


@contextlib.contextmanager
def only_kept(model: nn.Module, layers: Sequence[KeptKeys | None]) -> Iterator[None]:
    """Let each layer of a decoder see only the kept keys, in one pass over the text within the context."""
    if not layers:
        yield
        return
    assert isinstance(model, Transformer)
    assert model.decoder is not None
    tables = iter(layers)
    own: dict[SoftmaxAttention, SoftmaxConfig] = {}

    def before(mechanism: SoftmaxAttention, arguments: tuple[Tensor, ...]) -> None:
        # Layers of a group share a mechanism, which is called once for each.
        table, config = next(tables), own[mechanism]
        if table is not None:
            groups = arguments[0].shape[1] // arguments[1].shape[1]
            config = config.within(MaskModPattern(table.mask(groups)))
        mechanism.config = config

    with contextlib.ExitStack() as stack:
        for layer in dict.fromkeys(model.decoder.sequence):
            mechanism = layer.attention.mechanism
            assert isinstance(mechanism, SoftmaxAttention)
            own[mechanism] = mechanism.config
            stack.callback(setattr, mechanism, "config", mechanism.config)
            stack.enter_context(mechanism.register_forward_pre_hook(before))
        yield
