"""Choose the threshold of a model's early exits for a given risk, and save it in the checkpoint.

Generates texts without exits and with exits at decreasing thresholds, and saves the lowest threshold that
passes Learn then Test (Schuster et al. 2022, CALM): with probability --confidence, the generated texts lose
at most --risk of their quality on average. `generate` and `translate` then use this threshold. The texts must
not be part of the training data.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyformer.cli.commands.options import Device, argument, device, option, parse_numbers
from polyformer.core.errors import InputError
from polyformer.core.limits import NEW_TOKENS
from polyformer.core.ranges import PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.exits import ThresholdTest, Write
    from polyformer.cli.commands.model_and_texts import ModelAndTexts

EXAMPLES = """examples:
  polyformer calibrate runs/mine --data valid.txt
  polyformer calibrate smollm2-exits --data valid.txt --risk 0.1 --confidence 0.9 --texts 100
  polyformer calibrate runs/multi30k --data valid.tsv --measure references
  polyformer calibrate runs/mine --data valid.md --format text --thresholds 0.99,0.95,0.9
"""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of `polyformer calibrate`."""

    model: str = argument("folder of a trained run, or of a checkpoint, with early exits", metavar="MODEL")
    data: str | None = option(
        "texts to calibrate with; pairs for a translation model (default: the run's validation data)",
        metavar="PATH",
    )
    format: str | None = option(
        "format of PATH, if its name does not show it: text, lines, articles, tsv, ..."
    )
    risk: float = option("largest expected loss of quality, from 0 to 1 (default: 0.05)", 0.05)
    confidence: float = option("probability that the loss is within the risk (default: 0.95)", 0.95)
    measure: Literal["consistency", "references"] = option(
        "quality: agreement with the texts generated without exits, or ROUGE-L against the references "
        "(default: consistency)",
        "consistency",
    )
    thresholds: str | None = option(
        "thresholds to test, in decreasing order, separated by commas (default: 0.95,0.9,...,0.05)",
        metavar="X,X",
    )
    texts: PositiveInt = option("largest number of texts (default: 200)", 200)
    prompt: PositiveInt = option(
        "for a decoder-only model: tokens of each text that it reads as the prompt (default: 32)", 32
    )
    new_tokens: PositiveInt = option(
        "for a decoder-only model: tokens to generate (default: 32)", 32, most=NEW_TOKENS
    )
    device: Device = device()


def run(options: CalibrateOptions) -> None:
    """Print the tests and save the threshold."""
    from polyformer.applications.exits import CalibrateConfig, calibrate, check_texts, exits_of
    from polyformer.cli.commands.model_and_texts import load
    from polyformer.core.files import atomic_write
    from polyformer.core.ops.cpu import model_threads
    from polyformer.data import DataConfig
    from polyformer.models.architectures.pretrained import CONFIG

    asked = CalibrateConfig(risk=options.risk, confidence=options.confidence, measure=options.measure)
    if options.thresholds is not None:
        asked = replace(asked, thresholds=parse_numbers("--thresholds", options.thresholds))
    check_texts(options.texts, asked)
    if not Path(options.model).exists():
        raise InputError(f"{options.model}: no such directory; expected a run or a checkpoint with exits")
    source = load(options.model, held_out(options), options.device)
    exits_of(source.model)
    if options.format is not None:
        data = DataConfig.from_dict({**source.data.to_dict(), "format": options.format}, "data")
        source = replace(source, data=data)
    write, references = writing(options, source)
    check_texts(len(references), asked)
    layers = source.model.config.decoder.num_hidden_layers  # type: ignore[union-attr]
    print(f"{len(references)} texts; without exits a token passes {layers} layers\n")
    print("threshold    risk   p-value   layers per token   speedup")
    with model_threads(source.model):
        result = calibrate(source.model, write, references, asked, _show)
    if result.threshold is None:
        print(f"\nno threshold passes the test at risk {asked.risk}; {options.model} is unchanged")
        return
    atomic_write(Path(options.model) / CONFIG, source.model.config.to_json().encode())
    print(f"\nthreshold {result.threshold}: saved in {Path(options.model) / CONFIG}")


def _show(test: "ThresholdTest") -> None:
    measured = f"{test.threshold:9.2f}  {test.risk:6.4f}  {test.p_value:8.4f}"
    print(f"{measured}  {test.layers:17.2f}  {test.speed:8.2f}", flush=True)


def held_out(options: CalibrateOptions) -> str:
    """Return --data, or the validation data of the run."""
    from polyformer.models.architectures.pretrained import RECIPE
    from polyformer.training.recipes.run import Run

    if options.data is not None:
        return options.data
    named = None
    if (Path(options.model) / RECIPE).is_file():
        named = Run.open(options.model).recipe.data.validation
    if named is None:
        raise InputError("--data is missing: name texts that the model was not trained on")
    return named


def writing(options: CalibrateOptions, source: "ModelAndTexts") -> "tuple[Write, list[str]]":
    """Return the function that generates the texts, and the references."""
    from itertools import islice

    from polyformer.applications.exits import continuation_generator, translation_generator
    from polyformer.cli.commands.model_and_texts import texts, token_rows
    from polyformer.training.recipes.run import writer
    from polyformer.training.tasks import Translation

    if source.model.encoder is None:
        length = options.prompt + options.new_tokens
        rows = token_rows(source, source.columns[0], length, options.texts)
        return continuation_generator(rows, options.prompt, source.tokenizer.decode)
    if len(source.columns) < 2:
        raise InputError(
            f"{options.model}: a translation model can be calibrated only as a run, which has text pairs"
        )
    pairs = [list(islice(texts(source, column), options.texts)) for column in source.columns]
    return translation_generator(writer(options.model, Translation, options.device)[0], pairs[0]), pairs[1]
