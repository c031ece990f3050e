"""The engine of the server: rows that join and leave a batch get the texts of `generate`."""

import dataclasses
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("prometheus_client")

from chat_models import chat_tokenizer
from polyformer import GenerationConfig, create_model
from polyformer.applications.serving.engine import CHUNK, Engine, Limits, Overloaded
from polyformer.applications.serving.rows import (
    Ended,
    Failed,
    Job,
    Piece,
    PromptRead,
    repeated_tokens,
    scores_of,
)
from polyformer.applications.serving.states import can_join, joined, padded, selected
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer
from polyformer.models.checkpoints.convert import with_parts
from polyformer.nn.cache import CachePolicy

TOKENIZER: Tokenizer = chat_tokenizer()
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
SIZES |= {"max_position_embeddings": 600}
PRESETS = {
    "rotary": ("decoder-tiny", {"position": "rope"}),
    "learned": ("gpt2", {}),
    "alibi": ("alibi-small", {}),
    "recurrent": ("decoder-tiny", {"attention": "gla"}),
    "window": ("decoder-tiny", {"position": "rope", "attention": "Causal() & Window(9)"}),
}
JOINING = "rotary", "learned", "alibi"


def model_of(name: str) -> Any:
    preset, options = PRESETS[name]
    torch.manual_seed(0)
    model = create_model(preset, vocab_size=len(TOKENIZER), **{**SIZES, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


class Client:
    """A job and the events that it got."""

    def __init__(self, ids: list[int], most: int, config: GenerationConfig | None = None, **options: Any):
        self.events: queue.Queue[Any] = queue.Queue()
        config = config or GenerationConfig(max_new_tokens=most)
        self.job = Job(ids, config, most, self.events.put, **options)

    def until_end(self) -> list[Any]:
        """All events, up to the end of the last choice."""
        events: list[Any] = []
        left = self.job.count
        while left:
            events.append(self.events.get(timeout=60))
            left -= isinstance(events[-1], Ended)
            if isinstance(events[-1], Failed):
                break
        return events

    def texts(self) -> list[str]:
        pieces = [event for event in self.until_end() if isinstance(event, Piece)]
        return ["".join(p.text for p in pieces if p.index == index) for index in range(self.job.count)]


@contextmanager
def engine_of(model: Any, cache: CachePolicy | None = None, **limits: Any) -> Iterator[Engine]:
    with Engine(model, TOKENIZER, Limits(**{"tokens": 600, **limits}), cache) as engine:
        yield engine


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 250, (length,), generator=generator).tolist()


def alone(model: Any, client: Client, cache: CachePolicy | None = None) -> str:
    job = client.job
    config = dataclasses.replace(job.config, cache=cache)
    generated = model.generate(torch.tensor([job.ids]), None, config, None, TOKENIZER.decode)
    return generated.texts(TOKENIZER.decode, job.config.stop)[0]


CASES = [
    (3, 25, {}),
    (40, 6, {"sampling": {"do_sample": True, "seed": 5, "top_p": 0.9, "temperature": 1.5}}),
    (1, 12, {"repetition_penalty": 1.4}),
    (CHUNK + 30, 9, {}),
    (17, 14, {"sampling": {"do_sample": True, "seed": 6, "top_k": 20}}),
    (9, 40, {"stop": ["a", "e", "i", "o"]}),
]


@pytest.mark.parametrize("name", PRESETS)
def test_each_request_gets_the_text_that_it_gets_alone(name: str):
    model = model_of(name)
    clients = [
        Client(prompt(size, seed), most, GenerationConfig.from_dict({"max_new_tokens": most, **options}))
        for seed, (size, most, options) in enumerate(CASES)
    ]
    expected = [alone(model, client) for client in clients]
    with engine_of(model, batch=4) as engine:
        assert engine.joins == (name in JOINING)
        for client in clients:
            engine.submit(client.job)
        assert [client.texts()[0] for client in clients] == expected
        # The engine is empty, and the same request gets the same text again.
        again = Client(prompt(3), 25)
        engine.submit(again.job)
        assert again.texts() == expected[:1]


BOUNDED = {
    "int8": ({}, "int8"),
    "int4": ({}, "int4(group=4, window=8)"),
    "snapkv": ({}, "snapkv(budget=12, window=3)"),
    "h2o": ({}, "h2o(budget=12)"),
    "sinks": ({"memory": "sinks(first=2, length=9)"}, None),
    "recurrent memory": ({"memory": "recurrent(length=9)"}, None),
    "sparse": ({"attention": "Window(9) | Global(2)"}, None),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounded_caches_and_patterns_serve_the_text_of_generate(name: str):
    """An option of the command in a batch: `generate` of each text alone with the same option, and scores."""
    parts, policy = BOUNDED[name]
    model = with_parts(model_of("rotary"), **parts)
    cache = None if policy is None else CachePolicy.from_dict(policy)
    clients = [
        Client(prompt(size, seed), most, GenerationConfig.from_dict({"max_new_tokens": most, **options}))
        for seed, (size, most, options) in enumerate(CASES)
    ]
    expected = [alone(model, client, cache) for client in clients]
    plain = [alone(model_of("rotary"), client) for client in clients]
    scored = Client(prompt(CHUNK + 5), 2, scores=0, prompt_scores=True)
    with engine_of(model, cache, batch=4) as engine:
        assert engine.joins == (name == "int8")
        engine.submit(*(client.job for client in clients), scored.job)
        assert [client.texts()[0] for client in clients] == expected
        read = next(event.scores for event in scored.until_end() if isinstance(event, PromptRead))
    assert expected != plain or name == "int8"  # rounding changes no greedy choice here
    ids = torch.tensor([scored.job.ids])
    state = None if cache is None else model.new_state(ids.shape[1], cache)
    own = model(ids, state=state).logits[0, :-1].log_softmax(-1).gather(1, ids.T[1:]).squeeze(1)
    torch.testing.assert_close(torch.tensor([score.logprob for score in read[1:]]), own)


def test_a_policy_that_a_model_cannot_have_is_refused_before_serving():
    with pytest.raises(InputError, match="cache"):
        Engine(model_of("recurrent"), TOKENIZER, Limits(), CachePolicy.from_dict("int8"))


def test_a_short_text_does_not_wait_for_a_long_one():
    model, order = model_of("rotary"), queue.Queue()
    long, short = Client(prompt(4), 300), Client(prompt(5), 3)
    long.job.send = lambda event: order.put(("long", event))
    short.job.send = lambda event: order.put(("short", event))
    with engine_of(model) as engine:
        engine.submit(long.job)
        while not isinstance(order.get(timeout=60)[1], Piece):
            pass
        engine.submit(short.job)
        ends = []
        while len(ends) < 2:
            name, event = order.get(timeout=60)
            ends += [name] * isinstance(event, Ended)
    assert ends == ["short", "long"]


def test_several_texts_of_a_prompt_have_seeds_in_turn():
    model = model_of("rotary")
    sampling = {"do_sample": True, "seed": 11}
    several = Client(prompt(6), 8, GenerationConfig.from_dict({"sampling": sampling}), count=3)
    with engine_of(model) as engine:
        engine.submit(several.job)
        texts = several.texts()
        for index, text in enumerate(texts):
            config = GenerationConfig.from_dict({"sampling": {**sampling, "seed": 11 + index}})
            single = Client(prompt(6), 8, config)
            engine.submit(single.job)
            assert single.texts() == [text]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("name", ["rotary", "recurrent"])
def test_scores_are_log_probabilities_of_the_model(name: str):
    model, ids = model_of(name), prompt(CHUNK + 5)
    client = Client(ids, 4, scores=3, prompt_scores=True)
    with engine_of(model) as engine:
        engine.submit(client.job)
        events = client.until_end()
    read = next(event.scores for event in events if isinstance(event, PromptRead))
    new = [score for event in events if isinstance(event, Piece) for score in event.scores]
    whole = [*ids, *(score.id for score in new)]
    logs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    assert [score.id for score in (*read, *new)] == whole
    assert read[0].logprob is None
    values = torch.tensor([score.logprob for score in (*read[1:], *new)])
    torch.testing.assert_close(values, logs[:-1].gather(1, torch.tensor(whole[1:]).unsqueeze(1)).squeeze(1))
    for score, row in zip((*read[1:], *new), logs):
        assert [number for number, _ in score.top] == row.topk(3).indices.tolist()
    assert all(score.top[0][0] == score.id for score in new)  # greedy


def test_a_prompt_can_be_scored_without_new_tokens():
    model = model_of("rotary")
    for length in (1, 2, CHUNK, CHUNK + 1):
        client = Client(prompt(length), 0, GenerationConfig(max_new_tokens=1), scores=0, prompt_scores=True)
        with engine_of(model) as engine:
            engine.submit(client.job)
            read, end = client.until_end()
        assert (len(read.scores), end) == (length, Ended(0, "length"))


def test_penalties_are_those_of_the_definition():
    history, logits = torch.tensor([[7, 1, 2, 2, 3]]), torch.zeros(1, 9)
    penalized = repeated_tokens(0.5, 0.25, 1)(logits, history)
    assert penalized[0].tolist() == [0, -0.75, -1.25, -0.75, 0, 0, 0, 0, 0]
    model = model_of("rotary")
    client = Client(prompt(6), 30, frequency_penalty=2.0, presence_penalty=2.0, scores=0)
    plain = Client(prompt(6), 30, scores=0)
    with engine_of(model) as engine:
        engine.submit(client.job, plain.job)
        ids = [
            [score.id for event in each.until_end() if isinstance(event, Piece) for score in event.scores]
            for each in (client, plain)
        ]
    assert len(set(ids[0])) > len(set(ids[1]))


def test_an_error_ends_its_request_alone():
    model = model_of("rotary")
    good, bad = Client(prompt(5), 30), Client([10**6], 5)
    expected = alone(model, good)
    with engine_of(model) as engine:
        engine.submit(good.job, bad.job)
        assert [type(event) for event in bad.until_end()] == [Failed]
        assert good.texts() == [expected]
        assert engine.alive


def test_settings_that_make_no_distribution_end_their_request_alone():
    model = model_of("rotary")
    sampling = {"do_sample": True, "seed": 1, "temperature": 1e-300}
    good, bad = (
        Client(prompt(5), 30),
        Client(prompt(4), 30, GenerationConfig.from_dict({"sampling": sampling}), count=2),
    )
    expected = alone(model, good)
    with engine_of(model) as engine:
        engine.submit(bad.job, good.job)
        failed = bad.until_end()[-1]
        assert isinstance(failed, Failed)
        assert "RuntimeError" in failed.message
        assert good.texts() == [expected]
    assert engine.load.running == 0


def test_requests_that_are_left_or_late_leave_the_batch():
    model = model_of("rotary")
    left, late, waiting = Client(prompt(5), 500), Client(prompt(5), 500), Client(prompt(5), 500)
    late.job.deadline = float("inf")
    with engine_of(model, batch=2) as engine:
        engine.submit(left.job, late.job, waiting.job)
        while not isinstance(late.events.get(timeout=60), Piece):
            pass
        waiting.job.deadline = 0.0
        assert waiting.events.get(timeout=60) == Failed(
            "the request waited longer than its time", overloaded=True
        )
        late.job.deadline = 0.0
        assert late.until_end()[-1] == Ended(0, "length")
        left.job.cancelled.set()
        last = Client(prompt(3), 2)
        engine.submit(last.job)
        last.until_end()
    assert engine.load.running == engine.load.waiting == 0
    assert engine.load.new_tokens < 1000


def test_a_full_queue_and_an_ended_engine_refuse():
    model = model_of("rotary")
    with engine_of(model, batch=1, queue=2) as engine:
        first = Client(prompt(5), 400)
        engine.submit(first.job)
        first.events.get(timeout=60)
        engine.submit(Client(prompt(5), 2).job, Client(prompt(5), 2).job)
        with pytest.raises(Overloaded, match="too many"):
            engine.submit(Client(prompt(5), 2).job)
        with pytest.raises(InputError, match="n: expected at most 1"):
            engine.submit(Client(prompt(5), 2, count=2).job)
        first.job.cancelled.set()
    with pytest.raises(Overloaded, match="ending"):
        engine.submit(first.job)
    assert not engine.alive


def test_the_engine_finishes_what_it_accepted():
    model, client = model_of("rotary"), Client(prompt(5), 40)
    with engine_of(model) as engine:
        engine.submit(client.job)
    assert client.texts() == [alone(model, client)]


@pytest.mark.parametrize("name", JOINING)
def test_joined_states_continue_as_their_texts_do(name: str):
    """Rows of 3, 9 and 5 tokens in float64: logits of the next tokens, and again without the longest row."""
    model = model_of(name).double()
    assert can_join(model)
    prompts = [prompt(size, size) for size in (3, 9, 5)]
    with torch.no_grad():
        states = []
        for ids in prompts:
            state = model.new_state(len(ids))
            states.append(model.following(torch.tensor([ids]), state)[1])
        state = joined([joined(states[:2]), states[2]])
        assert state.tokens.length == 9
        rows = [0, 1, 2]
        for step in range(4):
            tokens = [20 + step + row for row in rows]
            hidden, state = model.following(torch.tensor(tokens).unsqueeze(1), state)
            for place, (row, token) in enumerate(zip(rows, tokens)):
                prompts[row].append(token)
                expected = model(torch.tensor([prompts[row]])).last_hidden_state[0, -1]
                torch.testing.assert_close(hidden[place, 0], expected)
            if step == 1:
                state, rows = selected(state, [2, 0]), [2, 0]
                assert state.tokens.length == 7  # the five tokens of the longer row, and two steps
        single = selected(state, [0])
        assert single.tokens.valid is None
        assert single.tokens.length == 5 + 4


def test_models_with_other_states_do_not_join():
    assert not any(can_join(model_of(name)) for name in PRESETS if name not in JOINING)
    assert not can_join(create_model("transformer-tiny", vocab_size=20, **SIZES))
    assert padded(torch.ones(1, 2), 4).tolist() == [[0, 0, 1, 1]]


def test_scores_of_impossible_tokens_are_numbers():
    logits = torch.tensor([[0.0, -torch.inf]])
    assert scores_of(logits, [1], 2)[0].logprob == scores_of(logits, [1], 2)[0].top[1][1] == -9999.0
