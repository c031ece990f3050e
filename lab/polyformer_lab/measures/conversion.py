"""Trained models converted to another attention."""

from collections.abc import Iterator, Mapping

from polyformer.models.checkpoints import convert, read_attention
from polyformer.training.tasks import TextTask
from polyformer_lab.cells import Cell, Row, measurement


@measurement("converted")
def converted(cell: Cell, attentions: Mapping[str, str | None] = {}) -> Iterator[Row]:
    """Yield the validation perplexity of the run, or of its model converted to each attention.

    Args:
        cell: a run.
        attentions: the attention of each conversion by name, None for no change; each model is saved in
            the folder of this name in the run's folder.
    """
    fitted = cell.fitted
    assert isinstance(fitted.task, TextTask)
    rows = fitted.task.held_out(fitted.splits.validation or [])
    for name, text in attentions.items():
        model, report = convert(fitted.model, read_attention(text))
        model.save_pretrained(cell.folder / name)
        scores = fitted.task.measure(model.eval(), rows)
        yield {
            "converted": name,
            "perplexity": scores["perplexity"],
            "new_tensors": len(report.newly_initialized),
        }
    if not attentions:
        yield {"perplexity": fitted.scores["validation"]["perplexity"]}
