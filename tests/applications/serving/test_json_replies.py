"""Replies that are JSON by a schema: all that end are valid, and other rows of the batch are unchanged."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import torch

pytest.importorskip("prometheus_client")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from pydantic import BaseModel  # noqa: E402
from test_server import LIMITS, client_of, number_of, served  # noqa: E402
from test_serving_engine import TOKENIZER, Client, alone, engine_of, model_of, prompt  # noqa: E402

from chat_models import chat_folder  # noqa: E402
from chat_templates import turn  # noqa: E402
from polyformer import GenerationConfig  # noqa: E402
from polyformer.applications.serving.grammars import Grammars  # noqa: E402
from polyformer.applications.serving.rows import Ended, Failed, Piece  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402

EOS = len(TOKENIZER) - 1
WORD = {"type": "string", "maxLength": 6}
PERSON = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "film": {"enum": ["fine", "funny"]},
        "trips": {
            "type": "array",
            "items": {"anyOf": [WORD, {"type": "null"}]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "film", "trips"],
    "additionalProperties": False,
}
LINKED = {
    "$defs": {
        "item": {
            "properties": {"v": {"enum": [1, 2]}, "next": {"$ref": "#/$defs/item"}},
            "required": ["v"],
            "additionalProperties": False,
            "type": "object",
        }
    },
    "$ref": "#/$defs/item",
}
SCHEMAS = [
    PERSON,
    LINKED,
    {"enum": ["a", 5, None]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
]
SAMPLING = {"do_sample": True, "temperature": 1.5, "top_p": 0.95}


def grammar_of(schema: dict[str, Any], size: int = len(TOKENIZER)) -> Any:
    return Grammars(TOKENIZER, size).of_schema(schema, (EOS,))


def settings(most: int, **options: Any) -> GenerationConfig:
    return GenerationConfig.from_dict({"max_new_tokens": most, "special": {"eos": [EOS]}, **options})


def checked(text: str, schema: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("name", ["rotary", "recurrent"])
def test_every_reply_is_valid_and_other_rows_are_unchanged(name: str):
    """Random weights, greedy and drawn, together with plain rows, in batches that join and that do not."""
    model, most = model_of(name), 300
    plain = [Client(prompt(9, seed), 40, settings(40)) for seed in range(2)]
    plain += [Client(prompt(9, 5), 40, settings(40, sampling={**SAMPLING, "seed": 8}))]
    expected = [alone(model, client) for client in plain]
    constrained = [
        (Client(prompt(7, seed), most, settings(most, **options), grammar=grammar_of(schema)), schema)
        for seed, schema in enumerate(SCHEMAS)
        for options in ({}, {"sampling": {**SAMPLING, "seed": seed}}, {"repetition_penalty": 1.5})
    ]
    with engine_of(model, batch=6) as engine:
        for client in (*plain, *(client for client, _ in constrained)):
            engine.submit(client.job)
        assert [client.texts()[0] for client in plain] == expected
        ended = 0
        for client, schema in constrained:
            events = client.until_end()
            if events[-1] == Ended(0, "stop"):
                ended += 1
                checked("".join(event.text for event in events if isinstance(event, Piece)), schema)
    assert ended >= len(constrained) - 2  # a list that links on may reach the limit


def test_a_mask_forbids_what_no_valid_text_continues_with():
    """Each token that is chosen is the best among those after which some valid text remains."""
    model = model_of("rotary")
    client = Client(prompt(5), 12, settings(12), grammar=grammar_of({"enum": ["Anna", "Tom"]}), scores=0)
    with engine_of(model) as engine:
        engine.submit(client.job)
        ids = [score.id for event in client.until_end() if isinstance(event, Piece) for score in event.scores]
    allowed = {f'"{name}"'[:size] for name in ("Anna", "Tom") for size in range(1, 7)}
    texts = [TOKENIZER.decode([i]) for i in range(len(TOKENIZER))]
    for place, chosen in enumerate(ids):
        so_far = TOKENIZER.decode(ids[:place])
        logits = model(torch.tensor([[*client.job.ids, *ids[:place]]])).logits[0, -1]
        fitting = [i for i, text in enumerate(texts) if text and so_far + text in allowed and i != EOS]
        if fitting:
            assert chosen == max(fitting, key=lambda i: logits[i].item())
    assert json.loads(TOKENIZER.decode(ids)) in ("Anna", "Tom")


def test_settings_that_exclude_all_that_a_grammar_allows_do_not_break_it():
    model = model_of("rotary")
    config = settings(9, min_new_tokens=9, constraints={"suppress_tokens": [TOKENIZER.encode('"')[0]]})
    client = Client(prompt(5), 9, config, grammar=grammar_of({"enum": ["ab"]}))
    with engine_of(model) as engine:
        engine.submit(client.job)
        assert client.texts() == ['"ab"']


def test_a_larger_table_than_the_tokenizers_and_unknown_tokenizers():
    assert grammar_of({"type": "null"}, len(TOKENIZER) + 40).matcher().compute_bitmask()
    with pytest.raises(InputError, match="not supported with the tokenizer"):
        Grammars(TOKENIZER, 5).of_schema({}, (2,))


def test_a_schema_that_becomes_too_complex_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch):
    model, good = model_of("rotary"), Client(prompt(5), 20)
    expected = alone(model, good)
    bad = Client(prompt(4), 20, settings(20), grammar=grammar_of(PERSON))
    matcher = bad.job.grammar.matcher()
    matcher.consume_token(5)
    assert matcher.is_error()  # llguidance's state after a limit is reached, too
    monkeypatch.setattr(bad.job.grammar, "matcher", lambda: matcher)
    with engine_of(model) as engine:
        engine.submit(good.job, bad.job)
        failed = bad.until_end()[-1]
        assert isinstance(failed, Failed)
        assert "too complex" in failed.message
        assert good.texts() == [expected]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(chat_folder(tmp_path_factory.mktemp("json")), *LIMITS) as (_, place):
        yield place


class Trip(BaseModel):
    city: str
    nights: int
    fine: bool


def test_the_client_gets_json_for_its_schema(address: str):
    """OpenAI's own client, at once: schemas, any object, and unchanged texts in the same batch."""
    messages = [turn("user", "Anna")]
    create = client_of(address).chat.completions.create
    plain = create(model="tiny", messages=messages, max_tokens=60).choices[0].message.content
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}

    def ask(seed: int) -> Any:
        return create(
            model="tiny", messages=messages, max_tokens=300, seed=seed, temperature=1.0, response_format=form
        ).choices[0]

    with ThreadPoolExecutor(6) as clients:
        replies = clients.map(ask, range(5))
        other = clients.submit(create, model="tiny", messages=messages, max_tokens=60).result()
        for choice in replies:
            assert choice.finish_reason == "stop"
            checked(choice.message.content, PERSON)
    assert other.choices[0].message.content == plain
    text = (
        create(model="tiny", messages=messages, max_tokens=60, response_format={"type": "text"})
        .choices[0]
        .message.content
    )
    assert text == plain
    anything = create(
        model="tiny", messages=messages, max_tokens=300, response_format={"type": "json_object"}, n=2, seed=1
    )
    for choice in anything.choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
    stream = create(model="tiny", messages=messages, max_tokens=300, stream=True, response_format=form, n=2)
    pieces: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + (choice.delta.content or "")
    assert len(pieces) == 2
    for text in pieces.values():
        checked(text, PERSON)


