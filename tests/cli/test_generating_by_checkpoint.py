"""`generate` and `translate` of a checkpoint: with its own settings, and with those of the command line."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch

import polyformer
from polyformer.cli.main import main
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.generation import GenerationConfig

os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def gpt2(folder: Path, **settings: object) -> Path:
    checkpoints.save(folder, "gpt2", checkpoints.byte_files(folder, "gpt2"), max_position_embeddings=100)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("settings", [{"max_new_tokens": 7}, {"max_length": 15, "num_beams": 3}])
def test_generate_as_transformers_does(settings: dict, tmp_path: Path, output: Callable[..., str]):
    transformers = pytest.importorskip("transformers")
    gpt2(tmp_path, **settings)
    load_tokenizer(tmp_path).save(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).generate(
        **tokenizer("Anna", return_tensors="pt")
    )
    expected = tokenizer.decode(ids[0], skip_special_tokens=True)
    assert output("generate", tmp_path, "--prompt", "Anna") == expected + "\n"


def test_what_the_command_line_says_wins(tmp_path: Path, output: Callable[..., str]):
    folder = gpt2(tmp_path, max_length=15, num_beams=3, do_sample=False, repetition_penalty=1.5)
    model, tokenizer = polyformer.from_pretrained(folder), load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode("Anna")])

    def generated(**options: object) -> str:
        config = GenerationConfig.from_dict({"repetition_penalty": 1.5, **options})
        return "Anna" + model.generate(ids, config=config).texts(tokenizer.decode)[0] + "\n"

    greedy = output("generate", folder, "--prompt", "Anna", "--max-new-tokens", 4, "--num-beams", 1)
    assert greedy == generated(max_new_tokens=4)
    sampled = output("generate", folder, "--prompt", "Anna", "--max-new-tokens", 9, "--seed", 3)
    assert sampled == generated(max_new_tokens=9, sampling={"do_sample": True, "seed": 3})
    plain = output(
        "generate",
        folder,
        "--prompt",
        "Anna",
        "--max-new-tokens",
        9,
        "--num-beams",
        1,
        "--repetition-penalty",
        1,
    )
    assert plain == generated(max_new_tokens=9, repetition_penalty=1.0)


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--penalty-alpha 0.9 --top-k 3", {"penalty_alpha": 0.9, "top_k": 3}),
        ("--dola-layers 0", {"dola_layers": [0]}),
        (
            "--num-beams 4 --num-beam-groups 2 --diversity-penalty 0.5",
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "normalization": "length"}
            | {"length_penalty": 1.0, "early_stopping": False},
        ),
    ],
)
def test_contrasts_and_groups_of_beams(
    flags: str, options: dict, tmp_path: Path, output: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    folder = gpt2(tmp_path, max_new_tokens=6, do_sample=False)
    model, tokenizer = polyformer.from_pretrained(folder), load_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode("Anna")])
    texts = model.generate(ids, None, GenerationConfig(), max_new_tokens=6, **options)
    expected = "Anna" + texts.texts(tokenizer.decode)[0] + "\n"
    assert output("generate", folder, "--prompt", "Anna", *flags.split()) == expected
    for wrong in ("--dola-layers middle", "--penalty-alpha 0.5 --num-beams 2", "--num-beam-groups 2"):
        assert main(["generate", str(folder), "--prompt", "Anna", *wrong.split()]) == 2
        assert wrong.split()[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_a_draft_writes_the_same_and_says_what_came_of_it(
    tmp_path: Path, train_tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    folder = gpt2(tmp_path)
    command = ["generate", str(folder), "--prompt", "Anna and Anna", "--max-new-tokens", "12"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    for draft, counts in (("lookup", r"\d+ of \d+"), (str(folder), r"(\d+) of \1")):
        assert main([*command, "--draft", draft, "--draft-tokens", "3"]) == 0
        out, err = capsys.readouterr()
        assert out == plain
        assert re.fullmatch(rf"draft: {counts} proposed tokens accepted in \d+ passes of the model\n", err)
    assert main([*command, "--draft", str(train_tiny("lm"))]) == 2
    assert "have different vocabularies" in capsys.readouterr().err


def test_a_model_is_trained_to_draft_and_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The second run adds heads to the trained model, whose weights and text stay as they are."""
    data, first, second = tmp_path / "text.txt", tmp_path / "first", tmp_path / "second"
    data.write_text("one two three four five six seven eight nine ten. " * 60)
    train = ["train", "--data", str(data), "--task.kind", "lm", "--task.row_length", "32", "--steps", "3"]
    train += ["--tokenizer.vocab_size", "270", "--device", "cpu"]
    assert (
        main([*train, "--model", "decoder-tiny", "--model.drafting", "multi_token", "--out", str(first)]) == 0
    )
    heads = ["--pretrained", str(first), "--model.drafting", "medusa(alone=true)", "--out", str(second)]
    assert main([*train, *heads]) == 0
    before, after = (polyformer.from_pretrained(run) for run in (first, second))
    for name, tensor in after.state_dict().items():
        assert name.startswith("drafting.") or torch.equal(before.state_dict()[name], tensor), name
    assert after.get_parameter("drafting.residual").any(), "trained"
    texts = set()
    for run, flags in ((first, []), (first, ["--draft", "self"]), (second, ["--draft", "self"])):
        capsys.readouterr()
        assert main(["generate", str(run), "--prompt", "one two", "--max-new-tokens", "16", *flags]) == 0
        out, err = capsys.readouterr()
        texts.add(out)
        assert bool(re.search(r"draft: \d+ of \d+ proposed tokens accepted", err)) == bool(flags)
    assert len(texts) == 1


