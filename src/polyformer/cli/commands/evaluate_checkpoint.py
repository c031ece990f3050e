"""`evaluate` of a checkpoint: the perplexity of a language model that was not trained by a run.

The windows of --length tokens are independent. Each predicts the next token at every position, so that every
token of the text except the first is predicted exactly once.
"""

from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.training.tasks.workers import Workers


def measure(options: Any, shared: "Workers") -> None:
    """Print loss and perplexity per token; the processes share the batches."""
    import torch

    from polyformer.applications.retrieval.readers import open_reader
    from polyformer.applications.retrieval.scoring import batched, contexts
    from polyformer.applications.retrieval.windows import windows
    from polyformer.cli.commands.evaluate_datastore import check, texts_of
    from polyformer.cli.commands.evaluate_progress import report, resumable
    from polyformer.core.ops.cpu_threads import model_threads
    from polyformer.training.recipes.report import table
    from polyformer.training.tasks.metrics import perplexity_metrics

    check(options)
    if options.data is None:
        raise InputError("--data is missing: a checkpoint has no validation data; name a text")
    reader = open_reader(options.run, options.device)
    reading = reader.reading(options.length, 0)
    every = windows(reader.documents(texts_of(options.data, options.format)), reading)
    settings = {"length": reading.length, "isolated": reader.isolated}
    shared = resumable(options.progress, shared, reader.model, [reader.config, settings])

    def sums(batch: list[Any]) -> torch.Tensor:
        _, _, log_p = contexts(reader, batch)
        return torch.tensor([-float(log_p.double().sum()), len(log_p)], dtype=torch.float64)

    zero = torch.zeros(2, dtype=torch.float64, device=next(reader.model.parameters()).device)
    with model_threads(reader.model):
        batches = batched(every, reading.length, options.tokens)
        nats, count = shared.total(sums, batches, zero)
    report(shared)
    if not count:
        raise InputError(f"{options.data}: too short: at least two tokens are required; name a longer text")
    if not shared.rank:
        print(table([(options.data, {**perplexity_metrics(nats, count), "tokens": int(count)})]))
