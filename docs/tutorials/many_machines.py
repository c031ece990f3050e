# %% [markdown]
# # Train on many machines, on your laptop
#
# Two processes on one machine do all that a thousand do on a hundred: they divide a model, exchange what
# they need, die and are started again. So everything below is the real thing, only small. At its end stands
# what to change for a cluster, which is one line.
#
#     python docs/tutorials/many_machines.py      # half a minute on two cores
#
# The command that trains on one process is `polyformer train RECIPE`. On several it is the same, behind
# `torchrun`, which starts the processes, tells each its number, and starts all again if one dies.

# %%
import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from polyformer.cli.main import main
from polyformer.core.files import read_tensors
from polyformer.training.metrics import read_metrics

random.seed(0)
os.environ["OMP_NUM_THREADS"] = "1"  # a thread for each process: two cores have no more
FIRST, STEPS = 12, 40

# %% [markdown]
# ## 1. A text, a recipe, one process
#
# A recipe holds all of a run. Here are two layers on made-up sentences; the sizes are a laptop's, nothing
# else differs from a large one's. `dropout: 0` because processes draw other random numbers than one process
# does, and we want to compare.

# %%
words = ["".join(random.choices("aeioubdgklmnrst", k=random.randint(2, 5))) for _ in range(60)]
text = "\n".join(" ".join(random.choices(words, k=9)) for _ in range(400))
Path("text.txt").write_text(text)
Path("recipe.yaml").write_text(f"""
task: {{kind: lm, row_length: 32, batch_tokens: 128, ngram_order: 2}}
model: {{preset: decoder-tiny, hidden_size: 64, num_hidden_layers: 2, dropout: 0.0}}
data: {{path: text.txt, format: lines, validation_fraction: 0.1}}
tokenizer: {{algorithm: bytes}}
schedule: {{kind: constant}}
training:
  steps: {STEPS}
  engine: {{device: cpu}}
  reporting: {{log_every: 1}}
  saving: {{checkpoint_every: 4}}
""")