def test_generate_without_settings_or_prompt(tmp_path: Path, output: Callable[..., str]):
    folder = checkpoints.save(
        tmp_path, "gpt2", checkpoints.byte_files(tmp_path, "gpt2"), max_position_embeddings=100
    )
    model, tokenizer = polyformer.from_pretrained(folder), load_tokenizer(folder)
    expected = model.generate(torch.tensor([[tokenizer.bos_id]])).texts(tokenizer.decode)[0]
    assert output("generate", folder) == expected + "\n"


@pytest.mark.parametrize("form", ["hub", "polyformer"])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_translate_as_the_model_does(family: str, form: str, tmp_path: Path, output: Callable[..., str]):
    tokenizer = (
        checkpoints.piece_files(tmp_path) if family == "t5" else checkpoints.byte_files(tmp_path, "bart")
    )
    checkpoints.save(tmp_path, {"t5": "t5-small", "bart": "bart-base"}[family], tokenizer)
    polyformer.from_pretrained(tmp_path).save_pretrained(tmp_path / "copy", format=form)
    tokenizer.save(tmp_path / "copy")
    (tmp_path / "copy/generation_config.json").write_text('{"num_beams": 2, "max_new_tokens": 9}')
    model, ids = polyformer.from_pretrained(tmp_path), tokenizer.encode_for_model("a funny film")[0]
    for words, beam in (
        ((), {"num_beams": 2, "normalization": "length", "length_penalty": 1.0, "early_stopping": False}),
        (("--num-beams", 1), {}),
    ):
        config = GenerationConfig.from_dict({"max_new_tokens": 9, "beam": beam})
        expected = model.generate(torch.tensor([ids]), config=config).texts(tokenizer.decode)[0]
        assert output("translate", tmp_path / "copy", "a funny film", *words) == expected.strip() + "\n"


