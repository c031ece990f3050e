"""What families do beyond a pass, compared with transformers: attention weights, chunks with a cache, texts.

Also the labels of encoder-decoders, which become inputs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import PATCHES
from families import Inputs, at_real, counted, loaded, same, shaken, texts
from family_inputs import DECODED, ended
from family_table import TABLE, language_model, their_model
from torch import Tensor

from polyformer.models import transformers as hub
from polyformer.models.architectures import Transformer
from polyformer.models.generation import GenerationConfig
from polyformer.models.generation.config import SpecialIds
from polyformer.models.generation.hub_format import from_hub

DECODERS = (
    *("ctrl", "gemma3_text", "gpt2", "gpt_neo", "gpt_oss", "gptj", "llama", "mistral", "olmo2", "openai-gpt"),
    *("deepseek_v2", "deepseek_v3", "phi3", "qwen2", "qwen3"),
)
AT_NIGHT = (
    *("biogpt", "bloom", "cohere", "cohere2", "exaone4", "falcon", "gemma", "gemma2", "glm4", "gpt_bigcode"),
    *("gpt_neox", "granite", "granitemoe", "xglm"),
    *("mixtral", "mpt", "olmo3", "opt", "phi", "qwen2_moe", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)
"""Decoders of parts that `DECODERS` has too."""

# mBART's labels begin with the language, in transformers with the last of them
MBART = pytest.param("mbart", marks=pytest.mark.nightly)
SEQUENCES = (
    *("bart", "bigbird_pegasus", "m2m_100", "t5", MBART),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("blenderbot", "led", "marian", "pegasus")),
)
# transformers counts positions from the padding on the left
RIGHT = ("bart", "bigbird_pegasus", "blenderbot", "led", "marian", "mbart", "pegasus")
SPECIAL = {"is_decoder": True, "bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 0}
PAD = 0


@pytest.fixture
def exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    PATCHES.get(request.getfixturevalue("name"), lambda patch: None)(monkeypatch)


def verify_attentions(ours: Transformer, theirs: Any) -> None:
    """Every layer's weights [B, H, Tq, Tk] at the real queries; `theirs` computes them in full."""
    inputs = texts(ours.config.vocab_size, pad=PAD, side="left")
    mask = inputs["attention_mask"]
    mine = ours(**inputs, output_attentions=True).attentions
    other = theirs(**inputs, position_ids=counted(mask), output_attentions=True).attentions
    for a, b in zip(mine, other, strict=True):
        same(at_real(a.transpose(1, 2), mask), at_real(b.transpose(1, 2), mask))


def verify_cache(ours: Transformer, theirs: Any) -> None:
    """Chunks of several sizes with the cache are one pass of theirs."""
    inputs = texts(ours.config.vocab_size, pad=PAD, side="left")
    mask = inputs["attention_mask"]
    expected = theirs(**inputs, position_ids=counted(mask)).logits
    for sizes in ([1] * 11, [4, 7], [3, 1, 5, 2]):
        same(at_real(pieces(ours, inputs, sizes), mask), at_real(expected, mask))


def pieces(ours: Transformer, inputs: Inputs, sizes: list[int]) -> Tensor:
    """What a decoder predicts from a cache and pieces of these sizes."""
    state, actual, start = None, [], 0
    for size in sizes:
        piece = {name: item[:, start : start + size] for name, item in inputs.items()}
        output = ours(**piece, state=state, use_cache=True)
        state, start = output.state, start + size
        actual.append(output.logits)
    return torch.cat(actual, 1)


def verify_generation(ours: Transformer, theirs: Any, **options: Any) -> None:
    """Texts of rows padded on the left, token for token; greedy ones unless `options` say otherwise.

    Small models repeat themselves: a second text, in which no token may come twice, depends on all of them.
    Without an end, and without the pad token, which theirs counts among a text's tokens.
    """
    inputs = texts(ours.config.vocab_size, pad=PAD, side="left")
    eos = ours.config.special.eos
    for more in ({}, {"no_repeat_ngram_size": 1, "suppress_tokens": [PAD, eos]}):
        wanted = {"max_new_tokens": 6, "pad_token_id": PAD, "do_sample": False, **options, **more}
        actual = ours.generate(inputs["input_ids"], inputs["attention_mask"], from_hub(wanted)).sequences
        expected = theirs.generate(**inputs, **wanted)
        assert up_to_the_end(actual[:, 11:], eos) == up_to_the_end(expected[:, 11:], eos)
    assert len(actual[:, 11:].unique()) > 4, "the texts are too much the same to compare"


def up_to_the_end(tokens: Tensor, eos: int | None) -> list[list[int]]:
    """Texts up to their ends, whatever fills the rows after them."""
    rows = tokens.tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


CASES = [(name, config) for name in DECODERS for config in (*TABLE[name].configs, *TABLE[name].trunks)]
CASES += [
    pytest.param(name, config, marks=pytest.mark.nightly)
    for name in AT_NIGHT
    for config in (*TABLE[name].configs, *TABLE[name].trunks)
]


