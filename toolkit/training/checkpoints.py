"""When a run saves a checkpoint, and what is in it. `toolkit.training.resume` restores it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.model_folder import (
    lora_config,
    write_adapter_config,
    write_config_files,
)
from toolkit.checkpoint.parameters import full_shape, tied_names
from toolkit.checkpoint.safetensors_writer import Shapes
from toolkit.checkpoint.state import LiveState
from toolkit.checkpoint.strategies import live_state
from toolkit.evaluation.best import Best
from toolkit.launch.strategy import strategy_name
from toolkit.training.extra_state import random_states, registered_content
from toolkit.training.metrics import StepMetrics
from toolkit.training.optimizer import updates_done
from toolkit.training.precision import scaler_state
from toolkit.training.steps import Steps
from toolkit.utils.files import explain_write_errors, flush_path
from toolkit.utils.modules import unwrapped

_AFTER_A_FAILURE = (
    "earlier checkpoints are untouched. "
    "Free some space (is the disk full?) or lower --keep_checkpoints, "
    "and run the same command again"
)


class Checkpoints:
    """The checkpoints of one run; all ranks must call every method. `provenance` goes into each
    state.json: settings, versions, and `identity`, which must be equal in a run that resumes it."""

    def __init__(
        self,
        steps: Steps,
        tokenizer: Any,
        best: Best,
        run_folder: Path,
        provenance: dict[str, Any],
    ) -> None:
        self.accelerator = steps.accelerator
        self.model = steps.model
        self.optimizer = steps.optimizer
        self.scheduler = steps.scheduler
        self.tokenizer = tokenizer
        self.steps = steps
        self.best = best
        self.provenance = provenance
        self.settings = steps.settings
        self.path = run_folder / "checkpoints"
        self.continues = False
        """Whether this run resumed from one of them."""
        self._saved_step = 0
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def live(self) -> LiveState:
        """The weights and the optimizer state in memory."""
        return live_state(self.accelerator, self.model, self.optimizer)

    def save_if_due(
        self,
        metrics: StepMetrics,
        evaluation_left: bool = False,
        last: bool = False,
    ) -> None:
        """Saves after a stop signal; with `checkpoint_every` every so many steps, at the best and
        the last step; without it at the last step of a resumed run. `evaluation_left`: this step's
        evaluation was skipped; a resumed run begins with it. `last`: the recipe has left the loop
        after this step. Raises UserError if a file cannot be written, in the background at one of
        the next steps."""
        if self._pending is not None and self._pending.done():
            self.wait()
        if last and metrics.step == self._saved_step:
            self.set_links()  # the evaluation after it may have been the best
        elif self._is_due(metrics.step, last):
            self.wait()
            self._save(metrics, evaluation_left)

    def wait(self) -> None:
        """Waits for a checkpoint in the background. Raises UserError if it cannot be written."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def set_links(self) -> None:
        """Points the links `best` and `last` to the checkpoints of the best and the last step."""
        if self.accelerator.is_main_process:
            folders.set_links(self.path, self.best.step)

    def _is_due(self, step: int, last: bool) -> bool:
        if self.steps.stop_signal:
            return True
        is_last = (
            last or step == self.steps.schedule.total_steps or self.best.patience_exhausted
        )
        every = self.settings.checkpoint_every
        if every is None:
            return is_last and self.continues
        return is_last or step == self.best.step or step % every == 0

    def _save(self, metrics: StepMetrics, evaluation_left: bool) -> None:
        live = self.live()
        excluded = _excluded(live.module)
        weights, moments = live.weight_shapes(), live.moment_shapes()
        for name in excluded:
            del weights[name]
        tables = {folders.WEIGHTS_FILE: weights, folders.OPTIMIZER_FILE: moments}
        entries = {
            **self._entries(live, metrics),
            "excluded": excluded,
            "evaluation_left": evaluation_left,
        }
        objects = registered_content(self.accelerator)
        folder = folders.step_folder(self.path, metrics.step)
        tensors = itertools.chain(
            live.gather(weights, live.weights()),
            live.gather(moments, live.moments()),
        )
        write = partial(self._write, folder, tables, entries, objects)
        if self.accelerator.is_main_process and self.settings.checkpoint_in_background:
            copies = [tensor.to("cpu", copy=True) for tensor in tensors]
            self._pending = self._background.submit(write, copies)
        elif self.accelerator.is_main_process:
            write(tensors)
        # exhausts both gathers on every rank: other ranks send what they have of each tensor, and
        # even a gather of none begins with a collective
        for _ in tensors:
            pass
        self._saved_step = metrics.step

    def _write(
        self,
        folder: Path,
        tables: dict[str, Shapes],
        entries: dict[str, Any],
        objects: bytes,
        tensors: Iterable[torch.Tensor],
    ) -> None:
        """On rank 0; in the background in a thread, while `best` may already be of a later step
        than `entries`."""
        best_step = entries["best"]["step"]
        with explain_write_errors(folder, _AFTER_A_FAILURE):
            folders.save(
                folder, tables, tensors, entries, partial(self._write_others, objects)
            )
            folders.set_links(self.path, best_step)
            folders.prune(self.path, self.settings.keep_checkpoints, best_step)

    def _write_others(self, objects: bytes, draft: Path) -> None:
        module = unwrapped(self.model)
        (draft / "objects.pt").write_bytes(objects)
        (draft / "model").mkdir()
        write_config_files(module, self.tokenizer, draft / "model")
        if lora_config(module):
            write_adapter_config(module, draft / "model")

    def _entries(self, live: LiveState, metrics: StepMetrics) -> dict[str, Any]:
        accelerator = self.accelerator
        return {
            "step": metrics.step,
            "strategy": strategy_name(accelerator),
            "world": accelerator.num_processes,
            "device": accelerator.device.type,
            "mixed_precision": accelerator.mixed_precision,
            "tied": tied_names(live.module),
            "base_model": self.provenance["settings"].get("model_name_or_path"),
            "optimizer": {"class": live.algorithm, "groups": live.changed_groups()},
            "scheduler_steps": updates_done(self.scheduler),
            "loss_scale": scaler_state(accelerator, self.optimizer),
            "best": self.best.state(),
            "lines": {
                name: self._count_lines(name) for name in ("metrics.jsonl", "eval.jsonl")
            },
            "random": gather_object([random_states(accelerator.device)]),
            **self.provenance,
        }

    def _count_lines(self, name: str) -> int:
        """Of a log, which is flushed to the disk before the checkpoint is complete."""
        path = self.path.with_name(name)
        if not self.accelerator.is_main_process or not path.is_file():
            return 0
        flush_path(path)
        return path.read_bytes().count(b"\n")


def _excluded(module: torch.nn.Module) -> dict[str, list[int]]:
    """Name -> shape of LoRA's base weights, large and unchanged, which checkpoints leave out."""
    if lora_config(module) is None:
        return {}
    parameters = module.named_parameters()
    return {
        name: list(full_shape(each)) for name, each in parameters if not each.requires_grad
    }
