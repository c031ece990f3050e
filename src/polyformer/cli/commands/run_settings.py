"""The generation settings of a run, for commands that write its model for other libraries."""

from typing import Any

from polyformer.core.paths import checked_path


def settings_of_run(folder: str, config: Any) -> dict[str, Any] | None:
    """Return the generation settings of a run that translates or summarizes, with the special tokens of the
    model's `config`; None for other models.
    """
    from polyformer.models.architectures.pretrained import RECIPE
    from polyformer.training.recipes.run import Run
    from polyformer.training.tasks import SequenceToSequence

    if not (checked_path(folder) / RECIPE).is_file():
        return None
    run = Run.open(folder)
    if not issubclass(run.recipe.task.task, SequenceToSequence):
        return None
    tokens = config.special.eos, config.special.pad, config.special.bos
    names = "eos_token_id", "pad_token_id", "decoder_start_token_id"
    special = {name: token for name, token in zip(names, tokens) if token is not None}
    return {**special, **run.task_of(SequenceToSequence).generation_settings()}
