"""Train a small language model on your own text file, then continue a prompt with it.

python examples/own_data.py FILE.txt FOLDER [STEPS]
"""

import sys

import torch

from polyformer import Recipe, fit

settings = {
    "data": {"path": sys.argv[1], "format": "paragraphs"},  # 5% of the paragraphs are held out
    "tokenizer": {"algorithm": "bpe", "vocab_size": 1000},
    "model": {"preset": "decoder-tiny", "position": "rope", "attention": "Window(64, 0)"},
    "task": {"kind": "lm", "row_length": 128, "batch_tokens": 2048},
    "optimizer": {"kind": "adamw", "lr": 3e-3},
    "training": {"steps": int(sys.argv[3]) if len(sys.argv) > 3 else 300},
}
fitted = fit(Recipe.from_dict(settings), out=sys.argv[2])  # the folder keeps model, tokenizer and metrics
print(f"validation loss: {fitted.scores['validation']['loss']:.3f}")

tokenizer = fitted.run.tokenizer
prompt = torch.tensor([tokenizer.encode("The ")])
generated = fitted.model.eval().generate(prompt, max_new_tokens=40, do_sample=True, seed=0)
print("The " + generated.texts(tokenizer.decode)[0])
