"""The tasks: the answers are in a prompt as often as stated, prompts fill their length, and seeds repeat."""

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from polyformer.applications.probe_tasks import (
    SINGLE,
    CommonWords,
    FrequentWords,
    Needles,
    VariableTracking,
)
from polyformer.applications.probing import (
    TASKS,
    ProbeText,
    PromptFormat,
    Sample,
    fill,
    find_task,
    match_all,
    match_any,
    read_text,
    task_names,
)
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig

CONTEXTS = [
    f"Town {i} was founded in the year {1000 + i}. It has a river and two bridges." for i in range(30)
]
ROWS: list[dict[str, Any]] = [
    {"question": f"When was town {i} founded?", "context": text, "answers": {"text": [f"{1000 + i}"]}}
    for i, text in enumerate(CONTEXTS)
]
TEXT = ProbeText(" ".join(CONTEXTS).split(), ROWS, CONTEXTS)
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: Tokenizer.train(TokenizerConfig(algorithm="bytes"), []),
    "bpe": lambda: Tokenizer.train(TokenizerConfig(algorithm="bpe", vocab_size=500), [*CONTEXTS, *SINGLE]),
}
LENGTHS = {"bytes": 6000, "bpe": 2048}


def draw(task: Any, units: int = 200, seed: int = 0) -> Sample:
    return task.sample(units, random.Random(seed))


@pytest.mark.parametrize("name", TASKS)
def test_seeds_repeat_and_differ(name: str):
    task = find_task(name, 2048, TEXT)
    assert draw(task, 25) == draw(task, 25)
    assert draw(task, 25) != draw(task, 25, seed=1)


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
@pytest.mark.parametrize("units", [0, 1, 200])
def test_a_needle_is_once_in_its_haystack(name: str, units: int):
    task = find_task(name, 2048, TEXT)
    assert isinstance(task, Needles)
    sample = draw(task, units)
    assert len(sample.answers) == task.queries * task.values
    assert all(sample.text.count(answer) == 1 for answer in sample.answers)
    needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", sample.text)
    if task.haystack != "text" and units:  # the question is never next to its needle
        assert not any(answer in sample.text.split("\n")[-2] for answer in sample.answers)
    hay = units if task.haystack == "needles" else 0
    assert len(needles) == task.keys * task.values + hay
    assert len({key for key, _ in needles}) == task.keys + hay
    asked = [key for key, value in needles if value in sample.answers]
    assert len({*asked}) == task.queries
    question = sample.text.rsplit("\n", 1)[1]
    assert all(key in question and key in sample.prefix for key in asked)
    assert sample.depth is not None
    assert 0 <= sample.depth <= 1


def test_needles_are_at_every_depth():
    depths = [draw(find_task("niah_single_2", 2048, TEXT), seed=seed).depth or 0 for seed in range(300)]
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert 0.4 < sum(depths) / len(depths) < 0.6


def test_a_single_answer_is_asked_for_in_the_singular():
    single, several = (
        draw(find_task("niah_single_1", 2048, TEXT)),
        draw(find_task("niah_multivalue", 2048, TEXT)),
    )
    assert single.text.startswith("A special magic number is hidden")
    assert single.prefix.endswith("mentioned in the provided text is")
    assert several.text.startswith("Some special magic numbers are hidden")
    assert several.prefix.endswith("mentioned in the provided text are")


@pytest.mark.parametrize("chains", [1, 3])
def test_variables_follow_their_chain(chains: int):
    sample = draw(VariableTracking(chains=chains), 30)
    assignments = re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", sample.text)
    assert len(assignments) == 5 * chains
    value = re.search(r"assigned the value (\d{5}) in the text", sample.text)
    assert value
    known = [value.group(1)]
    for name, source in assignments:  # in order, so that a single pass finds the chain
        if source in known:
            known.append(name)
    assert tuple(known[1:]) == sample.answers
    assert "5 variables are assgined" in sample.prefix  # as in RULER


def test_demonstrations_hide_their_answers_as_the_samples_do():
    noise = r"(?:The grass is green\. .* back again\.\n ?)"
    chain = r"VAR (\w{3}) = \d{5} .*" + "".join(rf"VAR (\w{{3}}) = VAR \{n}  .*" for n in range(1, 5))
    text = VariableTracking().demonstration(random.Random(0))
    shown = re.search(chain, text, re.DOTALL)
    assert shown
    assert text.endswith(f"they are:  {' '.join(shown.groups())}\n\n")
    assert len(re.findall(noise, text)) == 10
    words = find_task("cwe", 1024, TEXT).demonstration(random.Random(0))
    counts = Counter(re.findall(r"\d\. ([a-z-]+)", words.split("\nQuestion")[0]))
    answers = re.findall(r"(\d+)\. ([a-z-]+)", words.split("list are: ")[1])
    assert [int(number) for number, _ in answers] == list(range(1, 11))
    assert {word for word, count in counts.items() if count == 3} == {word for _, word in answers}


