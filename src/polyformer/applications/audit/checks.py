"""What an audit measures: a model behind one interface, and a check with its smallest failing input.

A `Subject` is a call, its accepted arguments and a function that draws inputs. A `Check` measures a subject
on an input of chosen sizes. A difference that rounding cannot explain is searched again at smaller sizes.
"""

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from polyformer.core.errors import InputError

ABILITIES = (
    "attention_mask",
    "document_ids",
    "state",
    "use_cache",
    "labels",
    "num_items_in_batch",
)
"""Arguments of a call, beyond its input, that checks pass if the call accepts them."""

Call = Callable[..., Any]
Sample = Callable[[int, int, torch.Generator], Tensor]


class NotApplicableError(Exception):
    """A check does not concern a model; the message is the reason."""


def select_rows(state: Any, index: Tensor) -> Any:
    """Return the rows `index` of every tensor in a state."""
    return tree_map(lambda leaf: leaf[index] if isinstance(leaf, Tensor) and leaf.dim() else leaf, state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to audit, in float32 or float64 and in evaluation mode.

    call: `call(module, x, **named)` with any of `accepts`, a subset of `ABILITIES`. It returns outputs
    [B, T, ...] (or [B, ...] for whole rows), with `state` a pair of outputs and state, and with `labels` the
    loss. The `attention_mask` [B, S + T] includes the S tokens in the state. sample: draws x by a number of
    rows, a length and a generator. pad: the id of padding, if there is any. causal: earlier outputs must not
    depend on later inputs. fixed: x has no tokens, as an image. side: the part that reads x, such as
    "source"; "" for the only part. reorder: returns the state of some rows. generate: the logits [B, new, V]
    of greedy search for inputs, their mask, a number of new tokens, and whether to use a cache. save: writes
    into a folder and loads. plain: the same model with plain attention.
    """

    name: str
    module: nn.Module
    call: Call
    accepts: frozenset[str]
    sample: Sample
    causal: bool
    length: int = 12
    fixed: bool = False
    pad: int | None = None
    side: str = ""
    reorder: Callable[[Any, Tensor], Any] = select_rows
    generate: Callable[[nn.Module, Tensor, Tensor, int, bool], Tensor] | None = None
    save: Callable[[nn.Module, Path], nn.Module] | None = None
    plain: Callable[[nn.Module], nn.Module] | None = None

    def draw(self, rows: int, length: int, seed: int = 0) -> Tensor:
        """Return inputs [rows, length, ...]; longer inputs of a seed need not begin with shorter ones."""
        x = self.sample(rows, length, torch.Generator().manual_seed(1000 * seed + length))
        x = x.to(next(self.module.parameters(), x).device)
        return x.to(self.dtype) if x.is_floating_point() else x

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        types = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(types, torch.float32)

    def needs(self, *names: str) -> None:
        """Raise `NotApplicableError` if the call does not accept these arguments."""
        if self.fixed:
            raise NotApplicableError("the input has no tokens")
        for name in names:
            if name not in self.accepts:
                raise NotApplicableError(f"the model accepts no {name}")

    def run(self, x: Tensor, **named: Any) -> Tensor:
        """Return the outputs."""
        if named:
            self.needs(*named)
        output = self.call(self.module, x.to(self.dtype) if x.is_floating_point() else x, **named)
        return output[0] if isinstance(output, tuple) else output

    def step(self, x: Tensor, state: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the outputs of tokens that follow `state`, and the next state."""
        use_cache = True if "use_cache" in self.accepts else None
        named = {"attention_mask": mask, "state": state, "use_cache": use_cache}
        return self.call(
            self.module, x, **{name: value for name, value in named.items() if value is not None}
        )

    def gradients(self, value: Tensor) -> list[Tensor]:
        """Return the gradients of a scalar by the parameters."""
        self.module.zero_grad()
        value.backward()
        slopes = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.module.zero_grad()
        return slopes

    @contextlib.contextmanager
    def hooked(self, hook: Callable[..., Any]) -> Iterator[None]:
        """Call a forward hook after every module within the context."""
        with contextlib.ExitStack() as stack:
            for part in self.module.modules():
                stack.callback(part.register_forward_hook(hook).remove)
            yield

    def at(self, dtype: torch.dtype) -> Self:
        """Return a copy of the model in another precision."""
        module = copy.deepcopy(self.module).to(dtype)
        set_experts: Any = getattr(module, "set_experts_implementation", None)
        if set_experts is not None:
            set_experts("eager")  # the others lack kernels for some types
        return dataclasses.replace(self, module=module)

    @cached_property
    def per_token(self) -> bool:
        """Whether outputs have a vector for each token."""
        x = self.draw(2, 5)
        with torch.no_grad():
            return not self.fixed and self.run(x).shape[:2] == x.shape[:2]

    @cached_property
    def rounding(self) -> float:
        """The relative difference that rounding can explain.

        Two ways to compute the same numbers have errors of about eps times the condition of the problem, and
        the distance from float64 measures that product for this model.
        """
        x, eps = self.draw(2, self.length), torch.finfo(self.dtype).eps
        try:
            with torch.no_grad():
                noise = distance(self.run(x), self.at(torch.float64).run(x))
        except (RuntimeError, TypeError, ValueError):  # no float64
            noise = 8 * eps
        return min(1e-3, max(64 * eps, 32 * noise))


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest finite entry; infinite with NaN."""
    actual, expected = actual.detach().double(), expected.detach().double()
    if not actual.numel():
        return 0.0
    differences = torch.where(actual == expected, 0.0, (actual - expected).abs())
    scale = expected.nan_to_num(0, 0, 0).abs().max()
    return float((differences.nan_to_num(torch.inf).max() / scale.clamp(min=1e-30)).item())


def module_subject(
    module: nn.Module,
    call: Call | None = None,
    *,
    vocab_size: int | None = None,
    width: int | None = None,
    sample: Sample | None = None,
    **options: Any,
) -> Subject:
    """Return any module as a subject, see `polyformer.audit`."""
    accepts = inspect.signature(call or module.forward).parameters.keys() & set(ABILITIES)
    table = next((part for part in module.modules() if isinstance(part, nn.Embedding)), None)
    size = vocab_size or (64 if table is None else table.num_embeddings)

    def draw(rows: int, length: int, generator: torch.Generator) -> Tensor:
        if width is not None:
            return torch.randn(rows, length, width, generator=generator)
        return torch.randint(size, (rows, length), generator=generator)

    for name in ("reorder", "reorder_cache", "_reorder_cache"):
        if hasattr(module, name):
            options.setdefault("reorder", getattr(module, name))
    return Subject(
        module=module,
        call=call or (lambda module, x, **named: module(x, **named)),
        accepts=frozenset(accepts),
        sample=sample or draw,
        **{"name": "model", "causal": True, **options},
    )


def expanded(extras: Mapping[str, Tensor], x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the other inputs of a call [1, ...], repeated for the rows of x, in the model's precision."""
    return {
        name: value.to(x.device, dtype if value.is_floating_point() else value.dtype).expand(
            len(x), *value.shape[1:]
        )
        for name, value in extras.items()
    }


Sizes = Mapping[str, int]

EVALUATIONS = 60
"""The most measurements in the search for a smaller input."""


class Gap(NamedTuple):
    """A difference that should be 0, and the largest that rounding explains; `note`: a remark on it."""

    figure: float
    limit: float
    note: str = ""

    @property
    def exceeds(self) -> bool:
        """Whether the difference is a finding; NaN is."""
        return not self.figure <= self.limit


Measure = Callable[..., Gap | tuple[Tensor, Tensor]]
"""A function from a subject and sizes to a gap, or to two outputs that are equal up to rounding."""

Starts = Callable[[int], Iterable[tuple[int, ...]]]
"""A function from the length to the sizes to measure, in the order of the measurement's arguments."""


class Check(NamedTuple):
    """A contract: its name, the sentence of a finding, and the measurement.

    least: the smallest sizes. whole_rows: the check makes sense for outputs of whole rows and inputs without
    tokens too.
    """

    name: str
    sentence: str
    measure: Measure
    starts: Starts
    least: Sizes
    whole_rows: bool

    def __call__(self, subject: Subject, sizes: Sizes) -> Gap:
        """Measure; a call that raises is an infinite difference.

        Raises `NotApplicableError` with the reason if the check does not concern the model.
        """
        if not self.whole_rows and not subject.per_token:
            what = "the input has no tokens" if subject.fixed else "the model has no output for each token"
            raise NotApplicableError(what)
        try:
            result = self.measure(subject, **sizes)
        except NotApplicableError:
            raise
        except (InputError, NotImplementedError) as error:
            raise NotApplicableError(f"the model refuses: {error}") from error
        except Exception as error:  # of any model
            return Gap(float("inf"), 0.0, f"the call raises {type(error).__name__}: {str(error)[:200]}")
        return result if isinstance(result, Gap) else Gap(distance(*result), subject.rounding)


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run."""


def check(
    sentence: str, starts: Starts, *, name: str = "", whole_rows: bool = False, gradients: bool = False
) -> Callable[[Measure], Measure]:
    """Register a measurement under its name; the defaults of its arguments are the smallest sizes."""

    def register(measure: Measure) -> Measure:
        own = name or measure.__name__.replace("_", " ")
        defaults = {key: each.default for key, each in inspect.signature(measure).parameters.items()}
        least = {key: value for key, value in defaults.items() if isinstance(value, int)}
        run = measure if gradients else torch.no_grad()(measure)
        CHECKS[own] = Check(own, sentence, run, starts, least, whole_rows)
        return measure

    return register


def find(check: Check, subject: Subject) -> tuple[Sizes, Gap]:
    """Return the first sizes with a finding, made small; or the sizes of the greatest difference."""
    measured: list[tuple[Sizes, Gap]] = []
    for values in check.starts(subject.length):
        sizes = dict(zip(check.least, values, strict=True))
        gap = check(subject, sizes)
        if gap.exceeds:
            return shrink(check, subject, sizes, gap)
        measured.append((sizes, gap))
    return max(measured, key=lambda pair: pair[1].figure)


def shrink(check: Check, subject: Subject, sizes: Sizes, gap: Gap) -> tuple[Sizes, Gap]:
    """Return the smallest sizes with a finding of the same kind, a difference or a failed call."""
    best, evaluations, changed = dict(sizes), 0, True
    fails = gap.figure == float("inf")
    while changed:
        changed = False
        for name, least in check.least.items():
            size = best[name]
            tries = {least, least + 1, least + 2, size // 4, size // 2, size - 1}
            for smaller in sorted(n for n in tries if least <= n < size):
                evaluations += 1
                if evaluations > EVALUATIONS:
                    return best, gap
                sizes = best | {name: smaller}
                with contextlib.suppress(NotApplicableError):
                    result = check(subject, sizes)
                    if result.exceeds and (result.figure == float("inf")) == fails:
                        best, gap, changed = sizes, result, True
                        break
    return best, gap
