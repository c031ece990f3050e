"""XLNet: an encoder with Transformer-XL's positions, pretrained in random orders. Yang et al. 2019.

Files are read as an encoder in which every token sees all others, the form of fine-tuning;
`polyformer.models.architectures.two_streams` is the form of pretraining, with the vector `mask_emb` that only
it reads. Segments are `segment_ids` here and `token_type_ids` in transformers. Memories of earlier segments
(`mems`) are not there: an encoder has none.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from polyformer.attention.positions import XLNetConfig
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.checkpoints.config_mapping import Option, Tree, activation, check_required, option
from polyformer.models.checkpoints.families.common import LAST_TOKEN, QUESTION_ANSWERING
from polyformer.models.checkpoints.families.transfo_xl import HeadVectors, SinesFirst
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter
from polyformer.models.checkpoints.values import options, special
from polyformer.models.config import ModelConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import ChooseConfig, ClassifyConfig, HeadConfig, LanguageModelConfig, TagConfig
from polyformer.nn.stack import AttentionConfig, StackConfig

LAYER = "encoder.layers.{i}"
SUMMARY = {"summary_type": "last", "summary_use_proj": True, "summary_activation": "tanh"}
"""The supported options of a head that classifies texts."""

LAST = ClassifyConfig(pooling="last", hidden=True, activation="tanh")
UNUSED = ("{base}mask_emb",)


@dataclasses.dataclass(frozen=True)
class ByHeads(Converter):
    """A projection [E, H, D] of theirs: ours is [H D, E], or of the output [E, H D]."""

    output: bool = False
    heads: int = 1

    def for_config(self, config: ModelConfig) -> "ByHeads":
        """Return the converter for the heads of a model."""
        assert config.encoder is not None
        return dataclasses.replace(self, heads=config.encoder.attention.num_attention_heads)

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Join the heads."""
        flat = theirs.flatten(1)
        return (flat if self.output else flat.T.contiguous(),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Separate the heads."""
        flat = ours[0] if self.output else ours[0].T
        return flat.unflatten(1, (self.heads, -1))


@dataclasses.dataclass(frozen=True)
class WavesByHeads(ByHeads):
    """W_R [E, H D] for sinusoids with all sines first, by heads."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Join the heads, and let sines and cosines alternate."""
        return SinesFirst(self.ours).split(*super().split(theirs))

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Put all sines first, and separate the heads."""
        return super().join((SinesFirst(self.ours).join(ours),))


TEMPLATE = ModelConfig(
    vocab_size=32000,
    hidden_size=1024,
    encoder=StackConfig(
        num_hidden_layers=24,
        attention=AttentionConfig(num_attention_heads=16, bias=False),
        feedforward=DenseConfig(intermediate_size=4096, activation="gelu"),
        position=XLNetConfig(),
        norm=LayerNormConfig(eps=1e-12),
    ),
    initializer_range=0.02,
)


@register
class XLNetFamily(Family):
    """An encoder with relative positions, which was pretrained by prediction in random orders."""

    model_type = "xlnet"
    class_prefix = "XLNet"
    paper = "Yang et al. 2019"
    objective = "permuted language modelling"
    base_model_prefix = "transformer"
    template = TEMPLATE
    config_mapping = options(
        "encoder",
        {"vocab_size": 32000, "d_model": 1024, "n_layer": 24, "n_head": 16, "d_inner": 4096},
        {"layer_norm_eps": 1e-12, "initializer_range": 0.02, **special(5, 1, 2)},
        activation("ff_activation", "gelu", "encoder.feedforward.activation"),
        Option(
            "clamp_len",
            -1,
            ("encoder.position.clamp_distance",),
            lambda length: length if length > 0 else None,
            lambda length: -1 if length is None else length,
        ),
        option(
            "dropout",
            0.1,
            *("encoder.dropout", "encoder.final_dropout", "encoder.feedforward.inner_dropout"),
            *("encoder.attention.mechanism.dropout", "encoder.position.waves_dropout"),
        ),
    )
    aliases: ClassVar = {"n_token": "vocab_size"}
    required: ClassVar = {"attn_type": "bi", "bi_data": False}
    other_options: ClassVar = {"d_head": None}
    ignored_options = (
        *("mem_len", "reuse_len", "use_mems_eval", "use_mems_train", "same_length", "untie_r"),
        *("start_n_top", "end_n_top", *SUMMARY, "summary_last_dropout"),
    )
    key_mapping: ClassVar = {
        "word_embedding": "tokens",
        **{
            f"layer.{{i}}.rel_attn.{name}": ByHeads((f"{LAYER}.attention.{ours}.weight",))
            for name, ours in {"q": "query", "k": "key", "v": "value"}.items()
        },
        "layer.{i}.rel_attn.o": ByHeads((f"{LAYER}.attention.output.weight",), output=True),
        "layer.{i}.rel_attn.r": WavesByHeads(("encoder.position.projections.{i}.weight",)),
        **{
            f"layer.{{i}}.rel_attn.r_{name}_bias": HeadVectors((f"encoder.position.{ours}.{{i}}",))
            for name, ours in {"w": "u", "r": "v", "s": "w"}.items()
        },
        "layer.{i}.rel_attn.seg_embed": "encoder.position.segments.{i}",
        "layer.{i}.rel_attn.layer_norm": f"{LAYER}.block.norms.0",
        "layer.{i}.ff.layer_[1|2]": f"{LAYER}.feedforward.[up|down]",
        "layer.{i}.ff.layer_norm": f"{LAYER}.block.norms.1",
    }
    tasks: ClassVar[Mapping[str, Task]] = {
        "LMHeadModel": Task(
            LanguageModelConfig(bias=True),
            {"lm_loss": "head"},
            tied_keys={"lm_loss.weight": "transformer.word_embedding.weight"},
            unused_keys=UNUSED,
        ),
        "Model": dataclasses.replace(LAST_TOKEN, unused_keys=UNUSED),
        "ForSequenceClassification": Task(
            LAST,
            {"sequence_summary.summary": "head.dense", "logits_proj": "head.output"},
            (option("summary_last_dropout", 0.1, "dropout"),),
            unused_keys=UNUSED,
        ),
        "ForTokenClassification": Task(
            TagConfig(dropout=0.0), {"classifier": "head.output"}, unused_keys=UNUSED
        ),
        "ForQuestionAnsweringSimple": dataclasses.replace(QUESTION_ANSWERING, unused_keys=UNUSED),
        "ForMultipleChoice": Task(
            ChooseConfig(text=dataclasses.replace(LAST, num_labels=1)),
            {"sequence_summary.summary": "head.text.dense", "logits_proj": "head.text.output"},
            (option("summary_last_dropout", 0.1, "text.dropout"),),
            labelled=False,
            unused_keys=UNUSED,
        ),
    }

    def config(self, hub: Tree, task: str, head: HeadConfig | None = None) -> ModelConfig:
        """Return the configuration as for every family; a memory of null is one of any length in files."""
        if hub.get("mem_len", 0) is None:
            hub = {name: value for name, value in hub.items() if name != "mem_len"}
        return super().config(hub, task, head)

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for odd widths, and for heads that do not divide the width."""
        width, size = hub["d_model"], hub["d_head"]
        if width % 2:
            raise InputError(f"config.json: d_model is {quote(width)}, expected an even number")
        if size not in (None, width // hub["n_head"]):
            raise InputError(
                f"config.json: d_head is {quote(size)}, expected d_model / n_head = {width // hub['n_head']}"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Check the options of a head that classifies texts."""
        if tree["head"]["kind"] in ("classify", "choose"):
            check_required(SUMMARY, hub)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the width of heads."""
        heads: Any = tree["encoder"]["attention"]["num_attention_heads"]
        return {"d_head": tree["hidden_size"] // heads}