def quietly(*words: str) -> None:
    """A command of polyformer in this process, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*words]) == 0


quietly("train", "recipe.yaml", "--out", "alone", "--training.accumulate", "2")
alone = [row["loss"] for row in read_metrics(Path("alone"))]
print(f"one process: the loss falls from {alone[0]:.2f} to {alone[-1]:.2f} in {len(alone)} steps")

# %% [markdown]
# A step here adds up the gradients of two batches (`accumulate`). Two processes that read a batch each should
# come to the very same weights.
#
# ## 2. Two processes, and what each holds
#
# Adam keeps 16 bytes for every weight: the weight, its gradient and two moments. With plain data parallelism
# (the mesh is then `data`, the default) every process has all of that. `shard: 2` divides it: each process
# holds half of every tensor, gathers a layer when it computes with it, and forgets the other half again.
# PyTorch calls this FSDP, and the paper that invented it ZeRO.

# %%
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PARALLEL = "--training.engine.parallel"


def torchrun(*words: str, restarts: int = 0) -> subprocess.Popen:
    """`torchrun --nproc-per-node 2 -m polyformer ...`, begun; what it prints goes to a file."""
    command = [*TORCHRUN, "--max-restarts", str(restarts), "-m", "polyformer", *words]
    with Path("log.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def check(ended: subprocess.Popen) -> None:
    """Wait for it, and say what went wrong, if anything did."""
    assert ended.wait() == 0, Path("log.txt").read_text()[-2000:]


def compare(run: str) -> str:
    """How far the losses of a run are from those of one process."""
    losses = [row["loss"] for row in read_metrics(Path(run))]
    apart = max(abs(ours - theirs) / theirs for ours, theirs in zip(losses, alone))
    return f"{len(losses)} steps, whose losses differ from those of one process by {apart:.0e} at most"


check(torchrun("train", "recipe.yaml", "--out", "run", "--steps", str(FIRST), f"{PARALLEL}.shard", "2"))
print(compare("run"))

# %% [markdown]
# The difference is that of float32, where the order of a sum matters. What each process held can be seen in
# the checkpoint: each wrote a file of its own parts.


# %%
def numbers_in(path: Path) -> int:
    """How many numbers a file of tensors has."""
    return sum(tensor.numel() for tensor in read_tensors(path).values())


print(f"the model has {numbers_in(Path('run/model.safetensors')):,} weights")
newest = max(Path("run/checkpoints").iterdir())
for number, path in enumerate(sorted((newest / "model").glob("shard-*"))):
    print(f"process {number} holds {numbers_in(path):,} of them")

# %% [markdown]
# ## 3. Another mesh, and a process that dies
#
# A checkpoint belongs to no mesh. The same run goes on with `tensor: 2`, where both processes read the same
# batch and each computes half of the heads and half of every inner layer (so two batches a step are again
# `accumulate: 2`). And while it does, one of the two processes is killed, as a machine dies: without a word.
# `--max-restarts` allows torchrun to start both again; they find the run's last checkpoint by themselves.

# %%
mesh = [f"{PARALLEL}.shard", "1", f"{PARALLEL}.tensor", "2", "--training.accumulate", "2"]
launched = torchrun("train", "--resume", "run", "--steps", str(STEPS), *mesh, restarts=2)
while max(Path("run/checkpoints").iterdir()) == newest:
    assert launched.poll() is None, Path("log.txt").read_text()[-2000:]
    time.sleep(0.005)
children = subprocess.run(["pgrep", "-P", str(launched.pid)], capture_output=True, text=True, check=True)
os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
check(launched)
resumed = Path("log.txt").read_text().count("resumed run at step")
print(f"the run was taken up {resumed} times: on another mesh, and after a process had been killed")
print(compare("run"))

# %% [markdown]
# What comes out is a model like any other, in one file.

# %%
ours, theirs = (read_tensors(Path(run, "model.safetensors")) for run in ("run", "alone"))
apart = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
print(f"no weight differs from that of one process by more than {apart:.0e}")
quietly("generate", "run", "--prompt", words[0], "--max-new-tokens", "8")

# %% [markdown]
# ## 4. What a cluster needs, before you ask for one
#
# `polyformer show MODEL --mesh ...` predicts what every process will hold and send. First for our run, which
# takes a moment to check: half of the weights are the numbers above, at 4 bytes each.

# %%
assert main(["show", "run", "--mesh", "shard=2", "--batch", "4", "--length", "32", "--precision", "no"]) == 0

# %% [markdown]
# Then for a model that no laptop trains. Does Llama 2 7B fit into 8 GPUs of 80 GB, with texts of 4,096
# tokens?

# %%
assert main(["show", "llama-2-7b", "--mesh", "shard=8", "--length", "4096"]) == 0

# %% [markdown]
# It does: 60 GB, or 21 GB with `recompute: true`, which computes layers again instead of keeping them. With
# `--mesh shard=8,tensor=2` or `--length 32768` you see what the next question costs. Which dimension is for
# what, and the same for 70 billion weights, 10^12 tokens and a million positions, is in
# [from laptop to cluster](../cluster.md).
#
# ## 5. On the cluster
#
# The recipe stays. On one machine of 8 GPUs:
#
#     torchrun --nproc-per-node 8 --max-restarts 3 -m polyformer train recipe.yaml --out RUN \
#         --training.engine.parallel.shard 8 --training.engine.precision bf16 --training.engine.recompute true
#
# Under Slurm, `sbatch` [slurm.sbatch](../../examples/cluster/slurm.sbatch) `recipe.yaml /shared/runs/mine`:
# the same line on each of 4 machines, with a copy of the model on each (`parallel.data: 4`). Change three
# things in that file: the numbers of machines and GPUs, the time, and the mesh, whose product must be the
# number of all processes. All machines must see the run's folder. Before the job's time is up it writes a
# checkpoint and goes back in the queue; the same line goes on. All that a run accepts on several processes is
# in [runs](../runs.md#several-processes).
