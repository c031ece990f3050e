"""The rows of `make speed`, and the processes that run them; `tests/speed.py` compares two revisions by them.

A row is a function that prepares its inputs and returns two calls: ours, and torch's own operations to which
ours is related in the history of the project. Rows use only the public names of `polyformer`, so that they
run on revisions of other structure.

    python tests/speed_rows.py ADDRESS    fork a process for each line "ROW ARM CACHE" of standard input
"""

import contextlib
import functools
import importlib
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import polyformer

Call = Callable[[], object]
Row = Callable[[], tuple[Call, Call]]

WIDE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 2}
"""Layers of GPT-2's and BERT's width: two of them, since the others repeat them."""

NARROW = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 1}
"""A single layer in which attention takes most of the time."""

SHORTEST, LONG = 0.02, 0.5
"""The least seconds of a timed run, and the seconds from which a first call is not repeated to warm up."""

PATTERNS = "BlockWindow", "Causal", "Global", "Random", "Strided", "Window"

TINY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 4}
"""A model in which Python takes most of the time."""


def tensors(length: int, heads: int = 8, width: int = 64, gradients: bool = False) -> list[Tensor]:
    """Return q, k and v [1, H, T, D] in the memory layout of projections."""
    torch.manual_seed(0)
    inputs = (torch.randn(1, length, heads, width).transpose(1, 2) for _ in range(3))
    return [x.requires_grad_(gradients) for x in inputs]


def without_gradients(call: Call) -> Call:
    return torch.no_grad()(call)


def product() -> Call:
    """Return a product of matrices, the work of most layers."""
    x, weight = torch.randn(512, 1024), torch.randn(1024, 1024)
    return without_gradients(lambda: F.linear(x, weight))


def dense(length: int, causal: bool = False, backward: bool = False) -> Call:
    """Return torch's attention over all keys, of the shapes of `tensors`."""
    q, k, v = tensors(length, gradients=backward)
    forward = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
    return (lambda: forward().sum().backward()) if backward else without_gradients(forward)


def attention(pattern: str, length: int, backward: bool = False, alibi: bool = False) -> Row:
    """Return the row of `attend` with a pattern, an expression of its public names."""

    def row() -> tuple[Call, Call]:
        q, k, v = tensors(length, gradients=backward)
        read = eval(pattern, {name: getattr(polyformer, name) for name in PATTERNS if name in pattern})
        slopes = 2.0 ** -torch.arange(1, 9)

        def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - slopes[h] * (q_idx - kv_idx).abs()

        mods = {"score_mod": bias} if alibi else {}

        def ours() -> Tensor:
            return polyformer.attend(q, k, v, pattern=read, **mods)

        call = (lambda: ours().sum().backward()) if backward else without_gradients(ours)
        return call, dense(min(length, 1024), "Causal" in pattern, backward)

    return row


def model(name: str, sizes: dict[str, int], **options: Any) -> Any:
    torch.manual_seed(0)
    return polyformer.create_model(name, **{**sizes, "vocab_size": 1000, **options}).eval()


