"""The places of a model where a trace reads and replaces values, and the hooks that reach them."""

import contextlib
import contextvars
import dataclasses
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyformer.attention.functional.request import Call, edited_calls
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.softmax import edited_weights
from polyformer.models.attached.attention_layers import attention_layers
from polyformer.nn.stack.feature_stack import HyperStack
from polyformer.nn.stack.multihead import MultiHeadAttention
from polyformer.nn.stack.stack import Stack

IMPLEMENTATION = "polyformer"
"""The implementation in transformers that runs `attend`."""

Change = Callable[[Any], Any]


@dataclasses.dataclass(eq=False)
class AttentionSite:
    """The self-attention or cross-attention of a layer, with the changes of its values by kind.

    Kinds: "output" [B, H, Tq, D], "weights" [B, H, Tq, Tk], "pattern"; of self-attention also "input" and
    "residual" [B, T, E] of its layer. softmaxes: calls of `attend` in the current call of the layer.
    """

    name: str
    number: int
    num_heads: int
    cross: bool = False
    has_stream: bool = True
    changes: dict[str, list[Change]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    softmaxes: int = 0

    def apply(self, kind: str, value: Any) -> Any:
        """Return the value after all changes, in the order in which they were added."""
        for change in self.changes[kind]:
            value = change(value)
        return value

    @property
    def changes_weights(self) -> bool:
        """Whether weights are read or replaced, or keys removed."""
        return bool(self.changes["weights"] or self.changes["pattern"])


class RunningSite:
    """The attention that runs now: the calls of `attend` and the weights inside belong to it.

    Hooks run in all threads that call the model; only the thread or task of the trace may be changed by it.
    """

    def __init__(self) -> None:
        self.site: AttentionSite | None = None
        self.tokens: int | None = None
        self._traced: contextvars.ContextVar[bool] = contextvars.ContextVar("traced", default=False)

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        """Apply the changes of patterns and weights within the context."""
        token = self._traced.set(True)
        try:
            with edited_calls.editing(self._call), edited_weights.editing(self._weights):
                yield
        finally:
            self._traced.reset(token)

    def own(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that does nothing in other threads and tasks."""
        return lambda *arguments: hook(*arguments) if self._traced.get() else None

    def start(self, site: AttentionSite, tokens: int | None = None) -> None:
        """Begin a call of the attention of `site`, of queries to a number of `tokens`, if it is known."""
        self.site, self.tokens, site.softmaxes = site, tokens, 0

    def stop(self, *_: Any) -> None:
        """End the call; raise `InputError` if it had no softmax to change."""
        site, self.site = self.site, None
        if site is not None and site.changes_weights and not site.softmaxes:
            raise InputError(
                f"weights: expected softmax attention by `attend`, but {site.name} computes no softmax over "
                "its keys; change its output"
            )

    def _call(self, call: Call) -> Call:
        site = self.site
        if site is None:
            return call
        site.softmaxes += 1
        if not site.changes_weights:
            return call
        heads, spread = call.q.shape[1], call.context is not None and call.context.shard is not None
        if site.softmaxes > 1 or heads != site.num_heads or spread:
            raise InputError(
                f"weights: expected a single softmax over all keys for {site.num_heads} heads, but "
                f"{site.name} joins several softmaxes or processes; change its output"
            )
        if site.changes["pattern"] and self.tokens not in (None, call.k.shape[2]):
            raise InputError(
                f"pattern: expected a key for each of {self.tokens} tokens, but {site.name} attends to "
                f"{call.k.shape[2]} summaries of them; change its weights"
            )
        call = call._replace(pattern=site.apply("pattern", call.pattern))
        return call._replace(backend="definition") if site.changes["weights"] else call

    def _weights(self, weights: Tensor) -> Tensor:
        # Softmaxes outside `attend`, such as the scores of routing, are not attention weights.
        return self.site.apply("weights", weights) if self.site and self.site.softmaxes else weights


@contextlib.contextmanager
def hooked_sites(model: nn.Module) -> Iterator[list[AttentionSite]]:
    """Return the sites of a model of polyformer or of transformers; their changes apply within the context.

    Raises `InputError` for a compiled model, and for a model of transformers that does not dispatch.
    """
    parts = list(model.modules())
    if hasattr(model, "_orig_mod") or any(getattr(part, "_compiled_call_impl", None) for part in parts):
        raise InputError("model: expected a model that is not compiled; trace the original module")
    running = RunningSite()
    with contextlib.ExitStack() as stack:
        stack.enter_context(running.editing())
        stacks = [(name, part) for name, part in model.named_modules() if isinstance(part, Stack)]
        if not stacks:
            yield stack.enter_context(_transformers_sites(model, running))
            return
        sites: list[AttentionSite] = []
        for name, part in stacks:
            hooks = _StackHooks(name, part, running)
            sites += hooks.sites
            stack.callback(_remove, hooks.register())
        yield sites


class _StackHooks:
    """Hooks on the layers of a stack of polyformer; layers of a group share modules, so calls are counted."""

    def __init__(self, name: str, stack: Stack, running: RunningSite):
        self.stack, self.running, self.next, self.layer = stack, running, 0, 0
        has_stream = not (stack.reversible or isinstance(stack, HyperStack))
        self.own: dict[int, AttentionSite] = {}
        self.crosses: dict[int, AttentionSite] = {}
        for number, layer in enumerate(stack.sequence, stack.layer_range.start):
            for attention, sites in ((layer.attention, self.own), (layer.cross_attention, self.crosses)):
                if attention is not None:
                    cross = attention is layer.cross_attention
                    title = f"{'cross-attention of ' * cross}layer {number} of the {name.split('.')[-1]}"
                    heads = attention.config.num_attention_heads
                    sites[number] = AttentionSite(title, number, heads, cross, has_stream)

    @property
    def sites(self) -> list[AttentionSite]:
        return [*self.own.values(), *self.crosses.values()]

    def register(self) -> list[Any]:
        """Add the hooks, and return their handles."""
        own = self.running.own
        handles = [self.stack.register_forward_pre_hook(own(self._begin))]
        for layer in dict.fromkeys(self.stack.sequence):
            handles += [
                layer.register_forward_pre_hook(own(self._enter)),
                layer.register_forward_hook(own(self._leave)),
            ]
            for attention, sites in ((layer.attention, self.own), (layer.cross_attention, self.crosses)):
                if attention is not None:
                    handles += self._of_attention(attention, sites)
        return handles

    def _of_attention(self, attention: MultiHeadAttention, sites: dict[int, AttentionSite]) -> list[Any]:
        def start(module: nn.Module, arguments: Any) -> None:
            site = sites[self.layer]
            if attention.global_attention is not None and site.changes_weights:
                raise InputError(
                    f"weights: {site.name} has other projections for global tokens; change its output"
                )
            self.running.start(site, arguments[3].kv_len)  # q, k, v, context, ...

        def output(module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            # The concatenated heads [B, T, H D], before the output projection.
            site = sites[self.layer]
            heads = arguments[0].unflatten(-1, (site.num_heads, -1)).transpose(1, 2)
            return (site.apply("output", heads).transpose(1, 2).flatten(2),)

        own = self.running.own
        return [
            attention.mechanism.register_forward_pre_hook(own(start)),
            attention.mechanism.register_forward_hook(own(self.running.stop)),
            attention.output.register_forward_pre_hook(own(output)),
        ]

    def _begin(self, module: nn.Module, arguments: Any) -> None:
        stack, self.next = self.stack, self.stack.layer_range.start
        if stack.training and stack.layerdrop:
            raise InputError("model: layerdrop skips layers at random in training; call model.eval() first")
        changed = any(any(site.changes.values()) for site in self.sites)
        if changed and torch.is_grad_enabled() and (stack.reversible or (stack.recompute and stack.training)):
            raise InputError(
                "model: expected stored activations, but this stack computes its layers again in the "
                "backward pass, after the trace; run it under torch.no_grad() or without recompute"
            )

    def _enter(self, module: nn.Module, arguments: Any) -> Any:
        self.layer, self.next = self.next, self.next + 1
        x, *rest = arguments
        return self.own[self.layer].apply("input", x), *rest

    def _leave(self, module: nn.Module, arguments: Any, result: Any) -> Any:
        y, *rest = result
        return self.own[self.layer].apply("residual", y), *rest


@contextlib.contextmanager
def _transformers_sites(model: Any, running: RunningSite) -> Iterator[list[AttentionSite]]:
    """Return the sites of a model of transformers, which runs `attend` within the context."""
    layers = attention_layers(model)
    if not layers:
        raise InputError(
            f"model: expected a model of polyformer, or of transformers with layers that dispatch through "
            f"its AttentionInterface, got {quote(type(model).__name__)}"
        )
    import polyformer.models.transformers_attention  # noqa: F401  registers the implementation
    from polyformer.models.attached.attention import edited_outputs

    sites, handles, modules = [], [], dict(model.named_modules())
    for layer in layers:
        block = modules.get(_block_name(modules, layer.name))
        has_stream = block is not None and not layer.cross
        site = AttentionSite(layer.name, layer.index, layer.num_heads, layer.cross, has_stream)
        sites.append(site)
        handles += [
            layer.module.register_forward_pre_hook(running.own(lambda *_, site=site: running.start(site))),
            layer.module.register_forward_hook(running.own(running.stop)),
        ]
        if block is not None and has_stream:
            handles += _of_block(block, site, running)
    try:
        with (
            _dispatched(model),
            edited_outputs.editing(lambda y: running.site.apply("output", y) if running.site else y),
        ):
            yield sites
    finally:
        _remove(handles)


@contextlib.contextmanager
def _dispatched(model: Any) -> Iterator[None]:
    """Let a model of transformers run `attend` until the last of several traces of it ends.

    The implementation belongs to the model, so calls of other threads run `attend` too, unchanged.
    """
    with _lock:
        before, count = _dispatches.get(model, (model.config._attn_implementation, 0))
        model.set_attn_implementation(IMPLEMENTATION)
        _dispatches[model] = before, count + 1
    try:
        yield
    finally:
        with _lock:
            count = _dispatches[model][1] - 1
            _dispatches[model] = before, count
            if not count:
                del _dispatches[model]
                model.set_attn_implementation(before)


_lock = threading.Lock()
_dispatches: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
"""The implementation before the first of the running traces of a model, and the number of its traces."""


def _block_name(modules: dict[str, nn.Module], name: str) -> str:
    """Return the name of the layer around an attention: the outermost element of a list of modules."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        if isinstance(modules[".".join(parts[:end])], nn.ModuleList):
            return ".".join(parts[: end + 1])
    return name + ".none"


def _of_block(block: nn.Module, site: AttentionSite, running: RunningSite) -> list[Any]:
    def enter(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if arguments:
            return (site.apply("input", arguments[0]), *arguments[1:]), options
        return arguments, options | {"hidden_states": site.apply("input", options["hidden_states"])}

    def leave(module: nn.Module, arguments: Any, result: Any) -> Any:
        if isinstance(result, Tensor):
            return site.apply("residual", result)
        return site.apply("residual", result[0]), *result[1:]

    return [
        block.register_forward_pre_hook(running.own(enter), with_kwargs=True),
        block.register_forward_hook(running.own(leave)),
    ]


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
