"""Continue a text with a trained language model, shown as it is written."""

import sys
from dataclasses import dataclass
from typing import Literal

from polyformer.commands.base import argument, option

EXAMPLES = """examples:
  polyformer generate runs/default-1 --prompt "The assert statement"
  polyformer generate runs/default-1 --prompt "The" --temperature 0.8 --top-k 50 --seed 1
  polyformer generate runs/default-1 --prompt "The" --num-beams 4 --max-new-tokens 20
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument("folder of a run, or of a model with its tokenizer")
    prompt: str = option("the text to continue (default: none, the beginning of a document)", "")
    max_new_tokens: int = option("tokens to write at most", 64)
    temperature: float | None = option(
        "sample, with logits divided by this (default: the likeliest token every time)"
    )
    top_k: int | None = option("sample among so many of the likeliest tokens")
    top_p: float | None = option(
        "sample among the fewest likeliest tokens that together have this probability"
    )
    seed: int | None = option("sample the same text for the same seed")
    num_beams: int = option("beam search with so many beams (shown at the end)", 1)
    no_repeat_ngram_size: int = option("no run of so many tokens occurs twice (default: any may)", 0)
    repetition_penalty: float = option("above 1 makes tokens that are there already less likely", 1.0)
    stop: str | None = option("end at this text")
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.generation import TextStreamer
    from polyformer.recipes.run import writer

    config = asked(options)
    task, model = writer(options.run, options.device)
    if config.method == "beam":
        print(options.prompt + task.generate(model, options.prompt, config)[0])
        return
    waiting = [options.prompt]  # until something is written: a prompt may be too long

    def show(piece: str) -> None:
        sys.stdout.write(waiting.pop() + piece if waiting else piece)
        sys.stdout.flush()

    streamer = TextStreamer(task.tokenizer.decode, config.stop, show)
    task.generate(model, options.prompt, config, streamer)
    streamer.finish()
    show("\n")


def asked(options: Options):
    """The options as a `GenerationConfig`; any option of sampling asks for sampling."""
    from polyformer.generation import BeamConfig, ConstraintConfig, GenerationConfig, SamplingConfig

    given = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        repetition_penalty=options.repetition_penalty,
        stop=() if options.stop is None else (options.stop,),
        sampling=SamplingConfig(do_sample=True, **given) if given else SamplingConfig(),
        beam=BeamConfig(num_beams=options.num_beams),
        constraints=ConstraintConfig(no_repeat_ngram_size=options.no_repeat_ngram_size),
    )
