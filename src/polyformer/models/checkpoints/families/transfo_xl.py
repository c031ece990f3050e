"""Transformer-XL: recurrence over segments, adaptive embeddings and softmax. Dai et al. 2019.

transformers had the model until 4.35. There a text begins after `mem_len` vectors of zeros, to which its
tokens attend; here, as in the paper and the authors' PyTorch code, it begins without a memory. `zero_memory`
of `polyformer.models.architectures` reproduces their beginning, and so their outputs. `inputs_embeds` are
scaled here, like token vectors.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import TransformerXLConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Option, Tree, choice, get_path, option
from polyformer.models.checkpoints.families.gpt_common import LAST_TOKEN, MECHANISM
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter, Fused, Link, layered
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import AdaptiveSoftmaxConfig, EmbedConfig


@dataclasses.dataclass(frozen=True)
class SinesFirst(Converter):
    """W_R [H D, E] for sinusoids with all sines first, then all cosines; ours alternate."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Reorder channels from all sines first to alternating."""
        return (theirs.unflatten(1, (2, -1)).transpose(1, 2).flatten(1),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Reorder channels from alternating to all sines first."""
        return ours[0].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)


@dataclasses.dataclass(frozen=True)
class HeadVectors(Converter):
    """A vector for each head: theirs [H, D], ours [H, 1, D]."""

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Convert [H, D] to [H, 1, D]."""
        return (theirs.unsqueeze(1),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Convert [H, 1, D] to [H, D]."""
        return ours[0].squeeze(1)


LAYER = {
    "dec_attn.qkv_net": Fused(("attention.query", "attention.key", "attention.value")),
    "dec_attn.o_net": "attention.output",
    "dec_attn.layer_norm": "block.norms.0",
    "pos_ff.CoreNet.0": "feedforward.up",
    "pos_ff.CoreNet.3": "feedforward.down",
    "pos_ff.layer_norm": "block.norms.1",
}
TRUNK = {
    "word_emb.emb_layers.{i}": "tokens.tables.{i}",
    "word_emb.emb_projs.{i}": "tokens.projections.{i}.weight",
    **layered("layers.{i}", "decoder.layers.{i}", LAYER),
    "layers.{i}.dec_attn.r_net": SinesFirst(("decoder.position.projections.{i}",)),
    "layers.{i}.dec_attn.r_w_bias": HeadVectors(("decoder.position.u.{i}",)),
    "layers.{i}.dec_attn.r_r_bias": HeadVectors(("decoder.position.v.{i}",)),
    "r_w_bias": HeadVectors(("decoder.position.u.0",)),
    "r_r_bias": HeadVectors(("decoder.position.v.0",)),
}
OUTPUT = {
    "crit.out_layers.{i}.weight": "head.tables.{i}.weight",
    "crit.out_layers.{i}.bias": "head.biases.{i}",
    "crit.out_projs.{i}": "head.projections.{i}.weight",
    "crit.cluster_weight": "head.cluster.weight",
    "crit.cluster_bias": "head.cluster.bias",
}
FREQUENCIES = ("{base}pos_emb.inv_freq",)
"""The frequencies of the sinusoids, which are computed."""

OPTIONS = (
    option("vocab_size", 267735, "vocab_size"),
    option("cutoffs", [20000, 40000, 200000], "embedding.adaptive.cutoffs"),
    option("div_val", 4, "embedding.adaptive.div_val"),
    option("d_embed", 1024, "embedding.adaptive.d_embed"),
    option("d_model", 1024, "hidden_size"),
    option("n_layer", 18, "decoder.num_hidden_layers"),
    option("n_head", 16, "decoder.attention.num_attention_heads"),
    option("d_head", 64, "decoder.attention.head_size"),
    option("d_inner", 4096, "decoder.feedforward.intermediate_size"),
    option("mem_len", 1600, "decoder.memory.length"),
    Option(
        "clamp_len",
        1000,
        ("decoder.position.clamp_distance",),
        lambda length: length if length > 0 else None,
        lambda length: -1 if length is None else length,
    ),
    choice("untie_r", True, {True: False, False: True}, "decoder.position.shared_biases"),
    option(
        "dropout",
        0.1,
        "decoder.dropout",
        "decoder.final_dropout",
        "decoder.feedforward.inner_dropout",
        "decoder.position.waves_dropout",
    ),
    option("dropatt", 0.0, f"{MECHANISM}.dropout"),
    option("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    option("init_std", 0.02, "initializer_range"),
    option("tie_word_embeddings", True, "embedding.tied"),
    option("pad_token_id", None, "special.pad"),
    option("bos_token_id", None, "special.bos"),
    option("eos_token_id", 0, "special.eos"),
)


@register
class TransfoXL(Family):
    """A decoder with recurrence over segments; the public checkpoint is `transfo-xl-wt103`."""

    model_type = "transfo-xl"
    class_prefix = "TransfoXL"
    paper = "Dai et al. 2019"
    objective = "causal language modelling by segments"
    base_model_prefix = "transformer"
    template = model_config("transformer-xl-large")
    config_mapping = OPTIONS
    aliases: ClassVar = {
        "n_token": "vocab_size",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    required: ClassVar = {"attn_type": 0}
    other_options = ("same_length", "pre_lnorm", "tie_projs", "proj_share_all_but_first")
    ignored_options = (
        "adaptive",
        "init",
        "init_range",
        "proj_init_std",
        "sample_softmax",
        "trainer_compatible",
        "use_cache",
    )
    key_mapping = TRUNK
    tasks: ClassVar[Mapping[str, Task]] = {
        "LMHeadModel": Task(AdaptiveSoftmaxConfig(), OUTPUT, unused_keys=FREQUENCIES),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), prefixed=False, unused_keys=FREQUENCIES),
        "ForSequenceClassification": Task(LAST_TOKEN, {"score": "head.output"}, unused_keys=FREQUENCIES),
    }
    sizes = (
        "transformer-xl-base",
        "transformer-xl-large",
        "transformer-xl-enwik8-12",
        "transformer-xl-enwik8-24",
        "transformer-xl-1b-large",
    )
    removed = "4.36"

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for sampled softmax, sinusoids without pairs, and memories with all tokens
        hidden.
        """
        if hub.get("sample_softmax", -1) > 0:
            raise InputError("config.json: sample_softmax is above 0, which transformers refuses too; set -1")
        if hub.get("d_model", 1024) % 2:
            raise InputError(f"config.json: d_model is {quote(hub['d_model'])}, expected an even number")
        if hub.get("same_length", True) and hub.get("mem_len", 1600) < 2:
            raise InputError(
                f"config.json: same_length with mem_len {quote(hub['mem_len'])}: a token would see at most "
                "itself; expected 2 or more"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the attended pairs, the order of norms, and the projections shared by output and embeddings."""
        stack = tree["decoder"]
        length = stack["memory"]["length"]
        window = Window(length - 1, 0) if hub.get("same_length", True) else None
        stack["attention"]["mechanism"]["pattern"] = SoftmaxConfig(pattern=window).to_dict()["pattern"]
        pre = hub.get("pre_lnorm", False)
        stack["block"] = {"kind": "pre"} if pre else {"kind": "post"}
        stack["final_norm"] = not pre
        if tree["head"]["kind"] == AdaptiveSoftmaxConfig.kind:
            usual = _all_but_first(tree)
            shared = hub.get("proj_share_all_but_first", True)
            ties = hub.get("tie_projs") or (usual if shared else [False] * len(usual))
            tree["head"]["tie_projs"] = None if list(ties) == usual else ties

    def write_other_options(self, tree: Tree) -> Tree:
        """Return their options for pattern, norms and shared projections."""
        mechanism = get_path(tree, MECHANISM) or {}
        ties = get_path(tree, "head.tie_projs") or _all_but_first(tree)
        return {
            "same_length": mechanism.get("pattern") is not None,
            "pre_lnorm": get_path(tree, "decoder.block.kind") == "pre",
            "tie_projs": list(ties),
            "proj_share_all_but_first": list(ties) == _all_but_first(tree),
        }

    def layers(self, config: ModelConfig) -> int:
        """Return the number of layers or of clusters, which number tensors too and may be more."""
        adaptive = config.embedding.adaptive
        return max(super().layers(config), 0 if adaptive is None else len(adaptive.cutoffs) + 1)

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Return the links with the global query biases in the layers, or once before them."""
        stack = config.decoder
        assert stack is not None
        position = stack.position
        shared = isinstance(position, TransformerXLConfig) and position.shared_biases
        names = ("r_w_bias", "r_r_bias")
        return [
            link
            for link in super().links(config, task, own)
            if not link.theirs.endswith(names) or ("dec_attn" in link.theirs) != shared
        ]


def _all_but_first(tree: Tree) -> list[bool]:
    """Return for every cluster whether projections are tied according to `proj_share_all_but_first`."""
    cutoffs = get_path(tree, "embedding.adaptive.cutoffs") or ()
    return [False, *(True for _ in cutoffs)]
