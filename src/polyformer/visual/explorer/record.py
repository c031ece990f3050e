"""The calls of attention in one pass of a model, seen by hooks: it computes what it does anyway."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.base import MechanismConfig
from polyformer.attention.softmax_attention import SoftmaxAttention, SoftmaxConfig
from polyformer.core.errors import InputError
from polyformer.depth.recording import recorded_depths
from polyformer.dot_product.observed import observed
from polyformer.dot_product.request import Request
from polyformer.inside.find import Layer, attention_layers
from polyformer.model import Transformer
from polyformer.visual.explorer.calls import Call

IMPLEMENTATION = "polyformer"
"""The implementation in transformers that runs `attend`."""


@torch.no_grad()
def recorded_calls(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Call]:
    """Every call of attention, in order, while `model` reads `inputs` (one row), in evaluation.

    model: one of ours, wrapped for transformers or not, or one of transformers'. Raises `InputError` for one
    whose layers do not ask `AttentionInterface` what to run.
    """
    training = model.training
    model.eval()
    try:
        own = next((part for part in model.modules() if isinstance(part, Transformer)), None)
        return _of_theirs(model, inputs) if own is None else _of_ours(model, own, inputs)
    finally:
        model.train(training)


def _of_ours(model: nn.Module, own: Transformer, inputs: Mapping[str, Tensor]) -> list[Call]:
    calls: list[Call] = []
    with contextlib.ExitStack() as stack:
        requests = stack.enter_context(observed())
        depths = stack.enter_context(recorded_depths())
        for side, module in (("encoder", own.encoder), ("decoder", own.decoder)):
            if module is None:
                continue
            for layer in dict.fromkeys(module.sequence):  # layers of one group are one module
                kinds = {side: (layer.attention, module.mechanism)}
                if layer.cross_attention is not None:
                    kinds["encoder"] = (layer.cross_attention, module.mechanism.cross())
                for keys, (attention, config) in kinds.items():
                    hooks = _Hooks(side=side, keys=keys, config=config, requests=requests, calls=calls)
                    stack.enter_context(hooked(attention.mechanism, hooks.before, hooks.after))
        model(**inputs)
    return calls if not depths else [_with_depths(call, depths) for call in calls]


@dataclasses.dataclass(eq=False, kw_only=True)
class _Watching:
    """Hooks around a module that add to `calls` what it asked `attend`."""

    requests: list[Request]
    calls: list[Call]
    begun: int = 0

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Notes which requests are the module's own."""
        self.begun = len(self.requests)

    @property
    def own(self) -> list[Request]:
        """The requests since the module was called."""
        return self.requests[self.begun :]


@dataclasses.dataclass(eq=False, kw_only=True)
class _Hooks(_Watching):
    """Adds every call of a mechanism of ours; its layer: how many of its kind ran before."""

    side: str
    keys: str
    config: MechanismConfig

    def after(self, mechanism: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Adds the call."""
        q, k, v, context, state, position = arguments
        layer = sum((call.stack, call.keys) == (self.side, self.keys) for call in self.calls)
        config = self.config.at(layer)
        pattern = config.pattern if isinstance(config, SoftmaxConfig) else None
        call = Call(self.side, self.keys, layer, config.kind, None if pattern is None else pattern.to_text())
        if isinstance(mechanism, SoftmaxAttention) and len(self.own) == 1:
            self.calls.append(dataclasses.replace(call, request=self.own[0]))
            return

        def mix(values: Tensor) -> Tensor:
            return mechanism.forward(q, k, values, context, state, position)[0]

        self.calls.append(dataclasses.replace(call, mix=mix, values=v))


@contextlib.contextmanager
def hooked(module: nn.Module, before: Any, after: Any) -> Iterator[None]:
    """Calls both around every call of `module` inside."""
    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_depths(call: Call, depths: list[Tensor]) -> Call:
    """The call with how many layers each of its queries' tokens went through."""
    fitting = [x for x in depths if call.request is not None and x.shape[1] == call.request.context.q_len]
    if fitting:
        call.marks["layers run"] = fitting[-1][:1].short()
    return call


def _of_theirs(model: Any, inputs: Mapping[str, Tensor]) -> list[Call]:
    layers = attention_layers(model)
    if not layers:
        raise InputError(
            f"model: no layer of {type(model).__name__} asks transformers' AttentionInterface what to run; "
            "convert it with 'polyformer convert', or take another"
        )
    import polyformer.transformers_attention  # noqa: F401  registers the implementation

    implementation = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    calls: list[Call] = []
    try:
        with contextlib.ExitStack() as stack, observed() as requests:
            for layer in layers:
                hooks = _TheirHooks(layer=layer, requests=requests, calls=calls)
                stack.enter_context(hooked(layer.module, hooks.before, hooks.after))
            model(**inputs)
    finally:
        model.set_attn_implementation(implementation)
    return calls


@dataclasses.dataclass(eq=False, kw_only=True)
class _TheirHooks(_Watching):
    """Adds the call of `attend` that a layer of transformers makes."""

    layer: Layer

    def after(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Adds the call; a layer is of a decoder where it sees the past alone, or reads another sequence."""
        for request in self.own:
            own = "decoder" if request.context.causal or self.layer.cross else "encoder"
            keys = "encoder" if self.layer.cross else own
            self.calls.append(Call(own, keys, self.layer.index, "softmax", request=request))
