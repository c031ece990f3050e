"""Positions that are added to the input."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import polyformer
from polyformer.attention.positions import (
    AxialConfig,
    ConcatenatedConfig,
    GridConfig,
    LearnedConfig,
    LearnedPerLayerConfig,
    NoPositionConfig,
    PositionConfig,
    Shape,
    SinusoidalConfig,
    StepSinusoidConfig,
    sinusoids,
)
from polyformer.attention.positions.added import Concatenated
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Image
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints.convert import convert

SHAPE = Shape(hidden_size=4, num_layers=3, max_positions=10)


def test_one_learned_table_at_the_input():
    position = LearnedConfig().build(SHAPE)
    x, pos = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [7, 8, 9]])
    assert [tuple(parameter.shape) for parameter in position.parameters()] == [(10, 4)]
    assert torch.equal(position.embed(x, pos, 0), x + next(position.parameters())[pos])
    assert position.embed(x, pos, 1) is x


def test_a_learned_table_for_every_layer():
    position = LearnedPerLayerConfig().build(SHAPE)
    x, pos = torch.randn(2, 3, 4), torch.arange(3)
    tables = list(position.parameters())
    assert [tuple(table.shape) for table in tables] == [(10, 4)] * 3
    for layer in range(3):
        assert torch.equal(position.embed(x, pos, layer), x + tables[layer][pos])


@pytest.mark.parametrize("config", [LearnedConfig(), LearnedPerLayerConfig()])
def test_beyond_the_table_is_an_error(config: LearnedConfig):
    position = config.build(SHAPE)
    with pytest.raises(InputError) as caught:
        position.embed(torch.randn(1, 11, 4), torch.arange(11), 0)
    assert str(caught.value) == (
        "input of 11 tokens: longer than the 10 learned positions (max_position_embeddings); "
        "shorten the text or choose another position scheme"
    )
    assert position.embed(torch.randn(1, 10, 4), torch.arange(10), 0).shape == (1, 10, 4)
    assert position.embed(torch.randn(1, 0, 4), torch.arange(0), 0).shape == (1, 0, 4)


def test_a_learned_table_of_nothing_is_refused():
    with pytest.raises(InputError, match="max_position_embeddings: learned positions need 1 or more, got 0"):
        LearnedConfig().build(Shape(hidden_size=4, max_positions=0))


def test_no_positions():
    position = NoPositionConfig().build(SHAPE)
    x = torch.randn(1, 3, 4)
    assert position.embed(x, torch.arange(3), 0) is x
    assert list(position.parameters()) == []


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoids_are_the_equation(width: int):
    """PE(p, 2i) = sin(p / 10000^(2i/E)), PE(p, 2i+1) = cos of the same; positions count from 0."""
    table = sinusoids(torch.arange(9), width)
    assert table.shape == (9, width)
    for p in range(9):
        for j in range(width):
            angle = p / 10000 ** (2 * (j // 2) / width)
            assert math.isclose(table[p, j], math.cos(angle) if j % 2 else math.sin(angle), abs_tol=1e-14)
    assert table[0].tolist() == [float(j % 2) for j in range(width)]


@pytest.mark.parametrize("shift", [1, 3, 100])
def test_a_shift_is_one_linear_map(shift: int):
    """PE(p + k) = M_k PE(p), with M_k made of rotations that do not depend on p."""
    width = 8
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for i in range(0, width, 2):
        angle = shift / 10000 ** (i / width)
        matrix[i, i] = matrix[i + 1, i + 1] = math.cos(angle)
        matrix[i, i + 1], matrix[i + 1, i] = math.sin(angle), -math.sin(angle)
    p = torch.arange(50)
    shifted = sinusoids(p, width) @ matrix.T
    torch.testing.assert_close(shifted, sinusoids(p + shift, width), rtol=0, atol=1e-12)


def test_sinusoids_are_added_to_the_first_layer_alone():
    position = SinusoidalConfig(base=50.0).build(Shape(hidden_size=6))
    x, pos = torch.randn(2, 4, 6), torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    torch.testing.assert_close(position.embed(x, pos, 0), x + sinusoids(pos, 6, 50.0).float())
    assert position.embed(x, pos, 1) is x
    assert position.embed(x, pos[0], 0).shape == x.shape
    assert list(position.parameters()) == []


@pytest.mark.parametrize("width", [6, 7])
def test_all_sines_may_stand_before_all_cosines(width: int):
    x, pos = torch.zeros(1, 5, width, dtype=torch.float64), torch.arange(5)
    embedded = SinusoidalConfig(layout="halves").build(Shape(hidden_size=width)).embed(x, pos, 0)[0]
    sines = (width + 1) // 2
    for p in range(5):
        for j in range(width):
            angle = p / 10000 ** (2 * (j % sines) / width)
            assert math.isclose(
                embedded[p, j], math.sin(angle) if j < sines else math.cos(angle), abs_tol=1e-14
            )


@pytest.mark.parametrize("width", [6, 7, 2])
def test_factors_may_end_with_the_base(width: int):
    """As in tensor2tensor: sin(p / 10000^(i / (half - 1))), a zero where the width is odd; from an offset."""
    config = SinusoidalConfig(layout="halves", inclusive=True, offset=2)
    x, pos = torch.zeros(1, 5, width, dtype=torch.float64), torch.arange(5)
    embedded = config.build(Shape(hidden_size=width)).embed(x, pos, 0)[0]
    half = width // 2
    for p in range(5):
        for i in range(half):
            angle = (p + 2) / 10000 ** (i / max(half - 1, 1))
            assert math.isclose(embedded[p, i], math.sin(angle), abs_tol=1e-14)
            assert math.isclose(embedded[p, half + i], math.cos(angle), abs_tol=1e-14)
        assert embedded[p, 2 * half :].tolist() == [0.0] * (width % 2)


def test_far_positions_are_exact_in_float32():
    """The angles are made in float64: in float32 a position of a million would be wrong at once."""
    p = 1_000_003
    embedded = (
        SinusoidalConfig().build(Shape(hidden_size=4)).embed(torch.zeros(1, 1, 4), torch.tensor([p]), 0)
    )
    assert abs(float(embedded[0, 0, 0]) - math.sin(p)) < 1e-6


def test_options_of_sinusoids_are_checked():
    with pytest.raises(InputError, match=r"base: expected a number above 1, got 1\.0"):
        SinusoidalConfig(base=1.0)
    with pytest.raises(InputError, match="unknown layout 'turns': expected one of 'halves', 'pairs'"):
        SinusoidalConfig(layout="turns")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="offset: expected 0 or more, got -1"):
        SinusoidalConfig(offset=-1)


@pytest.mark.parametrize("width", [6, 7])
def test_step_sinusoids_are_the_equation(width: int):
    """PE(p, t, 2i) = sin(p / 10000^(2i/E)) + sin(t / 10000^(2i/E)), cosines at 2i + 1; at every layer."""
    position = StepSinusoidConfig().build(Shape(hidden_size=width, num_layers=4))
    x = torch.randn(2, 5, width, dtype=torch.float64)
    for t in range(4):
        added = position.embed(x, torch.arange(5), t) - x
        for p in range(5):
            for c in range(width):
                wave, size = (math.cos if c % 2 else math.sin), 10000 ** (2 * (c // 2) / width)
                expected = wave(p / size) + wave(t / size)
                assert math.isclose(added[0, p, c], expected, abs_tol=1e-12)
                assert math.isclose(added[1, p, c], expected, abs_tol=1e-12)
    assert list(position.parameters()) == []


def test_rows_have_step_sinusoids_of_their_own():
    position = StepSinusoidConfig(base=50.0).build(Shape(hidden_size=6))
    x, pos = torch.zeros(2, 3, 6), torch.tensor([[0, 1, 2], [0, 0, 1]])
    embedded = position.embed(x, pos, 2)
    assert embedded.dtype == torch.float32
    assert torch.equal(embedded[1, 2], embedded[0, 1])
    assert torch.equal(embedded[1, 0], embedded[1, 1])
    assert not torch.equal(embedded, position.embed(x, pos, 3))


def test_the_base_of_step_sinusoids_is_checked():
    with pytest.raises(InputError, match=r"base: expected a number above 1, got 0\.5"):
        StepSinusoidConfig(base=0.5)


@pytest.mark.parametrize(("grid", "widths"), [((3, 4), (2, 6)), ((2, 3, 2), (1, 3, 4)), ((5, 2), None)])
def test_an_axial_vector_is_made_of_its_axes(grid: tuple[int, ...], widths: tuple[int, ...] | None):
    position = AxialConfig(grid=grid, widths=widths).build(Shape(hidden_size=8)).double()
    tables = list(position.parameters())
    assert [table.shape[1] for table in tables] == list(widths or (2, 6))
    places = torch.cartesian_prod(*map(torch.arange, grid))  # the last axis runs fastest
    x = torch.randn(len(places), 8).double()
    embedded = position.embed(x[None], torch.arange(len(places)), 0)[0]
    for place, row, actual in zip(places.tolist(), x, embedded, strict=True):
        vector = torch.cat([table[i] for table, i in zip(tables, place, strict=True)])
        torch.testing.assert_close(actual, row + vector, rtol=1e-12, atol=1e-12)
    assert position.embed(x, torch.arange(3), 1) is x


def test_what_is_no_grid_is_refused():
    with pytest.raises(InputError, match="grid"):
        AxialConfig(grid=(64,))
    with pytest.raises(InputError, match="widths"):
        AxialConfig(grid=(4, 4), widths=(1, 2, 3))
    with pytest.raises(InputError, match="widths: expected numbers that add up to hidden_size 8"):
        AxialConfig(grid=(4, 4), widths=(1, 2)).build(Shape(hidden_size=8))
    with pytest.raises(InputError, match="max_position_embeddings"):
        AxialConfig(grid=(2, 3)).build(Shape(hidden_size=8)).embed(torch.zeros(1, 1, 8), torch.tensor([6]), 0)


def test_a_place_gets_its_row_its_column_and_its_colour():
    grid = GridConfig(shape=(2, 3, 2)).build(Shape(hidden_size=4))
    rows, columns, colours = (table.weight for table in grid.tables)
    assert [len(table) for table in (rows, columns, colours)] == [3, 3, 2]
    embedded = grid.embed(torch.zeros(1, 13, 4), torch.arange(13), 0)[0]
    place = 0
    for row in range(2):
        for column in range(3):
            for colour in range(2):
                torch.testing.assert_close(embedded[place], rows[row] + columns[column] + colours[colour])
                place += 1
    torch.testing.assert_close(embedded[12], rows[2] + columns[0] + colours[0])


def test_only_the_first_layer_gets_a_grid():
    grid, x = GridConfig(shape=(2, 3)).build(Shape(hidden_size=4)), torch.randn(1, 6, 4)
    assert grid.embed(x, torch.arange(6), 1) is x


def test_more_tokens_than_places_and_bad_shapes_are_refused():
    grid = GridConfig(shape=(2, 3)).build(Shape(hidden_size=4))
    grid.embed(torch.zeros(1, 7, 4), torch.arange(7), 0)
    with pytest.raises(InputError, match="input of 8 tokens: a grid of 2x3 has 6 places and one for a start"):
        grid.embed(torch.zeros(1, 8, 4), torch.arange(8), 0)
    with pytest.raises(InputError, match=r"grid: shape: expected 2 or 3 numbers, got \[2\]"):
        GridConfig(shape=(2,))


def test_tokens_before_the_patches_have_no_place():
    torch.manual_seed(0)
    grid = GridConfig(shape=(2, 3)).build(Shape(hidden_size=4, image=Image(2, 2, 3)))
    x = torch.randn(1, 8, 4)
    embedded = grid.embed(x, torch.arange(8), 0)
    rows, columns = (table.weight for table in grid.tables)
    assert torch.equal(embedded[:, :2], x[:, :2])
    for place in range(6):
        expected = x[0, 2 + place] + rows[place // 3] + columns[place % 3]
        torch.testing.assert_close(embedded[0, 2 + place], expected)
    with pytest.raises(
        InputError, match=r"position.shape: expected \[2, 3\], the rows and columns of patches"
    ):
        GridConfig(shape=(3, 2)).build(Shape(hidden_size=4, image=Image(2, 2, 3)))


WIDTH = 6


def built(config: ConcatenatedConfig, hidden: int = 8, size: int | None = None) -> Concatenated:
    torch.manual_seed(0)
    return config.build(Shape(hidden_size=hidden, embedding_size=size, max_positions=10)).double()


def tokens(width: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 3, width).double(), torch.tensor([[0, 1, 2], [7, 0, 9]])


def test_a_linear_map_of_a_concatenation_is_a_sum_of_two_maps():
    position = built(ConcatenatedConfig(width=WIDTH))
    x, pos = tokens()
    of_tokens, of_positions = position.projection.weight.split([8, WIDTH], 1)
    expected = x @ of_tokens.T + sinusoids(pos, WIDTH) @ of_positions.T
    torch.testing.assert_close(position.embed(x, pos, 0), expected, rtol=1e-12, atol=1e-12)
    assert position.embed(x, pos, 1) is x


@pytest.mark.parametrize("vectors", [SinusoidalConfig(offset=2), LearnedConfig(offset=2)])
def test_adding_is_the_case_of_two_identities(vectors: PositionConfig):
    position = built(ConcatenatedConfig(width=8, vectors=vectors))
    x, pos = tokens()
    with torch.no_grad():
        position.projection.weight.copy_(torch.eye(8).repeat(1, 2))
    added = position.vectors.embed(x, pos, 0)
    torch.testing.assert_close(position.embed(x, pos, 0), added, rtol=1e-12, atol=1e-12)


def test_there_is_no_matrix_where_token_vectors_leave_room():
    position = built(ConcatenatedConfig(width=WIDTH), hidden=8 + WIDTH, size=8)
    x, pos = tokens()
    assert list(position.parameters()) == []
    assert torch.equal(position.embed(x, pos, 0), torch.cat([x, sinusoids(pos, WIDTH)], -1))


def decoder(vectors: str = "sinusoidal", **changes: object) -> Transformer:
    torch.manual_seed(0)
    return polyformer.create_model(
        "decoder-tiny",
        num_hidden_layers=2,
        vocab_size=50,
        hidden_size=32,
        max_position_embeddings=16,
        position=f"concatenated(width=8, vectors={vectors})",
        **{"attention.num_attention_heads": 2, **changes},
    ).eval()


@pytest.mark.parametrize("vectors", ["sinusoidal", "learned"])
def test_a_decoder_with_a_narrow_table_sees_both_side_by_side(vectors: str, tmp_path: Path):
    """In one pass, by steps, from files; what comes in is the token's vector and the position's."""
    model = decoder(vectors, **{"embedding.size": 24, "embedding.tied": False})
    assert (model.tokens.weight.shape, model.head.weight.shape) == ((50, 24), (50, 32))
    assert isinstance(model.decoder_embedding.widen, nn.Identity)
    ids = torch.randint(0, 50, (2, 9))
    output = model(ids, output_hidden_states=True)
    assert torch.equal(output.hidden_states[0][..., :24], model.tokens(ids))
    read = model(ids[:, :4], use_cache=True)
    for t in range(4, 9):
        read = model(ids[:, t : t + 1], state=read.state, use_cache=True)
        torch.testing.assert_close(read.logits[:, 0], output.logits[:, t], rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    assert torch.equal(polyformer.from_pretrained(tmp_path)(ids).logits, output.logits)


def test_a_norm_of_the_embedding_is_of_what_the_layers_read():
    model = decoder(**{"embedding.size": 20, "embedding.tied": False, "embedding.normed": True})
    assert model.decoder.position.projection.weight.shape == (32, 28)
    assert model.decoder_embedding.norm.weight.shape == (32,)
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.isfinite().all()


def test_learned_positions_end_and_are_extended():
    model = decoder("learned")
    ids = torch.randint(0, 50, (1, 20))
    with pytest.raises(InputError, match="longer than the 16 learned positions"):
        model(ids)
    longer, _ = convert(model, max_positions=32)
    table = longer.decoder.position.vectors.tables[0].weight
    assert torch.equal(table, model.decoder.position.vectors.tables[0].weight.repeat(2, 1))
    assert torch.equal(longer.eval()(ids[:, :16]).logits, model(ids[:, :16]).logits)
    assert longer(ids).logits.shape == (1, 20, 50)


@pytest.mark.parametrize("kind", ["rope", "learned_per_layer", "none", "concatenated", "deberta"])
def test_what_has_no_vector_for_a_position_is_refused(kind: str):
    with pytest.raises(
        InputError, match=f"vectors: expected .* axial, grid, learned, sinusoidal; got '{kind}'"
    ):
        ConcatenatedConfig.from_dict({"kind": "concatenated", "vectors": kind})


def test_a_position_without_a_channel_is_refused():
    with pytest.raises(InputError, match="width: expected 1 or more"):
        ConcatenatedConfig(width=0)
