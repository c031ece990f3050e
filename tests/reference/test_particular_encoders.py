"""What one family of encoders has that others do not: files, inputs and outputs of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import PATCHES
from families import Inputs, compare_gradients, counted, loaded, same, shaken, squares, texts, verify
from family_inputs import TOKENS, TOPICS, without_effect
from family_table import TABLE, read_config, their_config, their_model

from polyformer import from_pretrained
from polyformer.attention.patterns import Marked, Window
from polyformer.core.errors import InputError
from polyformer.models import transformers as hub
from polyformer.models.architectures import TwoStreams
from polyformer.models.checkpoints import FAMILIES
from polyformer.models.presets import create_model, model_config
from polyformer.nn.heads import ClassifyConfig, SpanConfig, TagConfig

transformers = pytest.importorskip("transformers")

LENGTH = 13
GLOBAL: dict[str, list[list[int]]] = {
    "none": [[], [], []],
    "first": [[0], [0], [0]],
    "different": [[1, 5, 12], [], [9, 10]],
    "one-row": [[], [0, 2], []],
}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deberta", "longformer", "modernbert", "xlm", "xlnet"):
        PATCHES[name](monkeypatch)


def rows(side: str = "right", marks: str = "") -> Inputs:
    """Longformer's texts; `marks` says which tokens are global, "" nothing."""
    inputs = texts(23, (LENGTH, 9, 5), 1, side)
    if marks:
        chosen = torch.zeros_like(inputs["input_ids"])
        for row, slots in enumerate(GLOBAL[marks]):
            chosen[row, slots] = 1
        inputs["global_attention_mask"] = chosen * inputs["attention_mask"]
    return inputs


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("marks", GLOBAL)
def test_global_tokens(marks: str, side: str, tmp_path: Path):
    """Of lengths that theirs pads to a multiple of the window; the sides have different windows."""
    inputs = rows(side, marks)
    labels = torch.nn.functional.pad(TOKENS, (0, LENGTH - 11), value=-100)
    labels = {"labels": labels.masked_fill(inputs["attention_mask"] == 0, -100)}
    config = TABLE["longformer"].configs[0 if side == "left" else 2]
    verify(their_model("longformer", "ForMaskedLM", **config), inputs, tmp_path, labels=labels)


def test_a_classifier_marks_the_first_token_by_itself(tmp_path: Path):
    theirs = their_model("longformer", "ForSequenceClassification", num_labels=3)
    ours = verify(theirs, rows(), tmp_path, labels={"labels": TOPICS["one"]})
    alone = ours(**rows())
    same(alone.logits, ours(**rows(marks="first")).logits)
    assert (alone.logits - ours(**rows(marks="none")).logits).abs().max() > 1e-3


def test_questions_are_marked_up_to_their_separator(tmp_path: Path):
    """Theirs wants three separators in each row; the marks end before the first."""
    inputs = rows()
    inputs["input_ids"].masked_fill_(inputs["input_ids"] == 2, 3)
    for row, ends in enumerate([(4, 5, 12), (2, 3, 8), (1, 2, 4)]):
        inputs["input_ids"][row, list(ends)] = 2
    ours = verify(their_model("longformer", "ForQuestionAnswering"), inputs, tmp_path)
    marks = (torch.arange(LENGTH) < torch.tensor([[4], [2], [1]])).long()
    same(ours(**inputs).logits, ours(**inputs, global_attention_mask=marks).logits)


def test_attention_weights_of_global_tokens(tmp_path: Path):
    """Theirs come in pieces: a window's columns, and a table of the global rows."""
    theirs: Any = shaken(their_model("longformer", "Model"))
    ours = loaded(theirs, tmp_path)
    ids, chosen = texts(23, (16,), 1)["input_ids"], torch.zeros(1, 16, dtype=torch.long)
    chosen[0, [3, 7]] = 1
    mine = ours(ids, global_attention_mask=chosen, output_attentions=True).attentions
    other = theirs(input_ids=ids, global_attention_mask=chosen, output_attentions=True).global_attentions
    for a, b in zip(mine, other, strict=True):
        same(a[0, :, [3, 7]], b[0].mT)


def test_a_fresh_longformer_becomes_a_checkpoint(tmp_path: Path):
    """With the pattern that theirs has; with another it is refused."""
    names = "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"
    sizes = {name: TABLE["longformer"].sizes[name] for name in names}
    sizes |= {"max_position_embeddings": 20, "pad": 1, "bos": 0, "eos": 2}
    ours = create_model("longformer-base", **sizes, attention=Window(3) | Marked()).eval()
    ours.save_pretrained(tmp_path, format="hub")
    theirs = transformers.LongformerForMaskedLM.from_pretrained(tmp_path).eval()
    inputs, real = rows(marks="different"), rows()["attention_mask"].bool()
    same(ours(**inputs).logits[real], theirs(**inputs).logits[real], 1e-5)
    with pytest.raises(InputError, match="no public family"):
        create_model("longformer-tiny", **sizes).save_pretrained(tmp_path, format="hub")


