"""Every registered member as tiny models: a new member is tested by being registered, and by nothing else.

Families are found by walking a model's configuration, members in the families, patterns and presets in their
registries; each gives a `Case` for every shape of model that can hold it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from norm_statistics import fit_statistics
from torch import Tensor
from variants import VARIANTS, Family, replaced

from polyformer.attention.mechanisms import LSHConfig, RoutingConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Pattern, SourceSpans
from polyformer.attention.patterns.between_sequences import is_between_sequences
from polyformer.attention.patterns.global_tokens import reads_marks
from polyformer.attention.positions import (
    LearnedConfig,
    PositionConfig,
    RelationLabelsConfig,
    TransformerXLConfig,
    XLNetConfig,
)
from polyformer.core.config import Config
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.outputs import ModelOutput
from polyformer.models.presets import MODELS
from polyformer.nn.depth import DepthConfig
from polyformer.nn.depth.act import ACTConfig
from polyformer.nn.depth.exits import ExitsConfig
from polyformer.nn.feedforward import DenseConfig, ExpertsConfig
from polyformer.nn.memory import MemoryConfig, NoMemoryConfig
from polyformer.nn.stack import IndexerConfig, StackConfig
from registered import EVERYTHING, examples, registered

VOCAB, HEADS, LENGTH = 17, 2, 11
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": HEADS,
    "intermediate_size": 20,
    "vocab_size": VOCAB,
    "max_position_embeddings": 40,
}
WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 48}
"""Heads of 32 channels, which the kernels of a GPU require."""

LIMITS = {"num_key_value_heads": HEADS, "bos": 1, "eos": 2, "pad": 0}
"""What a preset leaves unset stays unset; what it sets must fit the tiny sizes."""

CHOOSING = ACTConfig, ExitsConfig, ExpertsConfig, IndexerConfig, LSHConfig, RoutingConfig
"""Parts that send a token to one of several places, as computed numbers tell."""


def parts(config: Config, listed: bool = True) -> Iterator[Config]:
    """Every configuration in the tree under `config`, itself included; with `listed` those in lists too."""
    yield config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for child in value if listed and isinstance(value, tuple) else (value,):
            if isinstance(child, Config):
                yield from parts(child, listed)


def shrunk(config: ModelConfig, heads: int = HEADS, sizes: dict[str, int] = SIZES) -> ModelConfig:
    """The same model in tiny sizes."""
    width = sizes["hidden_size"]

    def small(data: Any, key: str = "") -> Any:
        if key == "adaptive" and data is not None:
            few = [7, 11][: len(data["cutoffs"])]
            return {"cutoffs": few, "div_val": min(data["div_val"], 2), "d_embed": data["d_embed"] and width}
        if isinstance(data, dict):
            return {name: small(value, name) for name, value in data.items()}
        if key == "tie_projs" and data is not None:
            return data[:3]
        if isinstance(data, list):
            return [small(item) if isinstance(item, dict) else item for item in data]
        if key == "num_attention_heads":
            return heads
        if key == "fraction" and data is not None:  # of a head's channels, which must be even in number
            return data if data > 0.5 else 0.5
        if key in LIMITS and data is not None:
            return math.gcd(data, heads) if key == "num_key_value_heads" else LIMITS[key]
        if key == "head_size" and data is not None:
            return width // HEADS
        if key == "block_size":  # a text of `LENGTH` tokens has three blocks to sort or to choose from
            return min(data, LENGTH // 2 - 1)
        return sizes.get(key, data)

    return ModelConfig.from_dict(small(config.to_dict()))


def bases() -> dict[str, ModelConfig]:
    """One model of each shape."""
    stack = StackConfig(feedforward=DenseConfig(activation="gelu"), position=LearnedConfig())
    return {
        "decoder": ModelConfig(vocab_size=VOCAB, decoder=stack),
        "encoder": ModelConfig(vocab_size=VOCAB, encoder=stack),
        "pair": ModelConfig(vocab_size=VOCAB, encoder=stack, decoder=stack, special=SpecialTokens(bos=1)),
    }


def families() -> list[Family]:
    """The families whose members a model is made of."""
    used: set[Family] = {type(part).family for base in bases().values() for part in parts(base)}
    return sorted((family for family in used if family.kinds), key=lambda family: family.__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One tiny model around one member."""

    member: str
    config: ModelConfig
    kind: str = ""
    number: int = 0  # of the example, counted from 0

    def __str__(self) -> str:
        return self.member if self.member in MODELS else f"{self.shape}-{self.member}"

    @property
    def shape(self) -> str:
        if self.config.encoder is None:
            return "decoder"
        return "encoder" if self.config.decoder is None else "pair"

    def can(self, ability: str) -> bool:
        """Whether every mechanism in it has the ability."""
        return all(getattr(mechanism, ability) for mechanism in self.mechanisms)

    @functools.cached_property
    def text(self) -> str:
        return repr(self.config)

    @functools.cached_property
    def mechanisms(self) -> list[MechanismConfig]:
        return [part for part in parts(self.config) if isinstance(part, MechanismConfig)]

    def apart(self, actual: Tensor, exact: Tensor) -> float:
        """The relative distance of hidden states [B, T, E] from exact ones.

        Of a model in which rounding decides what a token meets it is the median token's: one may be sent
        elsewhere, and where that happens differs from processor to processor.
        """
        far, size = ((x.detach().double()).norm(dim=-1) for x in (actual.double() - exact, exact))
        chooses = any(isinstance(part, CHOOSING) for part in parts(self.config))
        return float((far / size).median() if chooses else far.norm() / size.norm())

    def changed(self, family: Family, function: Callable[[Any], Config]) -> "Case":
        return dataclasses.replace(self, config=replaced(self.config, family, function))

    def with_heads(self, heads: int) -> "Case":
        return dataclasses.replace(self, config=shrunk(self.config, heads))

    def wide(self) -> "Case":
        return dataclasses.replace(self, config=shrunk(self.config, sizes=WIDE))

    def definition(self) -> "Case":
        """The same model with every mechanism computed by its plain equation."""
        return self.changed(MechanismConfig, lambda mechanism: mechanism.definition())

    @property
    def adaptive(self) -> bool:
        """Whether tokens may leave out layers: some weights then have a part in training alone."""
        return any(isinstance(part, (ACTConfig, ExitsConfig, IndexerConfig)) for part in parts(self.config))

    def learns(self, name: str) -> bool:
        """Whether a batch of `labels` gives the parameter of this name a gradient.

        A memory's own weights learn from later segments. XLNet's learn from segments, which a target lacks.
        """
        of_segments = re.match(r"decoder\.position\.(w|segments)\.", name)
        return ".memory." not in name and not (of_segments and self.shape == "pair")

    def model(self, dtype: torch.dtype = torch.float64) -> Transformer:
        """In evaluation, with weights that are all away from their special initial values."""
        torch.manual_seed(0)
        model = Transformer(self.config).to(torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            fit_statistics(model, self.batch(4))
        return model.to(dtype).eval()

    def batch(self, rows: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
        """Random ids, and for a pair fewer of them to decode."""
        torch.manual_seed(1)
        batch = {"input_ids": torch.randint(3, VOCAB, (rows, length))}
        if self.shape == "pair":
            batch["decoder_input_ids"] = torch.randint(3, VOCAB, (rows, length - 4))
        return batch

    def labels(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with all that the model reads: labels, also of pairs of tokens, languages, marks."""
        torch.manual_seed(2)
        ids = batch.get("decoder_input_ids", batch["input_ids"])
        counts = [part.num_labels for part in parts(self.config) if isinstance(part, RelationLabelsConfig)]
        if counts:
            names = {name: name.replace("input", "relation") for name in batch}
            batch = batch | {
                new: torch.randint(-1, counts[0], (*batch[name].shape, batch[name].shape[1]))
                for name, new in names.items()
            }
        if any(isinstance(part, XLNetConfig) for part in parts(self.config)):
            source = batch["input_ids"]  # a target has no segments
            batch = batch | {"segment_ids": (torch.arange(source.shape[1]) // 3).expand_as(source)}
        extra = {
            "labels": self.config.head.example_labels(len(ids), ids.shape[1], VOCAB),
            "sentence_labels": self.config.head.example_sentence_labels(len(ids)),
        }
        if getattr(self.config.head, "kind", "") == "semiparametric":
            extra["neighbour_ids"] = torch.randint(-1, VOCAB, (*ids.shape, 3))
        if self.config.embedding.num_languages:
            extra["langs"] = torch.randint(self.config.embedding.num_languages, batch["input_ids"].shape)
        encoder = self.config.encoder
        if encoder is not None and reads_marks(encoder.attention.mechanism):
            first = torch.arange(batch["input_ids"].shape[1]) < 2
            extra["global_attention_mask"] = first.long().expand(batch["input_ids"].shape)
        return batch | {name: tensor for name, tensor in extra.items() if tensor is not None}


@functools.cache
def every_case() -> tuple[Case, ...]:
    """The first example of each member in every shape that can hold it (a pattern alone), others in one."""
    result = []
    for name, part, number in numbered():
        able = [base for shape, base in bases().items() if fits(part, shape)]
        kind = name.partition("-")[0]
        most = 1 if number else 2 if kind == "Pattern" else len(able)
        result += [Case(name, shrunk(with_part(base, part)), kind, number) for base in able[:most]]
    result += [
        Case(name, shrunk(change(base)), "Variant")
        for name, change in VARIANTS.items()
        for base in bases().values()
    ]
    names = MODELS if EVERYTHING else {type(MODELS[name]): name for name in MODELS}.values()
    presets = [(name, MODELS[name]()) for name in names]  # trajectories have tests of their own
    tiny = [
        Case(name, shrunk(config), "Preset") for name, config in presets if isinstance(config, ModelConfig)
    ]
    return *result, *distinct(tiny)


def distinct(some: Sequence[Case]) -> list[Case]:
    """The first of those that are one tiny model, as presets of a family are that differ in sizes."""
    return list({case.text: case for case in reversed(some)}.values())[::-1]


def with_part(base: ModelConfig, part: Any) -> ModelConfig:
    """`base` with `part` wherever a member of its family stands; a memory with positions that go on."""
    if is_between_sequences(part):
        return dataclasses.replace(base, cross_attention=part.pattern)
    if isinstance(part, MemoryConfig) and not isinstance(part, NoMemoryConfig):
        base = replaced(base, PositionConfig, lambda _: TransformerXLConfig())
    return replaced(base, type(part).family, lambda _: part)


@functools.cache
def numbered() -> list[tuple[str, Config, int]]:
    """Every example of every member and, as a mechanism, of every pattern; with its number."""
    result: list[tuple[str, Config, int]] = []
    for family in families():
        for member in registered(family.kinds):
            name = f"{family.__name__.removesuffix('Config')}-{member.kind}"
            result += [(f"{name}-{i}", example, i) for i, example in enumerate(examples(member))]
    for pattern in registered(Pattern.registry):
        if pattern is SourceSpans:  # needs an input in every call; test_cross_attention.py has it
            continue
        for i, example in enumerate(examples(pattern)):
            result.append((f"Pattern-{example.to_text()}", SoftmaxConfig(pattern=example), i))
    return result


def fits(part: Config, shape: str) -> bool:
    """Whether a model of this shape can hold the part at all."""
    if is_between_sequences(part):
        return shape == "pair"
    if isinstance(part, MemoryConfig) and not isinstance(part, NoMemoryConfig):
        return shape == "decoder"
    if isinstance(part, DepthConfig) and not part.encoder:
        return shape == "decoder"
    return shape == "encoder" or getattr(part, "causal", True)


def score(output: ModelOutput, mask: Tensor | None = None) -> Tensor:
    """A number that depends on all of the output (of its real tokens): what gradients are taken of."""
    hidden = output.last_hidden_state
    kept = hidden if mask is None else hidden[mask.bool()]
    return weighted_sum(kept)


def weighted_sum(hidden: Tensor) -> Tensor:
    """The sum of [..., E] with random weights, the same in every precision and on every device."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    torch.manual_seed(3)
    return (rows * torch.randn(rows.shape).to(rows)).sum()


def gradients(model: Transformer, value: Tensor) -> dict[str, Tensor]:
    """The gradient of `value` for every parameter, zeros where it does not reach."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(named[name]) if grad is None else grad for name, grad in zip(named, grads)}


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Equal up to `tolerance`, relative to the largest entry of each tensor: gradients differ in size."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            largest = float(tensor.detach().abs().max()) if tensor.numel() else 0.0
            note = functools.partial("{}: {}".format, name)
            absolute = tolerance * max(largest, 1.0)
            torch.testing.assert_close(actual[name], tensor, rtol=tolerance, atol=absolute, msg=note)
        return
    assert_same({"output": actual}, {"output": expected}, tolerance)
