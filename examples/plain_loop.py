"""Train a polyformer model in a plain PyTorch loop.

    python examples/plain_loop.py [STEPS]

The model is a character-level decoder of the text included in Python. The end prints a sample.
"""

import sys

import torch

import polyformer
from polyformer.data import default_documents

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
LENGTH, BATCH = 96, 16

torch.manual_seed(0)
text = "\n".join(default_documents())
letters = sorted(set(text))
number = {letter: index for index, letter in enumerate(letters)}
ids = torch.tensor([number[letter] for letter in text])
train, valid = ids[: -LENGTH * 200], ids[-LENGTH * 200 :]


def batch(data: torch.Tensor) -> torch.Tensor:
    """Return [BATCH, LENGTH] tokens from random positions of the text."""
    starts = torch.randint(len(data) - LENGTH, (BATCH,))
    return torch.stack([data[start : start + LENGTH] for start in starts])


model = polyformer.create_model("decoder-tiny", vocab_size=len(letters), position="rope")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)

for step in range(1, STEPS + 1):
    rows = batch(train)
    loss = model(rows, labels=rows).loss  # the model shifts the labels: each token predicts the next
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 50 == 0 or step == STEPS:
        with torch.no_grad():
            held_out = batch(valid)
            print(f"step {step}: loss {loss:.3f}, held out {model(held_out, labels=held_out).loss:.3f}")

model.eval()
prompt = torch.tensor([[number[letter] for letter in "The "]])
continued = model.generate(prompt, max_new_tokens=60, do_sample=True, temperature=0.7, seed=0)
print("".join(letters[index] for index in continued.sequences[0].tolist()))