@torch.no_grad()
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("name", "config"), CASES)
def test_weights_chunks_and_texts_are_the_same(name: str, config: dict[str, Any], tmp_path: Path):
    """Greedy texts and those of beams; GPT's keeps no cache, and reads all of a text for every token.

    Falcon of transformers adds ALiBi twice where it returns weights.
    """
    options = {**config, "attn_implementation": "sdpa" if config.get("alibi") else "eager"}
    if name == "gpt2":
        options["reorder_and_upcast_attn"] = False
    theirs = shaken(their_model(name, language_model(name), **options), 0.8)
    if config.get("sliding_window") == 1:
        theirs.generation_config.use_cache = False  # their cache keeps all keys for a window of 1
    ours = loaded(theirs, tmp_path)
    if not config.get("alibi"):
        verify_attentions(ours, theirs)
    verify_cache(ours, theirs)
    verify_generation(ours, theirs)
    verify_generation(ours, theirs, num_beams=3)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("bert", "LMHeadModel"),
        ("big_bird", "ForCausalLM"),
        pytest.param("megatron-bert", "ForCausalLM", marks=pytest.mark.nightly),
    ],
)
def test_descendants_of_bert_write_as_decoders(name: str, task: str, tmp_path: Path):
    theirs: Any = shaken(their_model(name, task, **SPECIAL), 0.6)
    ours = loaded(theirs, tmp_path)
    assert ours.encoder is None
    verify_cache(ours, theirs)
    verify_generation(ours, theirs)


@torch.no_grad()
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bamba", marks=pytest.mark.nightly),
        "kimi_linear",
        "lfm2",
        "mamba2",
        "nemotron_h",
        "qwen3_5_text",
        "qwen3_next",
    ],
)
def test_recurrent_decoders_write_from_their_state(name: str, tmp_path: Path):
    """transformers' classes return no attention weights of these layers."""
    theirs: Any = shaken(their_model(name, "ForCausalLM", **TABLE[name].configs[0]), 0.6)
    ours = loaded(theirs, tmp_path)
    verify_cache(ours, theirs)
    verify_generation(ours, theirs)
    verify_generation(ours, theirs, num_beams=3)


def test_a_roberta_writes_as_a_decoder(tmp_path: Path):
    """Theirs counts positions of padded rows from the ids."""
    theirs: Any = shaken(their_model("roberta", "ForCausalLM", **SPECIAL), 0.6)
    ours = loaded(theirs, tmp_path)
    assert ours.encoder is None
    ids = texts(23, (11, 11))["input_ids"]
    actual = ours.generate(ids, max_new_tokens=5, suppress_tokens=(0, 2)).sequences
    expected = theirs.generate(ids, max_new_tokens=5, do_sample=False, suppress_tokens=[0, 2])
    assert actual.tolist() == expected.tolist()
    assert hub.wrap(ours).can_generate()


@torch.no_grad()
@pytest.mark.nightly
def test_an_xlm_roberta_xl_writes_what_its_passes_predict(tmp_path: Path):
    """Their `generate` counts positions from 0, unlike their passes."""
    theirs: Any = shaken(their_model("xlm-roberta-xl", "ForCausalLM", **SPECIAL), 0.6)
    ours = loaded(theirs, tmp_path)
    assert ours.encoder is None
    ids = texts(23, (11, 11))["input_ids"]
    actual = ours.generate(ids, max_new_tokens=5, suppress_tokens=(0, 2)).sequences
    for _ in range(5):
        logits = theirs(ids).logits[:, -1].index_fill(-1, torch.tensor([0, 2]), -torch.inf)
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert actual.tolist() == ids.tolist()


def writer(name: str, **options: Any) -> Any:
    """A model of transformers with both stacks that writes."""
    return their_model(name, "MTModel" if name == "marian" else "ForConditionalGeneration", **options)


def source(theirs: Any, side: str = "right") -> Inputs:
    """Texts that end in one end token each, the same with padding on either side."""
    inputs = texts(29, pad=theirs.config.pad_token_id)
    mask = inputs["attention_mask"]
    ids = ended(inputs["input_ids"], mask, theirs.config.eos_token_id)
    if side == "left":
        ids = torch.stack([row.roll(11 - int(real.sum())) for row, real in zip(ids, mask)])
        mask = mask.flip(1)
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_steps_with_a_cache_are_one_pass(name: str, side: str, tmp_path: Path):
    config = TABLE[name].configs[2 if name == "bart" else 0]
    theirs: Any = shaken(writer(name, **config))
    ours, inputs, ids = loaded(theirs, tmp_path), source(theirs, side), torch.randint(3, 29, (3, 9))
    their_inputs = source(theirs, "right" if name in RIGHT else side)
    whole = theirs(**their_inputs, decoder_input_ids=ids, use_cache=False).logits
    state, logits = ours.encode(inputs["input_ids"], inputs["attention_mask"]), []
    for chunk in ids.split([1, 3, 1, 4], 1):
        output = ours(decoder_input_ids=chunk, state=state)
        state = output.state
        logits.append(output.logits)
    same(torch.cat(logits, 1), whole)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", [name for name in SEQUENCES if name != MBART])
