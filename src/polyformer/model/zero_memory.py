"""A text that begins after a memory full of zeros, to which its tokens attend: how transformers' own
Transformer-XL (until 4.35) began, where the paper, the authors' PyTorch code and ours begin after nothing."""

from polyformer.core.errors import InputError
from polyformer.memory.recurrent import Hidden, Recurrent
from polyformer.model.transformer import Transformer
from polyformer.outputs import ModelState
from polyformer.sequence.tokens import NO_TOKENS, Tokens
from polyformer.stack import LayerState


def zero_memory(model: Transformer, rows: int) -> ModelState:
    """The state before the first token of `rows` texts: `decoder.memory.length` vectors of zeros a layer.

    Its memories stay hidden states in evaluation too, which later segments project again.

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
    zeros = like.new_zeros(rows, memory.length, model.config.hidden_size)
    return ModelState(Tokens(memory.length), (LayerState(memory=Hidden(zeros)),) * layers)
