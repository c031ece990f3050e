"""Reformer, as a decoder: reversible layers of local and of LSH attention. Kitaev et al. 2020.

Outputs equal those of transformers for local layers at any length (with more than one chunk before, for texts
of more chunks than that: in shorter texts it reads some chunks twice), and for LSH layers in texts of at most
one chunk, where all tokens attend to one another. Beyond, LSH is random in both: transformers draws new
hashes in every call unless `hash_seed` is set, and cuts the sorted tokens into chunks, while ours has a
window that no later token moves. Its dropout precedes the activation, and is drawn separately for words and
for positions.

In an encoder the first chunk would read the last chunk, as if the text were a ring: it is refused.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import BlockWindow, Pattern
from polyformer.attention.positions import AxialConfig, LearnedConfig
from polyformer.core.errors import InputError
from polyformer.models.checkpoints.config_mapping import Tree, get_path, option
from polyformer.models.checkpoints.families.common import LAST_TOKEN
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import Converter, layered
from polyformer.models.checkpoints.values import options
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config
from polyformer.models.presets.long_texts import hashed, local
from polyformer.nn.heads import LanguageModelConfig


@dataclasses.dataclass(frozen=True)
class AxialTable(Converter):
    """The table [n, d] of an axis; in theirs the other axes have length 1: [.., 1, n, 1, .., d]."""

    axis: int = 0
    axes: int = 2

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Convert [.., 1, n, 1, .., d] to [n, d]."""
        return (theirs.reshape(-1, theirs.shape[-1]),)

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Convert [n, d] to [.., 1, n, 1, .., d]."""
        (table,) = ours
        shape = [1] * self.axes
        shape[self.axis] = len(table)
        return table.reshape(*shape, -1)


LAYER = {
    "attention.layer_norm": "block.norms.0",
    "attention.self_attention.[query|query_key|key|value]": "attention.[query|query|key|value]",
    "attention.output.dense": "attention.output",
    "feed_forward.layer_norm": "block.norms.1",
    "feed_forward.[dense|output].dense": "feedforward.[up|down]",
}
TABLES = "decoder.position.tables"


@register
class Reformer(Family):
    """A decoder with reversible layers of local and LSH attention."""

    model_type = "reformer"
    class_prefix = "Reformer"
    paper = "Kitaev et al. 2020"
    objective = "causal language modelling"
    base_model_prefix = "reformer"
    template = model_config("reformer-small")
    config_mapping = options(
        "decoder",
        {"vocab_size": 320, "hidden_size": 256, "max_position_embeddings": 4096, "num_attention_heads": 12},
        {"attention_head_size": 64, "feed_forward_size": 512, "hidden_act": "relu", "layer_norm_eps": 1e-12},
        {"initializer_range": 0.02, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2},
        option(
            "hidden_dropout_prob",
            0.05,
            *("decoder.dropout", "decoder.final_dropout", "decoder.feedforward.inner_dropout"),
        ),
    )
    required: ClassVar = {
        "tie_word_embeddings": False,
        "lsh_attention_probs_dropout_prob": 0.0,
        "local_num_chunks_after": 0,
        "lsh_num_chunks_after": 0,
    }
    other_options: ClassVar = {
        **{"is_decoder": False, "attn_layers": ["local", "lsh"] * 3, "num_hidden_layers": None},
        **{"axial_pos_embds": True, "axial_pos_shape": (64, 64), "axial_pos_embds_dim": (64, 192)},
        **{"local_attn_chunk_length": 64, "local_num_chunks_before": 1},
        **{"local_attention_probs_dropout_prob": 0.05, "lsh_attn_chunk_length": 64},
        **{"lsh_num_chunks_before": 1, "num_hashes": 1},
    }
    ignored_options = (
        *("num_buckets", "hash_seed", "axial_norm_std", "chunk_size_lm_head", "chunk_size_feed_forward"),
        *("use_cache", "classifier_dropout"),
    )
    key_mapping: ClassVar = {
        "embeddings.word_embeddings": "tokens",
        "embeddings.position_embeddings.embedding": f"{TABLES}.0",
        **{
            f"embeddings.position_embeddings.weights.{i}": AxialTable((f"{TABLES}.{i}.weight",), i)
            for i in range(2)
        },
        **layered("encoder.layers.{i}", "decoder.layers.{i}", LAYER),
        "encoder.layer_norm": "decoder.final_norm",
    }
    ignored_keys = ("*mask_value_float*",)
    tasks: ClassVar = {
        "ModelWithLMHead": Task(
            LanguageModelConfig(), {"lm_head.decoder": "head"}, unused_keys=("lm_head.bias",)
        ),
        "Model": LAST_TOKEN,
    }
    sizes = ("reformer-small", "reformer-enwik8")

    def check(self, hub: Tree) -> None:
        """Raise `InputError` for encoders, other kinds of layers and positions on other than two axes."""
        if not hub["is_decoder"]:
            raise InputError("config.json: is_decoder is False, and only True is supported")
        layers = hub["attn_layers"]
        if not layers or set(layers) - set(MECHANISMS):
            raise InputError(
                f"config.json: attn_layers is {layers}, expected 'local' or 'lsh' for each layer"
            )
        if hub["axial_pos_embds"] and len(hub["axial_pos_shape"]) != 2:
            raise InputError(
                f"config.json: axial_pos_shape is {hub['axial_pos_shape']}, and only 2 axes are supported"
            )

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set a mechanism for every layer, and the positions."""
        kinds, decoder = list(hub["attn_layers"]), tree["decoder"]
        mechanisms = {kind: MECHANISMS[kind](hub).to_dict() for kind in dict.fromkeys(kinds)}
        decoder["num_hidden_layers"] = len(kinds)
        decoder["attention"]["mechanism"] = {
            "kind": "alternate",
            "mechanisms": [mechanisms[kind] for kind in kinds],
        }
        # One table instead of a grid.
        position = LearnedConfig()
        if hub["axial_pos_embds"]:
            grid, widths = hub["axial_pos_shape"], hub["axial_pos_embds_dim"]
            default = list(widths) == _widths(tree)
            position = AxialConfig(grid=tuple(grid), widths=None if default else tuple(widths))
        decoder["position"] = position.to_dict()

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of both kinds of layers and of the positions."""
        layers: list[Tree] = get_path(tree, "decoder.attention.mechanism.mechanisms") or []
        kinds = ["lsh" if layer["kind"] == "lsh" else "local" for layer in layers]
        hub: Tree = {"is_decoder": True, "attn_layers": kinds, "num_hidden_layers": len(kinds)}
        for kind, layer in zip(kinds, layers):
            hub |= _write_lsh(layer) if kind == "lsh" else _write_local(layer)
        position: Tree = get_path(tree, "decoder.position") or {}
        hub["axial_pos_embds"] = position.get("kind") == "axial"
        if hub["axial_pos_embds"]:
            widths = position["widths"] or _widths(tree)
            hub |= {"axial_pos_shape": list(position["grid"]), "axial_pos_embds_dim": widths}
        return hub

    def hub_config(self, config: ModelConfig) -> tuple[Tree, str]:
        """Return the configuration, with the number of buckets as factors, or open as before."""
        hub, task = super().hub_config(config)
        if config.origin is not None and "num_buckets" in hub:
            # Factors, such as [64, 128], as a product, and null for the default.
            buckets = config.origin.fields.get("num_buckets")
            if _buckets({**hub, "num_buckets": buckets}) == hub["num_buckets"]:
                hub["num_buckets"] = buckets
        return hub, task

    def has_tensor(self, config: ModelConfig, task: str, theirs: str) -> bool:
        """Return whether a tensor is of its layer's kind, and of the model's kind of positions.

        LSH layers have `query_key` instead of `query`, axial positions `weights` instead of `embedding`.
        """
        assert config.decoder is not None
        learned = isinstance(config.decoder.position, LearnedConfig)
        if "position_embeddings." + ("weights." if learned else "embedding.") in theirs:
            return False
        query = re.search(r"layers\.(\d+)\.attention\.self_attention\.(query_key|query)\.", theirs)
        if query is None:
            return True
        mechanism = config.decoder.attention.mechanism.for_layer(int(query[1]))
        return (query[2] == "query_key") == mechanism.shares_queries

    def generated_tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the seeds of the hashes, which are the same in every load."""
        names = [name for name in own if name.endswith(".directions.origin")]
        return {name: torch.tensor([number, 0]) for number, name in enumerate(names)}


