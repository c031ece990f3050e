"""Encoders of ours as sentence-transformers' modules: opened, trained by its Trainer, saved, opened again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import polyformer
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig
from polyformer.data.tokenizers import build_tokenizer
from polyformer.models.checkpoints.folder_files import embedding_head, write_modules

TEXTS = [f"line {i} of a small text" for i in range(60)]
LONG = " ".join(TEXTS[:9])  # longer than the source's 40 positions

TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 60}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries' own, of each other


def source_folder(folder: Path) -> Path:
    """A BERT as sentence-transformers saves it: mean pooling, length 1."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=60, max_position_embeddings=40, **sizes)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder / "bert")
    build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=60), TEXTS).save(folder / "bert")
    modules = [Transformer(str(folder / "bert")), Pooling(16), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "theirs"))
    return folder / "theirs"


def ours(folder: Path, texts: list[str]) -> torch.Tensor:
    """Vectors [N, E] by our model and our tokenizer, text by text."""
    from polyformer.data.tokenizers import load_tokenizer

    model, tokenizer = polyformer.from_pretrained(folder), load_tokenizer(folder)
    with torch.no_grad():
        rows = [torch.tensor([tokenizer.encode_for_model(text)[0]]) for text in texts]
        return torch.cat([model(row).logits for row in rows])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Theirs, and the same for longer texts with a window."""
    root = tmp_path_factory.mktemp("sentence")
    theirs = source_folder(root)
    words = ["convert", str(theirs), str(root / "long"), "--head", "embed", "--max-positions", "300"]
    assert main([*words, "--attention", "Window(64) | Global(1)", "--format", "wrapped"]) == 0
    return theirs, root / "long"


def opened(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")


def test_a_converted_encoder_is_opened(folders: tuple[Path, Path]):
    theirs, long = folders
    embedder = opened(long)
    assert embedder.max_seq_length == 300
    vectors = embedder.encode([*TEXTS[:3], LONG], convert_to_tensor=True)
    torch.testing.assert_close(vectors, ours(long, [*TEXTS[:3], LONG]), rtol=1e-5, atol=1e-5)
    short = opened(theirs).encode(TEXTS[:3], convert_to_tensor=True)
    torch.testing.assert_close(vectors[:3], short, rtol=1e-5, atol=1e-5)


def test_our_folder_is_the_module_of_a_pooling_of_ones_own(folders: tuple[Path, Path]):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    module = Transformer(
        str(folders[1]),
        model_args={"trust_remote_code": True},
        config_args={"trust_remote_code": True},
        tokenizer_args={"trust_remote_code": True},
    )
    embedder = SentenceTransformer(modules=[module, Pooling(16, pooling_mode="cls")], device="cpu")
    vectors = embedder.encode([TEXTS[4]], convert_to_tensor=True)
    model = polyformer.from_pretrained(folders[1])
    ids = module.tokenizer([TEXTS[4]], return_tensors="pt")["input_ids"]
    expected = model(ids).last_hidden_state[:, 0].detach()
    torch.testing.assert_close(vectors, expected, rtol=1e-5, atol=1e-5)


def test_its_trainer_trains_it_and_what_it_saves_is_ours(folders: tuple[Path, Path], tmp_path: Path):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    embedder = opened(folders[1])
    before = embedder.encode(TEXTS[:2], convert_to_tensor=True)
    pairs = Dataset.from_dict({"anchor": TEXTS[:8], "positive": [LONG + text for text in TEXTS[8:16]]})
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    SentenceTransformerTrainer(
        model=embedder, args=settings, train_dataset=pairs, loss=MultipleNegativesRankingLoss(embedder)
    ).train()
    after = embedder.encode(TEXTS[:2], convert_to_tensor=True)
    assert float((after - before).abs().max()) > 1e-3
    embedder.save(str(tmp_path / "trained"))
    assert (tmp_path / "trained" / "modeling_polyformer.py").is_file()
    again = opened(tmp_path / "trained").encode(TEXTS[:2], convert_to_tensor=True)
    torch.testing.assert_close(again, after, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        F.normalize(ours(tmp_path / "trained", TEXTS[:2])), after, rtol=1e-5, atol=1e-5
    )


def test_the_modules_say_what_the_head_does(folders: tuple[Path, Path], tmp_path: Path):
    model = polyformer.from_pretrained(folders[1])
    assert embedding_head(folders[1]) == model.config.head
    assert not write_modules(polyformer.create_model("bert-base", **TINY).config, tmp_path)
    assert not [*tmp_path.iterdir()], "an encoder with another head is none of theirs"
    with pytest.raises(InputError, match="head: a model in polyformer's format has its own head"):
        polyformer.from_pretrained(folders[1], head="masked")
