"""Parts of modules: found at once, and plain functions while nothing looks at their calls.

**Declared parts.** `nn.Module` looks for `self.query` in the class, the instance and three tables in turn,
half a microsecond each time. A class that names its parts finds them faster:

    class Attention(nn.Module):
        query: Linear = submodule()

They are registered, saved, replaced and removed as always. A value in the instance comes first (None, or the
weight of a pruned layer), and so does a property of a subclass (a parametrized weight).

**Bound parts.** `nn.Module.__call__` looks for hooks, compilers and replaced methods at every call. With the
search for parts this takes a fifth of a forward pass of small layers. A stack looks once, for all of its
modules: if nothing watches them, then until the call ends each declared submodule is a function in its
instance, its `Bound`. What runs is the same `forward`: values and gradients are equal, bit for bit.

A hook, a compiled or a replaced part is seen before the next call: the whole stack then runs as modules. So
does a stack inside a compiler, a tracer or a transform. Weights are read at every call. Copies and pickles
have no bound parts.
"""

import copy
import functools
import inspect
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"

REPLACED = "forward", "_compiled_call_impl"
"""What an instance has only if a tool has replaced its method, or compiled it."""

CALL = nn.Module.__call__
"""The method that tracers of modules replace."""


class Part:
    """A descriptor without `__set__`, so that `nn.Module` still decides where a value is registered."""

    def __init__(self, table: str) -> None:
        self.table = table

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        if "__getstate__" not in vars(owner):
            owner.__getstate__ = own_attributes  # type: ignore[attr-defined]

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__[self.table][self.name]
        except KeyError:
            raise AttributeError(self.name) from None


def submodule() -> Any:
    """Return the descriptor of a submodule, for the body of a class."""
    return Part("_modules")


def parameter() -> Any:
    """Return the descriptor of a parameter, for the body of a class."""
    return Part("_parameters")


class Bound(functools.partial):  # type: ignore[type-arg]
    """The plain function of a module. In all other respects it is the module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["module"], name, value)

    def __copy__(self) -> nn.Module:
        return copy.copy(self.__dict__["module"])

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.__dict__["module"], memo)

    @property
    def __class__(self) -> Any:
        """The module's class, for `isinstance`."""
        return type(self.__dict__["module"])


