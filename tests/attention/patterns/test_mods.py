"""FlexAttention mods mean in every backend what FlexAttention means by them; its own code is the oracle."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from attention_cases import assert_same, dense, random_context, results, tensors
from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms.softmax_attention import SoftmaxAttention
from polyformer.attention.patterns import Causal, Full, PerHead, Strided, Window
from polyformer.attention.patterns.composition import as_pattern
from polyformer.attention.patterns.mods import Mod
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config

B, H, T = 2, 3, 24
CPU = torch.device("cpu")
GRID = 6  # tokens to a line, for images
torch.manual_seed(0)
PLACES = torch.randn(T, 3, dtype=torch.float64)
DOCUMENTS = torch.randint(0, 4, (B, T)).sort(1).values
BIAS = torch.randn(B, H, T, dtype=torch.float64)
OFFSETS = torch.tensor([0, 5, 6, 15, T])
SMALL = DOCUMENTS.to(torch.uint8)


def ordered(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Neighbours in a grid, as NATTEN: the window is moved inwards at the edges."""
    x, y = i // GRID, i % GRID
    return ((x.clamp(1, T // GRID - 2) - j // GRID).abs() <= 1) & (
        (y.clamp(1, GRID - 2) - j % GRID).abs() <= 1
    )


def stuck_together(first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A rule made of rules: of the one in even heads, of the other in odd ones."""
    return lambda b, h, i, j: torch.where(h % 2 == 0, first(b, h, i, j), second(b, h, i, j))


def looped(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Python at work on captured numbers and on the shape of a scalar."""
    allowed = i >= j + i.dim()
    for start in OFFSETS.tolist():
        allowed = allowed | ((i >= start) & (j == start))
    return allowed


MASKS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j <= 4),
    "prefix": lambda b, h, i, j: (i >= j) | (j < 7),
    "dilated": lambda b, h, i, j: ((i - j).abs() <= 9) & ((i - j) % 3 == 0),
    "documents": lambda b, h, i, j: (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (i >= j),
    "by search": lambda b, h, i, j: (i >= OFFSETS).sum() == (j >= OFFSETS).sum(),
    "natten": ordered,
    "stuck": stuck_together(ordered, lambda b, h, i, j: i >= j),
    "rows": lambda b, h, i, j: DOCUMENTS[b][i] == DOCUMENTS[b][j],
    "norm": lambda b, h, i, j: (PLACES[i] - PLACES[j]).norm() < 2,
    "products": lambda b, h, i, j: (PLACES[i] * PLACES[j]).sum() > 0,
    "dot": lambda b, h, i, j: torch.dot(PLACES[i], PLACES[j]) > 0,
    "any": lambda b, h, i, j: (j == OFFSETS).any() | (i == j),
    "slices": lambda b, h, i, j: PLACES[i, :2].sum() > PLACES[j, 1:].sum(),
    "no axis": lambda b, h, i, j: BIAS[..., j][b, h] > 0,
    "mixed": lambda b, h, i, j: BIAS[b, 1, j] > BIAS[0, h][i],
    "small": lambda b, h, i, j: SMALL[b, i] + torch.tensor(255) > SMALL[b, j] + torch.tensor(256),
    "looped": looped,
    "in place": lambda b, h, i, j: (i >= j).logical_or_(j == 2),
    "tensor of one": lambda b, h, i, j: (i >= j).view(1),
}


def slopes(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: s - table.exp()[h, 0] * (i - j).abs()


def soft_cap(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: table[0, 0] * torch.tanh(s / table[0, 0])


def rows(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: s + table[h][(i - j) % 5]


def inner(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: s * (1 + torch.dot(table[i % H], table[j % H]))


def in_place(table: Tensor) -> Callable[..., Tensor]:
    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s += table[h, (i * j) % 5]
        s.mul_(2)
        return torch.where(i >= j, s, -float("inf"))

    return mod


def half_frozen(table: Tensor) -> Callable[..., Tensor]:
    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = table[h, i % 5] * s
        return s.detach() * 0.5 + s + table[h].max() * s + fixed

    return mod


class Twice(torch.autograd.Function):
    """Doubles, with a gradient of its own, which no operation shows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / 3


def custom(table: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: Twice.apply(s) + table[h, j % 5]  # type: ignore[operator]


SCORES = {mod.__name__: mod for mod in (slopes, soft_cap, rows, inner, in_place, half_frozen, custom)}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_flex_attentions_in_every_backend(name: str) -> None:
    torch.manual_seed(1)
    q, k, v = tensors(B, H, H, T, T)
    mask_mod = MASKS[name]
    mask = torch.zeros(B, H, T, T, dtype=torch.bool)
    for place in (mask == 0).nonzero():
        mask[tuple(place)] = mask_mod(*place).squeeze()
    if name not in (
        "mixed",
        "no axis",
    ):  # torch's own indexing by scalars reads the number of a batched tensor
        assert torch.equal(create_mask(mask_mod, B, H, T, T, device="cpu").view_as(mask), mask)
    expected = results(
        q,
        k,
        v,
        pattern=Causal() & Window(T),
        mask_mod=lambda b, h, i, j: mask[b, h, i, j],
        lse=False,
        backend="definition",
    )
    for backend in ("definition", "sdpa", "tiled"):
        ours = results(q, k, v, pattern=Causal() & Window(T), mask_mod=mask_mod, lse=False, backend=backend)
        assert_same(ours, expected)


def by_pairs(q: Tensor, k: Tensor, v: Tensor, mod: Callable[..., Tensor], allowed: Tensor) -> Tensor:
    """Attention whose scores the mod is given one by one."""
    scores = q @ k.mT / q.shape[3] ** 0.5
    places = torch.ones_like(scores).nonzero()
    modified = torch.stack([mod(scores[tuple(place)].clone(), *place) for place in places]).view_as(scores)
    return modified.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    "pattern", [None, PerHead((Strided(4), Window(5)))], ids=["all", "by head and class"]
)
def test_a_score_mod_is_flex_attentions_in_every_backend(name: str, pattern: PerHead | None) -> None:
    torch.manual_seed(1)
    length = 11
    q, k, v = tensors(B, H, H, length, length)
    table = torch.randn(H, 5, dtype=torch.float64, requires_grad=True)
    mod, context = SCORES[name](table), Context(length, length)
    allowed = dense(pattern or Full(), context, B, H)
    out = by_pairs(q, k, v, mod, allowed)
    weights = torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape) / out.numel()
    grads = torch.autograd.grad((out * weights).sin().sum(), [q, k, v, table])
    for backend in ("definition", "tiled"):
        ours = results(q, k, v, tables=[table], pattern=pattern, score_mod=mod, lse=False, backend=backend)
        assert_same([ours[0], *ours[2:]], [out, *grads])
    if pattern is None and name != "custom":  # dynamo, which it runs, warns of such functions
        with torch.no_grad():
            flex = flex_attention(*(x.detach() for x in (q, k, v)), score_mod=mod)
        torch.testing.assert_close(flex, out, rtol=1e-10, atol=1e-10)


PROVEN = "causal", "window", "prefix", "dilated", "documents", "natten", "stuck", "small", "looped"


def test_common_mods_need_no_vmap() -> None:
    proven = [name for name in MASKS if Mod.of(MASKS[name], "mask_mod", None, CPU).program is not None]
    assert sorted(proven) == sorted(PROVEN)


@pytest.mark.parametrize("backend", ["definition", "sdpa", "tiled"])
def test_types_mix_as_in_flex_attention(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach().float() for x in tensors(B, H, H, T, T))
    table = torch.randn(H, T, dtype=torch.float64)
    mask = lambda b, h, i, j: table[h, i] + torch.tensor(1e-9, dtype=torch.float64) > table[h, i]  # noqa: E731
    assert attend(q, k, v, mask_mod=mask, backend=backend).any()
    if backend != "sdpa":
        mod = lambda s, b, h, i, j: s + table[h, j]  # noqa: E731
        out = attend(q, k, v, score_mod=mod, backend=backend)
        assert out.dtype == torch.float32
        exact = attend(q.double(), k.double(), v.double(), score_mod=mod)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def branching(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i > j if i > 3 else i == j


BAD: dict[str, tuple[Any, str]] = {
    "if": (branching, r"mask_mod: it reads the value .* use torch.where, & \| ~"),
    "and": (lambda b, h, i, j: i >= j and i < 9, "mask_mod: it reads the value"),
    "item": (lambda b, h, i, j: torch.tensor(i.item() > 1), "mask_mod: it reads the value"),
    "numpy": (lambda b, h, i, j: torch.tensor(i.numpy() > 1), "mask_mod: it reads the value"),
    "int": (lambda b, h, i, j: i - j, r"mask_mod: expected it to return bool, got torch.int64; compare"),
    "many": (
        lambda b, h, i, j: PLACES[i] > PLACES[j],
        r"one value for each pair of tokens, got shape \(3,\)",
    ),
    "python": (lambda b, h, i, j: True, "mask_mod: expected it to return a tensor, got bool"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_a_mod_is_refused(name: str) -> None:
    function, message = BAD[name]
    for backend in ("definition", "sdpa", "tiled"):
        with pytest.raises(InputError, match=message):
            attend(*tensors(B, H, H, T, T), mask_mod=function, backend=backend)


def test_a_branching_score_mod_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="score_mod: it reads the value"):
        attend(*tensors(B, H, H, T, T), score_mod=lambda s, b, h, i, j: s if s > 0 else -s)


def test_a_block_mask_is_refused_with_what_to_pass() -> None:
    block_mask: Any = create_block_mask(MASKS["causal"], None, None, 128, 128, device="cpu")
    for name in ("mask_mod", "pattern"):
        options: dict[str, Any] = {name: block_mask}
        with pytest.raises(InputError, match=f"{name}: got a BlockMask; pass .* block_mask.mask_mod"):
            attend(*tensors(1, 1, 1, 128, 128), **options)


@pytest.mark.parametrize("name", ["rows", "window"])
def test_a_user_defined_mask_compiles_into_one_graph(name: str) -> None:
    q, k, v = (x.detach() for x in tensors(B, H, H, T, T))
    function = lambda q, k, v: attend(q, k, v, mask_mod=MASKS[name])  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), function(q, k, v))


CHUNKS = {"definition": 7, "sdpa": 1, "tiled": 7}, {"definition": 1, "sdpa": 7, "tiled": 1}
"""How many queries come at a time: for a mask after another the first or the second."""


@pytest.mark.parametrize(("name", "chunks"), [(name, CHUNKS[i % 2]) for i, name in enumerate(MASKS)])
def test_chunks_of_queries_see_what_one_pass_sees(name: str, chunks: dict[str, int]) -> None:
    torch.manual_seed(2)
    q, k, v = tensors(B, H, H, T, T)
    mod = lambda s, b, h, i, j: s - i * 0.1 * (h + 1) + BIAS[b, h, j] * i  # noqa: E731
    valid = torch.arange(T) >= torch.tensor([[0], [5]])
    for backend, chunk in chunks.items():
        options: dict[str, Any] = {"mask_mod": MASKS[name], "backend": backend}
        if backend != "sdpa":
            options["score_mod"] = mod
        whole = attend(q, k, v, context=Context(T, T, causal=True, kv_valid=valid), **options)
        for start in range(0, T, chunk):
            stop = min(start + chunk, T)
            context = Context(stop - start, stop, causal=True, kv_valid=valid[:, :stop])
            part = attend(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], context=context, **options)
            torch.testing.assert_close(part, whole[:, :, start:stop], rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_without_a_context_queries_count_from_0_as_in_flex_attention() -> None:
    q, k, v = (x.detach() for x in tensors(B, H, H, 8, T))
    mod = lambda s, b, h, i, j: s - (i - j).abs()  # noqa: E731
    mask = create_block_mask(MASKS["prefix"], None, None, 8, T, device="cpu")
    expected = flex_attention(q, k, v, score_mod=mod, block_mask=mask)
    for backend in ("definition", "tiled"):
        ours = attend(q, k, v, mask_mod=MASKS["prefix"], score_mod=mod, backend=backend)
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_used_context_notices_what_has_changed(backend: str, grad: bool) -> None:
    torch.manual_seed(3)
    q, k, v = (x.detach() for x in tensors(1, 2, 2, T, T))
    seen, valid = torch.rand(T) > 0.5, torch.rand(1, T) > 0.2
    context = Context(T, T, causal=True, kv_valid=valid)
    layout: list[int] = [T]
    mask_mod = lambda b, h, i, j: seen[j]  # noqa: E731
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            for options in ({"mask_mod": mask_mod}, {"pattern": mask_mod}, {}):
                ours = attend(q, k, v, context=context, backend=backend, **options)  # type: ignore[arg-type]
                fresh = Context(T, T, causal=True, kv_valid=valid.clone())
                expected = attend(q, k, v, context=fresh, backend="definition", **options)  # type: ignore[arg-type]
                torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
            seen.logical_not_()
            valid[0, layout[0] - 5 :] = False
            layout[0] -= 5


@pytest.mark.parametrize("backend", ["definition", "sdpa", "tiled"])
def test_a_mod_may_be_asked_outside_of_a_call(backend: str) -> None:
    context = random_context(B, T, T, documents=True)
    pattern = Window(3) | MASKS["rows"]
    places = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(1, -1, 1, 1)
    mask = pattern.mask(context, *places, torch.arange(T).view(-1, 1), torch.arange(T))
    q, k, v = tensors(B, H, H, T, T)
    ours = attend(q, k, v, pattern=pattern, context=context, backend=backend)
    both = lambda b, h, i, j: mask.expand(B, H, T, T)[b, h, i, j]  # noqa: E731
    torch.testing.assert_close(ours, attend(q, k, v, mask_mod=both, context=context, backend="definition"))


@pytest.mark.parametrize("name", ["prefix", "products", "rows", "stuck"])
def test_a_decoder_with_a_user_defined_mask_goes_on_as_one_pass(name: str) -> None:
    torch.manual_seed(5)
    config = model_config("decoder-tiny", {"num_hidden_layers": 2, "hidden_size": 24, "vocab_size": 30})
    model = Transformer(config).double().eval()
    for layer in model.modules():
        if isinstance(layer, SoftmaxAttention):
            layer.config = dataclasses.replace(layer.config, pattern=as_pattern(MASKS[name]))
    ids, mask = torch.randint(3, 30, (B, T)), torch.arange(T) >= torch.tensor([[0], [5]])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        state = None
        for start, stop in ((0, 9), (9, 10), (10, 13), (13, T)):
            seen = mask[:, start:stop] if state is None else mask[:, :stop]
            out = model(ids[:, start:stop], attention_mask=seen, state=state, use_cache=True)
            real = mask[:, start:stop]
            torch.testing.assert_close(out.logits[real], whole[:, start:stop][real], rtol=1e-9, atol=1e-9)
            state = out.state
