"""Continue texts with a trained language model, and print each text while it is generated.

The texts are arguments, those of --prompt, or a file (--file). Several texts are continued independently, in
their order, separated by an empty line.

The default is greedy decoding. --temperature, --top-k, --top-p and --seed select sampling; --num-beams
selects beam search, --num-beam-groups diverse beam search; --penalty-alpha selects contrastive search among
the --top-k most probable tokens; --dola-layers contrasts layers (DoLa). --draft generates the same text with
fewer passes of the model and prints on standard error how many proposed tokens were accepted. A masked
diffusion model fills masks: --denoising-steps, --block-length and --remasking say in which order. Without an
option, a checkpoint's own generation settings apply. --datastore mixes in the next tokens of similar contexts
in another text (kNN-LM); with --frozen, a model that was trained with neighbours (SPALM) reads them.

With several processes (torchrun --nproc-per-node N -m polyformer generate ...), the model is tensor parallel,
for models that are too large for one device. Only the first process prints, and the output is the same.
"""

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from polyformer.cli.commands.inputs import input_lines, refuse_file_names, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device, option, refuse, set_options
from polyformer.cli.commands.processes import ModelShard, refuse_several, tensor_parallel
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import COUNT, NEW_TOKENS, PositiveFloat, PositiveInt, Share

if TYPE_CHECKING:
    from polyformer.applications.retrieval import Mixture as KnnMixture
    from polyformer.applications.retrieval.readers import ContextReader
    from polyformer.models.architectures import Transformer
    from polyformer.models.generation import Draft, GenerationConfig, Mixture, Retrieval

EXAMPLES = """examples:
  polyformer generate runs/demo-1 "class Stack:" "def push("
  polyformer generate runs/demo-1 --prompt "def " --temperature 0.8 --top-k 50 --seed 1
  polyformer generate runs/demo-1 --prompt "def " --num-beams 4 --max-new-tokens 20
  polyformer generate runs/demo-1 --prompt "def " --num-beams 4 --num-beam-groups 2 --diversity-penalty 0.5
  polyformer generate runs/demo-1 --prompt "def " --penalty-alpha 0.6 --top-k 4
  polyformer generate runs/demo-1 --prompt "def " --dola-layers high --repetition-penalty 1.2
  polyformer generate runs/demo-1 --prompt "def " --draft lookup
  polyformer generate runs/medusa --prompt "def " --draft self
  polyformer generate runs/diffusion-1 --prompt "The " --denoising-steps 32 --block-length 16
  polyformer generate smollm2.gguf --chat "What is the capital of France?"
  polyformer generate runs/demo-1 --prompt "def " --max-new-tokens 1000 --compile
  polyformer generate model.gguf --file book.txt --cache "snapkv(budget=1024)"
  polyformer generate model.gguf --file book.txt --save-state book.safetensors
  polyformer generate model.gguf --state book.safetensors --prompt "$(cat book.txt) Who is the author?"
  polyformer generate runs/demo-1 --prompt "def " --datastore stores/demo --lambda 0.3 --knn-temperature 10
  polyformer generate runs/spalm --prompt " The" --frozen runs/wikitext2 --datastore stores/wikitext2
"""


SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "max_new_tokens",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "penalty_alpha",
    "dola_layers",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "denoising_steps",
    "block_length",
    "remasking",
)
"""Options with the names of generation settings, most of them transformers' names."""

