"""This toolkit against `transformers.Trainer`: time, CPU seconds and peak memory of the same work.

    python benchmarks/trainer.py                       about 5 minutes on two cores
    python benchmarks/trainer.py --samples 3200 --rounds 7 --write

The same model, samples, global batch, dropout, learning rates and clipping: the demo's weights (demo:minilm) on
sentences of at most 128 tokens in batches of 32 (demo:rotten-tomatoes), or, with `--lengths 128 512`, also on reviews
of at most 512 in batches of 16 (demo:imdb). `TRAINER_PRECISION=no` computes in fp32, for CPUs on which bf16 is slower;
with `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` this CPU computes like an older one. Contestants:

    ours     as recipes/cls.py trains and evaluates: bf16, by length, a line of metrics for every step
    tuned    Trainer, the batch at once: bf16, group_by_length, dynamic padding, fused AdamW, samples in a list,
             no logging, evaluation batches of 64 by length
    small    as tuned, in micro-batches of 2048 tokens with gradient accumulation, as ours has them on a CPU; evaluation
             batches likewise. transformers 5.23 multiplies its loss and gradient by their number (#47688)
    plain    Trainer as in most scripts: every text padded to 128, fp32, defaults (evaluation batches of 8)

Each run is a new process with its own memory, and the contestants take turns, so that other jobs on the machine slow
all of them: compare the ratios, which are within a round. Imports, loading, tokenizing and a small warm-up are not
timed, but count in the peak memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import hardware

# Nothing heavy is imported here: Linux lets a child's ru_maxrss start at its parent's resident size.

CONTESTANTS = ("ours", "tuned", "small", "plain")
TASKS = ("train", "evaluate")
SEED = 42
JOB = {"model_name_or_path": "demo:minilm", "learning_rate": 1e-4, "warmup_ratio": 0.1, "weight_decay": 0.01,
       "mixed_precision": os.environ.get("TRAINER_PRECISION", "bf16"), "seed": SEED}  # fmt: skip
# max_length -> (data set, global batch size, number of validation texts)
TEXTS = {128: ("demo:rotten-tomatoes", 32, 1000), 512: ("demo:imdb", 16, 500)}
# Largest difference of a contestant's loss from ours for a valid comparison: training has other random orders and
# dropout masks, evaluation only rounding.
LOSS_TOLERANCE = {"train": 0.1, "evaluate": 0.005}


# ---- one contestant, in its own process


@dataclass(frozen=True)
class Job:
    """The inputs of all contestants: tokens and loaded weights."""

    settings: Any
    tokenizer: Any
    data: Any
    model: Any
    warm_steps: int = 0
    """Optimizer steps before the clock starts."""


@dataclass
class Clock:
    """Seconds and CPU seconds (user and system, all threads, data loader workers too)."""

    wall: float = 0.0
    cpu: float = 0.0

    def start(self) -> None:
        _synchronize()
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def stop(self) -> None:
        _synchronize()
        self.wall, self.cpu = time.perf_counter() - self._wall, _cpu_seconds() - self._cpu


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_settings(output_dir: str, samples: int, length: int) -> Any:
    """The settings of the demo job, for `samples` texts of at most `length` tokens."""
    from toolkit.config import TaskSettings, build

    data, batch, _ = TEXTS[length]
    job = {**JOB, "dataset_name": data, "max_length": length, "global_batch_size": batch}
    return build(TaskSettings, {**job, "output_dir": output_dir, "max_steps": samples // batch})


def load_job(settings: Any, samples: int) -> Job:
    """The same weights (with the new head) and samples for every contestant."""
    from toolkit.data.prepare import add_collator, prepare_data
    from toolkit.data.tokens import load_tokenizer
    from toolkit.models.classifier import load_classifier
    from toolkit.pretrained import load_config

    tokenizer = load_tokenizer(settings.model)
    data = prepare_data(settings, tokenizer, load_config(settings.model))
    held_back = sample_of(data.validation, min(len(data.validation), TEXTS[data.max_length][2]))
    data = add_collator(settings, replace(data, train=sample_of(data.train, samples), validation=held_back))
    return Job(settings, tokenizer, data, load_classifier(settings.model, data.labels, SEED))


def sample_of(split: Any, samples: int) -> Any:
    """A split of random samples."""
    import numpy as np

    if samples > len(split):
        raise SystemExit(f"--samples {samples}: the data set has {len(split)} training samples")
    indices = np.sort(np.random.default_rng(SEED).choice(len(split), samples, replace=False))
    return replace(
        split,
        input_ids=np.concatenate([split.tokens(int(index)) for index in indices]),
        offsets=np.cumsum([0, *split.lengths[indices]], dtype=np.int64),
        labels=split.labels[indices],
        rows=split.rows[indices],
    )


def warm_up(model: Any, bf16: bool) -> None:
    """Runs the first kernels of the process, which are slower."""
    import torch

    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        model(input_ids=torch.ones(8, 32, dtype=torch.int64, device=device)).logits.float().sum().backward()
    model.zero_grad()


def ours(job: Job, task: str, clock: Clock) -> dict[str, Any]:
    """The lines of recipes/cls.py."""
    from toolkit import launch

    accelerator = launch.make_accelerator(job.settings.training.mixed_precision)
    return (_train_ours if task == "train" else _evaluate_ours)(job, accelerator, clock)


def _train_ours(job: Job, accelerator: Any, clock: Clock) -> dict[str, Any]:
    import torch

    from toolkit.data.batches import collator_of
    from toolkit.objective.losses import sample_losses
    from toolkit.run import Run
    from toolkit.training.optimizer import make_scheduler, parameter_groups
    from toolkit.training.prepare import align_strategy
    from toolkit.training.steps import Steps

    data, labels = job.data, job.data.labels
    training = job.settings.training.limit_tokens(accelerator.device.type, int(data.train.lengths.max()))
    collator_of(data.train, job.tokenizer, accelerator.device).prepare_model(accelerator, job.model)
    steps = Steps(accelerator, data.train, job.tokenizer, training)
    groups = parameter_groups(job.model, training.weight_decay)
    optimizer: Any = torch.optim.AdamW(groups, lr=training.learning_rate, fused=True)
    align_strategy(accelerator, job.model, optimizer, training, steps.schedule)
    model, optimizer = accelerator.prepare(job.model, optimizer)
    scheduler = make_scheduler(optimizer, training, steps.schedule.total_steps)
    run = Run(accelerator, job.settings, data, job.tokenizer, steps, lambda *_: {"f1_macro": 0.0}, recipe="benchmark")
    run.resume(model, optimizer, scheduler)
    done = []
    warm_up(model, bf16=accelerator.mixed_precision == "bf16")
    clock.start()
    for step in run.steps():
        model.train()
        for batch in step.micro_batches(model):
            logits = model(**batch.inputs).logits
            accelerator.backward(step.mean(sample_losses(logits, batch.labels, labels.problem_type)))
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log(step, grad_norm)
        done.append(step)
        if step.number == job.warm_steps:
            clock.start()
    clock.stop()
    peak = max(step.metrics.peak_memory_bytes for step in done)  # an evaluation's step starts to count again
    return {"loss": statistics.fmean(step.metrics.loss for step in done), "steps": len(done), "peak": peak}


def _evaluate_ours(job: Job, accelerator: Any, clock: Clock) -> dict[str, Any]:
    import torch

    from toolkit.data.batches import collator_of
    from toolkit.evaluation import Outputs, classification_evaluation, classification_metrics, evaluation_batches
    from toolkit.objective.losses import sample_losses

    labels, split = job.data.labels, job.data.validation
    training = job.settings.training.limit_tokens(accelerator.device.type, int(split.lengths.max()))
    collator_of(split, job.tokenizer, accelerator.device).prepare_model(accelerator, job.model)
    model = accelerator.prepare(job.model).eval()
    warm_up(model, bf16=accelerator.mixed_precision == "bf16")
    clock.start()
    outputs = Outputs(accelerator, split)
    with torch.no_grad():
        for batch in evaluation_batches(accelerator, split, job.tokenizer, training):
            logits = model(**batch.inputs).logits.float()
            losses = sample_losses(logits, batch.labels, labels.problem_type)
            outputs.add(accelerator.gather_for_metrics(batch.padded(logits, losses)))
    result = classification_evaluation(outputs, labels, lambda *outputs: classification_metrics(*outputs, labels))
    clock.stop()
    return {"loss": result.numbers["loss"], "accuracy": result.numbers["accuracy"]}


def small_batches_trainer(job: Job, task: str, clock: Clock) -> dict[str, Any]:
    """The same in micro-batches of at most 2048 tokens."""
    size = min(job.settings.training.global_batch_size, 2048 // job.data.max_length)
    return tuned_trainer(job, task, clock, size)


def tuned_trainer(
    job: Job, task: str, clock: Clock, micro_batch: int | None = None, cudnn: bool = False
) -> dict[str, Any]:
    """Trainer with the settings that its documentation recommends for speed, and samples as lists in memory. `cudnn`:
    with torch's default on a GPU, cuDNN's attention, which makes a plan for each new shape of a batch."""
    import torch
    from transformers import DataCollatorWithPadding

    batch = job.settings.training.global_batch_size
    size = micro_batch or batch
    options = {
        "bf16": JOB["mixed_precision"] == "bf16",
        "train_sampling_strategy": "group_by_length",
        "optim": "adamw_torch_fused",
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": batch // size,
        "per_device_eval_batch_size": micro_batch or 64,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
    }
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        # on a CPU they would compete with the computation
        options |= {"dataloader_num_workers": 4, "dataloader_persistent_workers": True}
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # or it may have none
        multiprocessing.set_start_method("fork", force=True)  # as in a script; processes.py uses another
    splits = [_items(split) for split in (job.data.train, job.data.validation)]
    return _run_trainer(job, task, clock, options, splits, DataCollatorWithPadding(job.tokenizer))


def plain_trainer(job: Job, task: str, clock: Clock) -> dict[str, Any]:
    """Trainer with `padding="max_length"` and defaults."""
    import datasets
    from transformers import default_data_collator

    def padded(split: Any) -> Any:
        features = job.tokenizer.pad(_items(split), padding="max_length", max_length=job.data.max_length)
        return datasets.Dataset.from_dict(dict(features))

    splits = [padded(split) for split in (job.data.train, job.data.validation)]
    batch = {"per_device_train_batch_size": job.settings.training.global_batch_size}
    return _run_trainer(job, task, clock, batch, splits, default_data_collator)


def _items(split: Any) -> list[dict[str, Any]]:
    return [
        {"input_ids": split.tokens(i).tolist(), "attention_mask": [1] * int(length), "label": int(split.labels[i])}
        for i, length in enumerate(split.lengths)
    ]


def _run_trainer(
    job: Job, task: str, clock: Clock, options: dict[str, Any], splits: list[Any], collate: Callable[..., Any]
) -> dict[str, Any]:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Timed(TrainerCallback):
        """Times training without Trainer's set-up."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            warm_up(job.model, args.bf16)
            clock.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == job.warm_steps:
                clock.start()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.stop()

    training = job.settings.training
    arguments = TrainingArguments(
        training.output_dir,
        max_steps=training.max_steps,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_ratio,  # below 1 it is a ratio
        weight_decay=training.weight_decay,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),  # or Trainer refuses bf16 on a CPU
        seed=SEED,
        **options,
    )
    trainer = Trainer(
        job.model, arguments, collate, *splits,
        processing_class=job.tokenizer, compute_metrics=_trainer_metrics, callbacks=[Timed()],
    )  # fmt: skip
    if task == "train":
        result = trainer.train()
        # transformers 5.23 multiplies it by the micro-batches (#47688)
        return {"loss": result.training_loss / arguments.gradient_accumulation_steps, "steps": result.global_step}
    warm_up(job.model.to(arguments.device), arguments.bf16)
    clock.start()
    numbers = trainer.evaluate()
    clock.stop()
    return {"loss": numbers["eval_loss"], "accuracy": numbers["eval_accuracy"]}


