"""When a run saves a checkpoint, and what is in it. `toolkit.training.resume` restores it."""

from __future__ import annotations

import collections
import itertools
import math
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import gather_object

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.model_folder import lora_config, write_adapter_config, write_config_files
from toolkit.checkpoint.parameters import full_shape, tied_names
from toolkit.checkpoint.safetensors_writer import DTYPE_NAMES, Shapes
from toolkit.checkpoint.state import LiveState, live_state
from toolkit.errors import UserError, listing, size_text
from toolkit.evaluation.best import Best
from toolkit.training.extra_state import random_states, registered_content
from toolkit.training.half_precision import scaler_state
from toolkit.training.steps import StepMetrics, Steps
from toolkit.utils.files import explain_write_errors, flush_path, nan_to_none
from toolkit.utils.modules import unwrapped

_DISK_REMEDY = "Free some space (is the disk full?) or lower --keep_checkpoints, and run the same command again"


class Checkpoints:
    """The checkpoints of one run; all ranks must call every method. `facts` go into each
    state.json: settings, versions, and `identity`, which must be equal in a run that resumes it."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: Any,
        scheduler: AcceleratedScheduler,
        tokenizer: Any,
        steps: Steps,
        best: Best,
        run_folder: Path,
        facts: dict[str, Any],
    ) -> None:
        """`model` and `optimizer` are prepared."""
        self.accelerator, self.model = accelerator, model
        self.optimizer, self.scheduler = optimizer, scheduler
        self.tokenizer, self.steps, self.best, self.facts = tokenizer, steps, best, facts
        self.settings = steps.settings
        self.path = run_folder / "checkpoints"
        self._saved = 0  # the last step that this process saved
        self.continues = False  # whether this run resumed from one of them
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def live(self) -> LiveState:
        """The weights and the optimizer state in memory."""
        return live_state(self.accelerator, self.model, self.optimizer)

    def save_if_due(self, metrics: StepMetrics, evaluation_due: bool = False, last: bool = False) -> dict[str, Any]:
        """Saves every `checkpoint_every` steps, at the best and the last step, and after a stop
        signal; the last step of a resumed run always. Returns the entries for the step's line in
        metrics.jsonl. `evaluation_due`: this step's evaluation was skipped; a resumed run begins
        with it. `last`: the recipe has left the loop after this step."""
        if self._pending is not None and self._pending.done():
            self.wait()
        if last and metrics.step == self._saved:  # but its best model may be another one now
            self.set_links()
            return {}
        if not self._is_due(metrics.step, last):
            return {}
        started = time.perf_counter()
        self.wait()
        size = self._save(metrics, evaluation_due)
        return {"checkpoint_seconds": round(time.perf_counter() - started, 3), "checkpoint_bytes": size}

    def _is_due(self, step: int, last: bool) -> bool:
        if self.steps.stop_signal:
            return True
        is_last = last or step == self.steps.schedule.total_steps or self.best.patience_exhausted
        every = self.settings.checkpoint_every
        if every is None:
            return is_last and self.continues
        return is_last or step == self.best.step or step % every == 0

    def _save(self, metrics: StepMetrics, evaluation_due: bool) -> int:
        """Returns the bytes of the tensors."""
        live = self.live()
        tables = self._tables(live)
        facts = {**self._facts(live, metrics), "evaluation_left": evaluation_due}
        weights = live.gather(tables[folders.WEIGHTS_FILE], live.weights())
        tensors = itertools.chain(weights, live.gather(tables[folders.OPTIMIZER_FILE], live.moments()))
        objects = registered_content(self.accelerator)
        write = partial(self._write, folders.step_folder(self.path, metrics.step), tables, facts, objects)
        if not self.accelerator.is_main_process:
            collections.deque(tensors, maxlen=0)  # takes part in gathering each
        elif self.settings.checkpoint_in_background:
            self._pending = self._background.submit(write, [each.to("cpu", copy=True) for each in tensors])
        else:
            write(tensors)
        self._saved = metrics.step
        return sum(math.prod(shape) * dtype.itemsize for shapes in tables.values() for dtype, shape in shapes.values())

    def _tables(self, live: LiveState) -> dict[str, Shapes]:
        """What the files of a checkpoint hold. LoRA's base weights, large and unchanged, are left
        out."""
        weights = live.weight_shapes()
        for name in self._excluded(live):
            del weights[name]
        return {folders.WEIGHTS_FILE: weights, folders.OPTIMIZER_FILE: live.optimizer_shapes()}

    def _excluded(self, live: LiveState) -> dict[str, list[int]]:
        if lora_config(live.module) is None:
            return {}
        parameters = live.module.named_parameters()
        return {name: list(full_shape(each)) for name, each in parameters if not each.requires_grad}

    def _write(
        self, folder: Path, tables: dict[str, Shapes], facts: dict[str, Any], objects: bytes, tensors: Any
    ) -> None:
        """On rank 0; in the background in a thread."""
        best_step = facts["best"]["step"]

        def write_others(draft: Path) -> None:
            (draft / "model").mkdir()
            module = unwrapped(self.model)
            write_config_files(module, self.tokenizer, draft / "model")
            if lora_config(module):
                write_adapter_config(module, draft / "model")
            if objects:
                (draft / "objects.pt").write_bytes(objects)

        with explain_write_errors(folder, f"earlier checkpoints are untouched. {_DISK_REMEDY}"):
            folders.save(folder, tables, tensors, facts, write_others)
            folders.set_links(self.path, best_step)
            folders.prune(self.path, self.settings.keep_checkpoints, best_step)

    def _facts(self, live: LiveState, metrics: StepMetrics) -> dict[str, Any]:
        steps, accelerator = self.steps, self.accelerator
        excluded = self._excluded(live)
        frozen = [name for name, each in live.module.named_parameters() if not each.requires_grad]
        epoch, position = divmod(metrics.step, steps.schedule.steps_per_epoch)
        return {
            "step": metrics.step,
            "epoch": epoch,
            "position": position,
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "strategy": live.strategy,
            "world": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "tied": tied_names(live.module),
            "frozen": [name for name in frozen if name not in excluded],
            "excluded": excluded,
            "base_model": self.facts["settings"].get("model_name_or_path"),
            "optimizer": {
                "class": type(live.optimizer).__name__,
                "groups": live.changed_groups(),
            },
            "scheduler_steps": self.scheduler.scheduler.last_epoch,
            "loss_scale": scaler_state(accelerator, self.optimizer),
            "best": self.best.state(),
            "metrics": nan_to_none(vars(metrics)),
            "lines": self._flush_log() if accelerator.is_main_process else {},
            "random": gather_object([random_states(accelerator.device)]),
            **self.facts,
        }

    def _flush_log(self) -> dict[str, int]:
        """Flushes the run's log files to the disk before the checkpoint is complete. Returns their
        numbers of lines."""
        lines = {}
        for name in ("config.json", "metrics.jsonl", "eval.jsonl"):
            path = self.path.with_name(name)
            lines[name] = path.read_bytes().count(b"\n") if path.is_file() else 0
            if path.is_file():
                flush_path(path)
        flush_path(self.path.parent)
        del lines["config.json"]
        return lines

    def set_links(self) -> None:
        """Points the links `best` and `last` to the checkpoints of the best and the last step."""
        if self.accelerator.is_main_process:
            with explain_write_errors(self.path):
                folders.set_links(self.path, self.best.step)

    def notes(self) -> list[str]:
        """Lines for the log: the size of checkpoints. Raises UserError if this run's state cannot
        be saved: at the start, not at the first save."""
        registered_content(self.accelerator)
        if not self.settings.checkpoint_every:
            return []
        live = self.live()
        shapes = live.weight_shapes()
        if unknown := [f"{name} ({dtype})" for name, (dtype, _) in shapes.items() if dtype not in DTYPE_NAMES]:
            why = "of a dtype that checkpoints do not support: use real numbers, or register_buffer(persistent=False)"
            raise UserError(f"{listing(unknown, 4)}: {why}")
        live.changed_groups()
        return [self._size_note(live)] if self.accelerator.is_main_process else []

    def _size_note(self, live: LiveState) -> str:
        """Compares the disk space that checkpoints need with what is free on rank 0's disk. Raises
        UserError if not one fits."""
        trained = sum(math.prod(full_shape(each)) for each in live.module.parameters() if each.requires_grad)
        weights = self._tables(live)[folders.WEIGHTS_FILE].values()
        # and AdamW's two moments
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in weights) + 8 * trained
        # the newest ones, the best one, and the next before the oldest is removed
        most = self.steps.schedule.total_steps // (self.settings.checkpoint_every or 1) + 2
        count = min(self.settings.keep_checkpoints + 2, most)
        disk = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.is_dir())
        present = sum(path.stat().st_size for path in self.path.glob("step-*/*.safetensors"))
        free = shutil.disk_usage(disk).free + present
        needed = f"checkpoints: about {size_text(size)} each, at most {count} at a time"
        note = f"{needed}; {size_text(free)} free at {self.path}"
        remedy = "free some space, pass another --output_dir, lower --keep_checkpoints or drop --checkpoint_every"
        if free < size:
            raise UserError(f"{note}, too little for one: {remedy}")
        return note if free >= count * size else f"{note}, too little: {remedy}"

    def wait(self) -> None:
        """Waits for a checkpoint in the background. Raises UserError if it cannot be written."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