@pytest.mark.parametrize("units", [10, 300, 700])
def test_common_words_occur_most_often(units: int):
    task = CommonWords()
    sample = draw(task, units)
    entries = re.findall(r"(\d+)\. ([a-z-]+)", sample.text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    counts = Counter(word for _, word in entries)
    assert {word for word, count in counts.items() if count == task.often} == {*sample.answers}
    assert len(counts) == 10 + units
    assert {*counts.values()} == {30, 3}
    others = counts.keys() - {*sample.answers}
    assert not any(answer in word for answer in sample.answers for word in others)


def test_no_word_contains_another():
    words = " ".join(SINGLE)
    assert all(words.count(word) == 1 for word in SINGLE)


@pytest.mark.parametrize("units", [0, 1, 5, 500])
def test_frequent_words_follow_their_ranks(units: int):
    task = FrequentWords(vocabulary=40)
    sample = draw(task, task.fewest + units)
    text = sample.text.split("coded words. ")[1].split("\n")[0].split()
    counts = Counter(text)
    (dots, most), *ranked = counts.most_common()
    assert dots == "..."
    assert {word for word, _ in ranked[:3]} == {*sample.answers}
    assert ranked[2][1] > (ranked[3][1] if len(ranked) > 3 else 0)
    assert most == pytest.approx(0.608 * (task.fewest + units), abs=1)


def test_questions_have_their_paragraph_among_others():
    sample = draw(find_task("qa", 2048, TEXT), 12)
    assert len(re.findall(r"Document \d+:\n", sample.text)) == 13
    number = re.search(r"town (\d+) founded", sample.text)
    assert number
    assert sample.answers == (str(1000 + int(number.group(1))),)
    assert sample.text.count(f"Town {number.group(1)} was") == 1


def test_scores():
    assert match_all("The numbers are 12 and 45.", ["12", "34", "45", "67"]) == 0.5
    assert match_all("APPLE", ["apple"]) == 1
    assert match_any("It was in Denver.", ["denver", "Denver, Colorado"]) == 1
    assert match_any("It was in Oslo.", ["denver", "Denver, Colorado"]) == 0
    assert find_task("qa", 512, TEXT).score("1003", ["1003", "the year 1003"]) == 1
    assert find_task("vt", 512, TEXT).score("ABCDE", ["ABCDE", "FGHIJ"]) == 0.5


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_prompts_fill_their_length(name: str, kind: str):
    """A further unit is too much; no unit has more than 160 tokens here."""
    tokenizer, length = TOKENIZERS[kind](), LENGTHS[kind]
    task = find_task(name, length, TEXT)
    prompt = fill(task, tokenizer.encode, length, PromptFormat(), "a")
    assert prompt == fill(task, tokenizer.encode, length, PromptFormat(), "a")
    assert len(prompt.ids) + task.new_tokens <= length
    if name != "qa":  # which may use up all paragraphs
        assert len(prompt.ids) + task.new_tokens > length - 160
    text = tokenizer.decode(prompt.ids)
    assert text == prompt.sample.text + prompt.sample.prefix
    assert all(answer in text for answer in prompt.sample.answers)


def test_demonstrations_and_a_template():
    task, tokenizer = find_task("niah_single_1", 3000, TEXT), TOKENIZERS["bytes"]()
    prompt = fill(task, tokenizer.encode, 3000, PromptFormat("<user>{prompt}\n<answer>\n", shots=2), "a")
    text = tokenizer.decode(prompt.ids)
    assert text.startswith("<user>A special magic number")
    assert text.count("What is the special magic number for") == 3
    assert text.endswith(f"\n<answer>\n{prompt.sample.prefix.strip()}")
    shown = re.findall(r"provided text is (\d{7})\n\n", text)
    assert len(shown) == 2
    assert not {*shown} & {*prompt.sample.answers}


def test_too_short_lengths_are_refused():
    task, tokenizer = find_task("vt", 400, TEXT), TOKENIZERS["bytes"]()
    with pytest.raises(
        InputError, match=r"the shortest prompt has \d+ tokens and its answer up to 30, got a"
    ):
        fill(task, tokenizer.encode, 400, PromptFormat(), "a")
    with pytest.raises(InputError, match=r"template: expected \{prompt\} once"):
        PromptFormat("no place")


def test_texts(tmp_path: Any):
    default = read_text(None)
    assert len(default.words) > 10_000
    assert "qa" not in task_names(default)
    with pytest.raises(InputError, match="'qa' needs questions about a text"):
        find_task("qa", 512, default)
    with pytest.raises(InputError, match="niah_single_4"):
        find_task("niah_single_4", 512, default)
    squad = tmp_path / "squad.json"
    squad.write_text(
        '{"data": [{"title": "a", "paragraphs": [{"context": "Rome is old.", "qas": [{"id": "1", "question": '
        '"What is old?", "answers": [{"text": "Rome", "answer_start": 0}]}]}]}]}'
    )
    read = read_text(str(squad))
    assert read.words == ["Rome", "is", "old."]
    assert [row["question"] for row in read.rows] == ["What is old?"]
    assert task_names(read) == list(TASKS)
    table = tmp_path / "pairs.csv"
    table.write_text("left,right\na,b\n")
    with pytest.raises(InputError, match="expected a column 'text'"):
        read_text(str(table))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="empty"):
        read_text(str(tmp_path / "empty.txt"))