def test_bigbird_counts_the_first_block_for_each_random_one(tmp_path: Path):
    """Theirs, in evaluation; ours draws random blocks, and its short texts do not depend on long ones."""
    theirs: Any = shaken(their_model("big_bird", "ForMaskedLM", num_random_blocks=2))
    ours = loaded(theirs, tmp_path)
    long, short = texts(23, (30, 30)), texts(23, (18, 11))
    mine, other = (item(**long).logits for item in (ours, theirs))
    assert (mine - other).abs().max() > 1e-3
    assert theirs.bert.attention_type == "block_sparse"
    weights = ours(**long, output_attentions=True).attentions
    assert weights is not None
    assert all((tensor == 0).any() for tensor in weights)
    real = short["attention_mask"].bool()
    same(ours(**short).logits[real], theirs(**short).logits[real])


@pytest.mark.parametrize("options", [{"hidden_act": "relu"}, {"attention_type": "original_full"}])
def test_bigbird_answers_behind_the_question(options: dict[str, Any], tmp_path: Path):
    """Rows of different questions, one without an end; theirs makes token types where it is given none."""
    inputs = texts(23, (11, 11, 11))
    ids = inputs["input_ids"]
    ids[ids == 5] = 7
    ids[0, 3] = ids[0, 10] = ids[1, 5] = 5
    question = torch.tensor([4, 6, 1])[:, None] > torch.arange(11)
    inputs["token_type_ids"] = (~question).long()
    theirs = their_model("big_bird", "ForQuestionAnswering", sep_token_id=5, **options)
    spans = torch.tensor([[4, 6], [0, 9], [9, 10]])
    names = {"start_positions": spans[:, 0], "end_positions": spans[:, 1]}
    positions = {"position_ids": counted(inputs["attention_mask"])}
    ours = verify(
        theirs, inputs, tmp_path, labels={"labels": spans}, their_labels=names, only_theirs=positions
    )
    logits = ours(**inputs).logits
    assert (logits[0, 1:4] < -1e5).all()
    assert (logits[0, [0, 4, 5]] > -1e5).all()
    wrapped = hub.wrap(ours)
    actual, expected = wrapped(ids, **names), theirs.float()(ids, **names)
    same(actual.start_logits[2], expected.start_logits[2], 1e-4)
    same(actual.loss, expected.loss, 1e-4)


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
@pytest.mark.parametrize("tied", [True, False])
def test_debertas_masked_head_of_the_original_code(name: str, tied: bool, tmp_path: Path):
    """Without `legacy` it reads the token table, tied or not."""
    theirs = their_model(name, "ForMaskedLM", legacy=False, tie_word_embeddings=tied)
    inputs = texts(23)
    labels = {"labels": TOKENS.masked_fill(inputs["attention_mask"] == 0, -100)}
    ours = verify(theirs, inputs, tmp_path, labels=labels, dead=without_effect(theirs))
    assert ours.config.embedding.tied


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_attention_weights_of_deberta(name: str, tmp_path: Path):
    options = {"max_relative_positions": 7, "position_buckets": -1, "attn_implementation": "eager"}
    theirs: Any = shaken(their_model(name, "Model", **options))
    ours, inputs = loaded(theirs, tmp_path), texts(23)
    real = inputs["attention_mask"].bool()
    mine, other = (item(**inputs, output_attentions=True).attentions for item in (ours, theirs))
    for a, b in zip(mine, other, strict=True):
        same(a.transpose(1, 2)[real], b.transpose(1, 2)[real])


def test_modernbert_computes_a_padded_batch_without_its_padding(tmp_path: Path):
    """Long enough that windows and unpadding matter: rows of 40 and 9 tokens are what they are alone."""
    options = {**TABLE["modernbert"].configs[0], "max_position_embeddings": 64}
    theirs = their_model("modernbert", "Model", **options).double().eval()
    ours, ids = loaded(theirs, tmp_path), torch.randint(3, 23, (2, 40))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        together = ours(ids, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
        alone = theirs(ids[1:, :9]).last_hidden_state
    same(together[1:, :9], alone)


def test_older_names_of_modernberts_options():
    """Files on the hub say the bases and which layers see all tokens in another way."""
    old = {"global_attn_every_n_layers": 2, "global_rope_theta": 50.0, "local_rope_theta": 7.0}
    old |= {name: TABLE["modernbert"].sizes[name] for name in ("num_hidden_layers", "local_attention")}
    config = FAMILIES["modernbert"].config(old, "ForMaskedLM")
    assert config == read_config(transformers.ModernBertConfig(**old))
    assert config.encoder is not None
    assert config.encoder.position.to_dict()["bases"] == [50.0, 7.0]


def test_what_no_modernbert_can_hold_is_named():
    config = model_config("modernbert-base")
    for path, value in (
        ("encoder.block.first_norm", True),
        ("encoder.position.bases", (7.0, 8.0)),
        ("encoder.attention.bias", ("query",)),
        ("encoder.dropout", 0.1),
    ):
        with pytest.raises(InputError, match=path):
            FAMILIES["modernbert"].hub_config(config.override(path, value))


def test_a_discriminator_becomes_a_classifier_with_a_fresh_head(tmp_path: Path):
    theirs = their_model("electra", "ForPreTraining")
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="not in the checkpoint, newly initialized: head.dense.weight"):
        ours = from_pretrained(tmp_path, head="ForSequenceClassification")
    assert torch.equal(ours.tokens.weight, theirs.electra.embeddings.word_embeddings.weight)