def test_translate_draws_anew_every_time(tmp_path: Path, output: Callable[..., str]):
    """Where a checkpoint's settings sample, whatever torch's own generator says."""
    checkpoints.save(tmp_path, "t5-small", checkpoints.piece_files(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "max_new_tokens": 20, "top_k": 0}')
    before, texts = torch.get_rng_state(), set[str]()
    for _ in range(3):
        torch.manual_seed(0)
        texts.add(output("translate", tmp_path, "a funny film"))
    torch.set_rng_state(before)
    assert len(texts) > 1


def test_translate_between_languages(
    tmp_path: Path, output: Callable[..., str], complaint: Callable[..., str]
):
    tokenizer = checkpoints.piece_files(tmp_path, "__en__ $A </s>", checkpoints.LANGUAGES)
    checkpoints.save(tmp_path, "m2m100-418m", tokenizer)
    model = polyformer.from_pretrained(tmp_path)
    ids = tokenizer.encode_for_model("a film", language="fr")[0]
    config = GenerationConfig.from_dict(
        {"max_new_tokens": len(ids) + 50, "constraints": {"forced_bos_token_id": tokenizer.languages["de"]}}
    )
    expected = model.generate(torch.tensor([ids]), config=config).texts(tokenizer.decode)[0].strip()
    words = "translate", tmp_path, "a film", "--source-language", "fr"
    assert output(*words, "--target-language", "de") == expected + "\n"
    assert output(*words, "--target-language", "en") != expected + "\n"
    known = "this model writes many languages; expected one of them, such as en, de, fr"
    assert f"--target-language: {known}" in complaint(*words)
    assert "unknown --target-language 'dee': did you mean 'de'" in complaint(
        *words, "--target-language", "dee"
    )


def test_translate_by_the_task_in_the_configuration(tmp_path: Path, output: Callable[..., str]):
    tokenizer = checkpoints.piece_files(tmp_path)
    task = {"prefix": "from Oslo to Paris: ", "max_length": 8, "num_beams": 1}
    hub = {"task_specific_params": {"translation_en_to_de": task}}
    checkpoints.save(tmp_path, "t5-small", tokenizer, hub=hub)
    ids = tokenizer.encode_for_model("from Oslo to Paris: a film")[0]
    config = GenerationConfig(max_new_tokens=7)
    made_here = polyformer.from_pretrained(tmp_path).generate(torch.tensor([ids]), config=config)
    words = "--source-language", "en", "--target-language", "de"
    assert (
        output("translate", tmp_path, "a film", *words) == made_here.texts(tokenizer.decode)[0].strip() + "\n"
    )


@pytest.mark.filterwarnings("ignore:this CPU has no bfloat16")
@pytest.mark.parametrize("weights", ["int8", "int4", "bfloat16"])
def test_converted_weights_write_as_they_are(
    weights: str, train_tiny: Callable[..., Path], tmp_path: Path, output: Callable[..., str]
):
    folder = tmp_path / weights
    assert main(["convert", str(train_tiny("lm")), str(folder), "--weights", weights]) == 0
    model = polyformer.from_pretrained(folder)
    stored = {"int4": torch.uint8}.get(weights) or getattr(torch, weights)
    assert stored in {tensor.dtype for tensor in model.state_dict().values()}
    text = output("generate", folder, "--prompt", "line", "--max-new-tokens", 20)
    assert text.startswith("line")
    assert len(text) > 10
    assert main(["evaluate", str(folder)]) == 2, "of runs alone: a checkpoint names no data and no task"


@pytest.mark.parametrize("flags", [[], ["--num-beams", "2"], ["--draft", "lookup"]])
@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_prompt_and_continuation_are_the_text_of_all_tokens(
    kind: str, flags: list[str], tmp_path: Path, output: Callable[..., str]
):
    """The space before the first new word is shown once, also if the prompt ends with a space."""
    config = TokenizerConfig.from_dict({"algorithm": kind, "vocab_size": 100, "lowercase": True})
    Tokenizer.train(config, checkpoints.TEXT).save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    folder = checkpoints.save(tmp_path, "gpt2", tokenizer, max_position_embeddings=100)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 8}))
    model, words = polyformer.from_pretrained(folder), checkpoints.TEXT[0].lower().split()
    search = {"num_beams": 2, "normalization": "length", "length_penalty": 1.0, "early_stopping": False}
    options = search if "--num-beams" in flags else {}

    def new_tokens(ids: list[int]) -> list[int]:
        return model.generate(torch.tensor([ids]), max_new_tokens=8, **options).new_tokens()[0]

    prompt = whole = ""
    for prompt in (f"{a} {b}" for a in words for b in words):
        ids = tokenizer.encode_prompt(prompt)
        new = new_tokens(ids)
        whole = tokenizer.decode([*ids, *new])
        if whole == f"{prompt} {tokenizer.decode(new)}":  # the new tokens alone have no space
            break
    assert whole.startswith(f"{prompt} ")
    for shown in (prompt, prompt + " "):
        ids = tokenizer.encode_prompt(shown)
        whole = tokenizer.decode([*ids, *new_tokens(ids)])
        assert output("generate", folder, "--prompt", shown, *flags) == whole + "\n"
