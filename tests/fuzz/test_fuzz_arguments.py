"""Python arguments of wrong types: each call of a public function succeeds or raises an `InputError`.

Every argument is replaced by every value of `VALUES`; at night also two arguments at a time.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import polyformer
from polyformer.applications.interventions import ablate
from polyformer.core.errors import MESSAGE
from registered import EVERYTHING

Arguments = dict[str, Any]

IDS, Q = torch.arange(12).view(2, 6) + 5, torch.linspace(-1, 1, 40).view(1, 2, 5, 4)
BY_DAY, PAIRS = 7, 320
"""By day every seventh case runs; at night all, and this many pairs of each function."""


class Models:
    """Small models, which all cases share."""

    def __init__(self, folder: Path):
        torch.manual_seed(0)
        self.decoder, self.encoder, self.both = (
            polyformer.create_model(f"{kind}-tiny").eval() for kind in ("decoder", "encoder", "transformer")
        )
        config = LlamaConfig(
            vocab_size=100,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        self.hub = LlamaForCausalLM(config).eval()
        self.state = self.decoder(IDS, use_cache=True).state
        self.folder = folder
        self.decoder.save_pretrained(folder / "saved")

    def attach(self, **named: Any) -> None:
        polyformer.attach(self.hub, **named)
        polyformer.detach(self.hub)

    def trace(self, layer: Any, head: Any, pattern: Any) -> None:
        with polyformer.trace(self.decoder) as calls:
            calls.layer(layer).head(head).limit(pattern)
            self.decoder(IDS)

    @property
    def values(self) -> list[Any]:
        """Values that some argument does not take."""
        numbers = [None, 5, -1, 2.5, float("nan"), True, 10**30]
        texts = ["x", "", b"x", Path("nowhere")]
        containers = [[], [1], ["a"], {}, {"a": 1}, ()]
        objects = [object(), lambda *inputs: 1, int, self.state, self.decoder]
        tensors = [torch.tensor(1.5), torch.zeros(0), torch.zeros(2, 6), torch.tensor([True]), IDS, Q]
        return [*numbers, *texts, *containers, *objects, *tensors]


def calls(models: Models) -> dict[str, tuple[Callable[..., Any], Arguments]]:
    """Return the functions by name, each with arguments that it takes."""
    attention = {"q": Q, "k": Q, "v": Q, "pattern": "Causal()", "context": None, "scale": None}
    text = {"input_ids": IDS, "attention_mask": None, "labels": None, "state": None}
    other = (
        *("position_ids", "document_ids", "segment_ids", "token_type_ids", "langs", "inputs_embeds"),
        *("global_attention_mask", "relation_ids", "shift_labels", "sentence_labels", "neighbour_ids"),
        *("score_positions", "source_spans", "decoder_input_ids"),
    )
    outputs = {"use_cache": False, "output_attentions": False, "output_hidden_states": False}
    model = {"name": "decoder-tiny", "hidden_size": 16, "attention": "Window(4)", "position": "rope"}
    settings = {"max_new_tokens": 2, "do_sample": False, "temperature": 1.0, "top_k": None, "num_beams": 1}
    objects = ("config", "streamer", "decode", "generator", "draft", "mixture", "retrieval")
    tables = ("q_pos", "kv_pos", "kv_valid", "q_doc", "kv_doc")
    return {
        "attend": (
            polyformer.attend,
            attention
            | {"mask_mod": None, "layout": None, "score_mod": None, "relative": None}
            | {"dropout": 0.0, "backend": "auto", "return_lse": False},
        ),
        "explain": (polyformer.explain, attention),
        "decoder": (models.decoder, text | dict.fromkeys(other) | outputs),
        "encoder": (models.encoder, text),
        "encoder-decoder": (models.both, text | {"decoder_input_ids": IDS, "decoder_attention_mask": None}),
        "generate": (
            models.decoder.generate,
            settings | {"input_ids": IDS, "attention_mask": None, **dict.fromkeys(objects)},
        ),
        "translate": (models.both.generate, {"input_ids": IDS, "attention_mask": None, "max_new_tokens": 2}),
        "encode": (models.both.encode, {"input_ids": IDS, "attention_mask": None, "reserve": 0}),
        "new_state": (models.decoder.new_state, {"reserve": 0, "cache": None}),
        "create_model": (polyformer.create_model, model | {"dropout": 0.1, "memory": None}),
        "model_config": (polyformer.model_config, {"name": "decoder-tiny", "overrides": {}}),
        "list_models": (polyformer.list_models, {"pattern": "*"}),
        "from_pretrained": (
            polyformer.from_pretrained,
            {"source": models.folder / "saved", "head": None, "weights": None, "attention": None}
            | {"memory": None, "dtype": None, "allow_pickle": False, "revision": None},
        ),
        "attach": (
            models.attach,
            {"attention": "Window(4)", "layers": None, "position": None, "score_mod": None, "memory": None}
            | {"cache": None},
        ),
        "detach": (polyformer.detach, {"model": None}),
        "audit": (polyformer.audit, {"model": None, "call": None, "checks": ["causality"], "accept": None}),
        "ablate": (ablate, {"model": models.decoder, "rows": [IDS], "by": "zero", "estimate": True}),
        "trace": (models.trace, {"layer": 0, "head": 0, "pattern": "Window(2)"}),
        "context": (polyformer.Context, {"q_len": 2, "kv_len": 4, "causal": True, **dict.fromkeys(tables)}),
        "context_parallel": (polyformer.context_parallel, {"group": None, "strategy": "auto"}),
        "window": (polyformer.Window, {"before": 3, "after": 0}),
        "strided": (polyformer.Strided, {"stride": 3}),
        "global": (polyformer.Global, {"tokens": 2}),
        "relative": (polyformer.Relative, {"first": 0, "bias": None, "content": None}),
        "generation_config": (polyformer.GenerationConfig, {"max_new_tokens": 3, "whole": None}),
        "fit": (polyformer.fit, {"recipe": None, "out": None, "resume": False, "start": None}),
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def cases(arguments: Arguments, values: list[Any]) -> Iterator[Arguments]:
    """Yield the replaced arguments of each case."""
    single = [{name: value} for name, value in itertools.product(arguments, values)]
    if not EVERYTHING:
        yield from single[::BY_DAY]
        return
    yield from single
    generator = random.Random(0)
    for _ in range(PAIRS if len(arguments) > 1 else 0):
        yield {name: generator.choice(values) for name in generator.sample(list(arguments), 2)}


FUNCTIONS = {"streamer", "decode", "mixture", "draft", "retrieval", "score_mod", "mask_mod", "layout", "call"}
"""Arguments that are functions: what these raise, or return wrongly, is left to their authors."""


def outcome(function: Callable[..., Any], arguments: Arguments) -> str:
    """Return "" if a call succeeds or raises a good `InputError`, else what it raised."""
    try:
        function(**arguments)
    except polyformer.InputError as error:
        return "" if 0 < len(str(error)) <= MESSAGE else f"a message of {len(str(error))} characters"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


@pytest.mark.filterwarnings("ignore")
def test_no_argument_ends_in_a_raw_error(models: Models):
    values, raw, count = models.values, [], 0
    for name, (function, arguments) in calls(models).items():
        for replaced in cases(arguments, values):
            if any(callable(value) for name, value in replaced.items() if name in FUNCTIONS):
                continue
            count += 1
            if problem := outcome(function, arguments | replaced):
                raw.append(f"{name}({', '.join(replaced)} = {[*map(type, replaced.values())]}): {problem}")
    assert raw == [], f"{len(raw)} of {count}"
    assert count > (10_000 if EVERYTHING else 500)


def test_the_message_names_the_argument_its_value_and_the_type():
    with pytest.raises(polyformer.InputError, match="context: expected Context or None, got int 5"):
        polyformer.attend(Q, Q, Q, context=5)  # type: ignore[call-overload]
    with pytest.raises(polyformer.InputError, match="dropout: expected float, got str 'x'"):
        polyformer.attend(Q, Q, Q, dropout="x")  # type: ignore[call-overload]
    with pytest.raises(polyformer.InputError, match="checks: expected Sequence or None, got int 5"):
        polyformer.audit("gpt2", checks=5)  # type: ignore[arg-type]


def test_other_errors_of_a_call_stay_as_they_are():
    def failing(*places: object) -> None:
        raise ZeroDivisionError("of the caller")

    for returned in (False, True):  # an overload each
        with pytest.raises(ZeroDivisionError, match="of the caller"):
            polyformer.attend(Q, Q, Q, score_mod=failing, return_lse=returned)  # type: ignore[call-overload]