def test_each_head_has_its_dropout():
    family = FAMILIES["distilbert"]
    hub = {"dropout": 0.1, "seq_classif_dropout": 0.2, "qa_dropout": 0.3}
    heads = {name: family.config(hub, name).head for name in family.tasks}
    assert heads["ForSequenceClassification"] == ClassifyConfig(activation="relu", dropout=0.2)
    assert heads["ForTokenClassification"] == TagConfig(dropout=0.1)
    assert heads["ForQuestionAnswering"] == SpanConfig(span_dropout=0.3)
    for name in ("gpt2", "gpt_neo"):
        hub = their_config(name, num_labels=4, classifier_dropout=0.3).to_dict()
        assert FAMILIES[name].config(hub, "ForTokenClassification").head == TagConfig(
            num_labels=4, dropout=0.3
        )


def test_names_that_transformers_takes_too():
    config = FAMILIES["distilbert"].config({"hidden_size": 24, "num_hidden_layers": 2}, "ForMaskedLM")
    assert config.encoder is not None
    assert (config.hidden_size, config.encoder.num_hidden_layers) == (24, 2)
    config = FAMILIES["xlm"].config({"n_words": 50, "pad_index": 7, "hidden_size": 32}, "WithLMHeadModel")
    assert (config.vocab_size, config.special.pad, config.hidden_size) == (50, 7, 32)


def test_without_languages_none_is_added(tmp_path: Path):
    theirs = shaken(their_model("xlm", "Model", n_langs=4))
    ours, inputs = loaded(theirs, tmp_path), texts(23, pad=2)
    same(ours(**inputs).last_hidden_state[0], theirs(**inputs).last_hidden_state[0])


def test_segments_of_xlnet_are_its_token_types(tmp_path: Path):
    """Any numbers: whether two are equal matters alone."""
    theirs = shaken(their_model("xlnet", "LMHeadModel", clamp_len=5))
    ours = loaded(theirs, tmp_path)
    inputs = texts(23, (LENGTH, 9, 5), side="left")
    mask = inputs["attention_mask"].bool()
    segments = torch.tensor([0] * 5 + [1] * 4 + [2] * 3 + [4]).expand(3, -1)
    actual, expected = (
        model(**inputs, **{name: segments}).logits[mask]
        for model, name in ((ours, "segment_ids"), (theirs, "token_type_ids"))
    )
    same(actual, expected)
    assert not torch.allclose(ours(**inputs).logits[mask], actual)
    compare_gradients(ours, squares([actual]), theirs, squares([expected]))


@pytest.mark.parametrize("with_segments", [False, True])
def test_two_streams_of_xlnet(with_segments: bool, tmp_path: Path):
    """Of each row the last tokens of an order are predicted, the others are known to all."""
    theirs: Any = shaken(their_model("xlnet", "LMHeadModel"))
    ours = loaded(theirs, tmp_path)
    query = torch.nn.Parameter(ours.unused_tensors["transformer.mask_emb"].flatten())
    model = TwoStreams(ours, query)
    inputs = texts(23, (LENGTH, 9, 7), side="left")
    mask, known, goals = inputs["attention_mask"], 3, 3
    torch.manual_seed(5)
    places = torch.rand(3, LENGTH, dtype=torch.float64).masked_fill(mask == 0, -1.0).argsort(1).argsort(1)
    ranks = (places - (LENGTH - goals) + 1).clamp_min(0)
    assert (ranks == 0).sum() > known
    targets = torch.stack([(ranks == number).long().argmax(1) for number in range(1, goals + 1)], 1)
    before = (ranks[:, None, :] < ranks[:, :, None]) | ((ranks[:, None, :] == 0) & (ranks[:, :, None] == 0))
    mapping = torch.nn.functional.one_hot(targets, LENGTH).double()
    segments = (torch.arange(LENGTH) // 4).expand(3, -1)
    more = ({"segment_ids": segments}, {"token_type_ids": segments}) if with_segments else ({}, {})
    actual = model(**inputs, ranks=ranks, **more[0]).logits
    actual = actual.gather(1, targets[..., None].expand(-1, -1, actual.shape[2]))
    expected = theirs(**inputs, perm_mask=(~before).double(), target_mapping=mapping, **more[1]).logits
    same(actual, expected)
    compare_gradients(ours, squares([actual]), theirs, squares([expected]), dead=("transformer.mask_emb",))
    assert query.grad is not None
    same(query.grad, theirs.transformer.mask_emb.grad.flatten())
