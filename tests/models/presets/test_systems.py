"""Systems by name: published sizes, a small size for each, and what sets them apart."""

import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import AlternateConfig, RoutingConfig, SoftmaxConfig
from polyformer.attention.positions import Shape
from polyformer.attention.positions.base import sinusoids
from polyformer.cli.documentation import parameters
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.presets import MODELS, create_model, model_config
from polyformer.nn.memory import CompressiveConfig, MemorizingConfig
from polyformer.nn.stack import StackConfig
from polyformer.nn.stack.layer import Layer

SYSTEMS = (
    "adaptive-span",
    "alibi",
    "bertsum",
    "bertsum-abs",
    "blockwise-bert",
    "calm",
    "char-transformer",
    "compressive-transformer",
    "da-transformer",
    "depth-adaptive",
    "image-transformer",
    "image-transformer-super-resolution",
    "knn-lm",
    "linformer",
    "memorizing-transformer",
    "performer",
    "rfa",
    "roformer",
    "routing-transformer",
    "shaw-transformer",
    "sinkhorn",
    "spalm",
    "sparse-transformer",
    "sparse-transformer-images",
)

PUBLISHED = {  # millions of parameters, tolerance
    "adaptive-span": (38, 0.03),  # with vectors for later tokens, which a decoder does not read
    "adaptive-span-large": (209, 0.01),
    "alibi": (247, 0.005),
    "alibi-1.3b": (1300, 0.05),
    "bertsum-abs": (180, 0.005),  # of the published code
    "char-transformer": (219, 0.005),
    "char-transformer-12": (41, 0.01),
    "gtrxl-dmlab30": (66.4, 0.01),
    "knn-lm": (247, 0.005),
    "m2m100-12b": (12000, 0.02),
    "memorizing-transformer": (200, 0.09),  # "approximately 200M"
    "rfa": (242, 0.01),
    "rfa-38m": (38, 0.005),
    "roformer": (124, 0.005),
    "sparse-transformer": (95, 0.005),
    "sparse-transformer-images": (152, 0.005),
    "t5-11b": (11000, 0.03),
    "t5-3b": (2800, 0.02),
    "t5-v1_1-small": (77, 0.005),
}


def decoder(name: str) -> StackConfig:
    stack = model_config(name).decoder
    assert stack is not None
    return stack


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_a_small_size(name: str):
    small, full = parameters(f"{name}-small"), parameters(name)
    assert small < 11e6
    assert small < full


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_papers(name: str):
    millions, tolerance = PUBLISHED[name]
    assert parameters(name) == pytest.approx(millions * 1e6, rel=tolerance)


def test_linformer_adds_a_projection_to_roberta():
    assert parameters("linformer") == parameters("roberta-base") + 512 * 256


def test_only_the_last_two_layers_route_and_half_of_their_heads():
    for name in ("routing-transformer", "routing-transformer-small"):
        stack = decoder(name)
        mechanism, heads = stack.attention.mechanism, stack.attention.num_attention_heads
        assert isinstance(mechanism, AlternateConfig)
        layers = [mechanism.for_layer(layer) for layer in range(stack.num_hidden_layers)]
        assert [isinstance(layer, RoutingConfig) for layer in layers] == [False] * (len(layers) - 2) + [
            True
        ] * 2
        last = layers[-1]
        assert isinstance(last, RoutingConfig)
        assert last.num_local(heads) == heads // 2


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("sparse-transformer-small", "merged"),
        ("sparse-transformer-strided-small", "by head"),
        ("sparse-transformer-images-small", "by layer"),
    ],
)
def test_the_three_integrations(name: str, kinds: str):
    """Every pair is connected within two layers, and the parts are joined as section 4.3 describes."""
    torch.manual_seed(0)
    model = create_model(name, vocab_size=17).eval()
    seen = model(torch.randint(17, (1, 64)), output_attentions=True).attentions
    first, second = ((weights[0] > 0) for weights in seen[:2])
    heads_differ, layers_differ = not (first == first[:1]).all(), not (first == second).all()
    assert (heads_differ, layers_differ) == (kinds == "by head", kinds == "by layer")
    reached = first.any(0).int() @ second.any(0).int()
    assert (reached.tril() > 0).sum() == 64 * 65 // 2
    assert first.any(0).tril().sum() != 64 * 65 // 2


def test_blockwise_bert_divides_the_text_and_the_heads():
    for name, blocks, heads in (("blockwise-bert", 2, [10, 2]), ("blockwise-bert-1024", 3, [8, 2, 2])):
        config = model_config(name)
        assert config.encoder is not None
        mechanism = config.encoder.attention.mechanism
        assert isinstance(mechanism, SoftmaxConfig)
        assert mechanism.pattern is not None
        text = mechanism.pattern.to_text()
        assert [text.count(f"permutation=[{shift},") for shift in range(blocks)] == heads
        assert f"size={-(-config.max_position_embeddings // blocks)}" in text


def test_memories_have_the_papers_lengths():
    compressive, memorizing = (
        decoder("compressive-transformer").memory,
        decoder("memorizing-transformer").memory,
    )
    assert isinstance(compressive, CompressiveConfig)
    assert (compressive.length, compressive.compressed_length, compressive.rate) == (500, 1500, 4)
    assert isinstance(memorizing, MemorizingConfig)
    assert (memorizing.store, memorizing.neighbours) == (65536, 32)
    shape = Shape(hidden_size=8, num_layers=12, num_heads=2, head_size=4)
    assert memorizing.build(shape).layer == 8


def test_names_of_systems_are_presets():
    assert {*SYSTEMS, *PUBLISHED, "gtrxl"} <= set(MODELS.names())


def universal_recurrence(model: Transformer, ids: Tensor, steps: int) -> Tensor:
    """h^t = LN(A^t + Transition(A^t)), A^t = LN(h' + Attention(h')), h' = h^(t-1) + P^t."""
    assert model.encoder is not None
    (layer,) = model.encoder.layers
    assert isinstance(layer, Layer)
    first, second = layer.block.norms
    length, width = ids.shape[1], model.config.hidden_size
    h, context = model.get_parameter("tokens.weight")[ids] * width**0.5, Context(length, length)
    for step in range(steps):
        p = sinusoids(torch.arange(length), width, 10000.0) + sinusoids(torch.tensor(step), width, 10000.0)
        moved = h + p
        a = first(moved + layer.attention(moved, context, model.encoder.position)[0])
        h = second(a + layer.feedforward(a, context))
    return h


def test_the_universal_encoder_is_the_recurrence_for_any_number_of_steps():
    torch.manual_seed(0)
    ids = torch.randint(3, 300, (2, 7))
    weights = None
    for steps in (1, 3, 5):
        model = create_model("universal-transformer-tiny", num_hidden_layers=steps).double().eval()
        if weights is not None:
            model.load_state_dict(weights)  # of the same layer, whatever the number of steps
        weights = model.state_dict()
        hidden = model.encode(ids).source
        assert hidden is not None
        torch.testing.assert_close(hidden, universal_recurrence(model, ids, steps), rtol=1e-12, atol=1e-12)


def test_the_universal_base_model_has_as_many_parameters_as_the_transformers():
    with torch.device("meta"):
        models = [create_model(name) for name in ("universal-transformer-base", "transformer-base")]
    ours, transformer = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert abs(ours / transformer - 1) < 0.1
