"""Statements of five lecture texts (docs/seeds.md) about paths between tokens, and what they cost."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms import LinformerConfig
from polyformer.attention.patterns import BlockWindow, Blockwise, Pattern, Random, Strided, Summary, Window
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model

VOCAB = 13


def mask(pattern: Pattern, context: Context) -> Tensor:
    """The pairs [Tq, Tk] of the first head as a matrix, the causal limit included."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    i, j = torch.arange(context.q_len).view(-1, 1), torch.arange(context.kv_len)
    allowed = pattern.mask(context, zero, zero, i, j).expand(1, 1, -1, -1)[0, 0]
    return allowed & (i >= j) if context.causal else allowed


def distances(links: Tensor) -> Tensor:
    """The least number of steps between each pair; -1 where there is no path."""
    reached, steps = torch.eye(len(links), dtype=torch.bool), torch.full(links.shape, -1)
    steps[reached] = 0
    for step in range(1, len(links)):
        wider = reached | (reached.float() @ links.float() > 0)
        steps[wider & ~reached] = step
        if torch.equal(wider, reached):
            break
        reached = wider
    return steps


@pytest.mark.parametrize(
    ("near", "far"),
    [(Window(8, 0), Strided(8)), (BlockWindow(8, 0, 0), Summary(8, 2))],
    ids=["strided", "fixed"],
)
def test_factorized_patterns_connect_all_pairs(near: Pattern, far: Pattern):
    """Two parts: every pair j <= i is joined by a path of three positions at most, two steps.

    In the fixed pattern the keys behind the last summary of their block are joined when it is complete.
    """
    n = 64
    context = Context(n, n, causal=True)
    steps = distances(mask(near, context) | mask(far, context))
    earlier = torch.ones(n, n, dtype=torch.bool).tril()
    assert (steps[earlier] >= 0).all()
    assert steps[earlier].max() == 2
    assert (distances(mask(near, context))[earlier].max() > 2) or (
        distances(mask(near, context))[earlier] < 0
    ).any()


def test_a_stride_of_the_width_is_a_column():
    """An image of 6 x 6 pixels in raster order: the far part of a pixel is its column."""
    seen = mask(Strided(6), Context(36, 36, causal=True))
    for pixel in range(36):
        assert seen[pixel].nonzero().flatten().tolist() == list(range(pixel % 6, pixel + 1, 6))
    near = mask(Window(6, 0), Context(36, 36, causal=True))
    assert near[17].nonzero().flatten().tolist() == list(range(11, 18)), "a whole row of pixels before it"


