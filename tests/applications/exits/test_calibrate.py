"""A model's own texts: what is lost by exits, and the threshold that its checkpoint keeps."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from polyformer.applications.exits import (
    CalibrateConfig,
    RougeL,
    calibrate,
    continuation_generator,
    generate_texts,
)
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.models.architectures import Transformer, load_pretrained
from polyformer.models.generation import GenerationConfig
from polyformer.models.presets import create_model
from polyformer.nn.depth import recorded_depths
from polyformer.nn.depth.exits import Exits, ExitsConfig, set_threshold

TEXT = "the cat sat on the mat and the dog sat on the log, and so they sat. " * 60


def model(depth: str = "exits(layers=[1], rule=saturation)") -> Transformer:
    """A decoder of bytes, random but for a second layer that changes little: its exit is often right."""
    torch.manual_seed(0)
    settings = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    result = create_model("decoder-tiny", vocab_size=260, depth=depth, **settings).eval()
    with torch.no_grad():
        assert result.decoder is not None
        for parameter in result.decoder.layers[1].parameters():
            parameter.mul_(0.05)
    return result


def rows(count: int, length: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 250, (count, length), generator=generator).tolist()


def text_of(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    similarity = RougeL()
    assert similarity("the cat sat on the mat", "the cat on a mat") == pytest.approx(2 * 4 / (6 + 5))
    assert similarity("con mèo ngồi trên chiếu", "con mèo ngồi trên chiếu") == 1.0
    assert similarity("con mèo", "con chó") == pytest.approx(0.5)
    assert similarity("", "") == 1.0


def test_layers_are_counted_of_written_tokens_alone():
    of = model()
    write, _ = continuation_generator(rows(3), 6, text_of)
    assert generate_texts(of, write, None).layers == 2
    assert generate_texts(of, write, 0.0).layers == 1


def test_rows_that_ended_before_their_batch_count_no_longer():
    of = model()
    sources = rows(8)
    write, _ = continuation_generator(sources, 6, text_of)
    texts = [text.split() for text in generate_texts(of, write, 1.0).texts]
    end = texts[0][2]  # some rows write it early, others late or never
    of.config = dataclasses.replace(of.config, special=dataclasses.replace(of.config.special, eos=int(end)))
    set_threshold(of, 0.5)
    right: list[int] = []
    for row in sources:  # alone in its batch, with nothing to count but what it writes
        with recorded_depths() as depths:
            of.generate(torch.tensor([row[:6]]), None, GenerationConfig(max_new_tokens=6))
        right += [int(depth) for depth in depths[1:]]
    assert len(right) < 8 * 5, "no row ended early"
    assert generate_texts(of, write, 0.5).layers == pytest.approx(sum(right) / len(right))


def test_the_lowest_threshold_that_passes_is_kept_and_the_losses_are_of_the_texts():
    of = model()
    write, references = continuation_generator(rows(80), 6, text_of)
    asked = CalibrateConfig(risk=0.2, confidence=0.9)
    result = calibrate(of, write, references, asked)
    assert result.threshold is not None
    last = result.tested[-1]
    assert all(test.p_value <= 0.1 for test in result.tested[:-1])
    whole, early = generate_texts(of, write, 1.0), generate_texts(of, write, last.threshold)
    right = [1 - RougeL()(full, text) for full, text in zip(whole.texts, early.texts)]
    assert last.losses == pytest.approx(right)
    depth = of.config.decoder.depth
    assert isinstance(depth, ExitsConfig)
    assert depth.threshold == result.threshold
    assert depth.calibration is not None
    assert (depth.calibration.risk, depth.calibration.texts) == (0.2, 80)
    assert isinstance(of.decoder.depth, Exits)
    assert list(of.decoder.depth.thresholds) == [result.threshold]


def test_beside_references_only_what_is_lost_counts():
    of = model()
    write, _ = continuation_generator(rows(80), 6, text_of)
    best = generate_texts(of, write, 0.0).texts  # references that exits at once reach
    asked = CalibrateConfig(risk=0.2, confidence=0.9, measure="references")
    result = calibrate(of, write, best, asked)
    assert result.threshold == asked.thresholds[-1]
    assert all(test.risk == 0.0 for test in result.tested[-1:])


def saved(folder: Path, of: Transformer) -> Path:
    of.save_pretrained(folder)
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(folder)
    return folder


def test_the_command_keeps_the_threshold_in_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder, text = saved(tmp_path / "model", model()), tmp_path / "text.txt"
    text.write_text(TEXT)
    sizes = ["--texts", "60", "--prompt", "8", "--new-tokens", "4", "--risk", "0.3", "--confidence", "0.9"]
    status = main(["calibrate", str(folder), "--data", str(text), *sizes])
    output, error = capsys.readouterr()
    assert status == 0, error
    kept = json.loads((folder / "config.json").read_text())["decoder"]["depth"]
    assert f"threshold {kept['threshold']}" in output
    assert kept["calibration"]["texts"] == 60
    loaded = load_pretrained(folder)
    assert list(loaded.decoder.depth.thresholds) == [kept["threshold"]]


def test_the_thresholds_and_the_format_of_the_texts_can_be_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    folder, text = saved(tmp_path / "model", model()), tmp_path / "text.notes"
    text.write_text(TEXT)
    sizes = ["--texts", "60", "--prompt", "8", "--new-tokens", "4", "--risk", "0.9", "--confidence", "0.9"]
    call = ["calibrate", str(folder), "--data", str(text), *sizes, "--thresholds", "0.98,0.5"]
    assert main(call) == 2
    assert "say format=" in capsys.readouterr().err
    assert main([*call, "--format", "text"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    tested = [words[0] for words in lines if len(words) == 5 and words[0].startswith("0.")]
    assert tested == ["0.98", "0.50"]


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    plain, text = saved(tmp_path / "plain", model("fixed")), tmp_path / "text.txt"
    exits = saved(tmp_path / "exits", model())
    text.write_text(TEXT)
    wrong = {
        "no early exits": [str(plain), "--data", str(text)],
        "expected 59 or more": [str(exits), "--data", str(text), "--texts", "20"],
        "--data is missing: name texts": [str(exits)],
        "no such directory": [str(tmp_path / "absent"), "--data", str(text)],
        "--thresholds: expected numbers": [str(exits), "--data", str(text), "--thresholds", "much"],
        "thresholds: expected falling": [str(exits), "--data", str(text), "--thresholds", "0.1,0.2"],
        "risk: expected a probability": [str(exits), "--data", str(text), "--risk", "2"],
    }
    before = (exits / "config.json").read_bytes()
    for message, arguments in wrong.items():
        assert main(["calibrate", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert (exits / "config.json").read_bytes() == before


def test_a_model_without_exits_is_refused():
    with pytest.raises(InputError, match="no early exits"):
        calibrate(model("fixed"), lambda model: [], [""] * 100, CalibrateConfig())
