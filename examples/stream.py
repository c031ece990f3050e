"""Stream generated text: a thread generates, and an iterator yields the text.

polyformer train --out runs/demo            # two minutes; or use any checkpoint with its tokenizer
python examples/stream.py runs/demo "class Stack:"
"""

import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import torch

import polyformer
from polyformer.data import load_tokenizer
from polyformer.models.generation import TextStreamer


def pieces(model, tokenizer, prompt: str, **settings) -> Iterator[str]:
    """Yield the continuation of the prompt in whole characters, without stop strings."""
    queue: SimpleQueue[str | BaseException | None] = SimpleQueue()
    streamer = TextStreamer(tokenizer.decode, settings.get("stop", ()), queue.put)

    def write() -> None:
        try:
            ids = torch.tensor([tokenizer.encode(prompt)])
            model.generate(ids, streamer=streamer, decode=tokenizer.decode, **settings)
            streamer.finish()
            queue.put(None)
        except BaseException as error:  # otherwise the reader would wait forever
            queue.put(error)

    threading.Thread(target=write, daemon=True).start()
    while (piece := queue.get()) is not None:
        if isinstance(piece, BaseException):
            raise piece
        yield piece


if __name__ == "__main__":
    folder, prompt = sys.argv[1:3]
    model = polyformer.from_pretrained(folder).eval()
    print(prompt, end="")
    for piece in pieces(model, load_tokenizer(folder), prompt, max_new_tokens=60):
        print(piece, end="", flush=True)
    print()
