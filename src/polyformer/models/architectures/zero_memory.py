"""An initial memory of zeros, to which the first tokens of a text attend. The Transformer-XL of transformers
(until 4.35) starts with it; the paper, the authors' PyTorch code and polyformer start with an empty
memory."""

from polyformer.core.errors import InputError
from polyformer.core.sequence.tokens import NO_TOKENS, Tokens
from polyformer.models.architectures.transformer import Transformer
from polyformer.models.outputs import ModelState
from polyformer.nn.memory.recurrent import Hidden, Recurrent
from polyformer.nn.stack import LayerState


def zero_memory(model: Transformer, rows: int) -> ModelState:
    """Return the state before `rows` texts: `decoder.memory.length` zero vectors per layer.

    Its memories are hidden states also in evaluation, and later segments project them again.

    Raises:
        InputError: the model's memory is not the recurrent one.
    """
    memory = None if model.decoder is None else model.decoder.memory
    if model.decoder is None or not isinstance(memory, Recurrent):
        raise InputError(
            "zero_memory: expected a model with the memory 'recurrent', as 'transfo-xl' models have"
        )
    layers = len(model.decoder.sequence)
    if not memory.length:
        return ModelState(NO_TOKENS, (LayerState(memory=Hidden()),) * layers)
    like = next(parameter for parameter in model.parameters() if parameter.is_floating_point()).detach()
    # Hidden states, which are projected like the states of an earlier segment.
    zeros = like.new_zeros(rows, memory.length, model.config.hidden_size)
    return ModelState(Tokens(memory.length), (LayerState(memory=Hidden(zeros)),) * layers)