def tokens(rows: int, length: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(5, 1000, (rows, length))


def step(model: Any, batch: dict[str, Tensor]) -> Call:
    """Return a training step: forward with the loss, backward, AdamW."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)

    def call() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return call


def layer(name: str, attention: Any, length: int) -> Row:
    """Return the row of a single layer of a mechanism, in inference."""

    def row() -> tuple[Call, Call]:
        sizes = NARROW | {"max_position_embeddings": length}
        ids = tokens(1, length)
        own = model(name, sizes, attention=attention)
        return without_gradients(lambda: own(ids)), dense(1024, name.startswith("decoder"))

    return row


def small_attend() -> tuple[Call, Call]:
    q, k, v = tensors(16, 4, 16)
    ours = functools.partial(polyformer.attend, q, k, v, pattern=polyformer.Causal())
    theirs = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    return without_gradients(ours), without_gradients(theirs)


def tiny(what: str) -> Row:
    def row() -> tuple[Call, Call]:
        own, ids = model("decoder-tiny", TINY), tokens(2, 16)
        calls: dict[str, Callable[[], Call]] = {
            "forward": lambda: without_gradients(lambda: own(ids)),
            "step": lambda: step(own, {"input_ids": ids, "labels": ids}),
            "generation": lambda: generation(own, ids, 12),
        }
        return calls[what](), small_attend()[1]

    return row


def generation(model: Any, ids: Tensor, count: int, **how: Any) -> Call:
    """Return greedy generation of `count` tokens, without an end token."""
    from polyformer import GenerationConfig

    special = importlib.import_module(GenerationConfig.__module__.rpartition(".")[0]).SpecialIds(eos=())
    config = GenerationConfig(max_new_tokens=count, special=special)
    return lambda: model.generate(ids, config=config, **how)


def gpt2_step() -> tuple[Call, Call]:
    ids = tokens(2, 256)
    return step(model("gpt2", WIDE), {"input_ids": ids, "labels": ids}), product()


def gpt2_generation(texts: int, compile: bool = False) -> Row:
    how = {"compile": True} if compile else {}
    return lambda: (generation(model("gpt2", WIDE), tokens(texts, 24), 24, **how), product())


def t5_generation() -> tuple[Call, Call]:
    sizes = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    return generation(model("t5-small", sizes), tokens(2, 24), 24), product()


def padded_bert() -> tuple[Call, Call]:
    ids, lengths = tokens(4, 256), torch.tensor([256, 150, 90, 60])
    mask = (torch.arange(256) < lengths.view(-1, 1)).long()
    own = model("bert-base", WIDE)
    return without_gradients(lambda: own(ids, attention_mask=mask)), product()


def longformer_step() -> tuple[Call, Call]:
    sizes = WIDE | {"num_hidden_layers": 1, "max_position_embeddings": 2048}
    own, ids = model("longformer-base", sizes), tokens(1, 2048)
    marks = (torch.arange(2048) < 1).long().unsqueeze(0)
    batch = {"input_ids": ids, "labels": ids, "global_attention_mask": marks}
    return step(own, batch), product()


def prompt() -> tuple[Call, Call]:
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 8200}
    return generation(model("smollm2-135m", sizes), tokens(1, 8192), 1), product()


def write_checkpoint(folder: Path) -> None:
    """Write a random Llama as transformers saves it, for the row that loads one."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=1000, **sizes)).save_pretrained(folder)


def loading() -> tuple[Call, Call]:
    """Return the loading of a checkpoint that the driver has written."""
    return functools.partial(polyformer.from_pretrained, os.environ["SPEED_CHECKPOINT"]), product()


def process(*words: str) -> Row:
    """Return the row of a process of its own; torch's own is its import."""

    def run(*words: str) -> None:
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)

    return lambda: (functools.partial(run, *words), functools.partial(run, "-c", "import torch"))


ROWS: dict[str, Row] = {
    "attend-16": small_attend,
    "window-1024": attention("Window(256)", 1024),
    "window-8192": attention("Window(256)", 8192),
    "window-1024-step": attention("Window(256)", 1024, backward=True),
    "window-8192-step": attention("Window(256)", 8192, backward=True),
    "window-global": attention("Window(256) | Global(4)", 4096),
    "bigbird": attention("BlockWindow(64, 1) | Global(64) | Random(3, 64, seed=0)", 4096),
    "strided": attention("Strided(64) & Causal()", 4096),
    "window-alibi": attention("Window(256)", 4096, alibi=True),
    "performer": layer("encoder-tiny", "performer", 4096),
    "lsh": layer("decoder-tiny", "lsh(rounds=2)", 4096),
    "routing": layer("decoder-tiny", "routing", 4096),
    "linformer": layer("encoder-tiny", {"kind": "linformer", "max_length": 4096}, 4096),
    "gated-delta": layer("decoder-tiny", "gated_delta", 2048),
    "tiny-forward": tiny("forward"),
    "tiny-step": tiny("step"),
    "tiny-generation": tiny("generation"),
    "gpt2-step": gpt2_step,
    "gpt2-generation-1": gpt2_generation(1),
    "gpt2-generation-8": gpt2_generation(8),
    "gpt2-compiled-1": gpt2_generation(1, compile=True),
    "gpt2-compiled-8": gpt2_generation(8, compile=True),
    "t5-generation": t5_generation,
    "bert-padded": padded_bert,
    "longformer-step": longformer_step,
    "prompt-8192": prompt,
    "import": process("-c", "import polyformer; polyformer.attend"),
    "help": process("-m", "polyformer", "--help"),
    "from-pretrained": loading,
}
"""The rows by name; README and results name the first seven."""