SPECULATION = "draft_tokens", "lookup_ngram"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of `polyformer generate`."""

    run: str = argument(
        "folder of a trained run of the task lm or masked_diffusion, or of a checkpoint with its tokenizer",
        metavar="RUN",
    )
    text: tuple[str, ...] = argument(
        "texts to continue, each in quotes (default: an empty text, the beginning of a document)", ()
    )
    prompt: tuple[str, ...] = option("the same texts as an option, instead of TEXT", (), "TEXT")
    file: str | None = text_file()
    lines: bool = text_lines()
    chat: bool = option(
        "take each text for a user's message, by the chat template of the checkpoint, and print the reply",
        False,
    )
    max_new_tokens: int | None = option(
        "largest number of tokens to generate (default: as in the checkpoint, else 64)", most=NEW_TOKENS
    )
    temperature: float | None = option("sample from softmax(logits / X), X > 0 (default: 1 for sampling)")
    top_k: int | None = option("sample among the N most probable tokens (default: all)")
    top_p: float | None = option(
        "nucleus sampling: sample from the smallest set of tokens with total probability X or "
        "more (default: 1)"
    )
    seed: int | None = option("random seed of sampling (default: random)", most=COUNT)
    num_beams: int | None = option(
        "beam search with N beams; the text is printed at the end (default: 1, no beam search)"
    )
    num_beam_groups: int | None = option(
        "diverse beam search: N groups of beams, which avoid the tokens of other groups (default: 1)"
    )
    diversity_penalty: float | None = option(
        "with --num-beam-groups: penalty of a token for each beam of an earlier group that chose it"
    )
    penalty_alpha: float | None = option(
        "contrastive search among the --top-k most probable tokens (default: 4): weight, up to 1, of the "
        "penalty on similarity to the preceding text"
    )
    dola_layers: str | None = option(
        "DoLa: contrast the last layer with earlier layers: low, high, or numbers from 0, such as 0,2,4",
        metavar="low|high|N,...",
    )
    no_repeat_ngram_size: int | None = option("do not repeat n-grams of N tokens (default: 0, no limit)")
    repetition_penalty: float | None = option(
        "values above 1 make tokens that already occur less probable (default: 1, no penalty)"
    )
    denoising_steps: int | None = option(
        "masked diffusion: passes of the model for all new tokens (default: one for each token)"
    )
    block_length: int | None = option(
        "masked diffusion: write blocks of N tokens from left to right (default: all tokens at once, or the "
        "blocks of the model)"
    )
    remasking: Literal["confidence", "entropy", "random"] | None = option(
        "masked diffusion: which predictions are kept; random requires sampling (default: confidence)"
    )
    draft: str | None = option(
        "speculative decoding with proposals of a smaller model with the same tokenizer (a run or a "
        "checkpoint), of the model itself ('self', if it was trained with drafting), or 'lookup' for "
        "repetitions of the preceding text (default: none)",
        metavar="RUN|self|lookup",
    )
    draft_tokens: int | None = option(
        "with --draft: maximum number of tokens to propose (default: 5, lookup: 10, self: all)"
    )
    lookup_ngram: int | None = option(
        "with --draft lookup: largest n-gram to find in the preceding text (default: 3)"
    )
    datastore: str | None = option("mix in the nearest neighbours of this store", metavar="STORE")
    lambda_: Share | None = option("with --datastore: weight of the neighbours (default: as tuned)")
    knn_temperature: PositiveFloat | None = option(
        "with --datastore: temperature of the neighbours' weights (default: as tuned)"
    )
    neighbours: PositiveInt | None = option("with --datastore: number of neighbours (default: as tuned)")
    search: Literal["auto", "flat", "index"] | None = option(
        "with --datastore: search with its index, or exhaustively (flat) (default: auto)"
    )
    frozen: str | None = option(
        "with --datastore, for a model trained with neighbours (SPALM): the run that built the store",
        metavar="RUN",
    )
    compile: bool = option(
        "make a graph of the step of a token, as on a GPU by default; a CPU compiles for 10 seconds",
        False,
    )
    cache: str | None = option(
        "policy of the KV cache, such as 'snapkv(budget=1024)', which drops keys of a long prompt, or 'int8' "
        "(default: all keys, as computed)",
        metavar="POLICY",
    )
    save_state: str | None = option(
        "write the state after the prompt to this file, for --state, which reads only what follows",
        metavar="FILE",
    )
    state: str | None = option(
        "continue from the state in this file (--save-state); each text must begin with its tokens",
        metavar="FILE",
    )
    stop: str | None = option("stop after this text is generated", metavar="TEXT")
    device: Device = device()


def run(options: GenerateOptions) -> None:
    """Print the prompt and its continuation."""
    from polyformer.applications.retrieval.readers import foreign

    settings = settings_of(options)
    if options.datastore is not None and options.frozen is None and foreign(Path(options.run)):
        refuse_several("--datastore")
        refuse(options, ("chat",), f"not available for {options.run}, which transformers runs; leave it out")
        return write_by_transformers(options, settings)
    with tensor_parallel(options.device) as shard:
        write_texts(options, settings, shard)


def settings_of(options: GenerateOptions) -> "dict[str, Any]":
    """Return the generation settings that are set by options."""
    from polyformer.applications.loaded.writers import with_sampling

    settings = set_options(options, SETTINGS)
    if "dola_layers" in settings:
        settings["dola_layers"] = layers_of(settings["dola_layers"])
    return with_sampling(settings)


def write_texts(options: GenerateOptions, settings: "dict[str, Any]", shard: ModelShard) -> None:
    """Print the prompts and their continuations by a model of polyformer, which may be tensor parallel."""
    from polyformer.applications.loaded import load_for
    from polyformer.applications.loaded.writers import plain_settings
    from polyformer.core.ops.cpu import model_threads
    from polyformer.models.generation import SpeculationConfig

    plain_settings(settings)  # raises errors before the weights are read
    loaded = load_for(options.run, "generate", shard.loading_device(options.device))
    task, model = loaded.task, loaded.model
    shard.divide(model)
    if options.chat:
        config = loaded.reply_settings(settings, None, options.stop)
    else:
        config = loaded.settings(settings, options.stop)
    # torch's default seed is the same in all processes.
    if config.method == "sample" and config.sampling.seed is None:
        config = replace(config, sampling=replace(config.sampling, seed=shard.agree(secrets.randbits(63))))
    speculation = SpeculationConfig(**set_options(options, SPECULATION))
    config = replace(config, speculation=speculation, cache=options.cache)
    draft = None if options.draft is None else draft_of(options, task)
    retrieval = retrieval_of(options, task)
    mixture = mixture_of(options) if retrieval is None else None
    more = {"draft": draft, "mixture": mixture, "retrieval": retrieval, "compile": options.compile or None}
    make = PromptStart.of_message if options.chat else PromptStart.of_text
    with model_threads(model):
        if options.save_state is not None or options.state is not None:
            from polyformer.cli.commands.kept_states import write_with_state

            starts = (make(task, prompt) for prompt in prompts_of(options))
            return write_with_state(options, task, model, config, starts, printer_after)
        for prompt in in_turn(prompts_of(options)):
            write(task, model, config, make(task, prompt), more)


class PromptStart(NamedTuple):
    """The tokens that a model continues, and their printed part."""

    ids: list[int]
    shown: str

    @classmethod
    def of_text(cls, task: Any, prompt: str) -> "PromptStart":
        """Return the start of a text."""
        from polyformer.applications.loaded.writers import shown_prompt

        ids = task.start(prompt)
        return cls(ids, shown_prompt(prompt, task.tokenizer.decode(ids)))

    @classmethod
    def of_message(cls, task: Any, message: str) -> "PromptStart":
        """Return the start of the reply to a user's message, of which nothing is shown."""
        messages = [{"role": "user", "content": message}]
        text = task.tokenizer.chat.render(messages, add_generation_prompt=True)
        return cls(task.tokenizer.encode_chat(text)[0], "")


