"""Reformer, as a decoder: reversible layers of local and of LSH attention. Kitaev et al. 2020.

Numbers are those of transformers for local layers at any length (with more than one chunk before, for texts
of more chunks than that: in shorter ones it reads some chunks twice), and for LSH layers in texts of at most
one chunk, where all tokens see one another. Beyond, LSH is random in both: transformers draws new hashes in
every call unless `hash_seed` is set, and cuts the sorted tokens into chunks, where ours keeps a window that
no later token moves. Its dropout stands before the activation, and is one for words and one for positions.

In an encoder the first chunk would read the last one, as if the text were a ring: it is refused.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyformer.architecture import ModelConfig
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Tree, act, field, look_up
from polyformer.checkpoints.names import Link, Part, layered
from polyformer.core.errors import InputError
from polyformer.heads import EmbedConfig, LanguageModelConfig
from polyformer.position import AxialConfig, LearnedConfig
from polyformer.presets import model_config
from polyformer.presets.reformer import hashed, local


@dataclasses.dataclass(frozen=True)
class Axis(Part):
    """The table [n, d] of an axis, whose other axes have length 1 in theirs: [.., 1, n, 1, .., d]."""

    axis: int = 0
    axes: int = 2

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        return (theirs.reshape(-1, theirs.shape[-1]),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        (one,) = ours
        shape = [1] * self.axes
        shape[self.axis] = len(one)
        return one.reshape(*shape, -1)


LAYER = {
    "attention.layer_norm": "block.norms.0",
    "attention.self_attention.query": "attention.query",
    "attention.self_attention.query_key": "attention.query",
    "attention.self_attention.key": "attention.key",
    "attention.self_attention.value": "attention.value",
    "attention.output.dense": "attention.output",
    "feed_forward.layer_norm": "block.norms.1",
    "feed_forward.dense.dense": "feedforward.up",
    "feed_forward.output.dense": "feedforward.down",
}
TABLES = "decoder.position.tables"
FIELDS = (
    field("vocab_size", 320, "vocab_size"),
    field("hidden_size", 256, "hidden_size"),
    field("max_position_embeddings", 4096, "max_position_embeddings"),
    field("num_attention_heads", 12, "decoder.attention.num_attention_heads"),
    field("attention_head_size", 64, "decoder.attention.head_size"),
    field("feed_forward_size", 512, "decoder.feedforward.intermediate_size"),
    act("hidden_act", "relu", "decoder.feedforward.activation"),
    field(
        "hidden_dropout_prob",
        0.05,
        "decoder.dropout",
        "decoder.final_dropout",
        "decoder.feedforward.inner_dropout",
    ),
    field("layer_norm_eps", 1e-12, "decoder.norm.eps"),
    field("initializer_range", 0.02, "initializer_range"),
    field("pad_token_id", 0, "special.pad"),
    field("bos_token_id", None, "special.bos"),
    field("eos_token_id", 2, "special.eos"),
)
KINDS = ("local", "lsh")
LAYERS = ["local", "lsh", "local", "lsh", "local", "lsh"]


@register
class Reformer(Family):
    """The decoder."""

    model_type = "reformer"
    classes = "Reformer"
    paper = "Kitaev et al. 2020"
    objective = "causal language modelling"
    base = "reformer"
    template = model_config("reformer-small")
    fields = FIELDS
    fixed: ClassVar = {
        "tie_word_embeddings": False,
        "lsh_attention_probs_dropout_prob": 0.0,
        "local_num_chunks_after": 0,
        "lsh_num_chunks_after": 0,
    }
    adjusted = (
        "is_decoder",
        "attn_layers",
        "num_hidden_layers",
        "axial_pos_embds",
        "axial_pos_shape",
        "axial_pos_embds_dim",
        "local_attn_chunk_length",
        "local_num_chunks_before",
        "local_attention_probs_dropout_prob",
        "lsh_attn_chunk_length",
        "lsh_num_chunks_before",
        "num_hashes",
    )
    inert = (
        "num_buckets",
        "hash_seed",
        "axial_norm_std",
        "chunk_size_lm_head",
        "chunk_size_feed_forward",
        "use_cache",
        "classifier_dropout",
    )
    names: ClassVar = {
        "embeddings.word_embeddings": "tokens",
        "embeddings.position_embeddings.embedding": f"{TABLES}.0",
        **{
            f"embeddings.position_embeddings.weights.{i}": Axis((f"{TABLES}.{i}.weight",), i)
            for i in range(2)
        },
        **layered("encoder.layers.{i}", "decoder.layers.{i}", LAYER),
        "encoder.layer_norm": "decoder.final_norm",
    }
    ignored = ("*mask_value_float*",)
    tasks: ClassVar = {
        "ModelWithLMHead": Task(
            LanguageModelConfig(), {"lm_head.decoder": "head"}, unused_keys=("lm_head.bias",)
        ),
        "Model": Task(EmbedConfig(pooling="last", normalize=False), base=False),
    }
    sizes = ("reformer-small", "reformer-enwik8")

    def check(self, hub: Tree) -> None:
        if not hub.get("is_decoder", False):
            raise InputError("config.json: is_decoder is False, and only True is supported")
        layers = hub.get("attn_layers", LAYERS)
        if not layers or set(layers) - set(KINDS):
            raise InputError(
                f"config.json: attn_layers is {layers}, expected 'local' or 'lsh' for each layer"
            )
        if hub.get("axial_pos_embds", True) and len(hub.get("axial_pos_shape", (64, 64))) != 2:
            raise InputError(
                f"config.json: axial_pos_shape is {hub['axial_pos_shape']}, and only 2 axes are supported"
            )

    def adjust(self, tree: Tree, hub: Tree) -> None:
        kinds, decoder = list(hub.get("attn_layers", LAYERS)), tree["decoder"]
        near = (
            local(
                hub.get("local_attn_chunk_length", 64),
                hub.get("local_num_chunks_before", 1),
                hub.get("local_attention_probs_dropout_prob", 0.05),
            )
            if "local" in kinds
            else None
        )
        far = (
            hashed(
                hub.get("lsh_attn_chunk_length", 64),
                hub.get("lsh_num_chunks_before", 1),
                hub.get("num_hashes", 1),
                _buckets(hub),
            )
            if "lsh" in kinds
            else None
        )
        chosen = {"local": near, "lsh": far}
        decoder["num_hidden_layers"] = len(kinds)
        decoder["attention"]["mechanism"] = {
            "kind": "alternate",
            "mechanisms": [one.to_dict() for kind in kinds if (one := chosen[kind]) is not None],
        }
        position = LearnedConfig()
        if hub.get("axial_pos_embds", True):
            grid, widths = hub.get("axial_pos_shape", (64, 64)), hub.get("axial_pos_embds_dim", (64, 192))
            usual = _widths(tree)  # which need not be said
            position = AxialConfig(grid=tuple(grid), widths=None if list(widths) == usual else tuple(widths))
        decoder["position"] = position.to_dict()

    def describe(self, tree: Tree) -> Tree:
        found: Tree = {"is_decoder": True}
        layers: list[Tree] = look_up(tree, "decoder.attention.mechanism.mechanisms") or []
        kinds = ["lsh" if one["kind"] == "lsh" else "local" for one in layers]
        found |= {"attn_layers": kinds, "num_hidden_layers": len(kinds)}
        for kind, one in zip(kinds, layers):
            found |= _described_lsh(one) if kind == "lsh" else _described_local(one)
        position: Tree = look_up(tree, "decoder.position") or {}
        found["axial_pos_embds"] = position.get("kind") == "axial"
        if found["axial_pos_embds"]:
            widths = position["widths"] or _widths(tree)
            found |= {"axial_pos_shape": list(position["grid"]), "axial_pos_embds_dim": widths}
        return found

    def hub(self, config: ModelConfig) -> tuple[Tree, str]:
        hub, task = super().hub(config)
        if config.origin is not None and "num_buckets" in hub:  # as factors, or left open, where it was
            given = config.origin.fields.get("num_buckets")
            if _buckets({**hub, "num_buckets": given}) == hub["num_buckets"]:
                hub["num_buckets"] = given
        return hub, task

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        assert config.decoder is not None
        mechanism = config.decoder.attention.mechanism

        other = "weights." if isinstance(config.decoder.position, LearnedConfig) else "embedding."

        def belongs(name: str) -> bool:
            """Of two projections one is for local layers and one where keys are queries; of two tables one is
            for positions on a grid."""
            if "position_embeddings." + other in name:
                return False
            found = re.search(r"layers\.(\d+)\.attention\.self_attention\.(query_key|query)\.", name)
            return not found or (found[2] == "query_key") == mechanism.at(int(found[1])).shares_queries

        return [link for link in super().links(config, task, own) if belongs(link.theirs)]

    def made(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where the hashes start from: the same in every load."""
        names = [name for name in own if name.endswith(".directions.origin")]
        return {name: torch.tensor([number, 0]) for number, name in enumerate(names)}


