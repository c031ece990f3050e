# %% [markdown]
# # Train on many machines, on your laptop
#
# Two processes on one machine do the same as a thousand processes on a hundred machines: they shard a model,
# exchange tensors, fail and restart. Everything below is real, only small. For a cluster you change one line;
# see the last section.
#
#     python docs/tutorials/many_machines.py      # half a minute on two cores
#
# The command for one process is `polyformer train RECIPE`. For several processes, run it with `torchrun`. It
# starts the processes, assigns their ranks, and restarts all of them if one fails.

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
os.environ["OMP_NUM_THREADS"] = "1"  # one thread per process on two cores
FIRST, STEPS = 12, 40

# %% [markdown]
# ## 1. A text, a recipe, one process
#
# A recipe describes a whole run. This recipe trains two layers on random sentences. Only the sizes differ
# from a large recipe. We set `dropout: 0` to compare the runs, because several processes draw other random
# numbers than one process.

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
    """Run a polyformer command in this process without output."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*words]) == 0


quietly("train", "recipe.yaml", "--out", "single", "--training.accumulate", "2")
single = [row["loss"] for row in read_metrics(Path("single"))]
print(f"one process: the loss falls from {single[0]:.2f} to {single[-1]:.2f} in {len(single)} steps")

# %% [markdown]
# Each step accumulates the gradients of two batches (`accumulate`). Two processes that read one batch each
# should reach the same weights.
#
# ## 2. Two processes and their shards
#
# Adam needs 16 bytes per weight: the weight, its gradient and two moments. In plain data parallelism (the
# mesh `data`, the default) every process stores all of them. With `shard: 2` each process stores half of
# every tensor. It gathers a layer to compute with it, and then frees the other half. PyTorch calls this FSDP;
# the original paper calls it ZeRO.

# %%
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PARALLEL = "--training.engine.parallel"


def torchrun(*words: str, restarts: int = 0) -> subprocess.Popen:
    """Start `torchrun --nproc-per-node 2 -m polyformer ...` with its output in log.txt."""
    command = [*TORCHRUN, "--max-restarts", str(restarts), "-m", "polyformer", *words]
    with Path("log.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def check(launched: subprocess.Popen) -> None:
    """Wait for the processes, and raise an error with the end of the log if they failed."""
    assert launched.wait() == 0, Path("log.txt").read_text()[-2000:]


def compare(run: str) -> str:
    """Compare the losses of a run with the losses of one process."""
    losses = [row["loss"] for row in read_metrics(Path(run))]
    difference = max(abs(ours - theirs) / theirs for ours, theirs in zip(losses, single))
    return f"{len(losses)} steps; the losses differ from one process by {difference:.0e} at most"


check(torchrun("train", "recipe.yaml", "--out", "run", "--steps", str(FIRST), f"{PARALLEL}.shard", "2"))
print(compare("run"))

# %% [markdown]
# The difference comes from float32, in which the order of a sum matters. The checkpoint shows the shards:
# each process wrote one file.


# %%
def numbers_in(path: Path) -> int:
    """Count the numbers in a file of tensors."""
    return sum(tensor.numel() for tensor in read_tensors(path).values())


print(f"the model has {numbers_in(Path('run/model.safetensors')):,} weights")
newest = max(Path("run/checkpoints").iterdir())
for number, path in enumerate(sorted((newest / "model").glob("shard-*"))):
    print(f"process {number} holds {numbers_in(path):,} of them")

# %% [markdown]
# ## 3. Another mesh, and a process that fails
#
# A checkpoint works with every mesh. We resume the run with tensor parallelism, `tensor: 2`: both processes
# read the same batch, and each computes half of the heads and half of every feed-forward (so we set
# `accumulate: 2` again). During the run we kill one process, as if its machine had failed. `--max-restarts`
# lets torchrun restart both processes. They load the last checkpoint of the run automatically.

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
print(f"the run was resumed {resumed} times: on another mesh, and after a process was killed")
print(compare("run"))

# %% [markdown]
# The result is an ordinary model in one file.

# %%
ours, theirs = (read_tensors(Path(run, "model.safetensors")) for run in ("run", "single"))
difference = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
print(f"the weights differ from one process by {difference:.0e} at most")
quietly("generate", "run", "--prompt", words[0], "--max-new-tokens", "8")

# %% [markdown]
# ## 4. Predict memory and traffic
#
# `polyformer show MODEL --mesh ...` predicts the memory and the traffic of every process. First for our run:
# the weights per process are the numbers above, at 4 bytes each.

# %%
assert main(["show", "run", "--mesh", "shard=2", "--batch", "4", "--length", "32", "--precision", "no"]) == 0

# %% [markdown]
# Then for a larger model. Does Llama 2 7B fit into 8 GPUs with 80 GB each, for texts of 4,096 tokens?

# %%
assert main(["show", "llama-2-7b", "--mesh", "shard=8", "--length", "4096"]) == 0

# %% [markdown]
# It fits: 60 GB, or 21 GB with activation checkpointing (`recompute: true`). Try `--mesh shard=8,tensor=2` or
# `--length 32768` as well. [From laptop to cluster](../cluster.md) explains each dimension of the mesh, and
# predicts runs with 70 billion weights, 10^12 tokens and a million positions.
#
# ## 5. On the cluster
#
# The recipe does not change. On one machine with 8 GPUs:
#
#     torchrun --nproc-per-node 8 --max-restarts 3 -m polyformer train recipe.yaml --out RUN \
#         --training.engine.parallel.shard 8 --training.engine.precision bf16 --training.engine.recompute true
#
# With Slurm, run `sbatch` [slurm.sbatch](../../examples/cluster/slurm.sbatch)
# `recipe.yaml /shared/runs/mine`. It runs the same line on each of 4 machines, with one copy of the model per
# machine (`parallel.data: 4`). Change three things in this file: the numbers of machines and GPUs, the time
# limit, and the mesh. The product of the mesh must be the number of processes. All machines must see the
# folder of the run. Before the time limit the job writes a checkpoint, requeues itself, and resumes.
# [Runs](../runs.md#several-processes) lists all settings for several processes.