def layers_of(text: str) -> "str | list[int]":
    """Return the value of --dola-layers; raise `InputError` for an invalid layer."""
    if text in ("low", "high"):
        return text
    names = text.split(",")
    if not all(name.strip().isdecimal() for name in names):
        raise InputError(f"--dola-layers: expected low, high, or layers such as 0,2,4, got {quote(text)}")
    return [int(name) for name in names]


def mixture_of(options: GenerateOptions) -> "Mixture | None":
    """Return the mixture of --datastore and its options; raise `InputError` for a store of another model."""
    if options.datastore is None:
        refuse(options, ("lambda_", "knn_temperature", "neighbours", "search"), "requires --datastore")
        return None
    from polyformer.applications.retrieval.readers import open_reader

    return mixture_for(options, open_reader(options.run, options.device))


def mixture_for(options: GenerateOptions, reader: "ContextReader") -> "KnnMixture":
    """Return the mixture for a loaded model."""
    from polyformer.applications.retrieval import Mixture, MixtureConfig, open_store

    store = open_store(options.datastore or "", reader.fingerprints, options.search or "auto")
    options_of_mixture = options.lambda_, options.knn_temperature, options.neighbours
    return Mixture(store, MixtureConfig.chosen(store.mixture(), *options_of_mixture, "--knn-temperature"))


def write_by_transformers(options: GenerateOptions, settings: "dict[str, Any]") -> None:
    """Print the prompts and their continuations by a model that only transformers can load."""
    from polyformer.applications.loaded.writers import shown_prompt
    from polyformer.applications.retrieval.mixture import generate
    from polyformer.applications.retrieval.readers import open_reader
    from polyformer.core.ops.cpu import model_threads
    from polyformer.models.generation import TextStreamer

    names = ("draft", "num_beam_groups", "diversity_penalty", "penalty_alpha", "dola_layers", "compile")
    refuse(
        options, (*names, "cache"), f"not available for {options.run}, which transformers runs; leave it out"
    )
    reader: Any = open_reader(options.run, options.device)
    mixture, stop = mixture_for(options, reader), () if options.stop is None else (options.stop,)
    with model_threads(reader.model):
        for prompt in in_turn(prompts_of(options)):
            decode = reader.tokenizer.decode
            show = printer_after(shown_prompt(prompt, decode(reader.encode([prompt])[0])))
            streamer = TextStreamer(decode, stop, show)
            tokens = generate(reader, mixture, prompt, settings, stop, streamer)
            if not streamer.tokens:
                streamer.tokens = tokens  # beam search does not stream tokens
            streamer.finish()
            show("\n")


