"""A run as one HTML page that requires no network: curves, baselines, samples, attention maps, costs.

`write_report` collects all results of a finished run from its folder. Maps show the attention of the trained
model on one text, and a table states them in words.
"""

import base64
import dataclasses
import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.mechanisms.softmax_attention import SoftmaxConfig
from polyformer.attention.patterns import Full
from polyformer.cli.plots.model import check, matrices, parameters, tree
from polyformer.cli.plots.pattern import pictures
from polyformer.cli.plots.report.examples import examples
from polyformer.cli.plots.report.mistakes import HeldOutRows, read_held_out
from polyformer.cli.plots.report.page import (
    HEAD_SIZE,
    HEADS,
    WINDOW,
    Growth,
    Series,
    asset,
    bar_chart,
    details,
    figure,
    line_chart,
    measure_growth,
    page,
    reliability,
    section,
    table,
    tiles,
)
from polyformer.cli.plots.svg import pattern_svg
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.core.sequence.context import Context
from polyformer.data import Tokenizer
from polyformer.models.architectures import Transformer, VisionTransformer
from polyformer.models.config import max_positions
from polyformer.models.generation import GenerationConfig, SamplingConfig
from polyformer.training.metrics import PER_SECOND, Row, read_metrics, series
from polyformer.training.recipes.report import number
from polyformer.training.recipes.run import Run
from polyformer.training.tasks import LanguageModelling

__all__ = ["REPORT", "write_report"]

TOKENS = 64
"""The most tokens of a text whose attention is shown."""


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The attention maps: `weights` [layers, H, n, n] of each token (row) for each token (column)."""

    tokens: list[str]
    weights: Tensor


def attention_maps(model: Transformer, tokenizer: Tokenizer, text: str) -> AttentionMaps | None:
    """Return the self-attention of an encoder or a decoder on the beginning of `text`.

    None for an encoder-decoder, and if attention has no matrix of tokens by tokens.
    """
    if model.encoder is not None and model.decoder is not None:
        return None
    try:
        check(model)
    except InputError:
        return None
    ids, _ = tokenizer.encode_for_model(text)
    if model.decoder is not None and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
    ids = ids[: min(TOKENS, max_positions(model.config) or TOKENS)]
    with torch.no_grad():
        row = {"input_ids": torch.tensor([ids], device=next(model.parameters()).device)}
        (layers,) = matrices(model.eval(), row).values()
    tokens = [tokenizer.decode([number], keep_special=True) for number in ids]
    return AttentionMaps(tokens, torch.stack([layer.float().cpu() for layer in layers]))


def attention_view(maps: AttentionMaps) -> str:
    """Return the parts of the page that its script fills, the data as JSON, and the table."""
    layers, heads = maps.weights.shape[:2]
    weights = base64.b64encode(bytes((maps.weights * 255).round().byte().flatten().tolist())).decode()
    data = json.dumps({"tokens": maps.tokens, "layers": layers, "heads": heads, "weights": weights})
    data = data.replace("<", "\\u003c")  # the text must not end the script element
    return (
        '<div class="heads" id="attention-heads" data-save="attention of every head" role="group" '
        'aria-label="heads: a row for each layer"></div>\n'
        '<div class="split"><div><canvas class="matrix" id="attention-matrix" data-save="attention" '
        'role="img" aria-label="attention matrix of the chosen head: query down, key across"></canvas>'
        "</div>\n"
        '<div><div class="tokens" id="attention-tokens" role="listbox" '
        'aria-label="tokens: choose one to see what it attends to"></div>\n'
        '<output id="attention-said"></output></div></div>\n'
        "<noscript><p>The maps are drawn by a script; the table below needs none.</p></noscript>\n"
        f'<script type="application/json" id="attention-data">{data}</script>\n'
        f"{details('Every head in numbers', attention_table(maps))}"
    )


def attention_table(maps: AttentionMaps) -> str:
    """Return a table by head, means over queries: distance of attention, and its share on three places."""
    n = len(maps.tokens)
    index = torch.arange(n)
    distance = (index.view(-1, 1) - index).abs().float()
    rows: dict[str, list[str]] = {}
    for layer, heads in enumerate(maps.weights, 1):
        for head, weights in enumerate(heads, 1):
            shares = weights.diagonal().mean(), weights.diagonal(-1).mean(), weights[:, 0].mean()
            far = f"{float((weights * distance).sum(-1).mean()):.1f}"
            rows[f"layer {layer}, head {head}"] = [far, *(f"{100 * float(share):.0f} %" for share in shares)]
    return table("", ["mean distance in tokens", "itself", "the token before", "the first token"], rows)


def highlighted(prompt: str, continuation: str) -> str:
    """Return a sample as preformatted text with a highlighted prompt."""
    return f"<pre><b>{html.escape(prompt)}</b>{html.escape(continuation)}</pre>"


REPORT = "report.html"

TEMPERATURES = (0.4, 0.7, 1.0)
DRAWN = 48
"""The number of tokens in the picture of the model's own pattern."""