def test_the_client_parses_a_class(address: str):
    parse = client_of(address).chat.completions.parse
    ended = 0
    for seed in range(4):
        try:
            reply = parse(
                model="tiny", messages=[turn("user", "Tom")], max_tokens=370, seed=seed, response_format=Trip
            )
        except openai.LengthFinishReasonError:  # a random model can write a long city
            continue
        ended += 1
        assert isinstance(reply.choices[0].message.parsed, Trip)
    assert number_of(address, "polyformer_running_texts") == 0
    assert ended


REFUSED = {
    "Invalid type: nope": {"type": "nope"},
    "anyOf is empty": {"enum": []},
    "no text fulfils it": {"$ref": "#"},
    "another document": {"$ref": "file:///etc/passwd"},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    '"contains"': {"type": "array", "contains": {}, "x-guidance": {"lenient": True}},
    "at most 65,536": {"enum": ["word" * 30_000]},
    "recursion": json.loads('{"items": ' * 300 + "{}" + "}" * 300),
    "too large": {
        "allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in "abcd"]} for i in range(12)]
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_schema_is_refused_in_openais_form(address: str, reason: str):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": REFUSED[reason]}}
    with pytest.raises(openai.BadRequestError, match=reason) as refusal:
        client_of(address).chat.completions.create(
            model="tiny", messages=[turn("user", "Hi")], response_format=form
        )
    assert refusal.value.param == "response_format"
    assert refusal.value.type == "invalid_request_error"
    assert "passwd" not in refusal.value.message
