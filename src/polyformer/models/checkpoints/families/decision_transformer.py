"""Decision Transformer: trajectories read by GPT-2's layers. Chen et al. 2021."""

import dataclasses
from typing import Any, ClassVar

from polyformer.attention.positions import LearnedConfig
from polyformer.models.architectures import PredictionConfig, TrajectoryConfig, TrajectoryTransformer
from polyformer.models.checkpoints.config_mapping import Tree, option
from polyformer.models.checkpoints.families.gpt import BUFFERS, LAYER, SCALE
from polyformer.models.checkpoints.families.layers import divide_by_layer, write_scales
from polyformer.models.checkpoints.family import Family, Task, register
from polyformer.models.checkpoints.key_mapping import layered
from polyformer.models.checkpoints.values import options


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
    config_mapping = options(
        "decoder",
        {"hidden_size": 128, "n_positions": 1024, "n_layer": 3, "n_head": 1, "n_inner": None},
        {"activation_function": "relu", "resid_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5},
        {"initializer_range": 0.02},
        option("max_ep_len", 4096, "max_timesteps"),
        option("state_dim", 17, "head.state_size"),
        option("act_dim", 4, "head.action_size"),
        option("action_tanh", True, "head.bounded"),
        option("embd_pdrop", 0.1, "embedding_dropout"),
        SCALE,
    )
    required: ClassVar = {"add_cross_attention": False}
    other_options: ClassVar = {"scale_attn_by_inverse_layer_idx": False}
    ignored_options = ("reorder_and_upcast_attn", "use_cache", "vocab_size", "bos_token_id", "eos_token_id")
    key_mapping: ClassVar = {
        "embed_timestep": "timesteps",
        "embed_[return|state|action]": "[returns|states|actions]",
        "embed_ln": "norm",
        "encoder.wpe": "decoder.position.tables.0",
        **layered("encoder.h.{i}", "decoder.layers.{i}", LAYER),
        "encoder.ln_f": "decoder.final_norm",
    }
    ignored_keys = BUFFERS
    tasks: ClassVar = {
        "Model": Task(
            PredictionConfig(),  # type: ignore[arg-type]
            {"predict_[state|action.0|return]": "head.[states|actions|returns]"},
            prefixed=False,
            labelled=False,
            # GPT-2 brings a table of tokens, and trajectories have none
            unused_keys=("encoder.wte.weight",),
        )
    }

    def read_other_options(self, tree: Tree, hub: Tree) -> None:
        """Set the default inner width, and the division of scores by the layer number."""
        feedforward = tree["decoder"]["feedforward"]
        if feedforward["intermediate_size"] is None:
            feedforward["intermediate_size"] = 4 * tree["hidden_size"]
        if hub["scale_attn_by_inverse_layer_idx"]:
            divide_by_layer(tree)

    def write_other_options(self, tree: Tree) -> Tree:
        """Return the options of the scores' scale."""
        return write_scales(tree)

    def task_of(self, config: Any) -> str:
        """Return the only class of the family."""
        return "Model"
