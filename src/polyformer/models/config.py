"""The configuration of a model."""

import dataclasses
from typing import Any, Literal

from polyformer.attention.positions import LearnedConfig, LearnedPerLayerConfig
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.sizes import check_deviation, check_sizes
from polyformer.models.plugins import Saved
from polyformer.nn.heads import HeadConfig, HeadShape, LanguageModelConfig
from polyformer.nn.memory import NoMemoryConfig
from polyformer.nn.stack import EmbeddingConfig, StackConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialTokens(Config):
    """Ids of the tokens that mean something to the model; None where there is none."""

    pad: int | None = None
    bos: int | None = None  # what an encoder-decoder's output starts from
    eos: int | None = None  # where generation stops


@dataclasses.dataclass(frozen=True, kw_only=True)
class OriginConfig(Config):
    """Whose checkpoint a model was, so that it can be saved as one again."""

    model_type: str
    architecture: str  # transformers' class
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)  # options that change no number


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Saved):
    """A model: with an encoder alone, a decoder alone, or both.

    `initializer_range`: standard deviation of the initial weights; None for the scheme of 2017 (see
    `initialize`). `weights`: "int8" where they are rounded to integers
    (`polyformer.models.architectures.weights`); None for floating point, of the type that the files have.
    """

    vocab_size: int
    hidden_size: int = 512
    max_position_embeddings: int = 512  # of learned positions; the others take any length
    embedding: EmbeddingConfig = EmbeddingConfig()
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    head: HeadConfig = LanguageModelConfig()
    special: SpecialTokens = SpecialTokens()
    initializer_range: float | None = None
    weights: Literal["int8"] | None = None
    origin: OriginConfig | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        check_sizes(self)
        check_deviation(self.initializer_range)
        if self.encoder is None and self.decoder is None:
            raise InputError("encoder, decoder: expected at least one of them")
        if self.encoder is not None and self.decoder is not None:
            width = self.encoder.block.width(self.hidden_size)
            if width != self.hidden_size:
                raise InputError(
                    f"encoder.block: a decoder reads vectors of hidden_size {self.hidden_size}, and this "
                    f"ends with {width}; set its join to 'mean'"
                )
        if self.encoder is not None:
            for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
                if stack is not None and not isinstance(stack.memory, NoMemoryConfig):
                    raise InputError(
                        f"{name}.memory: only a decoder alone reads a text by segments; set it to 'none'"
                    )
        if self.encoder is not None and not self.encoder.depth.encoder:
            raise InputError(
                f"encoder.depth: {quote(self.encoder.depth.kind)} is for decoders, which predict token "
                "by token; use 'act', or 'fixed'"
            )
        if self.encoder is not None and self.head.reruns_last_layer and not self.encoder.norm.tokenwise:
            raise InputError(
                f"encoder.norm: head {quote(self.head.kind)} runs the last layer again, and "
                f"{quote(self.encoder.norm.kind)} would count its tokens twice; use 'layer'"
            )
        if self.decoder is not None:
            self.decoder.attention.mechanism.require("causal")
            if not self.head.causal:
                raise InputError(
                    f"head {quote(self.head.kind)} runs an encoder's last layer again, which a decoder "
                    f"cannot; use it with an encoder alone"
                )

    def head_shape(self) -> HeadShape:
        """What the head is built for."""
        last = self.decoder or self.encoder
        assert last is not None
        width, size = last.block.width(self.hidden_size), self.embedding.width(self.hidden_size)
        wide = width != self.hidden_size and not self.embedding.tied  # token vectors of the head's own
        return HeadShape(
            hidden_size=width,
            vocab_size=self.vocab_size,
            tied=self.embedding.tied,
            table_size=width if wide else size,
            adaptive=self.embedding.adaptive,
        )

    @classmethod
    def examples(cls) -> tuple["ModelConfig", ...]:
        """An encoder of one layer."""
        return (cls(vocab_size=11, hidden_size=16, encoder=StackConfig(num_hidden_layers=1)),)


def longest(config: ModelConfig) -> int | None:
    """The most tokens of a text, where positions are learned; None for any number."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    learned = any(isinstance(stack.position, LearnedConfig | LearnedPerLayerConfig) for stack in stacks)
    return config.max_position_embeddings if learned else None
