"""Presets for long texts: ETC and BigBird against the published sizes, rows that run through them, and the
windows of Longformer's decoder; test_families compares models with transformers'."""

import pytest
import torch

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import ETC, Pattern, PerLayer
from polyformer.attention.positions import EtcLabelsConfig
from polyformer.data import Collate
from polyformer.data.rows.structured import structured
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.presets import create_model, model_config
from polyformer.nn.stack import StackConfig


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def encoder(name: str) -> StackConfig:
    stack = model_config(name).encoder
    assert stack is not None
    return stack


def pattern_of(name: str) -> Pattern | None:
    mechanism = encoder(name).attention.mechanism
    assert isinstance(mechanism, SoftmaxConfig)
    return mechanism.pattern


def on_meta(config: ModelConfig) -> int:
    with torch.device("meta"):
        return count(Transformer(config))


def test_bigbird_has_the_parameters_of_the_published_one():
    """Of theirs all but the pooler, which a masked language model does not read."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BigBirdConfig()
    assert (config.vocab_size, config.max_position_embeddings, config.block_size) == (50358, 4096, 64)
    with torch.device("meta"):
        theirs = transformers.BigBirdForMaskedLM(config)
    pooler = sum(parameter.numel() for name, parameter in theirs.named_parameters() if "pooler" in name)
    assert on_meta(model_config("bigbird-base")) == count(theirs) - pooler == 127_520_694


@pytest.mark.parametrize(
    ("name", "layers", "random"),
    [
        ("bigbird-base", 12, "blocks=3, size=64"),
        ("bigbird-pegasus-large", 16, "blocks=3, size=64"),
        ("bigbird-pegasus-small", 2, "blocks=2, size=16"),
    ],
)
def test_bigbird_draws_other_blocks_in_every_layer(name: str, layers: int, random: str):
    pattern = pattern_of(name)
    assert isinstance(pattern, PerLayer)
    assert [
        f"Random({random}, seed={layer})" in member.to_text() for layer, member in enumerate(pattern.patterns)
    ] == [True] * layers


def test_a_small_summarizer_trains_on_a_cpu():
    assert on_meta(model_config("bigbird-pegasus-small")) < 11e6


def test_etc_has_the_sizes_of_the_paper():
    """Those of BERT with labels in place of the 512 positions."""
    stack = encoder("etc-base")
    assert (stack.num_hidden_layers, stack.attention.num_attention_heads) == (12, 12)
    assert pattern_of("etc-base") == ETC(256, 84, hard_g2l=True)
    assert stack.position == EtcLabelsConfig(global_tokens=256, max_distance=12)
    labels = 12 * (4 * 12 + 6) * 768
    assert on_meta(model_config("etc-base")) == on_meta(model_config("bert-base")) - 512 * 768 + labels


@torch.no_grad()
@pytest.mark.parametrize("name", ["etc-base", "bigbird-etc-base", "bigbird-base"])
def test_a_long_row_runs_through_the_published_pattern(name: str):
    """4096 tokens in thin layers, and what is far apart meets: the first sentence moves the last token."""
    small = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    torch.manual_seed(0)
    model = create_model(name, **small, vocab_size=40, initializer_range=0.5).eval()
    sentences = torch.randint(3, 40, (256, 16)).tolist()
    batch = Collate(pad_id=0)([structured(sentences, global_id=1, global_tokens=256)])
    if name == "bigbird-base":  # one text of 4096 tokens, without global tokens of its own
        batch = {"input_ids": batch["input_ids"][:, 256:]}
    before = model(**batch).last_hidden_state
    first = -4096
    batch["input_ids"][0, first] = batch["input_ids"][0, first] % 36 + 3 + 1
    after = model(**batch).last_hidden_state
    assert before.isfinite().all()
    assert (after[0, -1] - before[0, -1]).abs().max() > 1e-6


def test_windows_and_dilation_of_the_decoder():
    """Windows grow upwards; only in the upper layers two heads skip keys (section 4.1)."""
    torch.manual_seed(0)
    model = create_model(
        "longformer-decoder-small", num_attention_heads=8, hidden_size=32, vocab_size=50
    ).eval()
    length = 400
    seen = model(torch.randint(50, (1, length)), output_attentions=True).attentions
    for weights, (reach, dilation) in zip(seen, [(31, 1), (63, 1), (127, 2), (127, 3)], strict=True):
        last = weights[0, :, -1].flip(-1)  # by distance, for the last query
        distances = [(head > 0).nonzero().flatten().tolist() for head in last]
        far = list(range(0, reach * dilation + 1, dilation))
        assert distances == [far] * 2 + [list(range(reach + 1))] * 6