LESS_IS_BETTER = {"loss", "perplexity", "word_perplexity", "bits_per_byte", "bits_per_dim"}
"""Metrics that a better model has less of."""


def write_report(run: Run, path: str | Path | None = None, growth: list[Growth] | None = None) -> Path:
    """Write the report of `run` to `path`, by default into its folder, and return the path.

    A section is omitted if the run has no data for it or if it does not concern the model: samples are drawn
    from language models, attention is shown for encoders and decoders that read text, the cost of causal
    attention for decoders with softmax attention. `growth`: the result of `measure_growth`, measured again by
    default (a few seconds).
    """
    path = run.folder / REPORT if path is None else Path(path)
    model = run.model("cpu")
    held, problem = validation_rows(run, model)
    samples = draw_samples(run, model)
    shown = samples[0][1] if samples else first_text(held)
    maps = attention_maps(model, run.tokenizer, shown) if shown else None
    sections = [
        summary(run, model),
        comparison(run),
        evaluations(run),
        curves(run),
        examples(held) if held is not None else problem,
        reliability(run),
    ]
    if samples:
        text = "What the model writes by itself, from cautious to bold. Blue is the prompt."
        blocks = [
            f"<h3>temperature {t}</h3>{highlighted(prompt, all_[len(prompt) :])}"
            for t, all_, prompt in samples
        ]
        sections.append(section("Samples", text, *blocks))
    if maps is not None:
        text = (
            "A square for each head: the query down, the key across, dark where the query attends. Choose a "
            "head, then hover over a token or move with the arrow keys: what the token attends to is shaded."
        )
        sections.append(section("Attention", text, attention_view(maps)))
    sections.append(patterns(model))
    if has_causal_attention(model):
        sections.append(scaling(measure_growth() if growth is None else growth))
    sections.append(parts(run, model))
    title = f"polyformer: the run {run.folder.resolve().name}"
    script = asset("attention.js") if maps is not None else ""
    content = page(title, described(run), list(filter(None, sections)), script)
    atomic_write(path, content.encode(errors="replace"))  # a row may have half of a character
    return path


def described(run: Run) -> str:
    """Return the run in a line: its data, and the library."""
    data, versions = run.recipe.data, run.facts.get("versions", {})
    source = "the default text" if data.path is None else data.path
    recipe, torch = run.recipe, versions.get("torch", "?")
    return f"task {recipe.task.kind}, trained on {source}, seed {recipe.seed}, torch {torch}"


def validation_rows(run: Run, model: Transformer) -> tuple[HeldOutRows | None, str]:
    """Return the validation rows; if they cannot be read any more, None and a section that says so."""
    try:
        return read_held_out(run, model), ""
    except InputError as error:
        return None, section("Examples", f"The validation data of the run cannot be read: {error}")


def first_text(held: HeldOutRows | None) -> str:
    """Return the first validation text, for a task that reads texts; "" without one."""
    if held is None or not held.rows or not held.task.config.tokenized:
        return ""
    return next((held.rows[0][name] for name in ("text", "source", "context") if name in held.rows[0]), "")


