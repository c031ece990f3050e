"""Continue a text with a trained language model; prints the text as it is generated.

Without options the most probable token is chosen every time (greedy decoding). Any of --temperature, --top-k,
--top-p and --seed turns on sampling, --num-beams beam search. A checkpoint's own generation settings apply
where an option is not given.
"""

import secrets
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polyformer.commands.options import Device, argument, device, option

if TYPE_CHECKING:
    from polyformer.generation import GenerationConfig
    from polyformer.model import Transformer
    from polyformer.recipes.writer import Writer

EXAMPLES = """examples:
  polyformer generate runs/demo-1 --prompt "class Stack:"
  polyformer generate runs/demo-1 --prompt "def " --temperature 0.8 --top-k 50 --seed 1
  polyformer generate runs/demo-1 --prompt "def " --num-beams 4 --max-new-tokens 20
"""


SAMPLING = "temperature", "top_k", "top_p", "seed"
SETTINGS = *SAMPLING, "max_new_tokens", "num_beams", "no_repeat_ngram_size", "repetition_penalty"
"""Options with the names of transformers' generation settings, and the seed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer generate` takes."""

    run: str = argument(
        "folder of a trained run of the task lm, or of a checkpoint with its tokenizer", metavar="RUN"
    )
    prompt: str = option("the text to continue (default: empty, the beginning of a document)", "", "TEXT")
    max_new_tokens: int | None = option(
        "largest number of tokens to generate (default: from the checkpoint, else 64)"
    )
    temperature: float | None = option("sample from softmax(logits / X); X > 0 (default: 1 where sampling)")
    top_k: int | None = option("sample among the N most probable tokens (default: all)")
    top_p: float | None = option(
        "nucleus sampling: sample among the fewest tokens whose probabilities sum to X or more (default: 1)"
    )
    seed: int | None = option("seed of sampling: the same seed, the same text (default: random)")
    num_beams: int | None = option(
        "beam search with N beams; printed at the end (default: 1, no beam search)"
    )
    no_repeat_ngram_size: int | None = option("generate no n-gram of N tokens twice (default: 0, no limit)")
    repetition_penalty: float | None = option(
        "above 1 makes tokens that already occur less probable (default: 1, no penalty)"
    )
    stop: str | None = option("stop after this text is generated", metavar="TEXT")
    device: Device = device()


def run(options: Options) -> None:
    """Print the prompt and its continuation."""
    from polyformer.ops.workers import suited
    from polyformer.recipes.run import writer
    from polyformer.recipes.writer import Writer
    from polyformer.tasks import LanguageModelling

    settings = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    if any(name in settings for name in SAMPLING):
        settings["do_sample"] = True
    config = generation_config(settings, options.stop)
    task, model = writer(options.run, LanguageModelling, options.device)
    if isinstance(task, Writer):
        config = checkpoint_config(task, settings, options.stop)
    if config.method == "sample" and config.sampling.seed is None:  # torch's own is the same in every process
        config = replace(config, sampling=replace(config.sampling, seed=secrets.randbits(63)))
    with suited(model):
        write(task, model, config, options.prompt)


def write(task: Any, model: "Transformer", config: "GenerationConfig", prompt: str) -> None:
    """Print the prompt and its continuation, token by token unless it is by beam search."""
    from polyformer.generation import TextStreamer

    if config.method == "beam":
        print(prompt + task.generate(model, prompt, config)[0])
        return
    pending = [prompt]  # until the first token: a prompt may be too long

    def show(piece: str) -> None:
        sys.stdout.write(pending.pop() + piece if pending else piece)
        sys.stdout.flush()

    streamer = TextStreamer(task.tokenizer.decode, config.stop, show)
    task.generate(model, prompt, config, streamer)
    streamer.finish()
    show("\n")


def generation_config(settings: "dict[str, Any]", stop: str | None) -> "GenerationConfig":
    """`settings` over the defaults of polyformer."""
    from polyformer.generation import BeamConfig, ConstraintConfig, GenerationConfig, SamplingConfig

    shared = {name: settings[name] for name in ("max_new_tokens", "repetition_penalty") if name in settings}
    sampling = {name: settings[name] for name in (*SAMPLING, "do_sample") if name in settings}
    return GenerationConfig(
        **shared,
        stop=() if stop is None else (stop,),
        sampling=SamplingConfig(**sampling),
        beam=BeamConfig(num_beams=settings.get("num_beams", 1)),
        constraints=ConstraintConfig(no_repeat_ngram_size=settings.get("no_repeat_ngram_size", 0)),
    )


def checkpoint_config(task: "Writer", settings: "dict[str, Any]", stop: str | None) -> "GenerationConfig":
    """`settings` over those of the checkpoint."""
    seed = settings.pop("seed", None)
    task.follow(**settings, **({"stop_strings": (stop,)} if stop else {}))
    config = task.settings(64)
    return replace(config, sampling=replace(config.sampling, seed=seed)) if seed is not None else config
