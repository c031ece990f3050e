"""Conversations: the replies of whole prompts, by computing only what is new."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from chat_models import chat_folder, chat_tokenizer
from chat_templates import TEMPLATES, turn
from polyformer.applications.chat import Conversation
from polyformer.applications.chat.conversation import turn_end
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import Int8Cache
from polyformer.data.chat import ChatTemplate
from polyformer.models.checkpoints.convert import with_parts
from polyformer.models.generation.kept_text import KeptText
from polyformer.nn.cache.base import CompressedCache

QUESTIONS = ["Anna and Tom flew.", "From Paris?", "2 of them; a film", "Oslo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat"))


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """The numbers of tokens of all passes of the layers."""
    passes: list[int] = []
    first = model.decoder.sequence[0]
    hook = first.register_forward_pre_hook(lambda module, inputs: passes.append(inputs[0].shape[1]))
    try:
        yield passes
    finally:
        hook.remove()


def test_replies_are_those_of_whole_prompts_and_only_new_tokens_are_computed(folder: Path):
    model = polyformer.load(folder, "cpu")
    conversation = model.conversation("Be brief.", max_new_tokens=12)
    read: list[int] = []
    for question in QUESTIONS:
        before, length = conversation.text.read_tokens, len(conversation.text.ids)
        pieces: list[str] = []
        with counted(model.model) as passes:
            reply = conversation.reply(question, pieces.append)
        assert "".join(pieces) == reply
        # The passes of this turn: what the text has more than before, each token once.
        assert sum(passes) == conversation.text.read_tokens - before == len(conversation.text.ids) - length
        assert passes[1:] == [1] * len(passes[1:])
        read.append(passes[0])
        # The tokens that were generated stay, so that the same text read at once has the same reply.
        ids = torch.tensor([conversation.known[0][1][: len(conversation.text.ids) - len(passes) + 1]])
        config = conversation.config
        again = model.model.generate(ids, None, config, None, model.task.tokenizer.decode)
        assert again.texts(model.task.tokenizer.decode)[0] == reply
    assert max(read[1:]) < 40 < len(conversation.text.ids) / 2
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 4]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_keeps_what_its_prompts_share(name: str, folder: Path):
    """Also templates that trim replies, move the system message or drop reasoning."""
    model = polyformer.load(folder, "cpu")
    tokenizer = model.task.tokenizer
    tokenizer.chat = ChatTemplate({"default": TEMPLATES[name]}, {"bos_token": "<s>", "eos_token": "</s>"})
    conversation = model.conversation(max_new_tokens=7)
    plain, prompts = conversation.text.generate, []

    def recorded(ids: list[int], *more: Any) -> Any:
        prompts.append(ids)
        return plain(ids, *more)

    conversation.text.generate = recorded  # type: ignore[method-assign]
    for question in QUESTIONS[:3]:
        reply = conversation.reply(question)
        ids = torch.tensor([prompts[-1]])
        expected = model.model.generate(ids, None, conversation.config, None, tokenizer.decode)
        assert expected.texts(tokenizer.decode)[0] == reply
        rendered = tokenizer.chat.render(conversation.messages[:-1], add_generation_prompt=True)
        # The tokens of the prompt are a way to split the text that the template shows.
        assert tokenizer.decode(prompts[-1], keep_special=True) == tokenizer.decode(
            tokenizer.encode_chat(rendered)[0], keep_special=True
        )


@pytest.mark.parametrize("cache", [None, "int8", "snapkv(budget=12, window=4)", "h2o(budget=16)"])
def test_a_cache_policy_and_a_memory_last_over_the_turns(folder: Path, cache: str | None):
    model = polyformer.load(folder, "cpu")
    if cache is None:
        model.model = with_parts(model.model, memory="sinks(first=2, length=20)")
    settings: dict[str, Any] = {} if cache is None else {"cache": cache}
    # Special tokens within a reply are no part of its text, so that the template does not repeat them.
    settings["suppress_tokens"] = [*model.task.tokenizer.special_ids]
    conversation = model.conversation(max_new_tokens=40, **settings)
    for question in QUESTIONS:
        conversation.reply(question)
    assert conversation.text.state is not None
    own: Any = conversation.text.state.model.layers[0].self_attention
    if cache == "int8":
        assert isinstance(own, Int8Cache)
    else:
        held = own.cache.held if isinstance(own, CompressedCache) else own.held
        assert held < len(conversation.text.ids) - 10
    # Nothing was read twice, and all of it once.
    assert conversation.text.read_tokens == len(conversation.text.ids)


def test_a_changed_beginning_is_read_again(folder: Path):
    model = polyformer.load(folder, "cpu")
    conversation = model.conversation("Be brief.", max_new_tokens=6)
    conversation.reply(QUESTIONS[0])
    conversation.set_system("Be long.")
    shared = conversation.text.read_tokens
    reply = conversation.reply(QUESTIONS[1])
    assert conversation.text.read_tokens - shared > len(conversation.text.ids) - 12
    assert reply == model.chat(conversation.messages[:-1], max_new_tokens=6)
    conversation.reset()
    assert [message["role"] for message in conversation.messages] == ["system"]
    assert conversation.reply("Oslo") == model.chat(conversation.messages[:2], max_new_tokens=6)
    conversation.set_system(None)
    conversation.reset()
    assert conversation.messages == []


def test_a_state_that_loses_no_tokens_is_kept_while_the_text_grows(tmp_path: Path):
    """Sums of a linear recurrence: the turns of one conversation, and a new beginning after a change."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
    model = polyformer.create_model("decoder-tiny", attention="gla", **sizes).eval()
    text, config = KeptText(model), polyformer.GenerationConfig(max_new_tokens=4)
    first = text.generate([5, 6, 7], config).new_tokens()[0]
    longer = [5, 6, 7, *first, 8, 9]
    second = text.generate(longer, config)
    assert second.new_tokens() == model.generate(torch.tensor([longer]), config=config).new_tokens()
    assert text.read_tokens == 3 + 3 + 3 + 3
    text.generate([5, 6, 9], config)
    assert text.read_tokens == 12 + 3 + 3
    assert text.ids[:3] == [5, 6, 9]


