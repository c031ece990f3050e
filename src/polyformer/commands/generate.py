"""Continue a text with a trained language model, shown as it is written."""

import secrets
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from polyformer.commands.base import argument, option

if TYPE_CHECKING:
    from polyformer.generation import GenerationConfig
    from polyformer.model import Transformer
    from polyformer.recipes.writer import Writer

EXAMPLES = """examples:
  polyformer generate runs/default-1 --prompt "The assert statement"
  polyformer generate runs/default-1 --prompt "The" --temperature 0.8 --top-k 50 --seed 1
  polyformer generate runs/default-1 --prompt "The" --num-beams 4 --max-new-tokens 20
"""


SAMPLING = "temperature", "top_k", "top_p", "seed"
SETTINGS = *SAMPLING, "max_new_tokens", "num_beams", "no_repeat_ngram_size", "repetition_penalty"
"""Options that the hub calls the same, but for the seed, of which it knows nothing."""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument("folder of a run, or of a checkpoint with its tokenizer")
    prompt: str = option("the text to continue (default: none, the beginning of a document)", "")
    max_new_tokens: int | None = option("tokens to write at most (default: as the checkpoint says, or 64)")
    temperature: float | None = option(
        "sample, with logits divided by this (default: the likeliest token every time)"
    )
    top_k: int | None = option("sample among so many of the likeliest tokens")
    top_p: float | None = option(
        "sample among the fewest likeliest tokens that together have this probability"
    )
    seed: int | None = option("sample the same text for the same seed (default: another every time)")
    num_beams: int | None = option("beam search with so many beams (shown at the end)")
    no_repeat_ngram_size: int | None = option("no run of so many tokens occurs twice (default: any may)")
    repetition_penalty: float | None = option("above 1 makes tokens that are there already less likely")
    stop: str | None = option("end at this text")
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.ops.workers import suited
    from polyformer.recipes.run import writer
    from polyformer.recipes.writer import Writer
    from polyformer.tasks import LanguageModelling

    given = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    if any(name in given for name in SAMPLING):
        given["do_sample"] = True
    config = asked(given, options)
    task, model = writer(options.run, LanguageModelling, options.device)
    if isinstance(task, Writer):
        config = told(task, given, options)
    if config.method == "sample" and config.sampling.seed is None:  # torch's own is the same in every process
        config = replace(config, sampling=replace(config.sampling, seed=secrets.randbits(63)))
    with suited(model):
        write(task, model, config, options.prompt)


def write(task: Any, model: "Transformer", config: "GenerationConfig", prompt: str) -> None:
    """Print the prompt and what `model` continues it with, as it comes."""
    from polyformer.generation import TextStreamer

    if config.method == "beam":
        print(prompt + task.generate(model, prompt, config)[0])
        return
    waiting = [prompt]  # until something is written: a prompt may be too long

    def show(piece: str) -> None:
        sys.stdout.write(waiting.pop() + piece if waiting else piece)
        sys.stdout.flush()

    streamer = TextStreamer(task.tokenizer.decode, config.stop, show)
    task.generate(model, prompt, config, streamer)
    streamer.finish()
    show("\n")


def asked(given: "dict[str, Any]", options: Options) -> "GenerationConfig":
    """What is `given`, over our defaults; any option of sampling asks for sampling."""
    from polyformer.generation import BeamConfig, ConstraintConfig, GenerationConfig, SamplingConfig

    parts = {name: given[name] for name in ("max_new_tokens", "repetition_penalty") if name in given}
    drawn = {name: given[name] for name in (*SAMPLING, "do_sample") if name in given}
    return GenerationConfig(
        **parts,
        stop=stops(options),
        sampling=SamplingConfig(**drawn),
        beam=BeamConfig(num_beams=given.get("num_beams", 1)),
        constraints=ConstraintConfig(no_repeat_ngram_size=given.get("no_repeat_ngram_size", 0)),
    )


def told(task: "Writer", given: "dict[str, Any]", options: Options) -> "GenerationConfig":
    """What is `given`, over what the checkpoint says."""
    seed = given.pop("seed", None)
    task.follow(**given, **({"stop_strings": stops(options)} if options.stop else {}))
    config = task.settings(64)
    return replace(config, sampling=replace(config.sampling, seed=seed)) if seed is not None else config


def stops(options: Options) -> tuple[str, ...]:
    return () if options.stop is None else (options.stop,)