def test_labels_are_shifted_as_theirs(name: str, tmp_path: Path):
    """What follows is predicted from the start token and labels, with padding where there is none (-100)."""
    labels = torch.tensor(
        [[5, 7, -100, 28, 9, 1], [8, -100, -100, 3, 1, -100], [9, 1, -100, -100, -100, -100]]
    )
    everywhere = torch.ones_like(labels) > 0
    if name == "m2m_100":  # in which padding has no position
        labels[0, 2], labels[1, 1:3], everywhere = 3, 4, labels != -100
    for config in TABLE[name].configs:
        theirs: Any = shaken(writer(name, **config))
        ours, inputs = loaded(theirs, tmp_path), source(theirs, TABLE[name].sides[0])
        mine, other = ours(**inputs, labels=labels), theirs(**inputs, labels=labels)
        same(mine.logits[everywhere], other.logits[everywhere])
        same(mine.loss, other.loss)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("config", range(3))
@pytest.mark.parametrize("name", SEQUENCES)
def test_it_writes_what_theirs_writes(name: str, config: int, tmp_path: Path):
    """The second by beams; M2M-100's translations into a language, whose code comes first."""
    changed = {"num_decoder_layers": 2} if name == "t5" else {"forced_eos_token_id": None}
    chosen = {**TABLE[name].configs[config], **changed}  # their cache of T5 cannot have more layers
    theirs: Any = shaken(writer(name, **chosen), 0.5)
    ours, options = loaded(theirs, tmp_path), {"max_new_tokens": 12, "num_beams": 4 if config == 1 else 1}
    if name == "m2m_100":
        options["forced_bos_token_id"] = 11
    inputs = source(theirs, TABLE[name].sides[0])
    expected = theirs.generate(**inputs, **options, do_sample=False)  # begins with the start token
    assert expected.shape[1] > 4
    for side in ("left", "right"):
        padded = source(theirs, side)
        actual = ours.generate(padded["input_ids"], padded["attention_mask"], from_hub(options)).sequences
        assert name != "m2m_100" or (actual[:, 0] == 11).all()
        eos = theirs.config.eos_token_id
        assert up_to_the_end(actual, eos) == up_to_the_end(expected[:, 1:], eos)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["t5"])
def test_attention_weights_of_both_stacks_are_theirs(name: str, tmp_path: Path):
    theirs: Any = shaken(their_model(name, language_model(name), **TABLE[name].configs[0]))
    theirs.set_attn_implementation("eager")
    ours = loaded(theirs, tmp_path)
    for side in ("left", "right"):
        inputs = {**source(theirs, side), "decoder_input_ids": DECODED}
        mine, other = ours(**inputs, output_attentions=True), theirs(**inputs, output_attentions=True)
        real, whole = inputs["attention_mask"].bool(), torch.ones(3, 6).bool()
        for ours_of, theirs_of, rows in (
            ("attentions", "decoder_attentions", whole),
            ("cross_attentions", "cross_attentions", whole),
            ("encoder_attentions", "encoder_attentions", real),
        ):
            for a, b in zip(getattr(mine, ours_of), getattr(other, theirs_of), strict=True):
                same(a.transpose(1, 2)[rows], b.transpose(1, 2)[rows])


def test_the_decoder_of_bart_alone_continues_as_theirs(tmp_path: Path):
    """Out of a checkpoint of both stacks, in which transformers does not find the decoder's token table."""
    whole: Any = shaken(their_model("bart", "ForConditionalGeneration", forced_eos_token_id=None), 0.5)
    ours = loaded(whole, tmp_path, head="BartForCausalLM")
    assert ours.config.encoder is None
    kind = type(their_model("bart", "ForCausalLM"))
    theirs = kind.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        theirs.get_input_embeddings().weight.copy_(whole.get_input_embeddings().weight)
    ids = torch.randint(6, 29, (2, 5))
    same(ours(ids).logits, theirs(input_ids=ids).logits)
    expected = theirs.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    actual = ours.generate(ids, config=GenerationConfig(max_new_tokens=8, special=SpecialIds(eos=())))
    assert actual.sequences.tolist() == expected.tolist()


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["reformer", "xlm"])
def test_a_decoder_reads_by_pieces(name: str, tmp_path: Path):
    """Reformer, whose model in transformers has no cache; XLM, languages and left padding included."""
    options = {"causal": True} if name == "xlm" else {}
    theirs: Any = shaken(their_model(name, language_model(name), **options))
    ours = loaded(theirs, tmp_path)
    if name == "reformer":
        inputs = {"input_ids": texts(23, (11, 11))["input_ids"]}
        whole, real = theirs(**inputs).logits, torch.ones(2, 11).bool()
    else:
        inputs = texts(23, pad=2, side="left")
        inputs["langs"] = torch.randint(2, inputs["input_ids"].shape)
        whole, real = ours(**inputs).logits, inputs["attention_mask"].bool()
    same(pieces(ours, inputs, [4, 1, 3, 3])[real], whole[real])
