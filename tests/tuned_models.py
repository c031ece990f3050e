"""LoRA of a chat model by this library, by transformers with peft, and by trl; then direct preferences.

    python tests/tuned_models.py MODEL --steps 200 --seeds 3 --out FOLDER

MODEL is a folder that transformers reads, such as that of `polyformer convert model.gguf MODEL --format hub`.
All learn the same 48 pairs, two in a step and each once in an epoch, in float32 with the same adapters,
optimizer and schedule. For each seed they take turns, in processes of their own; one that is not installed is
left out. One function of transformers measures the loss of all. The pairs are written here: capitals and
sums, answered in a fixed style. The last lines are a table of the medians over the seeds, with the least and
the most.
"""

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch

from polyformer.core.measuring import MIB, peak_memory

CAPITALS = (
    "Ireland Dublin, Norway Oslo, Spain Madrid, Portugal Lisbon, Greece Athens, Poland Warsaw, "
    "Hungary Budapest, Austria Vienna, Finland Helsinki, Sweden Stockholm, Denmark Copenhagen, "
    "Iceland Reykjavik, Egypt Cairo, Kenya Nairobi, Peru Lima, Chile Santiago, Cuba Havana, "
    "Japan Tokyo, China Beijing, India Delhi, Vietnam Hanoi, Thailand Bangkok, Nepal Kathmandu, "
    "Iran Tehran, Iraq Baghdad, Turkey Ankara, Canada Ottawa, Bulgaria Sofia, Romania Bucharest, "
    "Serbia Belgrade"
)
SUMS = [(a, b) for a in (2, 3, 5, 6, 8) for b in (1, 4, 7, 9, 10, 12)]
HELD_OUT = 12
RANK, RATE, WARMUP, DECAY, BETAS = 16, 3e-4, 10, 0.1, (0.9, 0.95)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BATCH, ROW = 2, 128
"""Pairs in a step; and the tokens of a packed row, which has two pairs."""


Pair: TypeAlias = tuple[str, str, str]
"""A question, the answer in the style, and an answer in another style."""


def pairs() -> list[Pair]:
    """All pairs, in a fixed random order."""
    capitals = [pair.split() for pair in CAPITALS.split(", ")]
    rows = [
        (f"What is the capital of {land}?", town, f"The capital of {land} is {town}.")
        for land, town in capitals
    ]
    rows += [(f"What is {a} plus {b}?", str(a + b), f"{a} plus {b} equals {a + b}.") for a, b in SUMS]
    random.Random(0).shuffle(rows)
    return [(question, f"Short answer: {answer}. Ask me more!", long) for question, answer, long in rows]


def parts() -> tuple[list[Pair], list[Pair]]:
    """The pairs for training, and those held out."""
    rows = pairs()
    return rows[:-HELD_OUT], rows[-HELD_OUT:]


def turns(question: str, answer: str) -> list[dict[str, str]]:
    """A conversation."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encoded(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """The ids of a conversation, and its labels: those of the reply, -100 elsewhere."""
    messages = turns(question, answer)
    render = tokenizer.apply_chat_template
    start = tokenizer.encode(render(messages[:1], tokenize=False, add_generation_prompt=True))
    ids = tokenizer.encode(render(messages, tokenize=False))
    assert ids[: len(start)] == start
    return ids, [-100] * len(start) + ids[len(start) :]


def batch_of(tokenizer: Any, rows: Sequence[Pair]) -> dict[str, torch.Tensor]:
    """Conversations as one batch, padded on the right."""
    both = [encoded(tokenizer, question, answer) for question, answer, _ in rows]
    width = max(len(ids) for ids, _ in both)
    table = lambda fill, number: torch.tensor([x[number] + [fill] * (width - len(x[0])) for x in both])  # noqa: E731
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in both])
    return {"input_ids": table(0, 0), "labels": table(-100, 1), "attention_mask": mask}


def opened(model: str) -> tuple[Any, Any]:
    """transformers' model and tokenizer."""
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return loaded, transformers.AutoTokenizer.from_pretrained(model)


def losses(model: str, adapter: Path | None = None) -> list[float]:
    """Nats per learned token of the pairs for training and of those held out, by transformers.

    The adapters of this library have its own names of layers, so a run is merged first.
    """
    if adapter is not None and adapter.name == "polyformer":
        from polyformer.cli.main import main as run_command

        merged = adapter.with_name("merged")
        run_command(["convert", str(adapter), str(merged), "--format", "hub"])
        return losses(str(merged))
    loaded, tokenizer = opened(model)
    if adapter is not None:
        import peft

        loaded = peft.PeftModel.from_pretrained(loaded, str(adapter))
    loaded.eval()
    results = []
    with torch.no_grad():
        for rows in parts():
            batch = batch_of(tokenizer, rows)
            results.append(round(float(loaded(**batch).loss), 4))
    return results


def run_polyformer(model: str, out: Path, steps: int, seed: int) -> float:
    """Tune by `polyformer train`; return the seconds of its loop. One pair that it trains on validates."""
    data, held, rows = out.with_suffix(".jsonl"), out.with_suffix(".held.jsonl"), parts()[0]
    lines = [json.dumps({"messages": turns(a, b)}) + "\n" for a, b, _ in rows]
    data.write_text("".join(lines))
    held.write_text(lines[0])
    return command(
        *(model, data, out, steps, RATE),
        *("--task.row_length", ROW, "--task.batch_tokens", ROW, "--seed", seed),
        *("--data.validation", held, "--training.reporting.evaluate_every", steps),
    )