def test_random_blocks_shorten_paths():
    context, window = Context(512, 512), BlockWindow(8)
    alone, joined = (distances(mask(pattern, context)) for pattern in (window, window | Random(3, 8)))
    assert alone.max() == 63
    assert joined.max() < 63 / 8
    assert joined.float().mean() < alone.float().mean() / 6


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_n_blocks_leave_an_nth_of_the_pairs(blocks: int):
    order = tuple((block + 1) % blocks for block in range(blocks))
    assert int(mask(Blockwise(64 // blocks, order), Context(64, 64)).sum()) == 64 * 64 // blocks


def attended(x: Tensor) -> Tensor:
    heads = x.unsqueeze(1)
    return attend(heads, heads, heads)[:, 0]


def layers_to_reach(layer: Callable[[Tensor], Tensor], far: int) -> int:
    """The number of layers until the first token changes the token `far` after it."""
    torch.manual_seed(0)
    x = torch.randn(1, far + 1, 4, dtype=torch.float64)
    changed = x.clone()
    changed[0, 0] += 1
    for count in range(1, far + 1):
        x, changed = layer(x), layer(changed)
        if not torch.equal(x[0, far], changed[0, far]):
            return count
    return far + 1


def test_steps_between_far_tokens():
    """Attention: a single layer. Windows of 7: distance / 3 layers. A recurrence: as many steps as tokens."""
    torch.manual_seed(0)
    convolution = nn.Conv1d(4, 4, 7, padding=3).double()
    for far in (12, 24):
        assert layers_to_reach(attended, far) == 1
        assert layers_to_reach(lambda x: convolution(x.mT).mT, far) == far // 3
    cell, calls = nn.LSTMCell(4, 4), 0
    for length in (12, 24):
        state, calls = (torch.zeros(1, 4), torch.zeros(1, 4)), 0
        for step in torch.randn(length, 1, 4):
            state, calls = cell(step, state), calls + 1  # each step needs the state of the step before
        assert calls == length


def test_gradients_through_a_recurrence_vanish():
    """The gradient of the last output in the first token, relative to that in the last, by length."""
    torch.manual_seed(0)
    recurrent = nn.RNN(16, 16, batch_first=True).double()

    def share(read: Callable[[Tensor], Tensor], length: int) -> float:
        x = torch.randn(8, length, 16, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(read(x)[:, -1].square().sum(), x)
        return float(slope[:, 0].norm() / slope[:, -1].norm())

    by_length = [share(lambda x: recurrent(x)[0], length) for length in (5, 20, 80)]
    assert by_length[0] > 10 * by_length[1] > 1000 * by_length[2]
    assert share(attended, 80) > 1e4 * by_length[2]


def remembering(memory: str, layers: int, position: str = "transformer_xl") -> Transformer:
    torch.manual_seed(0)
    model = create_model(
        "decoder-tiny",
        vocab_size=VOCAB,
        hidden_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=0.5,
        position=position,
        memory=memory,
        dropout=0.0,
        attention="softmax(backend=definition)",
    )
    return model.double().eval()


@torch.no_grad()
def farthest(model: Transformer, tokens: int = 45) -> int:
    """The largest distance at which a token changes the last output; the text is read token by token.

    In row p the token at place p is another one; the last row is the text itself.
    """
    ids = (torch.arange(tokens) % VOCAB).repeat(tokens + 1, 1)
    ids[:-1].diagonal().add_(1).remainder_(VOCAB)
    state, hidden = model.new_state(), None
    for token in ids.split(1, 1):
        output = model(token, state=state)
        state, hidden = output.state, output.last_hidden_state
    assert hidden is not None
    moved = (hidden[:-1] - hidden[-1]).abs().amax((1, 2)) > 1e-12
    return tokens - 1 - int(moved.nonzero()[0])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_memories_reach_as_far_as_stated(layers: int, training: bool):
    """m per layer; m + c * m_cm with a compressed memory, give or take a compression under way.

    Evaluation keeps keys and values, training the hidden states.
    """
    assert farthest(remembering("recurrent(length=4)", layers).train(training)) == 4 * layers
    for rate in (2, 3):
        memory = f"compressive(length=4, compressed_length=2, rate={rate})"
        compressed = remembering(memory, layers).train(training)
        assert abs(farthest(compressed) - (4 + rate * 2) * layers) <= rate * layers


@torch.no_grad()
def operations(model: Transformer, length: int, before: int) -> int:
    """Operations in matrix products for a segment after `before` tokens of the text."""
    state = model.new_state()
    for segment in torch.zeros(1, before, dtype=torch.long).split(8, 1):
        state = model(segment, state=state).state
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long), state=state)
    return counter.get_total_flops()


def test_a_memory_costs_its_length():
    """Scores of L queries with m keys more: the cost rises in proportion to m, and not to c * m_cm."""
    costs = [operations(remembering(f"recurrent(length={m})", 1, "rope"), 8, 64) for m in (0, 16, 32)]
    assert costs[2] - costs[1] == costs[1] - costs[0] > 0
    same_size = [
        operations(remembering(f"compressive(length=8, compressed_length=8, rate={rate})", 1, "rope"), 8, 128)
        for rate in (2, 4)
    ]
    assert abs(same_size[1] - same_size[0]) < 0.2 * same_size[0]


def test_sliding_evaluation_computes_segments_again():
    """A token costs a whole segment if rows slide by one, and one step with a memory of the same reach."""
    length = 32
    model = remembering(f"recurrent(length={length})", 2)
    sliding = operations(model, length, 0)
    with_memory = operations(model, 1, 2 * length)
    assert sliding > length / 3 * with_memory


def saved_bytes(call: Callable[[], Tensor]) -> int:
    sizes = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call().sum().backward()
    return sum(sizes.values())


def test_stored_scores_grow_with_the_square_of_the_length():
    sizes = []
    for length in (256, 1024):
        q = torch.randn(1, 1, length, 4, requires_grad=True)
        sizes.append(saved_bytes(lambda q=q: attend(q, q, q, backend="definition")))
    assert 12 < sizes[1] / sizes[0] <= 16


def test_operations_grow_with_the_width_and_the_square_of_the_length():
    def count(length: int, width: int) -> int:
        q = torch.randn(1, 1, length, width)
        with FlopCounterMode(display=False) as counter:
            attend(q, q, q, backend="definition")
        return counter.get_total_flops()

    assert count(64, 8) == 4 * 64 * 64 * 8
    assert count(128, 8) == 4 * count(64, 8)
    assert count(64, 16) == 2 * count(64, 8)


def test_projected_keys_cost_n_times_k():
    def count(length: int, k: int) -> int:
        q, context = torch.randn(1, 1, length, 8), Context(length, length)
        mechanism = LinformerConfig(max_length=length, k=k, backend="tiled").build(1, 8)
        with FlopCounterMode(display=False) as counter:
            mechanism(q, q, q, context, None, None)
        return counter.get_total_flops()

    assert count(512, 32) == 2 * count(256, 32) == 2 * count(512, 16)
