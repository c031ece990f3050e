"""Decision Transformer: trajectories read by GPT-2's layers. Chen et al. 2021."""

import dataclasses
from typing import Any, ClassVar

from polyformer.checkpoints.families.gpt2 import (
    LAYER,
    MECHANISM,
    describe_scales,
    divide_by_layer,
)
from polyformer.checkpoints.family import Family, Task, register
from polyformer.checkpoints.fields import Tree, act, choice, field
from polyformer.checkpoints.names import layered
from polyformer.model import PredictionConfig, TrajectoryConfig, TrajectoryTransformer
from polyformer.position import LearnedConfig

FIELDS = (
    field("hidden_size", 128, "hidden_size"),
    field("max_ep_len", 4096, "max_timesteps"),
    field("state_dim", 17, "head.state_size"),
    field("act_dim", 4, "head.action_size"),
    field("action_tanh", True, "head.bounded"),
    field("n_positions", 1024, "max_position_embeddings"),
    field("n_layer", 3, "decoder.num_hidden_layers"),
    field("n_head", 1, "decoder.attention.num_attention_heads"),
    field("n_inner", None, "decoder.feedforward.intermediate_size"),
    act("activation_function", "relu", "decoder.feedforward.activation"),
    field("resid_pdrop", 0.1, "decoder.dropout"),
    field("embd_pdrop", 0.1, "embedding_dropout"),
    field("attn_pdrop", 0.1, f"{MECHANISM}.dropout"),
    field("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    field("initializer_range", 0.02, "initializer_range"),
    choice("scale_attn_weights", True, {True: None, False: 1.0}, f"{MECHANISM}.scale"),
)
HEAD = {
    "predict_state": "head.states",
    "predict_action.0": "head.actions",
    "predict_return": "head.returns",
}


@register
class DecisionTransformer(Family):
    """Its table of positions is kept, though every token stands at the first."""

    model_type = "decision_transformer"
    classes = "DecisionTransformer"
    paper = "Chen et al. 2021"
    objective = "recorded actions, given states and returns to go"
    template: ClassVar[Any] = dataclasses.replace(
        TrajectoryConfig(), decoder=dataclasses.replace(TrajectoryConfig().decoder, position=LearnedConfig())
    )
    model: ClassVar[Any] = TrajectoryTransformer
    fields = FIELDS
    aliases: ClassVar = {
        "max_position_embeddings": "n_positions",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    fixed: ClassVar = {"add_cross_attention": False}
    adjusted = ("scale_attn_by_inverse_layer_idx",)
    inert = ("reorder_and_upcast_attn", "use_cache", "vocab_size", "bos_token_id", "eos_token_id")
    names: ClassVar = {
        "embed_timestep": "timesteps",
        "embed_return": "returns",
        "embed_state": "states",
        "embed_action": "actions",
        "embed_ln": "norm",
        "encoder.wpe": "decoder.position.tables.0",
        **layered("encoder.h.{i}", "decoder.layers.{i}", LAYER),
        "encoder.ln_f": "decoder.final_norm",
    }
    ignored = ("*.attn.bias", "*.attn.masked_bias")
    tasks: ClassVar = {
        "Model": Task(
            PredictionConfig(),  # type: ignore[arg-type]
            HEAD,
            base=False,
            labelled=False,
            unused_keys=("encoder.wte.weight",),
        )
    }

    def adjust(self, tree: Tree, hub: Tree) -> None:
        feedforward = tree["decoder"]["feedforward"]
        if feedforward["intermediate_size"] is None:
            feedforward["intermediate_size"] = 4 * tree["hidden_size"]
        if hub.get("scale_attn_by_inverse_layer_idx"):
            divide_by_layer(tree)

    def describe(self, tree: Tree) -> Tree:
        return describe_scales(tree)

    def layers(self, config: Any) -> int:
        return config.decoder.num_hidden_layers

    def fits(self, config: Any) -> bool:
        return type(config) is type(self.template)

    def task_of(self, config: Any) -> str:
        return "Model"

    def tied(self, config: Any) -> bool:
        return False
