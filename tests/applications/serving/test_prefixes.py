"""Prompts that begin like earlier texts: the same tokens, and only the new ones are read."""

from typing import Any

import pytest
import torch

pytest.importorskip("prometheus_client")

from test_serving_engine import CASES, Client, alone, engine_of, model_of, prompt

from polyformer import GenerationConfig
from polyformer.applications.serving.prefixes import KeptTexts, shared_length
from polyformer.applications.serving.rows import Piece, PromptRead
from polyformer.nn.cache import CachePolicy

JOINING = "rotary", "learned", "alibi"


def shared(events: list[Any]) -> int:
    return next(event.shared for event in events if isinstance(event, PromptRead))


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


def test_the_length_of_a_shared_beginning_is_that_of_the_definition():
    texts = [(), (1,), (2, 1), (1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 9, 4, 5)]
    for a in texts:
        for b in texts:
            different = [i for i, (x, y) in enumerate(zip(a, b)) if x != y]
            assert shared_length(a, b) == (different[0] if different else min(len(a), len(b)))


@pytest.mark.parametrize("policy", [None, "int8"])
@pytest.mark.parametrize("name", JOINING)
def test_a_conversation_reads_only_its_new_tokens(name: str, policy: str | None):
    """Turns, each with the text before and its reply, beside another row; then another user's first turn."""
    model, cache = model_of(name), None if policy is None else CachePolicy.from_dict(policy)
    system, other = prompt(50), Client(prompt(20, 7), 400)
    with engine_of(model, cache) as engine:
        engine.submit(other.job)
        ids, known, total = system, 0, 0
        for turn in range(4):
            client = Client([*ids, *prompt(3, turn)], 9, scores=0)
            engine.submit(client.job)
            events = client.until_end()
            assert shared(events) == known
            assert text_of(events) == alone(model, client, cache)
            new = [score.id for event in events if isinstance(event, Piece) for score in event.scores]
            ids = [*client.job.ids, *new]
            total += known
            known = len(ids) - 1  # the last token of a reply was chosen, and not read
        second = Client([*system, *prompt(5, 11)], 9)
        engine.submit(second.job)
        events = second.until_end()
        # A question may begin with the same token by chance.
        assert shared(events) == 50 + (second.job.ids[50] == prompt(3, 0)[0])
        assert text_of(events) == alone(model, second, cache)
        assert engine.load.shared_tokens == total + shared(events)
        assert text_of(other.until_end()) == alone(model, other, cache)


def test_requests_at_once_share_a_system_message_and_keep_their_settings():
    model, system = model_of("rotary"), prompt(300, 3)
    clients = [
        Client(
            [*system, *prompt(size % 90, seed)],
            most,
            GenerationConfig.from_dict({"max_new_tokens": most, **options}),
        )
        for seed, (size, most, options) in enumerate(CASES)
    ]
    expected = [alone(model, client) for client in clients]
    with engine_of(model, batch=4) as engine:
        engine.submit(*(client.job for client in clients))
        assert [client.texts()[0] for client in clients] == expected
        assert engine.load.shared_tokens >= 300 * (len(CASES) - 1)
        assert engine.load.prompt_tokens <= 300 + sum(size for size, _, _ in CASES)
        scored = Client(clients[0].job.ids, 1, scores=0, prompt_scores=True)
        engine.submit(scored.job)
        read = next(event for event in scored.until_end() if isinstance(event, PromptRead))
        assert (len(read.scores), read.shared) == (len(scored.job.ids), 0)
    with engine_of(model, kept=0) as engine:
        for _ in range(2):
            engine.submit((again := Client(system, 3)).job)
            again.until_end()
        assert engine.load.shared_tokens == 0


def test_the_texts_that_were_used_last_stay():
    model = model_of("rotary")
    states: dict[int, Any] = {}
    with torch.no_grad():
        for seed in range(4):
            ids = torch.tensor([[seed, *prompt(9, seed)]])
            states[seed] = model.following(ids, model.new_state())[1]
        kept = KeptTexts(25)
        for seed in range(2):
            kept.add([seed, *prompt(9, seed)], states[seed])
        assert kept.longest_beginning([0, *prompt(9, 0), 5]).length == 10  # used now
        kept.add([2, *prompt(9, 2)], states[2])
        assert [ids[0] for ids in kept.states] == [0, 2]
        assert kept.longest_beginning([1, *prompt(9, 1), 5]) is None
        # A longer text replaces its beginning; a text beyond the limit is not kept.
        ids = [2, *prompt(9, 2), 7]
        kept.add(ids, model.following(torch.tensor([[7]]), states[2])[1])
        assert [len(text) for text in kept.states] == [10, 11]
        kept.add(prompt(26), states[3])
        kept.add([], states[3])
        assert (len(kept.states), kept.tokens) == (2, 21)
        # The last token of a prompt is read again; the kept state stays as it is.
        part = kept.longest_beginning(ids)
        assert part.length == 10
        model.following(torch.tensor([[9, 9, 9]]), part.state)
        whole = kept.longest_beginning([*ids, 5]).state
        expected = model(torch.tensor([[*ids, 5]])).last_hidden_state[:, -1]
        torch.testing.assert_close(model.following(torch.tensor([[5]]), whole)[0][:, 0], expected)