def draw_samples(run: Run, model: Transformer) -> list[tuple[float, str, str]]:
    """Return (temperature, whole text, prompt) by temperature; none for a model that is no language model."""
    task = run.task
    if not isinstance(task, LanguageModelling):
        return []
    prompt = task.config.prompt
    room = max(1, model.config.max_position_embeddings - len(task.start(prompt)))
    samples = []
    for temperature in TEMPERATURES:
        drawing = SamplingConfig(do_sample=True, temperature=temperature, top_p=0.95, seed=run.recipe.seed)
        config = GenerationConfig(max_new_tokens=min(200, room), sampling=drawing)
        samples.append((temperature, prompt + task.generate(model, prompt, config)[0], prompt))
    return samples


def summary(run: Run, model: Transformer) -> str:
    """Return the numbers at the top of the page."""
    facts, rows = run.facts, read_metrics(run.folder)
    seconds = next((row["seconds"] for row in reversed(rows) if row.get("seconds")), 0.0) or 0.0
    training = run.recipe.training
    numbers = [
        ("parameters", f"{parameters(model):,}", f"{run.recipe.model.preset or 'own configuration'}"),
        ("updates", f"{facts.get('steps', training.steps):,}", f"{run.recipe.optimizer.kind} optimizer"),
        ("training", f"{seconds:.0f} s", "wall-clock time, evaluations included"),
    ]
    numbers += speed(rows)
    for split, metrics in facts.get("metrics", {}).items():
        best = run.task.best
        numbers += [(name.replace("_", " "), number(metrics[name]), f"on {split} data") for name in (best,)]
        if "perplexity" in metrics:
            numbers.append(("perplexity", number(metrics["perplexity"]), f"a token, on {split} data"))
    return tiles(numbers)


def speed(rows: list[Row]) -> list[tuple[str, str, str]]:
    """Return the median speed of training in the unit of the task; nothing without a measured speed."""
    name = next((name for row in rows for name in row if name.endswith(PER_SECOND)), "")
    values = series(rows, name)[1]
    if not values:
        return []
    return [("speed", number(median(values)), f"{name.removesuffix(PER_SECOND)} a second in training")]


def comparison(run: Run) -> str:
    """Return the model compared with its baselines on the same held-out data, as bars and as a table."""
    scores = run.facts.get("metrics", {})
    rows = {**run.facts.get("baselines", {})}
    rows |= {f"this model, {split}": metrics for split, metrics in scores.items()}
    if not rows:
        return ""
    parts = [metrics_table(rows)]
    if not run.facts.get("baselines"):
        return section("Metrics", "Of held-out rows, which the model has not read.", *parts)
    candidates = ("bits_per_byte", run.task.best, "loss", *metric_names(rows))
    name = next(
        (name for name in candidates if all(has_bar(metrics, name) for metrics in rows.values())), None
    )
    if name is not None:
        bars = [(title, metrics[name]) for title, metrics in rows.items()]
        what = name.replace("_", " ")
        label = f"{what}: " + ", ".join(f"{title} {number(value)}" for title, value in bars)
        less = name in LESS_IS_BETTER or (name == run.task.best and run.task.direction == "min")
        better = "less" if less else "more"
        parts.insert(0, figure(bar_chart(label, bars, number), f"{what}; {better} is better"))
    text = "The baselines learn from the training rows and are measured on the validation rows."
    return section("Beside baselines", " ".join(filter(None, [run.facts.get("verdict"), text])), *parts)


def has_bar(metrics: dict[str, float], name: str) -> bool:
    """Return whether a metric can be drawn as a bar from 0."""
    return name in metrics and 0 <= metrics[name] < math.inf


def evaluations(run: Run) -> str:
    """Return the metrics of `polyformer evaluate` after training, by the name of the data."""
    rows = run.facts.get("evaluations", {})
    if not rows:
        return ""
    text = "Metrics of the trained model on these data, by polyformer evaluate."
    return section("Evaluations", text, metrics_table(rows))


def metrics_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table with a column for each metric of any row; a row without a metric has an empty cell."""
    names = metric_names(rows)
    cells = {
        title: [number(metrics[name]) if name in metrics else "" for name in names]
        for title, metrics in rows.items()
    }
    return table("", [name.replace("_", " ") for name in names], cells)


def metric_names(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the names of the metrics of all rows, in the order of their first appearance."""
    return list(dict.fromkeys(name for metrics in rows.values() for name in metrics))