def command(model: str, data: Path, out: Path, steps: int, rate: float, *words: object) -> float:
    """Tune by LoRA with `polyformer train` in this process; return the seconds of its loop."""
    from polyformer.cli.main import main

    common = ("--data", data, "--pretrained", model, "--tuning", f"lora(rank={RANK})", "--out", out)
    common = *common, "--steps", steps, "--optimizer.lr", rate, "--training.saving.checkpoint_every", steps
    main(["train", *map(str, (*common, *words))])
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["seconds"]


def run_peft(model: str, out: Path, steps: int, seed: int) -> float:
    """Tune by a plain loop over transformers and peft; return the seconds of the loop."""
    import peft
    import transformers

    loaded, tokenizer = opened(model)
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(loaded, config).train()
    weights = [weight for weight in tuned.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, RATE, BETAS, weight_decay=DECAY)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP, steps)
    batches, start = drawn_batches(parts()[0], random.Random(seed)), time.monotonic()
    for _ in range(steps):
        tuned(**batch_of(tokenizer, next(batches))).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seconds = time.monotonic() - start
    tuned.save_pretrained(str(out))
    return seconds


def drawn_batches(rows: list[Pair], generator: random.Random) -> Iterator[list[Pair]]:
    """Yield batches without end; each epoch has every pair once, in a new order."""
    while True:
        order = generator.sample(rows, len(rows))
        yield from (order[i : i + BATCH] for i in range(0, len(order), BATCH))


def run_trl(model: str, out: Path, steps: int, seed: int) -> float:
    """Tune by trl's `SFTTrainer`; return the seconds of its training."""
    import datasets
    import peft
    import trl

    loaded, tokenizer = opened(model)
    rows = [{"prompt": turns(a, b)[:1], "completion": turns(a, b)[1:]} for a, b, _ in parts()[0]]
    options = trl.SFTConfig(
        output_dir=str(out.with_suffix(".work")),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        weight_decay=DECAY,
        adam_beta2=BETAS[1],
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_steps=50,
        dataloader_pin_memory=False,
        seed=seed,
    )
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(
        loaded,
        options,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=config,
    )
    start = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - start
    trainer.save_model(str(out))
    return seconds


def run_dpo(model: str, out: Path, steps: int, seed: int) -> float:
    """Prefer the style to the other by `polyformer train`; return the seconds of its loop."""
    data, rows = out.parent / "preferences.jsonl", pairs()
    fields = [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in rows]
    data.write_text("".join(json.dumps(row) + "\n" for row in fields))
    every = max(1, steps // 4)
    return command(
        *(model, data, out, steps, 5e-5),
        *("--task.batch_tokens", 256, "--task.max_length", 128, "--seed", seed),
        *("--data.validation_fraction", HELD_OUT / len(rows), "--training.reporting.log_every", 1),
        *("--training.reporting.evaluate_every", every),
    )


RUNS = {"polyformer": run_polyformer, "peft": run_peft, "trl": run_trl, "dpo": run_dpo}
COMPARED = "polyformer", "peft", "trl"


def apart(name: str, model: str, out: Path, steps: int, seed: int) -> dict[str, float]:
    """Run a contender in a process of its own; return its times and its largest memory."""
    words = [sys.executable, __file__, model, "--steps", str(steps), "--out", str(out), "--only", name]
    with (out / f"{name}-{seed}.log").open("w") as log:
        process = subprocess.Popen([*words, "--seed", str(seed)], stdout=log, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    text = (out / f"{name}-{seed}.log").read_text()
    if status:
        raise SystemExit(f"{name} failed: {text[-2000:]}")
    own = json.loads(text.splitlines()[-1])
    # The peak is the process's own: that of `used` begins with the memory of this process.
    return {
        "seconds per step": round(own["seconds"] / steps, 3),
        "processor seconds of the process": round(used.ru_utime + used.ru_stime),
        "MiB at most": round(own["MiB"]),
    }


def compare(model: str, out: Path, steps: int, seeds: int) -> None:
    """Print the figures of all contenders, which take turns for each seed, and their table."""
    installed = [name for name in COMPARED if name == "polyformer" or importlib.util.find_spec(name)]
    if missing := [name for name in COMPARED if name not in installed]:
        print("not installed:", *missing, flush=True)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in installed}
    for seed in range(seeds):
        for name in installed:
            measured = apart(name, model, out, steps, seed)
            trained, held = losses(model, out / str(seed) / name)
            figures[name].append({"training pairs": trained, "held-out pairs": held, **measured})
            print(f"seed {seed}, {name}: {figures[name][-1]}", flush=True)
    print("| |", " | ".join(figures["polyformer"][0]), "|")
    for name, rows in figures.items():
        columns = [[row[column] for row in rows] for column in rows[0]]
        cells = (f"{median(values):g} ({min(values):g} to {max(values):g})" for values in columns)
        print(f"| {name} |", " | ".join(cells), "|")


def main() -> None:
    """Print the figures of every contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--dpo", action="store_true", help="only direct preferences, of a quarter of the steps"
    )
    parser.add_argument("--only", choices=[*RUNS], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    out: Path = options.out.absolute()
    if options.only is not None:
        folder = out / str(options.seed)
        folder.mkdir(exist_ok=True)
        seconds = RUNS[options.only](options.model, folder / options.only, options.steps, options.seed)
        print(json.dumps({"seconds": seconds, "MiB": peak_memory() / MIB}))
        return
    out.mkdir(parents=True)
    print("load of the machine:", round(os.getloadavg()[0], 2), flush=True)
    if options.dpo:
        print(apart("dpo", options.model, out, max(1, options.steps // 4), 0))
        return
    print("before:", losses(options.model), flush=True)
    compare(options.model, out, options.steps, options.seeds)


if __name__ == "__main__":
    main()