def retrieval_of(options: GenerateOptions, task: Any) -> "Retrieval | None":
    """Return the retrieval of --frozen and --datastore; raise `InputError` for options that contradict it."""
    if options.frozen is None:
        return None
    if options.datastore is None or options.lambda_ is not None or options.knn_temperature is not None:
        raise InputError("--frozen: requires --datastore, without --lambda and --knn-temperature")
    from polyformer.applications.retrieval import Retrieval, open_store
    from polyformer.applications.retrieval.readers import open_own_reader

    reader = open_own_reader(options.frozen, task.tokenizer, options.device)
    store = open_store(options.datastore, reader.fingerprints, options.search or "auto")
    return Retrieval(reader.model, store, 4 if options.neighbours is None else options.neighbours)


def draft_of(options: GenerateOptions, task: Any) -> "Draft":
    """Return the draft of --draft; raise `InputError` for a model with another tokenizer than `task`."""
    from polyformer.training.recipes.run import writer
    from polyformer.training.tasks import LanguageModelling

    assert options.draft is not None
    if options.draft == "lookup":
        return "lookup"
    if options.draft == "self":
        return "self"
    other, model = writer(options.draft, LanguageModelling, options.device)
    if other.tokenizer.backend.get_vocab() != task.tokenizer.backend.get_vocab():
        raise InputError(
            f"--draft: {options.draft} and {options.run} have different vocabularies; expected a model with "
            "the same tokenizer, or 'lookup'"
        )
    return model


def write(
    task: Any,
    model: "Transformer",
    config: "GenerationConfig",
    start: PromptStart,
    more: "dict[str, Any]",
) -> None:
    """Print a prompt and its continuation, token by token except for beam search.

    more: arguments of `polyformer.models.generation.generate`.
    """
    import torch

    from polyformer.models.generation import TextStreamer

    decode, ids = task.tokenizer.decode, torch.tensor([start.ids], device=next(model.parameters()).device)
    if config.method == "beam":
        generated = model.generate(ids, None, config, None, decode, **more)
        print(start.shown + generated.texts(decode, config.stop)[0])
        return
    show = printer_after(start.shown)
    streamer = TextStreamer(decode, config.stop, show)
    drafted = model.generate(ids, None, config, streamer, decode, **more).drafted
    streamer.finish()
    show("\n")
    if drafted is not None:
        counts = (
            f"{drafted.accepted} of {drafted.proposed} proposed tokens accepted in {drafted.passes} passes"
        )
        print(f"draft: {counts} of the model", file=sys.stderr)


def prompts_of(options: GenerateOptions) -> Iterator[str]:
    """Yield the texts to continue; raise `InputError` for a prompt that is the name of a file."""
    if options.file is None:
        refuse(options, ("lines",), "requires --file")
        if options.text and options.prompt:
            raise InputError("--prompt: not available with texts as arguments; leave out one of them")
        refuse_file_names("TEXT", options.text)
        refuse_file_names("--prompt", options.prompt)
        yield from options.text or options.prompt or ("",)
        return
    if options.text or options.prompt:
        other = "texts as arguments" if options.text else "--prompt"
        raise InputError(f"--file: not available with {other}; leave out one of them")
    for batch in input_lines((), options.file, options.lines):
        yield from batch


def in_turn(prompts: Iterable[str]) -> Iterator[str]:
    """Yield the prompts, and print an empty line between their outputs."""
    for number, prompt in enumerate(prompts):
        if number:
            print()
        yield prompt


def printer_after(prompt: str) -> Callable[[str], None]:
    """Return a function that prints pieces of a text; the first call prints the prompt first.

    An error such as a prompt that is too long thus comes before any output.
    """
    pending = [prompt]

    def show(piece: str) -> None:
        sys.stdout.write(pending.pop() + piece if pending else piece)
        sys.stdout.flush()

    return show
