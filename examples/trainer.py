"""Train a polyformer model, with any attention and position scheme, with transformers' Trainer.

    python examples/trainer.py [STEPS]

Needs transformers (`pip install 'polyformer[hub]'`). `wrap` returns a transformers model,
which works with Trainer, PEFT, `pipeline` and `push_to_hub`.
"""

import sys
import tempfile

import transformers
from transformers import Trainer, TrainingArguments

import polyformer
import polyformer.models.transformers
from polyformer.data import TokenizerConfig, build_tokenizer, default_documents

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
LENGTH = 64

transformers.set_seed(0)
documents = default_documents()
tokenizer = build_tokenizer(TokenizerConfig(vocab_size=1000), documents)
ids = [number for document in documents for number in tokenizer.encode(document)]
rows = [
    {"input_ids": row, "labels": row}
    for i in range(0, len(ids) - LENGTH, LENGTH)
    if (row := ids[i : i + LENGTH])
]
held_out, train = rows[:50], rows[50:]

model = polyformer.models.transformers.wrap(
    polyformer.create_model(
        "decoder-tiny", vocab_size=len(tokenizer), attention="Window(16, 0)", position="alibi"
    )
)
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=max(1, STEPS // 4),
            report_to=[],
            save_strategy="no",
            dataloader_pin_memory=False,
            disable_tqdm=True,
        ),
        train_dataset=train,
        eval_dataset=held_out,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    print(f"held-out loss: {before:.3f} before, {trainer.evaluate()['eval_loss']:.3f} after {STEPS} steps")

    # Both libraries can load the saved model.
    trainer.save_model(folder)
    print(type(transformers.AutoModelForCausalLM.from_pretrained(folder)).__name__)
    print(type(polyformer.from_pretrained(folder)).__name__)