def _widths(tree: Tree) -> list[int]:
    """Return the default widths of the vectors of both axes."""
    quarter = tree["hidden_size"] // 4
    return [quarter, tree["hidden_size"] - quarter]


def _buckets(hub: Tree) -> int:
    """Return the buckets per round; by default twice the chunks of the longest text, a power of two."""
    buckets = hub.get("num_buckets")
    if buckets is None:
        chunks = hub.get("max_position_embeddings", 4096) // hub.get("lsh_attn_chunk_length", 64)
        return 2 ** max(1, (2 * chunks).bit_length() - 1)
    return buckets if isinstance(buckets, int) else math.prod(buckets)


def _read_local(hub: Tree) -> MechanismConfig:
    return local(
        hub["local_attn_chunk_length"],
        hub["local_num_chunks_before"],
        hub["local_attention_probs_dropout_prob"],
    )


def _read_lsh(hub: Tree) -> MechanismConfig:
    return hashed(
        hub["lsh_attn_chunk_length"],
        hub["lsh_num_chunks_before"],
        hub["num_hashes"],
        _buckets(hub),
    )


MECHANISMS = {"local": _read_local, "lsh": _read_lsh}


def _write_lsh(mechanism: Tree) -> Tree:
    chunk = max(1, mechanism["whole"])
    return {
        "lsh_attn_chunk_length": chunk,
        "lsh_num_chunks_before": mechanism["window"] // chunk - 1,
        "num_hashes": mechanism["rounds"],
        "num_buckets": mechanism["buckets"],
    }


def _write_local(mechanism: Tree) -> Tree:
    text = mechanism.get("pattern")
    pattern = None if text is None else Pattern.from_text(text)
    if not isinstance(pattern, BlockWindow) or pattern.after:
        pattern = BlockWindow(64, before=1, after=0)  # transformers' default
    return {
        "local_attn_chunk_length": pattern.size,
        "local_num_chunks_before": pattern.before,
        "local_attention_probs_dropout_prob": mechanism.get("dropout", 0.0),
    }
