"""When a run saves a checkpoint, and what is in it. `toolkit.training.resume` restores it."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import broadcast_object_list, gather_object

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint import save
from toolkit.checkpoint.live import (
    DTYPE_NAMES,
    LiveState,
    full_shape,
    live_state,
    persistent_buffers,
    remember_groups,
    tied_names,
)
from toolkit.checkpoint.machines import collect_files, remote_ranks
from toolkit.checkpoint.model_folder import lora_config, write_adapter_config
from toolkit.errors import UserError, listing
from toolkit.evaluation.best import Best
from toolkit.training.half_precision import scaler_state
from toolkit.training.steps import StepMetrics, Steps
from toolkit.utils.files import explain_write_errors, flush_path, nan_to_none, write_new
from toolkit.utils.modules import unwrapped


class Checkpoints:
    """The checkpoints of one run; all ranks must call every method. `facts` go into each manifest: settings, versions,
    and `identity`, which must be equal in a run that resumes it."""

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
        self.accelerator, self.model, self.optimizer, self.scheduler = accelerator, model, optimizer, scheduler
        self.tokenizer, self.steps, self.best, self.facts = tokenizer, steps, best, facts
        self.settings = steps.settings
        self.path = run_folder / "checkpoints"
        self._saved = 0  # the last step that this process saved
        self.continues = False  # whether this run resumed from one of them
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        remember_groups(optimizer)

    def live(self) -> LiveState:
        """The weights and the optimizer state in memory."""
        return live_state(self.accelerator, self.model, self.optimizer)

    @functools.cached_property
    def _remote_ranks(self) -> dict[int, int]:
        return remote_ranks(self.accelerator, self.path)

    def save_if_due(self, metrics: StepMetrics, evaluation_due: bool = False, last: bool = False) -> dict[str, Any]:
        """Saves every `checkpoint_every` steps, at the best and the last step, and after a stop signal; the last step
        of a resumed run always. Returns the entries for the step's line in metrics.jsonl. `evaluation_due`: this step's
        evaluation was skipped; a resumed run begins with it. `last`: the recipe has left the loop after this step."""
        if self._pending is not None and self._pending.done():
            self.wait()
        every, step = self.settings.checkpoint_every, metrics.step
        if last and step == self._saved:  # but its best model may be another one now
            self.set_links()
            return {}
        last = last or step == self.steps.schedule.total_steps or self.best.patience_exhausted
        due = last or step == self.best.step or step % every == 0 if every else last and self.continues
        if not self.steps.stop_signal and not due:
            return {}
        started = time.perf_counter()
        self.wait()
        size = self._save(folders.step_folder(self.path, step), metrics, evaluation_due)
        return {"checkpoint_seconds": round(time.perf_counter() - started, 3), "checkpoint_bytes": size}

    def _save(self, folder: Path, metrics: StepMetrics, evaluation_due: bool) -> int:
        """Returns the bytes of the checkpoint, over all ranks."""
        with _writing(folder):
            manifest, written, drafts = self._write(folder, metrics)
            manifest["evaluation_left"] = evaluation_due
            collect_files(self.accelerator, self._remote_ranks, folder, written)
            manifest["files"] = {name: entry for entries in written for name, entry in entries.items()}
            size = sum(draft.layout.size for draft in drafts)
            if drafts and self._in_background(manifest["state"]):
                drafts = [draft.copy_to_host() for draft in drafts]
                self._pending = self._background.submit(self._complete, folder, manifest, drafts)
            elif self.accelerator.is_main_process:
                self._complete(folder, manifest, drafts)
        self.accelerator.wait_for_everyone()
        self._saved = metrics.step
        size += sum(entry["bytes"] for entries in written for entry in entries.values())
        return int(broadcast_object_list([size])[0])

    def _write(self, folder: Path, metrics: StepMetrics) -> tuple[dict[str, Any], list[dict], list[save.Draft]]:
        """(the manifest; by rank the entries of its written files; the files that this rank has yet to write)."""
        accelerator, rank = self.accelerator, self.accelerator.process_index
        if rank in (0, self._remote_ranks.get(rank)):
            folders.create_empty(folder)
        accelerator.wait_for_everyone()
        state = self.live()
        manifest = self._manifest(state, metrics)
        drafts, entries = list[save.Draft](), dict[str, Any]()
        if state.file_format == "deepspeed":
            engine: Any = self.model  # writes `latest` too, for DeepSpeed's tools
            tag, exclude = f"global_step{metrics.step}", bool(manifest["excluded"])
            engine.save_checkpoint(str(folder), tag=tag, exclude_frozen_parameters=exclude)
        else:
            drafts = save.make_drafts(state, set(manifest["excluded"]))
        if state.file_format == "slices":
            entries, drafts = {draft.name: save.write(draft, folder) for draft in drafts}, []
        write_new(folder / save.random_file(rank), json.dumps(save.random_states(accelerator)))
        objects = save.objects_content(accelerator)
        if accelerator.is_main_process:
            self._write_model_folder(folder / "model")
            if objects:
                (folder / save.OBJECTS_FILE).write_bytes(objects)
        entries |= folders.manifest_entries(folder, sorted(set(save.files_of_rank(folder, rank)) - set(entries)))
        return manifest, gather_object([entries]), drafts

    def _complete(self, folder: Path, manifest: dict[str, Any], drafts: list[save.Draft]) -> None:
        """Writes the remaining files and the manifest, on rank 0."""
        with _writing(folder):
            manifest["files"] |= {draft.name: save.write(draft, folder) for draft in drafts}
            folders.publish(folder, manifest)
        folders.set_links(self.path, manifest["best"]["step"])
        folders.prune(self.path, self.settings.keep_checkpoints, manifest["best"]["step"])

    def _in_background(self, file_format: str) -> bool:
        return self.settings.checkpoint_in_background and file_format == "whole"

    def _write_model_folder(self, folder: Path) -> None:
        """Config and tokenizer, for a conversion."""
        module = unwrapped(self.model)
        config: Any = getattr(module, "config", None)
        if hasattr(config, "save_pretrained"):  # a user's model class may have none
            config.save_pretrained(folder)
        if getattr(config, "is_encoder_decoder", False):  # the lengths and the beam search of generated texts
            module.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if lora_config(module):
            write_adapter_config(module, folder)

    def _manifest(self, state: LiveState, metrics: StepMetrics) -> dict[str, Any]:
        steps, accelerator = self.steps, self.accelerator
        frozen = {n: list(full_shape(p)) for n, p in state.module.named_parameters() if not p.requires_grad}
        with_adapter = lora_config(state.module) is not None
        epoch, position = divmod(metrics.step, steps.schedule.steps_per_epoch)
        return {
            "format": 1,
            "step": metrics.step,
            "epoch": epoch,
            "position": position,
            "saved_at": folders.next_save_time(self.path),
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "state": state.file_format,
            "strategy": state.strategy,
            "world": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "tied": tied_names(state.module),
            "optimizer": save.optimizer_facts(state),
            "buffers": [name for name, _ in persistent_buffers(state.module)],
            "frozen": [] if with_adapter else list(frozen),
            # LoRA's base weights are large and unchanged
            "excluded": frozen if with_adapter else {},
            "base_model": self.facts["settings"].get("model_name_or_path"),
            "scheduler_steps": self.scheduler.scheduler.last_epoch,
            "loss_scale": scaler_state(accelerator, self.optimizer),
            "best": self.best.state(),
            "metrics": nan_to_none(vars(metrics)),
            "lines": self._flush_log() if accelerator.is_main_process else {},
            **self.facts,
        }

    def _flush_log(self) -> dict[str, int]:
        """Flushes the run's log files to the disk before the checkpoint is complete. Returns their numbers of lines."""
        config, *lines = (self.path.with_name(name) for name in ("config.json", "metrics.jsonl", "eval.jsonl"))
        files = [path for path in (config, *lines) if path.is_file()]
        for path in files:
            flush_path(path)
        flush_path(self.path.parent)
        return {path.name: path.read_bytes().count(b"\n") if path in files else 0 for path in lines}

    def set_links(self) -> None:
        """Points the links `best` and `last` to the checkpoints of the best and the last step."""
        if self.accelerator.is_main_process:
            with explain_write_errors(self.path):
                folders.set_links(self.path, self.best.step)

    def notes(self) -> list[str]:
        """Lines for the log: settings without effect, the size of checkpoints, nodes without a shared disk. Raises
        UserError if this strategy's state cannot be saved: at the start, not at the first save."""
        save.objects_content(self.accelerator)
        if not (self.settings.checkpoint_every or self.settings.checkpoint_in_background):
            return []
        state, lines = self.live(), []
        tensors = (*state.module.named_parameters(), *persistent_buffers(state.module))
        if unknown := [f"{name} ({tensor.dtype})" for name, tensor in tensors if tensor.dtype not in DTYPE_NAMES]:
            why = "of a dtype that checkpoints do not support: use real numbers, or register_buffer(persistent=False)"
            raise UserError(f"{listing(unknown, 4)}: {why}")
        if self.settings.checkpoint_in_background and not self._in_background(state.file_format):
            why = f"works with one process or DDP only, and this is {state.strategy}"
            lines = [f"--checkpoint_in_background {why}: training waits for each save"]
        lines.append(self._size_note(state))
        hosts: list[str] = gather_object([socket.gethostname()])
        if others := list(dict.fromkeys(hosts[rank] for rank in self._remote_ranks)):
            effect = f"checkpoints are stored on {hosts[0]}, and other machines send and receive them over the network"
            lines.append(f"{hosts[0]} and {', '.join(others)} do not share {self.path}: {effect}")
        return lines

    def _size_note(self, state: LiveState) -> str:
        """Compares the disk space that checkpoints need with what is free on rank 0's disk."""
        usage = folders.disk_usage(self.path) if self.accelerator.is_main_process else None
        existing, free = broadcast_object_list([usage])[0]
        sizes = [(each.requires_grad, math.prod(full_shape(each))) for each in state.module.parameters()]
        trained = sum(size for trains, size in sizes if trains)
        frozen = 0 if lora_config(state.module) else sum(size for _, size in sizes) - trained
        size = existing[0] if existing else 12 * trained + 4 * frozen  # the weights, and AdamW's two moments
        if not existing and state.strategy in ("zero1", "zero2"):  # the weights in the dtype of computation, too
            size += next(state.module.parameters()).element_size() * (trained + frozen)
        # the newest ones, the best one, and the next before the oldest is removed
        most = self.steps.schedule.total_steps // (self.settings.checkpoint_every or 1) + 2
        return folders.size_note(self.path, size, min(self.settings.keep_checkpoints + 2, most), free + sum(existing))

    def wait(self) -> None:
        """Waits for a checkpoint in the background. Raises UserError if it cannot be written."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises UserError if a checkpoint cannot be written, after removing it unless only its links failed."""
    remedy = "Free some space (is the disk full?) or lower --keep_checkpoints, and run the same command again"
    try:
        with explain_write_errors(folder, f"earlier checkpoints are untouched. {remedy}"):
            yield
    except UserError:
        if not (folder / folders.MANIFEST).is_file():
            shutil.rmtree(folder, ignore_errors=True)
        raise