def serve(address: str) -> None:
    """Fork a process for each row that is asked for: the libraries are imported once."""
    for line in sys.stdin:
        row, arm, cache = line.split()
        with contextlib.suppress(ChildProcessError):  # of processes that have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        in_a_fork(functools.partial(work_until_settled, address, row, arm, cache))


def in_a_fork(job: Callable[[], bool]) -> int:
    """Fork a process that computes a job, and return its number; it ends with 0, 1 if False, 2 for errors."""
    process = os.fork()
    if process == 0:
        status = 2
        try:
            status = int(not job())
        finally:
            os._exit(status)
    return process


def work_until_settled(address: str, row: str, arm: str, cache: str) -> bool:
    """Let processes do the work of a row until all of its choices of kernels are stored."""
    with Client(address) as driver:  # closed here too, so that the driver notices a process that crashes
        for last in False, False, True:
            process = in_a_fork(functools.partial(work, driver, row, arm, cache, last))
            if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 1:
                break
    return True


def work(driver: Connection, row: str, arm: str, cache: str, last: bool) -> bool:
    """Answer the questions of the driver about a row: ("ours" or "torch", loops) -> seconds a call.

    False without an answer, unless it is the `last` try, if this process has measured choices of kernels and
    stored them: that takes up to 200 MiB, and leaves behind as much by chance as a row may take.
    """
    os.environ["XDG_CACHE_HOME"] = cache  # each launch measures its own choices of kernels
    before, choices = peak_mib(resource.RUSAGE_SELF), stored_choices(cache)
    calls: dict[str, Call] = {}
    loops: dict[str, int] = {}
    message = ""
    try:
        calls["ours"], calls["torch"] = ROWS[row]()
        loops = {name: loops_of(call) for name, call in calls.items()}
    except Exception as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    if not last and stored_choices(cache) != choices:
        return False
    driver.send((arm, loops, message))
    if not message:
        while (question := driver.recv()) is not None:
            name, count = question
            driver.send(timed(calls[name], count))
        own = peak_mib(resource.RUSAGE_SELF) - before
        driver.send(max(own, peak_mib(resource.RUSAGE_CHILDREN)))
    return True


def stored_choices(cache: str) -> list[bytes]:
    """Return the files of choices in a cache folder."""
    return [file.read_bytes() for file in sorted(Path(cache).rglob("tuning/*.json"))]


def loops_of(call: Call) -> int:
    """Return how often a call is repeated in a timed run of at least `SHORTEST`, after calls to warm up.

    The first calls of a short row are slow, so that the number grows with the calls that it counts.
    """
    loops, seconds = 1, timed(call, 1)
    if seconds < LONG:
        seconds = timed(call, 1)
    while loops * seconds < SHORTEST:
        loops = min(10 * loops, math.ceil(SHORTEST / seconds))
        seconds = timed(call, loops)
    return loops


def timed(call: Call, loops: int) -> float:
    """Return the seconds of a call, the mean of `loops`."""
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - start) / loops


def peak_mib(whose: int) -> float:
    """Return the largest memory of a process so far; Linux counts in KiB, macOS in bytes."""
    size = resource.getrusage(whose).ru_maxrss
    return size / (1 << 20 if sys.platform == "darwin" else 1 << 10)


if __name__ == "__main__":
    serve(sys.argv[1])