def _trainer_metrics(outputs: Any) -> dict[str, float]:
    from sklearn import metrics

    guess = outputs.predictions.argmax(axis=1)
    return {
        "accuracy": metrics.accuracy_score(outputs.label_ids, guess),
        "f1_macro": metrics.f1_score(outputs.label_ids, guess, average="macro"),
    }


def work(contestant: str, task: str, samples: int, length: int) -> dict[str, Any]:
    """One contestant's run in this process -> its measurements."""
    contenders = {"ours": ours, "tuned": tuned_trainer, "small": small_batches_trainer, "plain": plain_trainer}
    with tempfile.TemporaryDirectory() as output_dir:
        settings = make_settings(f"{output_dir}/run", samples, length)
        if contestant == "prepare":  # fills the cache of tokens
            return {"folder": str(load_job(settings, samples).data.folder)}
        clock = Clock()
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        job = load_job(settings, samples)
        if contestant != "ours":  # loading has replaced it in this process
            ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa_attention_forward)
        result = contenders[contestant](job, task, clock)
    import torch

    if task == "train" and result["steps"] != samples // TEXTS[length][1]:
        raise SystemExit(f"{contestant} made {result['steps']} steps")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = max(torch.cuda.max_memory_allocated(), result.get("peak", 0)) if torch.cuda.is_available() else 0
    return result | {"wall": clock.wall, "cpu": clock.cpu, "resident": resident, "device": device}


