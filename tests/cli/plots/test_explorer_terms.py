"""The neuron view of scores that functions change: its rows add up, to the weights that the model records."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from playwright.sync_api import Page
from torch import Tensor, nn

import polyformer
from polyformer import create_model
from polyformer.attention.patterns.score_steps import UNNAMED, chain_score_mods, step, steps_of
from polyformer.cli.plots.explorer import page_of
from polyformer.cli.plots.explorer.calls import Buffers, measure_call
from polyformer.cli.plots.explorer.explore import size, written
from polyformer.cli.plots.explorer.reading import Reading
from polyformer.cli.plots.explorer.record import recorded_calls

LENGTH, LAYER, HEAD = 23, 1, 2
IDS = torch.randint(5, 60, (1, LENGTH), generator=torch.Generator().manual_seed(3))
SIZE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
PAIRS = [(17, 6), (17, 17), (20, 3), (22, 19)]
CLIP, RESCALE = "clipped at zero: ReLU", "rescaled by distance: times f(w |i - j|)"
SPAN, BIAS = "span: log m(distance)", "bias of the distance"


def own(preset: str = "decoder-tiny", heads: int = 4, **options: Any) -> nn.Module:
    """A model of random numbers, those that begin at 0 too."""
    torch.manual_seed(0)
    if isinstance(options.get("attention"), dict):
        options["attention"] |= {"num_attention_heads": heads}
    else:
        options["num_attention_heads"] = heads
    model = create_model(preset, **{**SIZE, **options}).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("position.w", "position.b", "mechanism.vector")):
            nn.init.normal_(parameter)
    return model


def capped() -> nn.Module:
    """Gemma 2's limit of scores, 2 here, which is reached."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Gemma2Config(
        vocab_size=64, intermediate_size=32, head_dim=8, query_pre_attn_scalar=1, **sizes
    )
    config.attn_logit_softcapping, config.sliding_window = 2.0, 8
    model = transformers.Gemma2Model._from_config(config, attn_implementation="eager").eval()
    nn.init.normal_(model.get_parameter(f"layers.{LAYER}.self_attn.q_proj.weight"))
    return model


def bert(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).eval()
    polyformer.attach(model, **options)
    return model


def global_rows(position: str) -> nn.Module:
    attention = {"mechanism": "Window(3) | Global(2)", "global_projections": True}
    return own("encoder-tiny", attention=attention, position=position)


CASES: dict[str, tuple[Callable[[], nn.Module], list[str], list[tuple[int, int]]]] = {
    "da": (lambda: own(position="da"), [CLIP, RESCALE], PAIRS),
    "da of few keys": (
        lambda: own(
            position="da", attention="PerHead([Window(3), Window(5), Window(4) | Global(2), Full()])"
        ),
        [CLIP, RESCALE],
        [(17, 14), (17, 0), (22, 22)],
    ),
    "dynamic spans": (
        lambda: own(attention="dynamic_span(max_span=20, ramp=9, initial=0.0)", position="none"),
        [SPAN],
        PAIRS,
    ),
    "dynamic spans and da": (
        lambda: own(attention="dynamic_span(max_span=20, ramp=9, initial=0.0)", position="da"),
        [CLIP, RESCALE, SPAN],
        PAIRS,
    ),
    "soft cap": (capped, ["soft cap: c tanh(score / c), c = 2"], [(17, 12), (17, 17), (20, 15)]),
    "labels": (
        lambda: own("encoder-tiny", position="etc_labels(global_tokens=2)"),
        ["query · vector of the label"],
        PAIRS,
    ),
    "a user's": (lambda: bert(score_mod=lambda s, b, h, i, j: s + (i - j) * 0.1), [UNNAMED], PAIRS),
    "global rows, t5": (lambda: global_rows("t5"), [BIAS], [(1, 20), (0, 0), (9, 1), (17, 15)]),
    "global rows, alibi": (lambda: global_rows("alibi"), [BIAS], [(1, 20), (0, 0), (9, 1), (17, 15)]),
}


def recorded(model: nn.Module) -> Tensor:
    """The weights [T, T] that the model itself records, of one head."""
    with torch.no_grad():
        return model(IDS, output_attentions=True).attentions[LAYER][0, HEAD]


