"""Decision Transformer: trajectories read by GPT-2's layers. Chen et al. 2021."""

import dataclasses
from typing import Any, ClassVar

from polyformer.attention.positions import LearnedConfig
from polyformer.models.architectures import PredictionConfig, TrajectoryConfig, TrajectoryTransformer
from polyformer.models.checkpoints.config_mapping import Tree, activation, choice, option
from polyformer.models.checkpoints.families.gpt2 import LAYER
from polyformer.models.checkpoints.families.gpt_common import MECHANISM, divide_by_layer, write_scales
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered

OPTIONS = (
    option("hidden_size", 128, "hidden_size"),
    option("max_ep_len", 4096, "max_timesteps"),
    option("state_dim", 17, "head.state_size"),
    option("act_dim", 4, "head.action_size"),
    option("action_tanh", True, "head.bounded"),
    option("n_positions", 1024, "max_position_embeddings"),
    option("n_layer", 3, "decoder.num_hidden_layers"),
    option("n_head", 1, "decoder.attention.num_attention_heads"),
    option("n_inner", None, "decoder.feedforward.intermediate_size"),
    activation("activation_function", "relu", "decoder.feedforward.activation"),
    option("resid_pdrop", 0.1, "decoder.dropout"),
    option("embd_pdrop", 0.1, "embedding_dropout"),
    option("attn_pdrop", 0.1, f"{MECHANISM}.dropout"),
    option("layer_norm_epsilon", 1e-5, "decoder.norm.eps"),
    option("initializer_range", 0.02, "initializer_range"),
    choice("scale_attn_weights", True, {True: None, False: 1.0}, f"{MECHANISM}.scale"),
)
HEAD = {
    "predict_state": "head.states",
    "predict_action.0": "head.actions",
    "predict_return": "head.returns",
}


@register
class DecisionTransformer(Family):
    """A decoder of trajectories; its position table is kept, though every token has position 0."""

    model_type = "decision_transformer"
    class_prefix = "DecisionTransformer"
    paper = "Chen et al. 2021"
    objective = "prediction of recorded actions from states and returns-to-go"
    template: ClassVar[Any] = dataclasses.replace(
        TrajectoryConfig(), decoder=dataclasses.replace(TrajectoryConfig().decoder, position=LearnedConfig())
    )
    model: ClassVar[Any] = TrajectoryTransformer
    config_mapping = OPTIONS
    aliases: ClassVar = {
        "max_position_embeddings": "n_positions",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    required: ClassVar = {"add_cross_attention": False}
    other_options = ("scale_attn_by_inverse_layer_idx",)
    ignored_options = ("reorder_and_upcast_attn", "use_cache", "vocab_size", "bos_token_id", "eos_token_id")
    key_mapping: ClassVar = {
        "embed_timestep": "timesteps",
        "embed_return": "returns",
        "embed_state": "states",
        "embed_action": "actions",
        "embed_ln": "norm",
        "encoder.wpe": "decoder.position.tables.0",
        **layered("encoder.h.{i}", "decoder.layers.{i}", LAYER),
        "encoder.ln_f": "decoder.final_norm",
    }
    ignored_keys = ("*.attn.bias", "*.attn.masked_bias")
    tasks: ClassVar = {
        "Model": Task(
            PredictionConfig(),  # type: ignore[arg-type]
            HEAD,
            prefixed=False,
            labelled=False,
            unused_keys=("encoder.wte.weight",),
        )
    }

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the default inner width, and the division of scores by the layer number."""
        feedforward = tree["decoder"]["feedforward"]
        if feedforward["intermediate_size"] is None:
            feedforward["intermediate_size"] = 4 * tree["hidden_size"]
        if hub.get("scale_attn_by_inverse_layer_idx"):
            divide_by_layer(tree)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of the scores' scale."""
        return write_scales(tree)

    def layers(self, config: Any) -> int:
        """Return the number of layers of the decoder."""
        return config.decoder.num_hidden_layers

    def fits(self, config: Any) -> bool:
        """Return whether it is a model of trajectories."""
        return type(config) is type(self.template)

    def task_of(self, config: Any) -> str:
        """Return the only class of the family."""
        return "Model"

    def tied(self, config: Any) -> bool:
        """Return False: no output layer predicts tokens."""
        return False
