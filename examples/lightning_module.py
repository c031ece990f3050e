"""Train a polyformer model with Lightning, by a short LightningModule.

pip install lightning
python examples/lightning_module.py [STEPS]
"""

import sys
import tempfile

import lightning
import torch
from torch.utils.data import DataLoader

import polyformer

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 150


class Classifier(lightning.LightningModule):
    """An encoder that classifies which of two tokens comes first, which needs positions."""

    def __init__(self, **options):
        super().__init__()
        self.model = polyformer.create_model(
            "encoder-tiny", vocab_size=16, head="classify(num_labels=2)", **options
        )

    def training_step(self, batch, index):
        """Return the loss of a batch (ids [B, T], labels [B])."""
        ids, labels = batch
        loss = self.model(ids, labels=labels).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, index):
        """Log the accuracy."""
        ids, labels = batch
        self.log("accuracy", (self.model(ids).logits.argmax(-1) == labels).float().mean())

    def configure_optimizers(self):
        """Return a torch optimizer; `polyformer.training.optimizers` has more."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def rows(number: int, seed: int, length: int = 12):
    """Return rows with a 3 and a 4 among other tokens; the label is 1 if the 3 comes first."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 16, (number, length), generator=draw)
    places = torch.rand(number, length, generator=draw).argsort(1)[:, :2]  # two distinct positions
    ids.scatter_(1, places, torch.tensor([3, 4]).expand(number, 2))
    return list(zip(ids, (places[:, 0] < places[:, 1]).long()))


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    module = Classifier(position="rope")
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(rows(64 * STEPS, seed=0), batch_size=64))
        trainer.test(module, DataLoader(rows(512, seed=1), batch_size=64), verbose=False)
        print(f"accuracy: {trainer.callback_metrics['accuracy']:.3f}")
        module.model.save_pretrained(f"{folder}/saved")  # only the model, without the LightningModule
        polyformer.from_pretrained(f"{folder}/saved")