def rows(tab: Page, query: int, key: int) -> dict[str, tuple[str, float]]:
    """What each row of the neuron view says, by its id."""
    tab.set_default_timeout(5000)
    tab.evaluate(f"location.hash = 'view=neuron&layer={LAYER + 1}&head={HEAD + 1}&query={query}&key={key}'")
    tab.locator(".neuron h3", has_text=f"query {query} ").wait_for()
    said = tab.locator("tr[data-term]").evaluate_all(
        "rows => rows.map(row => [row.dataset.term, row.firstChild.textContent, row.dataset.value])"
    )
    return {name: (text, float(value)) for name, text, value in said}


@pytest.mark.parametrize("name", CASES)
def test_rows_add_up_to_the_recorded_weight(opened: Callable[..., Page], tmp_path: Path, name: str):
    build, steps, pairs = CASES[name]
    model = build()
    weights = recorded(model)
    tokens = [f"word{i}" for i in range(LENGTH)]
    reading = Reading(
        name=name, model=model, inputs={"input_ids": IDS}, tokens={"encoder": tokens, "decoder": tokens}
    )
    path = tmp_path / "page.html"
    path.write_text(page_of(reading), encoding="utf-8")
    tab = opened(path, "view=neuron")
    for query, key in pairs:
        shown = rows(tab, query, key)
        added = [shown[f"position-{i + 1}"] for i in range(len(shown) - 5)]
        assert [text for text, _ in added][-len(steps) :] == [f"+ {text}" for text in steps]
        total = shown["scaled"][1] + sum(value for _, value in added)
        assert shown["score"][1] == pytest.approx(total, abs=1e-5)
        assert shown["weight"][1] == pytest.approx(float(weights[query, key]), abs=1e-5)
    assert weights[tuple(zip(*pairs))].max() > 0.01, "weights of nearly 0 show nothing"


def test_what_no_span_reaches_has_no_weight(opened: Callable[..., Page], tmp_path: Path):
    model = own(attention="dynamic_span(max_span=20, ramp=2, initial=-2.0)", position="none")
    weights = recorded(model)
    query, key = next((i, j) for i, j in (weights[:, :18] == 0).nonzero().tolist() if j <= i)
    tokens = {"decoder": [f"word{i}" for i in range(LENGTH)]}
    path = tmp_path / "page.html"
    path.write_text(
        page_of(Reading(name="x", model=model, inputs={"input_ids": IDS}, tokens=tokens)), encoding="utf-8"
    )
    tab = opened(path, "view=neuron")
    shown = rows(tab, query, key)
    assert shown["weight"][1] == 0
    assert "\u2212∞" in tab.locator("tr[data-term='position-1'] td").inner_text()


@pytest.mark.parametrize("name", ["da of few keys", "global rows, alibi"])
def test_the_size_counts_what_functions_add(name: str):
    site = measure_call(recorded_calls(CASES[name][0](), {"input_ids": IDS})[0])
    for precision in ("float32", "float16", "int8"):
        buffers = Buffers()
        written(site, precision, buffers)
        assert size(site, precision) <= buffers.size + 400 <= size(site, precision) + 4096
        least = 2 if precision != "float32" else 4
        assert size(site, precision) > size(without_functions(site), precision) + 40 * least


def without_functions(site: Any) -> Any:
    """The site as if its scores were q . k and terms by distance."""
    call = site.call
    request = dataclasses.replace(call.request, score_mod=None)
    projected = call.projected and (call.projected[0], dataclasses.replace(call.projected[1], score_mod=None))
    return dataclasses.replace(site, call=dataclasses.replace(call, request=request, projected=projected))


def test_steps_are_named_and_flat():
    first, second = (lambda score, *_: score + 1), step("twice")(lambda score, *_: 2 * score)
    both = chain_score_mods([None, chain_score_mods([first, second]), second])
    assert [name for name, _ in steps_of(both)] == [UNNAMED, "twice", "twice"]
    assert chain_score_mods([None]) is None
    assert chain_score_mods([first, None]) is first
    assert both is not None
    place = torch.zeros(1)
    assert both(torch.ones(1), place, place, place, place) == 8
