"""XLM, masked and causal, with every head, loaded from transformers' files and saved back."""

import os
from typing import Any

import pytest
import torch

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
transformers = pytest.importorskip("transformers")

from encoders import PROBLEMS, counts, labels  # noqa: E402
from families import counted, same, shaken, texts, verify  # noqa: E402
from transformers.models.xlm import modeling_xlm  # noqa: E402

import polyformer  # noqa: E402
from polyformer.checkpoints import FAMILIES  # noqa: E402
from polyformer.core.errors import InputError  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "emb_dim": 12,
    "n_layers": 2,
    "n_heads": 3,
    "max_position_embeddings": 19,
}
CONFIGS: list[dict[str, Any]] = [
    {"n_langs": 4},
    {"causal": True, "n_langs": 2, "gelu_activation": False, "tie_word_embeddings": False},
    {
        "n_langs": 3,
        "use_lang_emb": False,
        "sinusoidal_embeddings": True,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 0,
        "n_heads": 2,
        "emb_dim": 10,
        "n_layers": 3,
        "summary_first_dropout": 0.4,
    },
    {"causal": True},
]
HEADS = (
    "WithLMHeadModel",
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnsweringSimple",
)
CASES = [
    *((head, config, "right", "one") for head in HEADS for config in range(3)),
    ("WithLMHeadModel", 3, "right", "one"),
    ("WithLMHeadModel", 0, "left", "one"),
    *(("ForSequenceClassification", 0, "right", problem) for problem in PROBLEMS if problem != "one"),
]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """transformers rounds the scores to float32; here it leaves those in float64 as they are."""
    plain = modeling_xlm.MultiHeadAttention.forward

    def forward(self, input, *rest, **named):
        with pytest.MonkeyPatch.context() as patch:
            if input.dtype == torch.float64:
                patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return plain(self, input, *rest, **named)

    monkeypatch.setattr(modeling_xlm.MultiHeadAttention, "forward", forward)


@pytest.mark.parametrize(("head", "config", "side", "problem"), CASES)
def test_xlm(head: str, config: int, side: str, problem: str, tmp_path):
    numbered = PROBLEMS[problem] if head == "ForSequenceClassification" else {}
    numbered = {"num_labels": 5} if head == "ForTokenClassification" else numbered
    chosen = transformers.XLMConfig(**{**SIZES, **CONFIGS[config], **numbered})
    torch.manual_seed(7)
    whole = head == "ForQuestionAnsweringSimple"
    inputs = texts(23, (11, 11, 11) if whole else (11, 8, 3), pad=chosen.pad_token_id, side=side)
    if chosen.n_langs > 1 and chosen.use_lang_emb:
        inputs["langs"] = torch.randint(chosen.n_langs, inputs["input_ids"].shape)
    mine, theirs = labels(
        "LMHeadModel" if head == "WithLMHeadModel" else head, inputs["attention_mask"], problem
    )
    if chosen.causal and head == "WithLMHeadModel":  # which transformers does not shift
        mine = {"labels": inputs["input_ids"]}
        following = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)[:, 1:]
        theirs = {"labels": torch.nn.functional.pad(following, (0, 1), value=-100)}
    verify(
        getattr(transformers, f"XLM{head}")(chosen),
        inputs,
        tmp_path,
        labels=mine,
        their_labels=theirs,
        only_theirs={"position_ids": counted(inputs["attention_mask"])},
    )


def test_without_languages_none_is_added(tmp_path):
    theirs = shaken(transformers.XLMModel(transformers.XLMConfig(**SIZES, n_langs=4)))
    theirs.save_pretrained(tmp_path)
    inputs = texts(23, pad=2)
    same(
        polyformer.from_pretrained(tmp_path)(**inputs).last_hidden_state[0],
        theirs(**inputs).last_hidden_state[0],
    )


def test_a_causal_model_reads_by_pieces(tmp_path):
    """With the cache as in one pass, languages and left padding included."""
    config = transformers.XLMConfig(**SIZES, n_langs=2, causal=True)
    shaken(transformers.XLMWithLMHeadModel(config)).save_pretrained(tmp_path)
    ours = polyformer.from_pretrained(tmp_path)
    inputs = texts(23, pad=2, side="left")
    inputs["langs"] = torch.randint(2, inputs["input_ids"].shape)
    whole, state, pieces = ours(**inputs).logits, None, []
    for start, stop in ((0, 5), (5, 6), (6, 11)):
        piece = {name: item[:, start:stop] for name, item in inputs.items()}
        output = ours(**piece, state=state, use_cache=True)
        state = output.state
        pieces.append(output.logits)
    real = inputs["attention_mask"].bool()
    same(torch.cat(pieces, 1)[real], whole[real])


@pytest.mark.parametrize(
    ("preset", "count", "millions"),
    [
        ("xlm-mlm-en-2048", 667_119_041, None),
        ("xlm-clm-ende-1024", 142_422_203, None),
        ("xlm-mlm-tlm-xnli15-1024", 249_071_384, 250),
    ],
)
def test_parameters(preset: str, count: int, millions: int | None):
    """`millions` is what Conneau et al. 2020, appendix, print of XLM with 15 languages."""
    assert counts(preset, "XLMWithLMHeadModel") == (count, count)
    assert millions is None or abs(count / 1e6 - millions) < 2


@pytest.mark.parametrize(
    ("task", "changed", "message"),
    [
        ("WithLMHeadModel", {"asm": True}, "config.json: asm is True, and only False is supported"),
        ("WithLMHeadModel", {"is_encoder": False}, "config.json: is_encoder is False"),
        ("ForSequenceClassification", {"summary_type": "mean"}, "config.json: summary_type is 'mean'"),
        (
            "ForSequenceClassification",
            {"summary_activation": "tanh"},
            "config.json: summary_activation is 'tanh'",
        ),
        ("ForSequenceClassification", {"summary_use_proj": False}, "config.json: summary_use_proj is False"),
    ],
)
def test_what_is_not_computed_is_refused(task: str, changed: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        FAMILIES["xlm"].config(changed, task)
    assert str(caught.value).startswith(message)


def test_a_summary_is_of_classes_alone():
    assert FAMILIES["xlm"].config({"summary_type": "mean"}, "WithLMHeadModel").encoder is not None


def test_old_names_of_options():
    config = FAMILIES["xlm"].config({"n_words": 50, "pad_index": 7, "hidden_size": 32}, "WithLMHeadModel")
    assert (config.vocab_size, config.special.pad, config.hidden_size) == (50, 7, 32)