def _widths(tree: Tree) -> list[int]:
    """Of the vectors of both axes, by default."""
    quarter = tree["hidden_size"] // 4
    return [quarter, tree["hidden_size"] - quarter]


def _buckets(hub: Tree) -> int:
    """In a round; where nothing is said, twice as many as the longest text has chunks, a power of two."""
    given = hub.get("num_buckets")
    if given is None:
        chunks = hub.get("max_position_embeddings", 4096) // hub.get("lsh_attn_chunk_length", 64)
        return 2 ** max(1, (2 * chunks).bit_length() - 1)
    return given if isinstance(given, int) else math.prod(given)


def _described_lsh(mechanism: Tree) -> Tree:
    chunk = max(1, mechanism["whole"])
    return {
        "lsh_attn_chunk_length": chunk,
        "lsh_num_chunks_before": mechanism["window"] // chunk - 1,
        "num_hashes": mechanism["rounds"],
        "num_buckets": mechanism["buckets"],
    }


def _described_local(mechanism: Tree) -> Tree:
    found = re.fullmatch(r"BlockWindow\(size=(\d+), before=(\d+), after=0\)", mechanism.get("pattern") or "")
    return {
        "local_attn_chunk_length": int(found[1]) if found else 64,
        "local_num_chunks_before": int(found[2]) if found else 1,
        "local_attention_probs_dropout_prob": mechanism.get("dropout", 0.0),
    }