def unbound(module: nn.Module) -> nn.Module:
    """Return the module of a `Bound`, and another module as it is."""
    return module.__dict__["module"] if type(module) is Bound else module


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of an instance for a copy of it: without parts that are bound at the moment."""
    parts = module._modules.keys() | module._parameters.keys()
    return {
        name: value
        for name, value in unbound(module).__dict__.items()
        if name not in parts and type(value) is not Bound
    }


def bind(module: nn.Module, function: Callable[..., Any]) -> Bound:
    """Return a function of a module as its `Bound`."""
    bound = Bound(function)
    bound.__dict__["module"] = module
    return bound


def plain_function(module: nn.Module, few_rows: bool) -> Callable[..., Any]:
    """Return `forward` of a module, or what its class gives for a call of few rows (`plain_function`)."""
    shorter: Callable[[], Callable[..., Any]] | None = getattr(module, "plain_function", None)
    return module.forward if shorter is None or not few_rows else shorter()


@functools.cache
def declared_parts(kind: type[nn.Module]) -> tuple[Part, ...]:
    """Return the descriptors of the parts of a class that no class below it has replaced."""
    names = {name for each in kind.__mro__ for name, value in vars(each).items() if isinstance(value, Part)}
    values = (inspect.getattr_static(kind, name) for name in sorted(names))
    return tuple(value for value in values if isinstance(value, Part))


class Binding:
    """The parts of all modules below `root` as `Bound`, and what must not change.

    few_rows: for calls with small products.
    """

    def __init__(self, root: nn.Module, few_rows: bool) -> None:
        self.places: list[tuple[dict[str, Any], str, Any]] = []  # instance, name and value of each part
        self.further: list[tuple[dict[str, Any], str, Any]] = []  # shorter methods
        self.bound: dict[nn.Module, Bound] = {}  # a shared module is bound once
        watched: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        for module in root.modules():
            self._place_parts(module, few_rows, watched)
        self.tables = [table for table, _ in watched.values()]
        self.names = [name for _, name in watched.values()]
        self.values = [table[name] for table, name in watched.values()]
        self.modules = list(self.bound)
        self.types = list(map(type, self.modules))
        # What an instance has only if somebody has compiled it, or replaced a method.
        self.instances = [module.__dict__ for module in self.modules for _ in REPLACED]
        self.replaced = [*REPLACED] * len(self.modules)
        self.shortened = [instance for instance, _, _ in self.further]
        self.methods = [name for _, name, _ in self.further]
        self.places += self.further
        self.hooks = [module.__dict__[name] for module in self.modules for name in HOOKS]

    def _place_parts(
        self, module: nn.Module, few_rows: bool, watched: dict[tuple[int, str], tuple[dict[str, Any], str]]
    ) -> None:
        """Add the parts of a module that its class declares."""
        instance, table = module.__dict__, module._modules
        for part in declared_parts(type(module)):
            name = part.name
            if part.table != "_modules" or name not in table or name in instance:
                continue
            value = table[name]
            watched[id(table), name] = table, name
            if isinstance(value, nn.ModuleList):
                items = value._modules
                watched |= {(id(items), key): (items, key) for key in items}
                value = [self._bound(each, few_rows) for each in value]
            elif isinstance(value, nn.Module):
                value = self._bound(value, few_rows)
            self.places.append((instance, name, value))
        further = getattr(module, "bound_parts", None)
        if few_rows and further is not None:
            self.further += [(instance, name, bind(module, value)) for name, value in further().items()]

    def _bound(self, module: nn.Module, few_rows: bool) -> "nn.Module | Bound":
        if type(module).forward is nn.Module.forward:
            return module  # only its methods are called, as of a position scheme
        if module not in self.bound:
            self.bound[module] = bind(module, plain_function(module, few_rows))
        return self.bound[module]

    @property
    def is_watched(self) -> bool:
        """Whether a hook, a tracer or a replaced method must see the calls of these modules."""
        hooked = any(self.hooks) or any(map(operator.contains, self.instances, self.replaced))
        return hooked or bool(_has_any_global_hook()) or nn.Module.__call__ is not CALL

    @property
    def is_current(self) -> bool:
        """Whether the modules and their parts are the same objects, of the same classes.

        Asked while the binding is not installed: then no instance has a method that it shortens.
        """
        if any(map(operator.contains, self.shortened, self.methods)):
            return False
        try:
            same = all(map(operator.is_, map(operator.getitem, self.tables, self.names), self.values))
        except KeyError:  # removed
            return False
        return same and list(map(type, self.modules)) == self.types


class Bindings:
    """The bindings of a module, made at its first calls. A copy of the module begins without any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.bindings: dict[bool, Binding] = {}
        self.running = 0  # calls with the installed binding
        self.installed: Binding | None = None

    def prepare(self, root: nn.Module) -> None:
        """Bind the modules below `root` for calls of few rows."""
        self.bindings[True] = Binding(root, True)

    def begin(self, root: nn.Module, few_rows: bool) -> bool:
        """Install the binding of the modules below `root` for a call, and return whether it is installed.

        It may be installed by a call around this one, or in another thread. If something watches the modules
        since then, it is removed: both calls then find modules.
        """
        with self.lock:
            binding = self.installed or self.bindings.get(few_rows)
            if binding is None:
                binding = self.bindings[few_rows] = Binding(root, few_rows)
            if binding.is_watched:
                self._remove()
                return False
            if self.installed is not None:
                self.running += 1
                return True
            if not binding.is_current:
                self.bindings.clear()  # the next call binds the new parts; nothing holds the old ones
                return False
            for instance, name, value in binding.places:
                instance[name] = value
            self.installed, self.running = binding, 1
            return True

    def end(self) -> None:
        """Remove the binding, unless another call uses it."""
        with self.lock:
            self.running -= 1
            if self.running <= 0:
                self._remove()

    def _remove(self) -> None:
        if self.installed is not None:
            for instance, name, _ in self.installed.places:
                instance.pop(name, None)
            self.installed = None


_bindings_of: "weakref.WeakKeyDictionary[nn.Module, Bindings]" = weakref.WeakKeyDictionary()
"""No module holds its bindings, which hold its parts: so it is freed with its last reference."""


def bindings_of(root: nn.Module) -> Bindings:
    """Return the bindings of a module."""
    own = _bindings_of.get(root)
    return _bindings_of.setdefault(root, Bindings()) if own is None else own


def forget_bound_parts(model: nn.Module) -> None:
    """Drop the bindings of a model before parts are replaced, so that nothing holds the old weights."""
    for module in model.modules():
        own = _bindings_of.get(module)
        if own is not None:
            own.bindings.clear()


def is_inspected() -> bool:
    """Return whether a compiler, a tracer or a transform looks at the modules of this call."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )
