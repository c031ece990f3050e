"""K1 the fast form is the definition; K6 backends agree: outputs and every gradient, in float64."""

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from members import Case, assert_same, gradients, parts, score
from selection import SINGLE, cases, mechanisms, patterns
from shared_models import defined, shared
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.plan import BACKENDS
from polyformer.attention.functional.request import Call, prepare
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Pattern
from polyformer.attention.positions import PositionConfig
from polyformer.attention.positions.rope_extensions import LengthExtensionConfig
from polyformer.core.errors import InputError
from polyformer.core.registry import in_package
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("case", cases("definition"), ids=str)
def test_model_equals_its_definition(case: Case):
    """With three heads, or pairs: mechanisms alone have one and two as well, below."""
    case = case.with_heads(3 * max(mechanism.head_multiple for mechanism in case.mechanisms))
    batch = case.batch(rows=3, length=13)
    batch["attention_mask"] = torch.ones(3, 13, dtype=torch.long)
    batch["attention_mask"][1, 9:] = 0
    outputs, slopes = [], []
    for form in (case, case.definition()):
        model = form.model()
        outputs.append(model(**batch))
        slopes.append(gradients(model, score(outputs[-1])))
    assert_same(outputs[0].last_hidden_state, outputs[1].last_hidden_state)
    assert_same(*slopes)


SELF_ATTENTION = cases("backends", shape=SINGLE)
REFUSED_BY_SDPA = {
    "alibi",
    "da",
    "deberta",
    "etc_labels",
    "grid_bias",
    "shaw",
    "t5",
    "transformer_xl",
    "xlnet",
}
"""Position schemes that change scores: SDPA takes a bias alone, and only where no gradient is needed."""


def schemes(case: Case) -> list[PositionConfig]:
    return [part for part in parts(case.config) if isinstance(part, PositionConfig)]


def sdpa_refuses(case: Case) -> bool:
    softmax = any(isinstance(part, SoftmaxConfig) for part in parts(case.config))
    return softmax and any(scheme.kind in REFUSED_BY_SDPA or joins_parts(scheme) for scheme in schemes(case))


def joins_parts(scheme: PositionConfig) -> bool:
    """Whether parts of the pairs are joined by log-sum-exp, which torch's function does not return."""
    return isinstance(getattr(scheme, "extension", None), LengthExtensionConfig)


def sdpa_takes(case: Case) -> bool:
    """Of the schemes of installed packages it is not known."""
    return not sdpa_refuses(case) and all(in_package(type(scheme)) for scheme in schemes(case))


def through(case: Case, backend: str) -> Transformer:
    """The model of the case with all softmax attention computed by `backend`."""
    config = case.changed(SoftmaxConfig, lambda mechanism: dataclasses.replace(mechanism, backend=backend))
    return config.model()


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "tiled") for case in SELF_ATTENTION),
        *((case, "sdpa") for case in SELF_ATTENTION if sdpa_takes(case)),
    ],
    ids=str,
)
def test_model_is_the_same_through_every_backend(case: Case, backend: str):
    """Whole models, position schemes included."""
    batch = case.batch(length=13)
    model = through(case, backend)
    output = model(**batch)
    expected, slopes = oracle(case)
    assert_same(output.last_hidden_state, expected)
    assert_same(gradients(model, score(output)), slopes)


@functools.cache
def oracle(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and gradients of the plain equations, computed once for all backends."""
    model = shared(defined(case))
    output = model(**case.batch(length=13))
    return output.last_hidden_state.detach(), gradients(model, score(output))


@pytest.mark.parametrize(
    "case", [case for case in SELF_ATTENTION if sdpa_refuses(case) and not case.number], ids=str
)
def test_sdpa_refuses_models_whose_positions_change_scores(case: Case):
    with pytest.raises(InputError, match=r"backend 'sdpa' cannot take this call: .* use 'auto'"):
        through(case, "sdpa")(**case.batch(length=13))


def test_every_scheme_that_sdpa_refuses_has_a_case():
    kinds = {scheme.kind for case in SELF_ATTENTION for scheme in schemes(case)}
    assert kinds >= REFUSED_BY_SDPA


def contexts(rows: int, queries: int, keys: int) -> list[Context]:
    """Every kind of limit that a context can set, at odd places."""
    torch.manual_seed(4)
    documents = torch.randint(0, 3, (rows, keys)).sort(1).values
    valid = torch.rand(rows, keys) > 0.2
    valid[0] = False
    positions = (valid.long().cumsum(1) - 1).clamp_min(0)
    plain, causal = Context(queries, keys), Context(queries, keys, causal=True)
    own = {"q_doc": documents[:, -queries:], "kv_doc": documents}
    placed = {"q_pos": positions[:, -queries:], "kv_pos": positions, "kv_valid": valid}
    changes: list[dict[str, Any]] = [{}, own, {**own, **placed}]
    return [plain, fresh(plain, placed), *(fresh(causal, change) for change in changes)]


def fresh(context: Context, changes: dict[str, Any]) -> Context:
    """`context` with other fields, and nothing remembered."""
    return dataclasses.replace(context, memo={}, **changes)


def tensors(rows: int, heads: int, groups: int, queries: int, keys: int, device: str = "cpu") -> list[Tensor]:
    """q, k, v and what the output is multiplied by to get a number."""
    torch.manual_seed(5)
    shapes = (rows, heads, queries, 4), (rows, heads // groups, keys, 4), (rows, heads // groups, keys, 4)
    leaves = [torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes]
    return [*leaves, torch.randn(rows, heads, queries, 4, dtype=torch.float64, device=device)]


@pytest.mark.parametrize(("name", "config"), mechanisms("mechanism"))
def test_mechanism_equals_its_definition(name: str, config: MechanismConfig):
    """With as many queries as keys and, as they are with a state, with fewer."""
    sizes = [(13, 13), *([(1, 9), (5, 12)] if config.supports_kv_cache else [])]
    for heads, (queries, keys) in itertools.product((1, 3), sizes):
        heads *= config.head_multiple
        *inputs, weight = tensors(2, heads, 1, queries, keys)
        for context in contexts(2, queries, keys):
            if (context.causal and not config.causal) or (
                context.q_doc is not None and not config.supports_packing
            ):
                continue
            results = []
            for form in (config, config.definition()):
                torch.manual_seed(6)  # for what a mechanism draws
                y, _ = form.build(heads, 4).double().eval()(*inputs, context, None, None)
                results.append((y, *torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True)))
            for actual, expected in zip(*results):
                assert_same(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("named", "groups"),
    [(named, groups) for i, named in enumerate(patterns()) for groups in ((2, 1) if i % 4 == 0 else (2,))],
    ids=str,
)
def test_backends_agree(named: tuple[str, Pattern], groups: int, device: str):
    """More keys than one block, queries fewer than keys, a score function, and rows that see nothing."""
    _, pattern = named
    queries, keys = 141, 157
    *inputs, weight = tensors(2, 2 * groups, groups, queries, keys, device)

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return s - 0.01 * (h + 1) * (q_idx - kv_idx).abs()

    for context, mod in zip(contexts(2, queries, keys), itertools.cycle((None, score_mod))):
        if not context.causal or pattern.causal():
            moved = {
                name: value.to(device) for name, value in vars(context).items() if isinstance(value, Tensor)
            }
            context = fresh(context, moved)
            request = prepare(Call(*inputs, pattern=pattern, score_mod=mod, context=context))
            results = {}
            for backend, module in BACKENDS.items():
                if module.refuses(request) is None:
                    y = attend(*inputs, pattern=pattern, score_mod=mod, context=context, backend=backend)
                    results[backend] = (y, *torch.autograd.grad((y * weight).sum(), inputs))
            assert {"definition", "tiled"} <= results.keys()
            for result in results.values():
                for actual, expected in zip(result, results["definition"]):
                    assert_same(actual, expected)


@pytest.mark.filterwarnings("ignore:.*flex_attention.*:UserWarning")
@pytest.mark.parametrize(("name", "pattern"), patterns())
def test_patterns_run_in_flex_attention_as_they_are(name: str, pattern: Pattern):
    """The mask_mod of a pattern is FlexAttention's own: torch evaluates it one query and key at a time."""
    from torch.nn.attention.flex_attention import create_mask

    context = contexts(2, 9, 14)[-1 if pattern.causal() else 1]
    mask = create_mask(pattern.mask_mod(context), 2, 3, 9, 14, device="cpu")
    b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(3).view(1, -1, 1, 1)
    expected = pattern.allows(context, b, h, torch.arange(9).view(-1, 1), torch.arange(14))
    assert torch.equal(mask, expected.expand(2, 3, 9, 14))
