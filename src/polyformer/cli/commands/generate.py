"""Continue texts with a trained language model; prints each text as it is generated.

Several texts are continued separately, in the given order, with an empty line between them.

By default the most probable token is chosen in each step (greedy decoding). Any of --temperature, --top-k,
--top-p and --seed turns on sampling, --num-beams beam search (with --num-beam-groups in diverse groups),
--penalty-alpha contrastive search among the --top-k likeliest tokens, and --dola-layers the contrast of
layers. --draft generates the same text in fewer passes of the model, and prints on standard error how many
proposed tokens were accepted. Other settings are the checkpoint's own generation settings. --datastore mixes
in the tokens that followed similar contexts in another text (kNN-LM); with --frozen a model that was trained
with neighbours (SPALM) reads them.

Several processes (torchrun --nproc-per-node N -m polyformer generate ...) share a model that is too large for
one device (tensor parallel): each has a part of the heads and of the feed-forwards. The first process prints
the same text as a single process.
"""

import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyformer.cli.commands.options import Device, argument, device, option
from polyformer.cli.commands.processes import Shares, divided, refuse_several
from polyformer.core.limits import COUNT, NEW_TOKENS

if TYPE_CHECKING:
    from polyformer.applications.retrieval import Mixture as KnnMixture
    from polyformer.applications.retrieval.readers import ContextReader
    from polyformer.models.architectures import Transformer
    from polyformer.models.generation import Draft, GenerationConfig, Mixture, Retrieval
    from polyformer.training.recipes.writer import Writer

EXAMPLES = """examples:
  polyformer generate runs/demo-1 --prompt "class Stack:" "def push("
  polyformer generate runs/demo-1 --prompt "def " --temperature 0.8 --top-k 50 --seed 1
  polyformer generate runs/demo-1 --prompt "def " --num-beams 4 --max-new-tokens 20
  polyformer generate runs/demo-1 --prompt "def " --num-beams 4 --num-beam-groups 2 --diversity-penalty 0.5
  polyformer generate runs/demo-1 --prompt "def " --penalty-alpha 0.6 --top-k 4
  polyformer generate runs/demo-1 --prompt "def " --dola-layers high --repetition-penalty 1.2
  polyformer generate runs/demo-1 --prompt "def " --draft lookup
  polyformer generate runs/demo-1 --prompt "def " --datastore stores/demo --lambda 0.3 --knn-temperature 10
  polyformer generate runs/spalm --prompt " The" --frozen runs/wikitext2 --datastore stores/wikitext2
"""


SAMPLING = "temperature", "top_k", "top_p", "seed"
SETTINGS = (
    *SAMPLING,
    "max_new_tokens",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "penalty_alpha",
    "dola_layers",
    "no_repeat_ngram_size",
    "repetition_penalty",
)
"""Options with the names of transformers' generation settings, and the seed."""

