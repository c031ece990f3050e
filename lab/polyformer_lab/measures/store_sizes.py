"""A checkpoint with an added store of earlier tokens, with stores of several sizes."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyformer.data.tokenizers.loading import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import convert, from_pretrained
from polyformer.nn.memory.memorizing import set_store
from polyformer.training.tasks import LanguageModelling
from polyformer.training.tasks.lm import LanguageModellingConfig
from polyformer.training.tasks.text import exp
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.texts import first_ids


@measurement("store")
def store_sizes(
    cell: Cell, model: str, text: str, tokens: int, memory: str, length: int, stores: Sequence[int]
) -> Iterator[Row]:
    """Yield the perplexity of a text by the number of entries of the store.

    Args:
        cell: its run is measured; without a recipe the converted checkpoint, which is saved in its folder.
        model: the folder of the checkpoint.
        text: a file written by a preparation.
        tokens: the number of tokens that are predicted.
        memory: the memory that is added to the checkpoint.
        length: tokens of a segment.
        stores: sizes, in entries.
    """
    if cell.recipe is None:
        reader, _ = convert(from_pretrained(model), memory=memory)
        reader.save_pretrained(cell.folder / "model")
    else:
        reader = cell.fitted.model
    tokenizer = load_tokenizer(model)
    bos = LanguageModelling(LanguageModellingConfig(), tokenizer).bos
    ids = torch.tensor([[bos, *first_ids(text, tokenizer, tokens)]])
    for size in stores:
        set_store(reader, size)
        yield {"store": size, "perplexity": perplexity(reader, ids, length)}


@torch.no_grad()
def perplexity(model: Transformer, ids: Tensor, length: int) -> float:
    """Return the perplexity of ids [1, n + 1] in segments, each with the state of the segment before."""
    device, state, nats = next(model.parameters()).device, None, 0.0
    model.eval()
    goals = ids[:, 1:].to(device)
    for segment, following in zip(ids[:, :-1].to(device).split(length, 1), goals.split(length, 1)):
        output = model(segment, shift_labels=following, state=state, use_cache=True)
        assert output.loss is not None
        nats += float(output.loss) * following.numel()
        state = output.state
    return exp(nats / goals.numel())
