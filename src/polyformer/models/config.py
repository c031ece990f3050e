"""The configuration of a model."""

import dataclasses
from typing import Any, Literal

from polyformer.attention.patterns import Pattern
from polyformer.attention.patterns.between_sequences import check_between_sequences
from polyformer.attention.positions import LearnedConfig, LearnedPerLayerConfig
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveInt, UnitFloat, check_sizes
from polyformer.models.plugins import ConfigWithImports
from polyformer.nn.heads import HeadConfig, HeadShape, LanguageModelConfig
from polyformer.nn.heads.drafting import DraftingConfig, DraftingShape
from polyformer.nn.memory import NoMemoryConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialTokens(Config):
    """Ids of the special tokens; None for a token that the model does not have."""

    pad: int | None = None
    bos: int | None = None  # the first token of an encoder-decoder's output
    eos: int | None = None  # ends generation
    mask: int | None = None  # of a masked diffusion model: generation begins with it and replaces it


@dataclasses.dataclass(frozen=True, kw_only=True)
class OriginConfig(Config):
    """The public checkpoint that a model was loaded from, so that it can be saved in the same format."""

    model_type: str
    architecture: str  # class name in transformers
    fields: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # options without an effect on the computation


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigWithImports):
    """The configuration of an encoder, a decoder, or an encoder-decoder.

    `initializer_range`: standard deviation of the initial weights; None for the scheme of 2017 (see
    `initialize`). `zero_branches`: the last matrices of sub-layers are 0 at first. `weights`: the format of
    quantized weights (`polyformer.models.architectures.weights`); None for floating point, in the dtype of
    the files. `drafting`: parts that predict further tokens, for drafts without a second model.
    """

    vocab_size: PositiveInt
    hidden_size: PositiveInt = 512
    max_position_embeddings: PositiveInt = 512  # length of learned positions; other schemes take any
    embedding: EmbeddingConfig = EmbeddingConfig()
    encoder: StackConfig | None = None
    decoder: StackConfig | None = None
    cross_attention: Pattern | None = None  # of a decoder to its source, such as "Aligned(2, 16, 16)"
    head: HeadConfig = LanguageModelConfig()
    special: SpecialTokens = SpecialTokens()
    initializer_range: UnitFloat | None = None
    zero_branches: bool = dataclasses.field(default=False, compare=False)
    weights: Literal["int8", "int4", "stored"] | None = None
    drafting: DraftingConfig | None = None
    origin: OriginConfig | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.encoder is None and self.decoder is None:
            raise InputError("encoder, decoder: expected at least one of them")
        self._check_cross_attention()
        if self.encoder is not None:
            self._check_encoder(self.encoder)
        if self.decoder is not None:
            self._check_decoder(self.decoder)
        elif self.drafting is not None:
            raise InputError(
                f"drafting: an encoder generates no text, expected null, got {quote(self.drafting.kind)}"
            )

    def _check_cross_attention(self) -> None:
        """Raise `InputError` for a pattern without a source, and for an encoder that no decoder reads."""
        if self.cross_attention is not None:
            if self.encoder is None or self.decoder is None:
                raise InputError(
                    "cross_attention: only an encoder-decoder attends to a source; for a pattern within one "
                    "sequence set attention"
                )
            check_between_sequences(self.cross_attention, "cross_attention")
        # Cross-attention projects encoder vectors of hidden_size.
        if self.encoder is not None and self.decoder is not None:
            width = self.encoder.block.width(self.hidden_size)
            if width != self.hidden_size:
                raise InputError(
                    f"encoder.block: a decoder reads vectors of hidden_size {self.hidden_size}, but this "
                    f"block returns {width}; set its join to 'mean'"
                )

    def _check_encoder(self, encoder: StackConfig) -> None:
        """Raise `InputError` for parts that a model with an encoder cannot have."""
        for name, stack in (("encoder", encoder), ("decoder", self.decoder)):
            if stack is not None and not isinstance(stack.memory, NoMemoryConfig):
                raise InputError(f"{name}.memory: only a decoder-only model can have one; set it to 'none'")
        if not encoder.depth.encoder:
            raise InputError(
                f"encoder.depth: {quote(encoder.depth.kind)} is only for decoders; use 'act' or 'fixed'"
            )
        if not self.head.reruns_last_layer:
            return
        again = f"head {quote(self.head.kind)} runs the last layer again"
        if not encoder.norm.tokenwise:
            norm = quote(encoder.norm.kind)
            raise InputError(f"encoder.norm: {again}, and {norm} would count its tokens twice; use 'layer'")
        if encoder.block.reversible:
            raise InputError(
                f"encoder.block: {again}, which the two streams of 'reversible' do not allow; use 'pre'"
            )
        if encoder.block.stream_copies:
            raise InputError(
                f"encoder.block: {again} from one residual stream, of which {quote(encoder.block.kind)} has "
                f"{encoder.block.stream_copies} copies; use 'pre'"
            )

    def _check_decoder(self, decoder: StackConfig) -> None:
        """Raise `InputError` for a mechanism that sees later tokens, and for a head of encoders."""
        decoder.attention.mechanism.require("causal")
        if self.embedding.token_dropout is not None:
            raise InputError(
                "embedding.token_dropout: vectors depend on all masks of a text, which a decoder has not "
                "read yet; set it to null, or use an encoder"
            )
        if not self.head.causal:
            raise InputError(
                f"head {quote(self.head.kind)} runs an encoder's last layer again, which a decoder "
                f"cannot; use it with an encoder-only model"
            )

    def cross(self) -> AttentionConfig | None:
        """Return the attention of the decoder to the source; None if the model is no encoder-decoder."""
        if self.encoder is None or self.decoder is None:
            return None
        return self.decoder.attention.cross(self.cross_attention)

    def head_shape(self) -> HeadShape:
        """Return the sizes with which the head is built."""
        last = self.decoder or self.encoder
        assert last is not None
        width, size = last.block.width(self.hidden_size), self.embedding.width(self.hidden_size)
        wide = width != self.hidden_size and not self.embedding.tied  # the head has its own token vectors
        return HeadShape(
            hidden_size=width,
            vocab_size=self.vocab_size,
            tied=self.embedding.tied,
            table_size=width if wide else size,
            adaptive=self.embedding.adaptive,
        )

    def drafting_shape(self) -> DraftingShape:
        """Return the sizes with which the parts that predict further tokens are built."""
        assert self.decoder is not None
        head = self.head_shape()
        return DraftingShape(
            hidden_size=head.hidden_size,
            vocab_size=self.vocab_size,
            table_size=self.embedding.width(self.hidden_size),
            max_positions=self.max_position_embeddings,
            decoder=self.decoder,
            reads_source=self.encoder is not None,
        )

    @classmethod
    def examples(cls) -> tuple["ModelConfig", ...]:
        return (cls(vocab_size=11, hidden_size=16, encoder=StackConfig(num_hidden_layers=1)),)


def longest_text(config: object) -> int | None:
    """Return the most tokens of a text for which a model was trained; None for models of other inputs.

    Models with positions by distance or angle accept longer texts.
    """
    return getattr(config, "max_position_embeddings", None)


def max_positions(config: ModelConfig) -> int | None:
    """Return the length of a model's learned positions; None without learned positions."""
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    learned = any(isinstance(stack.position, LearnedConfig | LearnedPerLayerConfig) for stack in stacks)
    return config.max_position_embeddings if learned else None
