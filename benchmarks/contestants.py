"""The contestants of trainer.py and gpu.py, each in a process of its own: this toolkit, and
`transformers.Trainer` with several settings."""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

# Nothing heavy is imported here: Linux lets a child's ru_maxrss start at its parent's resident size.

SEED = 42
JOB = {"model_name_or_path": "demo:minilm", "learning_rate": 1e-4, "warmup_ratio": 0.1, "weight_decay": 0.01,
       "mixed_precision": os.environ.get("TRAINER_PRECISION", "bf16"), "seed": SEED}  # fmt: skip
# max_length -> (data set, global batch size, number of validation texts)
TEXTS = {128: ("demo:rotten-tomatoes", 32, 1000), 512: ("demo:imdb", 16, 500)}


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
    from toolkit.data.prepare import finish_data, prepare_data
    from toolkit.data.tokens import load_tokenizer
    from toolkit.models.classifier import load_classifier
    from toolkit.pretrained import load_config

    tokenizer = load_tokenizer(settings.model)
    data = prepare_data(settings, tokenizer, load_config(settings.model))
    held_back = sample_of(data.validation, min(len(data.validation), TEXTS[data.max_length][2]))
    data = finish_data(
        settings,
        replace(data, train=sample_of(data.train, samples), validation=held_back),
        tokenizer,
        None,
    )
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
        model(
            input_ids=torch.ones(8, 32, dtype=torch.int64, device=device)
        ).logits.float().sum().backward()
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
    training = job.settings.training.limit_tokens(
        accelerator.device.type, int(data.train.lengths.max())
    )
    collator_of(data.train, job.tokenizer, accelerator.device).prepare_model(accelerator, job.model)
    steps = Steps(accelerator, data.train, job.tokenizer, training)
    groups = parameter_groups(job.model, training.weight_decay)
    optimizer: Any = torch.optim.AdamW(groups, lr=training.learning_rate, fused=True)
    align_strategy(accelerator, job.model, optimizer, training, steps.schedule)
    model, optimizer = accelerator.prepare(job.model, optimizer)
    scheduler = make_scheduler(optimizer, training, steps.schedule.total_steps)
    run = Run(
        accelerator,
        job.settings,
        data,
        job.tokenizer,
        steps,
        lambda *_: {"f1_macro": 0.0},
        recipe="benchmark",
    )
    run.resume(model, optimizer, scheduler)
    done = []
    warm_up(model, bf16=accelerator.mixed_precision == "bf16")
    clock.start()
    for step in run.steps():
        model.train()
        for batch in step.micro_batches(model):
            logits = model(**batch.inputs).logits
            accelerator.backward(
                step.mean(sample_losses(logits, batch.labels, labels.problem_type))
            )
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.log(step, grad_norm)
        done.append(step)
        if step.number == job.warm_steps:
            clock.start()
    clock.stop()
    peak = max(
        step.metrics.peak_memory_bytes for step in done
    )  # an evaluation's step starts to count again
    return {
        "loss": statistics.fmean(step.metrics.loss for step in done),
        "steps": len(done),
        "peak": peak,
    }


def _evaluate_ours(job: Job, accelerator: Any, clock: Clock) -> dict[str, Any]:
    import torch

    from toolkit.data.batches import collator_of
    from toolkit.evaluation import (
        Outputs,
        classification_evaluation,
        classification_metrics,
        evaluation_batches,
    )
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
    result = classification_evaluation(
        outputs, labels, lambda *outputs: classification_metrics(*outputs, labels)
    )
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
        multiprocessing.set_start_method(
            "fork", force=True
        )  # as in a script; processes.py uses another
    splits = [_items(split) for split in (job.data.train, job.data.validation)]
    return _run_trainer(job, task, clock, options, splits, DataCollatorWithPadding(job.tokenizer))


def plain_trainer(job: Job, task: str, clock: Clock) -> dict[str, Any]:
    """Trainer with `padding="max_length"` and defaults."""
    import datasets
    from transformers import default_data_collator

    def padded(split: Any) -> Any:
        features = job.tokenizer.pad(
            _items(split), padding="max_length", max_length=job.data.max_length
        )
        return datasets.Dataset.from_dict(dict(features))

    splits = [padded(split) for split in (job.data.train, job.data.validation)]
    batch = {"per_device_train_batch_size": job.settings.training.global_batch_size}
    return _run_trainer(job, task, clock, batch, splits, default_data_collator)


def _items(split: Any) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": split.tokens(i).tolist(),
            "attention_mask": [1] * int(length),
            "label": int(split.labels[i]),
        }
        for i, length in enumerate(split.lengths)
    ]


def _run_trainer(
    job: Job,
    task: str,
    clock: Clock,
    options: dict[str, Any],
    splits: list[Any],
    collate: Callable[..., Any],
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
        return {
            "loss": result.training_loss / arguments.gradient_accumulation_steps,
            "steps": result.global_step,
        }
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