SPECULATION = "draft_tokens", "lookup_ngram"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer generate` takes."""

    run: str = argument(
        "folder of a trained run of the task lm, or of a checkpoint with its tokenizer", metavar="RUN"
    )
    prompt: tuple[str, ...] = option(
        "texts to continue, each in quotes (default: empty, the beginning of a document)", ("",), "TEXT"
    )
    max_new_tokens: int | None = option(
        "maximum number of tokens to generate (default: from the checkpoint, else 64)", most=NEW_TOKENS
    )
    temperature: float | None = option("sample from softmax(logits / X); X > 0 (default: 1 if sampling)")
    top_k: int | None = option("sample among the N most probable tokens (default: all)")
    top_p: float | None = option(
        "nucleus sampling: sample among the fewest tokens with a total probability of X or more (default: 1)"
    )
    seed: int | None = option(
        "seed of sampling; the same seed gives the same text (default: random)", most=COUNT
    )
    num_beams: int | None = option(
        "beam search with N beams; printed at the end (default: 1, no beam search)"
    )
    num_beam_groups: int | None = option(
        "diverse beam search: N groups of beams that avoid each other's tokens (default: 1)"
    )
    diversity_penalty: float | None = option(
        "with --num-beam-groups: penalty of a token for each beam of an earlier group that has it"
    )
    penalty_alpha: float | None = option(
        "contrastive search among the --top-k likeliest tokens (default: 4): weight, up to 1, of the "
        "penalty for similarity to the text so far"
    )
    dola_layers: str | None = option(
        "DoLa: contrast the last layer with earlier ones: low, high, or layers from 0, such as 0,2,4",
        metavar="low|high|N,...",
    )
    no_repeat_ngram_size: int | None = option("generate no n-gram of N tokens twice (default: 0, no limit)")
    repetition_penalty: float | None = option(
        "values above 1 make tokens that already occur less probable (default: 1, no penalty)"
    )
    draft: str | None = option(
        "propose several tokens at once, for speed: 'lookup' for the tokens that followed the same "
        "text before, or the run or checkpoint of a smaller model with the same tokenizer (default: "
        "none)",
        metavar="RUN|lookup",
    )
    draft_tokens: int | None = option(
        "with --draft: maximum number of tokens to propose (default: 5, lookup: 10)"
    )
    lookup_ngram: int | None = option(
        "with --draft lookup: maximum number of tokens that must have occurred before (default: 3)"
    )
    datastore: str | None = option("mix in the nearest neighbours of this store", metavar="STORE")
    lambda_: float | None = option(
        "with --datastore: weight of the neighbours, from 0 to 1 (default: as tuned)"
    )
    knn_temperature: float | None = option(
        "with --datastore: temperature of the neighbours (default: as tuned)"
    )
    neighbours: int | None = option("with --datastore: number of neighbours (default: as tuned)")
    search: Literal["auto", "flat", "index"] | None = option(
        "with --datastore: search with its index, or flat (default: auto)"
    )
    frozen: str | None = option(
        "with --datastore, for a model trained with neighbours (SPALM): the run that built the store",
        metavar="RUN",
    )
    stop: str | None = option("stop after this text is generated", metavar="TEXT")
    device: Device = device()


def run(options: Options) -> None:
    """Print the prompt and its continuation."""
    from polyformer.applications.retrieval.readers import foreign

    settings = settings_of(options)
    if options.datastore is not None and options.frozen is None and foreign(Path(options.run)):
        refuse_several("--datastore")
        return write_by_transformers(options, settings)
    with divided(options.device) as shares:
        write_by(options, settings, shares)


def settings_of(options: Options) -> "dict[str, Any]":
    """The generation settings that are given."""
    settings = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    if "dola_layers" in settings:
        settings["dola_layers"] = layers_of(settings["dola_layers"])
    if "penalty_alpha" in settings:
        settings.setdefault("top_k", 4)
    if any(name in settings for name in SAMPLING if name != "top_k" or "penalty_alpha" not in settings):
        settings["do_sample"] = True
    return settings


def write_by(options: Options, settings: "dict[str, Any]", shares: Shares) -> None:
    """Print the prompt and its continuation by a model of ours, of which each process has its share."""
    from polyformer.core.ops.workers import suited
    from polyformer.models.generation import SpeculationConfig
    from polyformer.training.recipes.run import writer
    from polyformer.training.recipes.writer import Writer
    from polyformer.training.tasks import LanguageModelling

    config = generation_config(settings, options.stop)
    task, model = writer(options.run, LanguageModelling, shares.loading(options.device))
    shares.divide(model)
    if isinstance(task, Writer):
        config = checkpoint_config(task, settings, options.stop)
    if config.method == "sample" and config.sampling.seed is None:  # torch's own is the same in every process
        config = replace(config, sampling=replace(config.sampling, seed=shares.agree(secrets.randbits(63))))
    speculation = {name: getattr(options, name) for name in SPECULATION if getattr(options, name) is not None}
    config = replace(config, speculation=SpeculationConfig(**speculation))
    draft = None if options.draft is None else draft_of(options, task)
    retrieval = retrieval_of(options, task)
    mixture = mixture_of(options) if retrieval is None else None
    with suited(model):
        for prompt in in_turn(options.prompt):
            write(task, model, config, prompt, draft, mixture, retrieval)


def layers_of(text: str) -> "str | list[int]":
    """What --dola-layers names; raises `InputError` for what is no layer."""
    from polyformer.core.errors import InputError, quote

    if text in ("low", "high"):
        return text
    names = text.split(",")
    if not all(name.strip().isdecimal() for name in names):
        raise InputError(f"--dola-layers: expected low, high, or layers such as 0,2,4, got {quote(text)}")
    return [int(name) for name in names]


def mixture_of(options: Options) -> "Mixture | None":
    """What --datastore and its options name; raises `InputError` for a store of another model."""
    from polyformer.core.errors import InputError

    if options.datastore is None:
        for name in ("lambda_", "knn_temperature", "neighbours", "search"):
            if getattr(options, name) is not None:
                raise InputError(f"--{name.rstrip('_').replace('_', '-')}: goes with --datastore")
        return None
    from polyformer.applications.retrieval.readers import open_reader

    return mixture_for(options, open_reader(options.run, options.device))


def mixture_for(options: Options, reader: "ContextReader") -> "KnnMixture":
    """The same for a model that is open."""
    from polyformer.applications.retrieval import Mixture, MixtureConfig, open_store

    store = open_store(options.datastore or "", reader.fingerprints, options.search or "auto")
    asked = options.lambda_, options.knn_temperature, options.neighbours
    return Mixture(store, MixtureConfig.chosen(store.mixture(), *asked, "--knn-temperature"))


def write_by_transformers(options: Options, settings: "dict[str, Any]") -> None:
    """Print the prompt and its continuation by a model that transformers alone loads."""
    from polyformer.applications.retrieval.by_transformers import generate
    from polyformer.applications.retrieval.readers import open_reader
    from polyformer.core.errors import InputError
    from polyformer.core.ops.workers import suited
    from polyformer.models.generation import TextStreamer

    for name in ("draft", "num_beam_groups", "diversity_penalty", "penalty_alpha", "dola_layers"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag}: not for {options.run}, which transformers runs; leave it out")
    reader: Any = open_reader(options.run, options.device)
    mixture, stop = mixture_for(options, reader), () if options.stop is None else (options.stop,)
    with suited(reader.model):
        for prompt in in_turn(options.prompt):
            show = shown_after(prompt)
            streamer = TextStreamer(reader.tokenizer.decode, stop, show)
            tokens = generate(reader, mixture, prompt, settings, stop, streamer)
            if not streamer.tokens:
                streamer.tokens = tokens  # of beams, which are chosen at the end
            streamer.finish()
            show("\n")


def retrieval_of(options: Options, task: Any) -> "Retrieval | None":
    """What --frozen and --datastore name; raises `InputError` for options and tokenizers that do not fit."""
    from polyformer.core.errors import InputError

    if options.frozen is None:
        return None
    if options.datastore is None or options.lambda_ is not None or options.knn_temperature is not None:
        raise InputError("--frozen: goes with --datastore, and without --lambda and --knn-temperature")
    from polyformer.applications.retrieval import Retrieval, open_store
    from polyformer.applications.retrieval.readers import open_own_reader

    reader = open_own_reader(options.frozen, task.tokenizer, options.device)
    store = open_store(options.datastore, reader.fingerprints, options.search or "auto")
    return Retrieval(reader.model, store, 4 if options.neighbours is None else options.neighbours)


def draft_of(options: Options, task: Any) -> "Draft":
    """What --draft names; raises `InputError` for a model whose tokenizer is not that of `task`."""
    from polyformer.core.errors import InputError
    from polyformer.training.recipes.run import writer
    from polyformer.training.tasks import LanguageModelling

    assert options.draft is not None
    if options.draft == "lookup":
        return "lookup"
    other, model = writer(options.draft, LanguageModelling, options.device)
    if other.tokenizer.backend.get_vocab() != task.tokenizer.backend.get_vocab():
        raise InputError(
            f"--draft: {options.draft} has another vocabulary than {options.run}; expected a model with the "
            "same tokenizer, or 'lookup'"
        )
    return model


def write(
    task: Any,
    model: "Transformer",
    config: "GenerationConfig",
    prompt: str,
    draft: "Draft | None" = None,
    mixture: "Mixture | None" = None,
    retrieval: "Retrieval | None" = None,
) -> None:
    """Print the prompt and its continuation, token by token unless it is by beam search."""
    from polyformer.models.generation import TextStreamer

    if config.method == "beam":
        generated = task.write(model, prompt, config, draft=draft, mixture=mixture, retrieval=retrieval)
        print(prompt + generated.texts(task.tokenizer.decode, config.stop)[0])
        return
    show = shown_after(prompt)
    streamer = TextStreamer(task.tokenizer.decode, config.stop, show)
    drafted = task.write(model, prompt, config, streamer, draft, mixture, retrieval).drafted
    streamer.finish()
    show("\n")
    if drafted is not None:
        counts = (
            f"{drafted.accepted} of {drafted.proposed} proposed tokens accepted in {drafted.passes} passes"
        )
        print(f"draft: {counts} of the model", file=sys.stderr)


def in_turn(prompts: Sequence[str]) -> Iterator[str]:
    """Yield the prompts, and print an empty line between what is written for them."""
    for number, prompt in enumerate(prompts):
        if number:
            print()
        yield prompt


def shown_after(prompt: str) -> Callable[[str], None]:
    """Prints pieces of a text, before the first the prompt: until then it may be refused as too long."""
    pending = [prompt]

    def show(piece: str) -> None:
        sys.stdout.write(pending.pop() + piece if pending else piece)
        sys.stdout.flush()

    return show


def generation_config(settings: "dict[str, Any]", stop: str | None) -> "GenerationConfig":
    """`settings` over the defaults of polyformer."""
    from polyformer.models.generation import GenerationConfig
    from polyformer.models.generation.setting_names import with_settings

    return with_settings(GenerationConfig(stop=() if stop is None else (stop,)), settings)


def checkpoint_config(task: "Writer", settings: "dict[str, Any]", stop: str | None) -> "GenerationConfig":
    """`settings` over those of the checkpoint."""
    seed = settings.pop("seed", None)
    task.follow(**settings, **({"stop_strings": (stop,)} if stop else {}))
    config = task.settings(64)
    return replace(config, sampling=replace(config.sampling, seed=seed)) if seed is not None else config
