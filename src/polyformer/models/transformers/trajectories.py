"""The wrapped Decision Transformer."""

from typing import Any

from torch import nn
from transformers.models.decision_transformer.modeling_decision_transformer import DecisionTransformerOutput

from polyformer.core.errors import InputError
from polyformer.models.architectures import TrajectoryConfig, TrajectoryTransformer
from polyformer.models.transformers.base import OUTPUT_OPTIONS, PolyformerModel
from polyformer.models.transformers.config import PolyformerConfig
from polyformer.models.transformers.inputs import OUTPUT_ARGUMENTS, Arguments, accepts
from polyformer.models.transformers.offload import shared_weights_loaded


class PolyformerDecisionTransformer(PolyformerModel):
    """A Decision Transformer, which reads returns, states and actions and predicts the next of each."""

    main_input_name = "states"

    def _build(self, config: PolyformerConfig) -> nn.Module:
        resolve = config.resolve()
        assert isinstance(resolve, TrajectoryConfig)
        return TrajectoryTransformer(resolve)

    def get_input_embeddings(self) -> nn.Module:
        """Raise `InputError`: there is no token table."""
        raise InputError("get_input_embeddings: a Decision Transformer has no tokens")

    @accepts(
        "states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask", *OUTPUT_ARGUMENTS
    )
    def forward(self, arguments: Arguments) -> Any:
        """Return the result of transformers' model; the same arguments, without use of `rewards`."""
        as_dict = arguments.pop("return_dict", self.config.return_dict)
        arguments.pop("rewards", None)
        for name in OUTPUT_OPTIONS:
            arguments[name] = bool(arguments.get(name, getattr(self.config, name, False)))
        with shared_weights_loaded(self.model):
            result = self.model(**arguments)
        output = DecisionTransformerOutput(
            state_preds=result.states,
            action_preds=result.actions,
            return_preds=result.returns,
            last_hidden_state=result.last_hidden_state,
            hidden_states=result.hidden_states,
            attentions=result.attentions,
        )
        return output if as_dict is not False else output.to_tuple()


PolyformerModel.for_trajectories = PolyformerDecisionTransformer
