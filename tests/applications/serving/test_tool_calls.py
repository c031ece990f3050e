"""Tools of a chat: the template shows them, and what a model writes in its marks becomes calls.

The model writes a known text: its hidden state is the number of the position, and its output matrix has the
token of the next position.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from test_server import client_of, sent, served  # noqa: E402

from chat_models import chat_tokenizer  # noqa: E402
from chat_templates import CHATML, TEMPLATES, WEATHER, turn  # noqa: E402
from polyformer.applications.serving.tools import Call, CallReader, call_of  # noqa: E402
from polyformer.models.presets import create_model  # noqa: E402

MESSAGES = [turn("user", "Rain?")]
CALLED = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Züri"}}\n</tool_call>\n'
CALLED += '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
POSITIONS = 1024


def writer_folder(folder: Path, template: str, text: str, **options: Any) -> Path:
    """A model that continues the prompt of MESSAGES with a text, and then ends its turn."""
    tokenizer = chat_tokenizer(template)
    assert tokenizer.chat is not None
    prompt = tokenizer.chat.render(MESSAGES, add_generation_prompt=True, **options)
    ids = tokenizer.encode_chat(prompt)[0]
    reply = [*tokenizer.encode(text), tokenizer.encode_chat("<|im_end|>")[0][0]]
    assert len(ids) + len(reply) < POSITIONS
    model: Any = create_model(
        "gpt2",
        vocab_size=len(tokenizer),
        num_hidden_layers=1,
        hidden_size=POSITIONS,
        num_attention_heads=2,
        intermediate_size=4,
        max_position_embeddings=POSITIONS,
        tied=False,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.zero_()
        model.decoder.position.tables[0].weight.copy_(torch.eye(POSITIONS))
        for place, token in enumerate(reply, len(ids) - 1):
            model.head.weight[token, place] = 1.0
    model.save_pretrained(folder, format="hub")
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = writer_folder(tmp_path_factory.mktemp("tools"), TEMPLATES["hermes"], CALLED, tools=[WEATHER])
    with served(folder, key=None) as (_, address):
        yield client_of(address)


def asked(client: Any, **options: Any) -> Any:
    options = {"tools": [WEATHER], "temperature": 0, **options}
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


def test_calls_of_a_reply(client: Any):
    choice = asked(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name) for call in calls] == [("function", "weather")] * 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Züri"}, {"city": "Oslo"}]
    assert len({call.id for call in calls}) == 2


def test_calls_of_a_stream(client: Any):
    """The text comes before the end of the reply, a call in one part."""
    chunks = list(asked(client, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert json.loads(calls[1].function.arguments) == {"city": "Oslo"}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    shown = [number for number, delta in enumerate(deltas) if delta.content or delta.tool_calls]
    assert len(shown) > 3


def test_one_call_at_most_a_cut_call_and_no_tools(client: Any):
    choice = asked(client, parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1
    cut = asked(client, max_tokens=20).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert CALLED.startswith(cut.message.content)
    assert "<tool" in cut.message.content
    plain = asked(client, tool_choice="none").choices[0]
    assert plain.message.tool_calls is None


def test_the_client_sends_calls_and_results_back(client: Any):
    """Its arguments are JSON as text, and the template's a mapping: the prompt is that of the library."""
    call = asked(client).choices[0].message.tool_calls[0]
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "21 °C"})
    common = {"model": "tiny", "max_tokens": 1, "tools": [WEATHER]}
    usage = client.chat.completions.create(messages=history, **common).usage
    tokenizer = chat_tokenizer(TEMPLATES["hermes"])
    function = {"name": "weather", "arguments": {"city": "Züri"}}
    assert tokenizer.chat is not None
    turns = [*MESSAGES, turn("assistant", None, tool_calls=[{"type": "function", "function": function}])]
    text = tokenizer.chat.render([*turns, turn("tool", "21 °C")], tools=[WEATHER], add_generation_prompt=True)
    assert usage.prompt_tokens == len(tokenizer.encode_chat(text)[0])
    for arguments in ("{", "[1]", 5):
        broken = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        history[1] = {"role": "assistant", "content": None, "tool_calls": [broken]}
        with pytest.raises(openai.BadRequestError, match="message 1: expected a JSON object"):
            client.chat.completions.create(messages=history, **common)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "retrieval"}], "tool 0: expected the type function"),
        ([{"type": "function", "function": {"name": "a b"}}], "tool 0: expected a name"),
        ([WEATHER, {"type": "function", "function": {"name": "a", "parameters": 5}}], "tool 1: .* schema"),
        ([WEATHER] * 129, "at most 128"),
    ],
)
def test_wrong_tools_are_refused(client: Any, tools: list[Any], message: str):
    with pytest.raises(openai.BadRequestError, match=f"tools: .*{message}"):
        asked(client, tools=tools)


def test_a_template_without_tools_refuses_them(tmp_path: Path):
    folder = writer_folder(tmp_path, CHATML, CALLED)
    with served(folder, key=None) as (_, address):
        with pytest.raises(openai.BadRequestError, match="template of this model shows none"):
            asked(client_of(address))
        text = asked(client_of(address), tools=None).choices[0].message.content
        assert text == CALLED
        body = json.dumps({"model": "tiny", "messages": MESSAGES, "tools": [], "max_tokens": 1})
        assert sent(address, "POST", "/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "arguments": {"a": [1, null]}}', Call("f", '{"a": [1, null]}')),
        ('\n{"name": "f"}\n', Call("f", "{}")),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', Call("f", '{"a": 1}')),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": 5, "arguments": {}}', None),
        ('{"name": "f", "arguments": {}} and', None),
        ("[" * 10_000, None),
        ('{"name": "f", "arguments": {"a": "' + "b" * 2**16 + '"}}', None),
        ("<function=f>", None),
    ],
)
def test_what_is_a_call(text: str, call: Call | None):
    assert call_of(text) == call


BLOCK = '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text \n", "plain text \n", 0),
        (f"a {BLOCK} b", "a b", 1),
        (f"{BLOCK}\n{BLOCK}\n", "", 2),
        (" <tool_call>nothing</tool_call> x", " <tool_call>nothing</tool_call> x", 0),
        (f"<tool_call>no</tool_call> {BLOCK}", "<tool_call>no</tool_call>", 1),
        ("1 <tool < <tool_call", "1 <tool < <tool_call", 0),
        (f"{BLOCK} <tool_call>{{", " <tool_call>{", 1),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_pieces_of_any_size_are_read_alike(text: str, content: str, calls: int, size: int):
    reader, shown, calls_read = CallReader(), "", list[Call]()
    for piece in (text[i : i + size] for i in range(0, len(text), size)):
        more, new = reader.read(piece)
        shown += more
        calls_read += new
    assert (shown + reader.finish(), calls_read) == (content, [Call("f", "{}")] * calls)
