"""The effect of each head on the probability of each token, for the page."""

import dataclasses

from polyformer.applications.interventions import check_decoder, replacements, token_effects
from polyformer.cli.plots.explorer.reading import Reading
from polyformer.core.errors import InputError
from polyformer.core.evaluation_mode import evaluating


def with_effects(reading: Reading) -> Reading:
    """Return the reading with the effects of heads: a forward pass per head, with its mean over the text.

    Raises `InputError` for a model that does not predict the next token, a memory, or a text of one token.
    """
    check_decoder(reading.model)
    if reading.inputs.keys() != {"input_ids"} or reading.inputs["input_ids"].shape[1] < 2 or reading.kept:
        raise InputError(
            "effects: expected a text of 2 tokens or more, without segments and cache policies; leave it out"
        )
    ids = reading.inputs["input_ids"]
    with evaluating(reading.model):
        losses, rises = token_effects(reading.model, ids, replacements(reading.model, [ids]))
    return dataclasses.replace(reading, effects=(losses[0], rises[:, :, 0]))