def curves(run: Run) -> str:
    """Return the loss in training and in validation, with the baselines as levels."""
    rows = read_metrics(run.folder)
    lines = [
        Series(title, list(zip(*series(rows, name))))
        for title, name in (("training", "loss"), ("validation", "valid_loss"))
    ]
    if not any(line.points for line in lines):
        return ""
    for title, metrics in run.facts.get("baselines", {}).items():
        if "loss" in metrics:
            lines.append(Series(title, [(0.0, metrics["loss"])], level=True))
    kept = run.facts.get("kept", {})
    point = next((point for point in lines[1].points if point[0] == kept.get("step")), None)
    if point is not None:
        lines.append(Series(f"kept: step {kept['step']}", [point]))
    ends = [
        f"{line.name} ends at {line.points[-1][1]:.4g}" for line in lines if line.points and not line.level
    ]
    label = f"loss by step: {'; '.join(ends)}"
    chart = line_chart(label, lines, "step", "loss")
    text = "Less is better. Point at a dot for its value."
    if kept:
        text += f" The run {kept['reason']}."
    return section("Learning", text, figure(chart))


def patterns(model: Transformer) -> str:
    """Return the attended pairs of each stack with softmax attention; "" if all of its pairs are attended."""
    shown = []
    for name in ("encoder", "decoder"):
        stack, is_causal = getattr(model, name, None), name == "decoder"
        mechanism = None if stack is None else stack.mechanism.for_layer(0)
        if not isinstance(mechanism, SoftmaxConfig) or (mechanism.pattern is None and not is_causal):
            continue
        own = mechanism.pattern or Full()
        panels = pictures(own, seen_context(model, is_causal), block=8)
        causal = " and causal" if is_causal else ""
        caption = f"The {name}, first layer: {own.to_text()}{causal}. {panels[0].summary()}"
        shown.append(figure(pattern_svg(panels), caption, "pictures"))
    text = "A query is a row, a key a column. Light blue is computed with a mask, grey is masked out."
    return section("Patterns", text, *shown) if shown else ""


def has_causal_attention(model: Any) -> bool:
    """Return whether the model has a decoder with softmax attention."""
    decoder = getattr(model, "decoder", None)
    return decoder is not None and isinstance(decoder.mechanism.for_layer(0), SoftmaxConfig)


def seen_context(model: Any, is_causal: bool) -> Context:
    """Return the context for the picture of the model's own pattern: its image, or some tokens of a text."""
    if isinstance(model, VisionTransformer):
        image = model.config.image(*model.config.image_size)
        return Context(image.length, image.length, image=image)
    return Context(DRAWN, DRAWN, causal=is_causal)


def scaling(growth: list[Growth]) -> str:
    """Return the time by length of dense and of windowed attention, on this machine."""
    lines = [Series(item.name, list(zip(map(float, item.lengths), item.milliseconds))) for item in growth]
    last = ", ".join(f"{item.name} {item.milliseconds[-1]:.3g} ms" for item in growth)
    label = f"milliseconds by length, both logarithmic; at {growth[0].lengths[-1]} tokens: {last}"
    columns = [f"{item.name}, {unit}" for item in growth for unit in ("ms", "scores")]
    rows = {
        f"{length:,} tokens": [
            cell for item in growth for cell in (f"{item.milliseconds[i]:.3g}", f"{item.scores[i]:,}")
        ]
        for i, length in enumerate(growth[0].lengths)
    }
    text = (
        f"A forward pass of causal attention, {HEADS} heads of {HEAD_SIZE}, measured when this page was "
        f"written: to all tokens before, and to the last {WINDOW}. Twice the text costs 4 or 2 times."
    )
    chart = line_chart(label, lines, "tokens", "milliseconds", log=True)
    return section("Cost of attention", text, figure(chart), details("The numbers", table("", columns, rows)))


def parts(run: Run, model: Transformer) -> str:
    """Return the model's modules and the recipe, to read and to repeat."""
    return section(
        "Model and recipe",
        "The same recipe trains the same model again.",
        details("Modules and their parameters", f"<pre>{html.escape(tree(model))}</pre>"),
        details("Recipe", f"<pre>{html.escape(run.recipe.to_yaml())}</pre>"),
    )
