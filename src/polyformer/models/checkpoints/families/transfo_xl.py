"""Transformer-XL: recurrence over segments, adaptive embeddings and softmax. Dai et al. 2019.

transformers had the model until 4.35. There a text begins after `mem_len` vectors of zeros, to which its
tokens attend; here, as in the paper and the authors' PyTorch code, it begins without a memory. `zero_memory`
of `polyformer.models.architectures` reproduces their beginning, and so their outputs. `inputs_embeds` are
scaled here, like token vectors.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import TransformerXLConfig
from polyformer.core.errors import InputError, quote
from polyformer.models.checkpoints.config_mapping import Option, Tree, choice, get_path, option
from polyformer.models.checkpoints.families.common import LAST_TOKEN, SCORED
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter, Fused, layered
from polyformer.models.checkpoints.values import options, special
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.nn.heads import AdaptiveSoftmaxConfig


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
# The frequencies of the sinusoids, which are computed.
FREQUENCIES = ("{base}pos_emb.inv_freq",)


@register
class TransfoXL(Family):
    """A decoder with recurrence over segments; the public checkpoint is `transfo-xl-wt103`."""

    model_type = "transfo-xl"
    class_prefix = "TransfoXL"
    paper = "Dai et al. 2019"
    objective = "causal language modelling by segments"
    base_model_prefix = "transformer"
    template = model_config("transformer-xl-large")
    config_mapping = options(
        "decoder",
        {"vocab_size": 267735, "d_model": 1024, "n_layer": 18, "n_head": 16, "d_head": 64, "d_inner": 4096},
        option("cutoffs", [20000, 40000, 200000], "embedding.adaptive.cutoffs"),
        option("div_val", 4, "embedding.adaptive.div_val"),
        option("d_embed", 1024, "embedding.adaptive.d_embed"),
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
            *("decoder.dropout", "decoder.final_dropout", "decoder.feedforward.inner_dropout"),
            "decoder.position.waves_dropout",
        ),
        {"dropatt": 0.0, "layer_norm_epsilon": 1e-5, "init_std": 0.02, **special(eos=0)},
    )
    aliases: ClassVar = {"n_token": "vocab_size"}
    required: ClassVar = {"attn_type": 0}
    other_options: ClassVar = {
        "same_length": True,
        "pre_lnorm": False,
        "tie_projs": None,
        "proj_share_all_but_first": True,
    }
    ignored_options = (
        *("adaptive", "init", "init_range", "proj_init_std", "sample_softmax"),
        *("trainer_compatible", "use_cache"),
    )
    key_mapping = TRUNK
    tasks: ClassVar[Mapping[str, Task]] = {
        "LMHeadModel": Task(AdaptiveSoftmaxConfig(), OUTPUT, unused_keys=FREQUENCIES),
        "Model": dataclasses.replace(LAST_TOKEN, unused_keys=FREQUENCIES),
        "ForSequenceClassification": dataclasses.replace(SCORED, unused_keys=FREQUENCIES),
    }
    sizes = (
        *("transformer-xl-base", "transformer-xl-large", "transformer-xl-enwik8-12"),
        *("transformer-xl-enwik8-24", "transformer-xl-1b-large"),
    )
    removed = "4.36"

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for sampled softmax, odd widths, and memories with all tokens hidden."""
        if hub.get("sample_softmax", -1) > 0:
            raise InputError("config.json: sample_softmax is above 0, which transformers refuses too; set -1")
        if hub["d_model"] % 2:
            raise InputError(f"config.json: d_model is {quote(hub['d_model'])}, expected an even number")
        if hub["same_length"] and hub["mem_len"] < 2:
            raise InputError(
                f"config.json: same_length with mem_len {quote(hub['mem_len'])}: a token would see at most "
                "itself; expected 2 or more"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the attended pairs, the order of norms, and the projections shared by output and embeddings."""
        stack = tree["decoder"]
        length = stack["memory"]["length"]
        # Same_length: every token sees the same number of keys.
        window = Window(length - 1, 0) if hub["same_length"] else None
        stack["attention"]["mechanism"]["pattern"] = SoftmaxConfig(pattern=window).to_dict()["pattern"]
        pre = hub["pre_lnorm"]
        stack["block"] = {"kind": "pre"} if pre else {"kind": "post"}
        stack["final_norm"] = not pre
        if tree["head"]["kind"] == AdaptiveSoftmaxConfig.kind:
            usual = _all_but_first(tree)
            shared = hub["proj_share_all_but_first"]
            ties = hub["tie_projs"] or (usual if shared else [False] * len(usual))
            tree["head"]["tie_projs"] = None if list(ties) == usual else ties

    def write_other_options(self, tree: Tree) -> Tree:
        """Return their options for pattern, norms and shared projections."""
        mechanism = get_path(tree, "decoder.attention.mechanism") or {}
        ties = get_path(tree, "head.tie_projs") or _all_but_first(tree)
        return {
            "same_length": mechanism.get("pattern") is not None,
            "pre_lnorm": get_path(tree, "decoder.block.kind") == "pre",
            "tie_projs": list(ties),
            "proj_share_all_but_first": list(ties) == _all_but_first(tree),
        }

    def layers(self, config: ModelConfig) -> int:
        """Return the number of layers or of clusters, which number tensors too and may be more."""
        # {i} counts clusters in emb_layers.{i}.
        adaptive = config.embedding.adaptive
        return max(super().layers(config), 0 if adaptive is None else len(adaptive.cutoffs) + 1)

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether global query biases are of the model's kind: in each layer, or once before them."""
        assert config.decoder is not None
        position = config.decoder.position
        shared = isinstance(position, TransformerXLConfig) and position.shared_biases
        return not theirs.endswith(("r_w_bias", "r_r_bias")) or ("dec_attn" in theirs) != shared


def _all_but_first(tree: Tree) -> list[bool]:
    """Return for every cluster whether projections are tied according to `proj_share_all_but_first`."""
    cutoffs = get_path(tree, "embedding.adaptive.cutoffs") or ()
    return [False, *(True for _ in cutoffs)]
