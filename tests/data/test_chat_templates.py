"""Chat templates: the texts, tokens and spans of transformers, and the limits on a stranger's program."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from chat_templates import CHATML, CONVERSATIONS, SPECIAL, TEMPLATES, USER, turn
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig, load_tokenizer
from polyformer.data.chat import SANDBOX, ChatTemplate, RenderedChat, Sandbox

TEXT = [f"What is {i}? It is true, Zürich has 21 °C; 数 and so on." for i in range(40)]


@cache
def own() -> Tokenizer:
    tokenizer = Tokenizer.train(TokenizerConfig(vocab_size=400), TEXT)
    tokenizer.backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return Tokenizer(tokenizer.backend)


@cache
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    tokens = {f"{role}_token": name for role, name in own().roles.items() if name}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own().backend, **tokens)


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, theirs().special_tokens_map)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_and_tokens_are_those_of_transformers(name: str, conversation: str):
    messages, options = CONVERSATIONS[conversation]
    try:
        expected = theirs().apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, **options
        )
    except Exception:
        with pytest.raises(InputError):
            template(TEMPLATES[name]).render(messages, **options)
        return
    rendered = template(TEMPLATES[name]).render_spans(messages, **options)
    assert rendered.text == expected
    ids = theirs().apply_chat_template(messages, chat_template=TEMPLATES[name], **options)["input_ids"]
    assert own().encode_chat(rendered)[0] == ids


@pytest.mark.parametrize("algorithm", ["unigram", "wordpiece", "characters"])
def test_other_tokenizers_have_the_tokens_of_transformers_too(algorithm: str):
    """With the spaces of SentencePiece after special tokens, and pieces of words."""
    transformers = pytest.importorskip("transformers")
    size = {"characters": 100, "unigram": 60, "wordpiece": 80}[algorithm]
    trained = Tokenizer.train(TokenizerConfig(algorithm=algorithm, vocab_size=size), TEXT)
    trained.backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    ours = Tokenizer(trained.backend)
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=ours.backend, eos_token="[INST]")
    messages, options = CONVERSATIONS["turns"]
    for name in ("chatml", "zephyr", "phi3", "learned"):
        options = {**options, "return_dict": True, "return_assistant_tokens_mask": name == "learned"}
        expected = other.apply_chat_template(messages, chat_template=TEMPLATES[name], **options)
        chat = ChatTemplate({"default": TEMPLATES[name]}, other.special_tokens_map)
        ids, learned = ours.encode_chat(chat.render_spans(messages, add_generation_prompt=True))
        assert ids == expected["input_ids"]
        if name == "learned":
            assert [int(flag) for flag in learned] == expected["assistant_masks"]
            assert any(learned)


def test_most_conversations_are_rendered():
    """The comparison above is of texts, not of errors."""
    refused = 0
    for source in TEMPLATES.values():
        for messages, options in CONVERSATIONS.values():
            try:
                template(source).render(messages, **options)
            except InputError:
                refused += 1
    assert refused < len(TEMPLATES) * len(CONVERSATIONS) / 4


def test_the_assistants_tokens_are_those_of_transformers():
    messages = [turn("user", "What is 2?"), turn("assistant", "It is true."), USER, turn("assistant", "数!")]
    options = {"chat_template": TEMPLATES["learned"], "return_assistant_tokens_mask": True}
    expected = theirs().apply_chat_template(messages, return_dict=True, **options)
    rendered = template(TEMPLATES["learned"]).render_spans(messages)
    assert [rendered.text[first:end] for first, end in rendered.spans] == [
        "It is true.<|im_end|>",
        "数!<|im_end|>",
    ]
    ids, learned = own().encode_chat(rendered)
    assert ids == expected["input_ids"]
    assert [int(flag) for flag in learned] == expected["assistant_masks"]
    assert not any(own().encode_chat(RenderedChat(rendered.text))[1])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "limit"),
        ("{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{{ a }}{% endfor %}{% endfor %}", ""),
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ 'x'.center(10 ** 11) }}", "memory"),
        ("{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", ""),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}", "without an end"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "limit"),
        ("{{ 9 ** (9 ** 9) }}", "limit"),
        ("{% for i in range(9000) %}{{ 'abcdefgh' * 1000 }}{% endfor %}", "characters"),
        ("{{ range(10 ** 6) | list }}", "Range too big"),
    ],
)
def test_a_template_that_would_not_end_is_stopped(source: str, reason: str):
    before = os.times()
    with pytest.raises(InputError, match=f"chat template: .*{reason}"):
        ChatTemplate({"default": source}).render([USER])
    after = os.times()
    # The processor time of this process and of the children that ended, which a busy machine does not change.
    assert after.user + after.children_user - before.user - before.children_user < 4
    assert ChatTemplate({"default": "{{ 1 + 1 }}"}).render([USER]) == "2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str):
    with pytest.raises(InputError, match="chat template: "):
        ChatTemplate({"default": source}).render([USER])


def test_the_process_of_a_template_opens_no_file():
    """A limit of the kernel, behind the sandbox of Jinja."""
    program = Path(__file__).parents[2] / "src/polyformer/data/chat_sandbox.py"
    code = (
        f"import runpy, socket; runpy.run_path({str(program)!r})['limit_process'](2 ** 30)\n"
        f"for call in (lambda: open({str(program)!r}), socket.socket):\n"
        "    try: call()\n"
        "    except OSError as error: print(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["24", "24"], done.stderr


def test_a_killed_process_is_replaced():
    sandbox = Sandbox()
    assert sandbox.render("{{ a }}", {"a": 1}).text == "1"
    assert sandbox.process is not None
    sandbox.process.kill()
    sandbox.process.wait()
    assert sandbox.render("{{ a }}", {"a": 2}).text == "2"
    sandbox.close()
    assert sandbox.process is None


def test_wrong_conversations_are_refused_by_name():
    chat = ChatTemplate({"default": CHATML, "tool_use": "tools"})
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "messages: expected a message or more"),
        (["Hi"], {}, "messages: expected mappings"),
        ([{"role": "user", "content": {1, 2}}], {}, "messages: .*as in JSON"),
        ([USER], {"name": "other"}, "unknown chat template 'other'"),
        ([USER], {"add_generation_prompt": True, "continue_final_message": True}, "leave out one"),
        ([turn("assistant", None)], {"continue_final_message": True}, "expected a text"),
    ]
    for messages, options, message in cases:
        with pytest.raises(InputError, match=message):
            chat.render(messages, **options)
    hidden = ChatTemplate({"default": "{{ messages[0].content[:1] }}"})
    with pytest.raises(InputError, match="does not show the last message"):
        hidden.render([turn("assistant", "text")], continue_final_message=True)
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InputError, match="messages: "):
        chat.render([turn("user", nested)])
    assert chat.render([USER], tools=[{}]) == "tools"
    assert SANDBOX.render("{{ 1 }}", {}).text == "1"


def test_templates_in_all_files_are_read_and_kept(tmp_path: Path):
    """A list in tokenizer_config.json, files beside it that have priority, and what is written again."""
    folder, again = tmp_path / "a", tmp_path / "b"
    own().save(folder)
    assert load_tokenizer(folder).chat is None
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    listed = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "T"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": listed}))
    (folder / "chat_template.jinja").write_text("é{{ bos_token }}", encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat is not None
    assert dict(tokenizer.chat.sources) == {"default": "é{{ bos_token }}", "tool_use": "T"}
    assert tokenizer.chat.render([USER]) == "é<s>"
    tokenizer.save(again)
    assert (again / "chat_template.jinja").read_bytes() == "é{{ bos_token }}".encode()
    assert (again / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"
    assert load_tokenizer(again).chat == tokenizer.chat
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(again)
    assert loaded.chat_template == dict(tokenizer.chat.sources)
    own().save(again)
    assert load_tokenizer(again).chat is None


def test_damaged_template_files_are_refused(tmp_path: Path):
    own().save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for value, message in (
        (5, "expected a text, or a list"),
        ([{"name": "default"}], "expected a name and a template"),
        ([{"name": "../x", "template": "a"}], "has no name of letters"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": value}))
        with pytest.raises(InputError, match=message):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(InputError, match="larger than"):
        load_tokenizer(tmp_path)
