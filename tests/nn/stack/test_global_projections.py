"""Projections of their own for global tokens: the equation token by token, and beside plain models."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Global, Marked, Pattern, PerHead, PerLayer, Window
from polyformer.attention.positions import NoPositionConfig, Shape
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelOutput
from polyformer.models.presets import create_model
from polyformer.nn.stack import (
    AttentionConfig,
    FeatureAttention,
    copy_local_projections,
    global_projections,
)

NO_POSITION = NoPositionConfig().build(Shape(hidden_size=6))
ROWS, LENGTH = 3, 11
MARKS = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
MARKS[0, [5, 9]] = MARKS[1, 2] = True
VALID = torch.ones(ROWS, LENGTH, dtype=torch.bool)
VALID[0, 9:] = VALID[1, :3] = VALID[2, 6] = False
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [0] * 11, [0, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3]])


def positions() -> Tensor:
    """Real tokens counted from 0 in each document."""
    pos = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    for row in range(ROWS):
        for document in DOCUMENTS[row].unique():
            inside = (DOCUMENTS[row] == document) & VALID[row]
            pos[row, DOCUMENTS[row] == document] = (inside.long().cumsum(0) - 1).clamp_min(0)[
                DOCUMENTS[row] == document
            ]
    return pos


def contexts() -> list[Context]:
    marked: dict[str, Any] = {"q_marked": MARKS, "kv_marked": MARKS}
    placed = {
        "q_pos": positions(),
        "kv_pos": positions(),
        "kv_valid": VALID,
        "q_doc": DOCUMENTS,
        "kv_doc": DOCUMENTS,
    }
    return [
        Context(LENGTH, LENGTH, causal=causal, **marked, **more)
        for causal in (False, True)
        for more in ({}, placed)
    ]


def new_attention(pattern: Pattern, heads: int = 2, groups: int | None = None) -> FeatureAttention:
    torch.manual_seed(0)
    config = AttentionConfig(
        num_attention_heads=heads,
        num_key_value_heads=groups,
        global_projections=True,
        mechanism=SoftmaxConfig(pattern=pattern),
    )
    return FeatureAttention(6, config).double().eval()


def is_global(context: Context, row: int, slot: int, first: int, marked: bool) -> bool:
    position = slot if context.kv_pos is None else int(context.kv_pos[row, slot])
    return position < first or (marked and bool(MARKS[row, slot]))


def equation(
    module: FeatureAttention,
    x: Tensor,
    context: Context,
    first: int,
    marked: bool,
    windows: list[tuple[int, int]],
) -> Tensor:
    """One query and head after the other; a window is (keys on both sides, dilation)."""
    width, heads = module.head_size, module.config.num_attention_heads
    group = heads // module.config.kv_heads
    own = module.global_attention
    assert own is not None
    outputs = []
    for row in range(ROWS):
        for i in range(LENGTH):
            chosen = is_global(context, row, i, first, marked)
            part: Any = own if chosen else module
            q, k, v = part.query(x[row, i]), part.key(x[row]), part.value(x[row])
            for h in range(heads):
                reach, step = windows[h % len(windows)]
                seen = []
                for j in range(LENGTH):
                    near = abs(i - j) <= reach * step and (i - j) % step == 0
                    there = (context.kv_valid is None or bool(VALID[row, j])) and not (
                        context.causal and j > i
                    )
                    together = context.kv_doc is None or bool(DOCUMENTS[row, i] == DOCUMENTS[row, j])
                    if there and together and (chosen or near or is_global(context, row, j, first, marked)):
                        seen.append(j)
                mine, shared = (
                    slice(h * width, (h + 1) * width),
                    slice(h // group * width, (h // group + 1) * width),
                )
                weights = (k[seen][:, shared] @ q[mine] / width**0.5).softmax(0)
                outputs.append(weights @ v[seen][:, shared] if seen else torch.zeros_like(v[0, shared]))
    joined = torch.stack(outputs).view(ROWS, LENGTH, heads * width)
    return module.output(joined)


CASES = [
    pytest.param(Window(1) | Global(2), 2, False, [(1, 1)], 2, None, id="first"),
    pytest.param(Window(2) | Marked(), 0, True, [(2, 1)], 3, 1, id="marked-grouped"),
    pytest.param(Marked() | Window(1) | Global(1), 1, True, [(1, 1)], 2, None, id="both"),
    pytest.param(
        PerHead((Window(1) | Global(1), Window(2, dilation=2) | Global(1))),
        1,
        False,
        [(1, 1), (2, 2)],
        3,
        None,
        id="dilated-heads",
    ),
]


@pytest.mark.parametrize(("pattern", "first", "marked", "windows", "heads", "groups"), CASES)
def test_the_equation(
    pattern: Pattern, first: int, marked: bool, windows: list[tuple[int, int]], heads: int, groups: int | None
):
    """With padding in the middle and at both ends, packed documents, and causal: outputs and gradients."""
    module = new_attention(pattern, heads, groups)
    torch.manual_seed(1)
    x = torch.randn(ROWS, LENGTH, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]
    for context in contexts():
        real = torch.ones_like(VALID) if context.kv_valid is None else VALID
        actual = module(x, context, NO_POSITION)[0][real]
        expected = equation(module, x, context, first, marked, windows)[real]
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        weight = torch.randn_like(actual)
        slopes = [torch.autograd.grad((item * weight).sum(), inputs) for item in (actual, expected)]
        for mine, wanted in zip(*slopes):
            torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-10)


def test_only_the_global_rows_are_computed(monkeypatch: pytest.MonkeyPatch):
    """As many queries as the row with most of them has; padding at positions of global tokens is none."""
    seen, attend = [], global_projections.attend

    def counted(q: Tensor, *arguments: Any, **named: Any) -> Tensor:
        seen.append(q.shape[2])
        return attend(q, *arguments, **named)

    monkeypatch.setattr(global_projections, "attend", counted)
    module, x = new_attention(Window(1) | Marked()), torch.randn(ROWS, LENGTH, 6, dtype=torch.float64)
    marked = contexts()[0]
    module(x, marked, NO_POSITION)
    module(x, Context(LENGTH, LENGTH), NO_POSITION)
    padded = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    padded[:, 8:] = True
    pos = (padded.long().cumsum(1) - 1).clamp_min(0)
    new_attention(Window(1) | Global(1))(
        x, Context(LENGTH, LENGTH, q_pos=pos, kv_pos=pos, kv_valid=padded), NO_POSITION
    )
    assert seen == [2, 1]


def plain_and_projected(name: str, **options: Any) -> tuple[Transformer, Transformer]:
    """The same weights with and without projections of their own, copies of the ordinary ones."""
    pattern = options.pop("pattern", Window(2) | Global(1) | Marked())
    torch.manual_seed(0)
    plain = create_model(name, attention=pattern, **options).double().eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    projected = create_model(name, attention=pattern, global_projections=True, **options).double().eval()
    left = projected.load_state_dict(plain.state_dict(), strict=False)
    assert left.missing_keys
    assert all(".global_attention." in key for key in left.missing_keys)
    copy_local_projections(projected)
    return plain, projected


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def batch(rows: int = ROWS) -> dict[str, Tensor]:
    torch.manual_seed(2)
    return {"input_ids": torch.randint(300, (rows, LENGTH)), "global_attention_mask": MARKS[:rows].long()}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"position": "alibi"},
    {"position": "t5"},
    {"num_key_value_heads": 1},
    {"num_hidden_layers": 2, "pattern": PerLayer((Window(1) | Global(1) | Marked(), Window(3) | Marked()))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["encoder-tiny", "decoder-tiny"])
def test_copies_of_the_ordinary_projections_change_nothing(name: str, options: dict[str, Any]):
    """Outputs and attention weights, with padding and packed documents, and one graph under torch.compile."""
    plain, projected = plain_and_projected(name, **options)
    padded = {"attention_mask": VALID.long()}
    for more in ({}, padded, {"document_ids": DOCUMENTS, **padded}):
        fields = {**batch(), **more}
        real = VALID if more else torch.ones_like(VALID)
        expected = plain(**fields, output_attentions=True)
        same(projected(**fields).last_hidden_state[real], expected.last_hidden_state[real])
        recorded = projected(**fields, output_attentions=True)
        same(recorded.last_hidden_state[real], expected.last_hidden_state[real])
        for mine, other in zip(recorded.attentions, expected.attentions, strict=True):
            same(mine.transpose(1, 2)[real], other.transpose(1, 2)[real])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("marked", [False, True])
def test_it_is_one_graph(marked: bool):
    """Where marks are given, how many there are is not known while tracing."""
    _, projected = plain_and_projected("encoder-tiny")
    fields = batch() if marked else {"input_ids": batch()["input_ids"]}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **named: projected(**named).last_hidden_state, backend="eager", fullgraph=True
    )
    same(compiled(**fields), projected(**fields).last_hidden_state)


@pytest.mark.parametrize("position", ["learned", "alibi"])
def test_any_split_is_one_pass(position: str):
    """Marks that come late, left padding, and a state put in another order."""
    _, projected = plain_and_projected("decoder-tiny", position=position)
    with torch.no_grad():
        for parameter in projected.parameters():  # away from the copies
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, :2] = 0
    fields = {**batch(), "attention_mask": mask}
    expected = projected(**fields).last_hidden_state
    for split in ([5, 6], [3, 1, 1, 1, 4, 1], [1] * LENGTH):
        state, outputs = projected.new_state(), []
        for part in zip(*(fields[name].split(split, 1) for name in fields)):
            output: ModelOutput = projected(**dict(zip(fields, part)), state=state)
            assert output.state is not None
            state = output.state
            outputs.append(output.last_hidden_state)
        same(torch.cat(outputs, 1)[mask.bool()], expected[mask.bool()])
    order = torch.tensor([1, 0])
    first = projected(**{name: item[:, :6] for name, item in fields.items()}, use_cache=True)
    rest = projected(
        **{name: item[order, 6:] for name, item in fields.items()}, state=first.state.reorder(order)
    )
    same(rest.last_hidden_state, expected[order, 6:])


def test_a_source_keeps_its_global_tokens_to_itself():
    """In an encoder-decoder the encoder takes the marks; cross-attention has no global projections."""
    plain, projected = plain_and_projected("transformer-tiny")
    assert projected.decoder is not None
    names = [name for name, _ in projected.named_parameters() if "global_attention" in name]
    assert not [name for name in names if "cross_attention" in name]
    fields = {**batch(), "decoder_input_ids": torch.randint(300, (ROWS, 4))}
    same(projected(**fields).last_hidden_state, plain(**fields).last_hidden_state)
    state = projected.encode(fields["input_ids"])
    with pytest.raises(
        InputError, match="global_attention_mask: a source that was read already does not take"
    ):
        projected(decoder_input_ids=fields["decoder_input_ids"], state=state, global_attention_mask=MARKS)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (None, "expected a pattern with `| Global(n)` or `| Marked()`, got none; add one, or set"),
        (Window(2), r"expected a pattern with .* got Window\(before=2, after=2, dilation=1\); add one"),
        (Window(2) & Global(1), "expected a pattern with `| Global"),
        (PerHead((Window(2) | Global(1), Window(2) | Global(2))), "expected the same global tokens for all"),
    ],
)
def test_patterns_without_global_tokens_are_refused(pattern: Pattern | None, message: str):
    with pytest.raises(InputError, match="global_projections: ") as caught:
        AttentionConfig(mechanism=SoftmaxConfig(pattern=pattern), global_projections=True)
    assert caught.match(message.replace("|", r"\|").replace("(n)", r"\(n\)").replace("()", r"\(\)"))


def test_a_layer_without_global_tokens_is_refused():
    pattern = PerLayer((Window(2) | Global(1), Window(2)))
    config = AttentionConfig(mechanism=SoftmaxConfig(pattern=pattern), global_projections=True)
    FeatureAttention(8, config, 0)
    with pytest.raises(InputError, match="global_projections: expected a pattern with"):
        FeatureAttention(8, config, 1)


def test_dropout_reaches_global_tokens_too():
    module = new_attention(Window(1) | Global(11))
    mechanism = dataclasses.replace(module.config.mechanism, dropout=0.5)
    module = FeatureAttention(6, dataclasses.replace(module.config, mechanism=mechanism)).double()
    x = torch.randn(1, LENGTH, 6, dtype=torch.float64)
    item, another = (module.train()(x, Context(LENGTH, LENGTH), NO_POSITION)[0] for _ in range(2))
    assert not torch.equal(item, another)