# ---- the comparison


def spawn(contestant: str, task: str, samples: int, length: int) -> dict[str, Any]:
    """`work` in a new process."""
    command = [sys.executable, __file__, "--worker", contestant, task, str(samples), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(samples: int, length: int, rounds: int, contestants: list[str]) -> dict[str, dict[str, Any]]:
    """Task -> contestant -> a measurement per round; the contestants take turns."""
    spawn("prepare", "train", samples, length)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {task: {who: [] for who in contestants} for task in TASKS}
    for number in range(1, rounds + 1):
        for task in TASKS:
            for who in contestants:
                measured = spawn(who, task, samples, length)
                results[task][who].append(measured)
                line = f"round {number}/{rounds}, {length} tokens, {task} {who}: {measured['wall']:.2f} s"
                print(line, file=sys.stderr, flush=True)
    return results


def table(task: str, results: dict[str, list[dict[str, Any]]]) -> str:
    """One task's Markdown table: medians (smallest to largest), and ratios to ours within each round."""
    head = ["contestant", "seconds", "CPU seconds", "loss", "peak resident MB"]
    ratios = ["time / ours", "CPU / ours", "memory / ours"]
    on_device = any(run["device"] for runs in results.values() for run in runs)
    head += ["peak device MB"] * on_device + ratios * ("ours" in results)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for who, runs in results.items():
        cells = [who, spread(runs, "wall"), spread(runs, "cpu"), spread(runs, "loss", digits=4)]
        cells += [spread(runs, "resident", 1e-6, digits=0)]
        cells += [spread(runs, "device", 1e-6, digits=0)] * on_device
        if "ours" in results:
            memory = "device" if on_device else "resident"
            cells += [ratio(runs, results["ours"], key) for key in ("wall", "cpu", memory)]
            difference = abs(median(runs, "loss") - median(results["ours"], "loss"))
            cells[3] += " (VOID: too far from ours)" * (difference > LOSS_TOLERANCE[task])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def spread(runs: list[dict[str, Any]], key: str, unit: float = 1.0, digits: int = 2) -> str:
    return _spread([run[key] * unit for run in runs], digits)


def ratio(runs: list[dict[str, Any]], ours: list[dict[str, Any]], key: str) -> str:
    """Above 1, ours is better."""
    return _spread([run[key] / mine[key] for run, mine in zip(runs, ours, strict=True)], 2)


def _spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    middle = f"{statistics.median(values):.{digits}f}"
    return f"{middle} ({low:.{digits}f} to {high:.{digits}f})" if high > low else middle


def report(tables: list[str], rounds: int, load: str) -> str:
    """The whole page."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    return "\n".join(
        [
            "# Beside transformers.Trainer",
            "",
            (__doc__ or "").split("\n\n", 2)[2].strip().replace("\n    ", "\n- ").replace("-          ", "  "),
            "",
            *tables,
            "Medians (smallest to largest). Ratios are taken within each round: above 1, ours is better.",
            "",
            "## Conditions",
            "",
            f"- {hardware()}, Python {platform.python_version()}, {libraries}",
            f"- {rounds} rounds; load average before: {load}",
            f"- `python benchmarks/trainer.py {' '.join(sys.argv[1:])}`, {date.today()}",
            "",
        ]
    )


def tables(results: dict[str, dict[str, Any]], samples: int, length: int) -> list[str]:
    """The tables of texts of at most `length` tokens."""
    titles = {"train": f"Training, {samples} texts", "evaluate": "Evaluation of held-back texts"}
    return [
        line
        for task in TASKS
        for line in (f"## {titles[task]} of at most {length} tokens, one process", "", table(task, results[task]), "")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=640, help="of 128 tokens, a quarter as many of 512 [640]")
    parser.add_argument("--lengths", type=int, nargs="+", choices=TEXTS, default=[128], help="tokens [128]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant [3]")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/trainer.md")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        contestant, task, *numbers = options.worker
        print(json.dumps(work(contestant, task, *map(int, numbers))))
        return
    load, lines = " ".join(f"{value:.1f}" for value in os.getloadavg()), []
    for length in options.lengths:
        batch = TEXTS[length][1]
        samples = max(1, options.samples * 128 // length // batch) * batch
        lines += tables(compare(samples, length, options.rounds, options.contestants), samples, length)
    page = report(lines, options.rounds, load)
    print(page)
    if options.write:
        (Path(__file__).parent / "results" / "trainer.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