def test_a_text_that_shrinks_keeps_its_beginning(folder: Path):
    model = polyformer.load(folder, "cpu").model
    text, config = KeptText(model), polyformer.GenerationConfig(max_new_tokens=5)
    long = list(range(5, 30))
    text.generate(long, config)
    before = text.read_tokens
    for ids in (long[:9], [*long[:7], 3, 3, 3], long[:7]):
        expected = model.generate(torch.tensor([ids]), config=config).new_tokens()
        assert text.generate(ids, config).new_tokens() == expected
    assert text.read_tokens - before == (1 + 4) + (3 + 4) + (1 + 4)


def test_an_interruption_keeps_what_was_said(folder: Path):
    model = polyformer.load(folder, "cpu")
    conversation = model.conversation(max_new_tokens=12)
    pieces: list[str] = []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    reply = conversation.reply(QUESTIONS[0], interrupt)
    assert reply
    assert conversation.messages[-1] == {"role": "assistant", "content": reply}
    assert conversation.text.read_tokens == len(conversation.text.ids)
    following = conversation.reply(QUESTIONS[1])
    whole = conversation.known[0][1]
    assert conversation.text.ids == whole[: len(conversation.text.ids)]
    assert following == conversation.messages[-1]["content"]


def test_a_reply_ends_with_its_turn(tmp_path: Path):
    """Also where the end token of the checkpoint is another."""
    tokenizer = chat_tokenizer()
    assert tokenizer.chat is not None
    end = tokenizer.backend.token_to_id("<|im_end|>")
    assert turn_end(tokenizer.chat, tokenizer) == end != tokenizer.eos_id
    assert turn_end(ChatTemplate({"default": TEMPLATES["vicuna"]}), tokenizer) is None
    assert turn_end(ChatTemplate({"default": "{{ messages.x }}"}), tokenizer) is None
    loaded = polyformer.load(chat_folder(tmp_path), "cpu")
    assert loaded.reply_settings({}).special.eos[-1] == end
    assert loaded.conversation(eos_token_id=[7, end]).config.special.eos == (7, end)


def test_the_settings_of_the_checkpoint_are_defaults(tmp_path: Path):
    settings = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 9,
        "max_new_tokens": 7,
        "eos_token_id": [3, 4],
    }
    model = polyformer.load(chat_folder(tmp_path, generation=settings), "cpu")
    config = model.conversation().config
    assert (config.sampling.temperature, config.sampling.top_k, config.max_new_tokens) == (0.5, 9, 7)
    assert set(config.special.eos or ()) > {3, 4}
    assert model.conversation(temperature=2.0).config.sampling.temperature == 2.0
    plain = polyformer.load(chat_folder(tmp_path / "plain"), "cpu").conversation().config
    assert (plain.method, plain.max_new_tokens) == ("greedy", 512)


def test_chat_replies_to_several_conversations_at_once(folder: Path):
    model = polyformer.load(folder, "cpu")
    assert model.can == ("predict", "generate", "chat", "embed")
    chats = [[turn("user", question)] for question in QUESTIONS]
    replies = model.chat(chats, max_new_tokens=6)
    assert replies == [model.chat(chat, max_new_tokens=6) for chat in chats]
    samples = model.chat(chats[0], 6, seed=1, num_return_sequences=3)
    assert len(samples) == 3
    for messages in ("Hi", [], [5], [["Hi"]], {"role": "user"}):
        with pytest.raises(InputError, match="messages: expected"):
            model.chat(messages)


def test_models_without_a_template_are_refused_by_name(tmp_path: Path):
    model = polyformer.load(chat_folder(tmp_path, template=None), "cpu")
    assert model.can == ("predict", "generate", "embed")
    for call in (lambda: model.chat([turn("user", "Hi")]), model.conversation):
        with pytest.raises(InputError, match="no chat template"):
            call()


def test_other_searches_than_token_by_token_are_refused(folder: Path):
    model = polyformer.load(folder, "cpu")
    for settings in ({"num_beams": 2}, {"penalty_alpha": 0.5}):
        conversation = model.conversation(**settings)
        with pytest.raises(InputError, match="expected a greedy or sampled"):
            conversation.reply("Hi")
        assert conversation.messages == []


def test_saved_messages_are_lines_of_json(folder: Path, tmp_path: Path):
    conversation: Conversation = polyformer.load(folder, "cpu").conversation("数", max_new_tokens=3)
    conversation.reply("Hi")
    conversation.save(tmp_path / "chat.jsonl")
    lines = (tmp_path / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == conversation.messages
    assert "数" in lines[0]
