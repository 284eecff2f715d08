"""When a run saves itself, and what: see `toolkit.training.resume` for how it goes on from that."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import broadcast_object_list, gather_object

from toolkit import launch
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.disks import Disks, find_disks
from toolkit.checkpoint.live import LiveState, live_state, persistent_buffers, tied_names, whole_shape
from toolkit.checkpoint.model_folder import lora_config, save_model, write_adapter_config
from toolkit.checkpoint.optimizer_state import remember_groups
from toolkit.checkpoint.publish import (
    Background,
    Completion,
    begin_on_all,
    publish_on_all,
    settle_on_all,
    why_not_written,
)
from toolkit.checkpoint.save import (
    Draft,
    drafts_of,
    optimizer_facts,
    write,
    write_deepspeed,
    write_random_states,
    written_by,
)
from toolkit.errors import UserError
from toolkit.evaluation.best import Best
from toolkit.training.optimizer import scaler_state
from toolkit.training.steps import StepMetrics, Steps


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint saves and a resume restores; model and optimizer are prepared."""

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: Any
    scheduler: AcceleratedScheduler
    tokenizer: Any
    steps: Steps
    best: Best

    def live(self) -> LiveState:
        """Weights and optimizer state where this strategy keeps them."""
        return live_state(self.accelerator, self.model, self.optimizer)

    def save_model(self, folder: Path, step: int) -> None:
        """Saves the weights of `step` as a Hugging Face folder; all processes call this."""
        save_model(self.accelerator, self.model, self.tokenizer, folder, step)


@dataclass(frozen=True)
class Saved:
    """What a checkpoint cost."""

    folder: Path
    seconds: float
    """That training stood still."""
    size: int
    """Bytes, over all processes."""


class Checkpoints:
    """The checkpoints of one run; every process calls every method.

    `facts` go into each manifest as they are: settings, versions, and `identity`, what a resumed run must
    have in common with it.
    """

    def __init__(self, state: TrainingState, run_folder: Path, facts: dict[str, Any]) -> None:
        self.state, self.facts = state, facts
        self.accelerator, self.steps, self.best = state.accelerator, state.steps, state.best
        self.settings = state.steps.settings
        self.path = run_folder / "checkpoints"
        self.evaluations = run_folder / "eval.jsonl"
        self._writer: Background | None = None
        self._disks: dict[Path, Disks] = {}
        remember_groups(state.optimizer)

    def disks(self, checkpoints: Path) -> Disks:
        """Which processes find the same folder of checkpoints there. Found out once; all processes ask alike."""
        if checkpoints not in self._disks:
            self._disks[checkpoints] = find_disks(self.accelerator, checkpoints)
        return self._disks[checkpoints]

    def save_if_due(self, metrics: StepMetrics) -> Saved | None:
        """Saves where a checkpoint is due after this step: every `checkpoint_every` steps, at the best and the last
        one, and where a stop signal came."""
        if self._writer is not None:
            self._writer.raise_if_failed()
        every, step = self.settings.checkpoint_every, metrics.step
        marked = step in (self.best.step, self.steps.schedule.total_steps) or self.best.gives_up
        if not self.steps.stop_signal and not (every and (step % every == 0 or marked)):
            return None
        return self._save(metrics)

    def _save(self, metrics: StepMetrics) -> Saved:
        started = time.perf_counter()
        self.wait()
        folder = folders.step_folder(self.path, metrics.step)
        try:
            complete = self._write(folder, metrics)
        except (OSError, RuntimeError) as error:
            why = why_not_written(error)
            if why is None:
                raise
            shutil.rmtree(folder, ignore_errors=True)
            raise UserError(
                f"the checkpoint {folder} cannot be written: {why}; those before it are untouched. "
                "Make room, or keep fewer (--keep_checkpoints), and start the same command again"
            ) from error
        size = sum(entry["bytes"] for entry in complete.files.values())
        size += broadcast_object_list([sum(draft.layout.size for draft in complete.drafts)])[0]
        if not self.disks(self.path).shared:
            settle_on_all(self.accelerator, self.disks(self.path), complete)
            if not self.settings.checkpoint_every:  # otherwise it was said at the start
                launch.say(self.accelerator, self._note_of_disks(complete.manifest["state"] == "whole"))
        return Saved(folder, time.perf_counter() - started, size)

    def _write(self, folder: Path, metrics: StepMetrics) -> Completion:
        accelerator, disks, rank = self.accelerator, self.disks(self.path), self.accelerator.process_index
        begin_on_all(accelerator, disks, folder)
        state = self.state.live()
        manifest = self._manifest(state, metrics)
        mine, later = self._write_state(folder, state, manifest)
        names = [*self._write_small(folder), *written_by(folder, rank)]
        mine |= folders.described(folder, [name for name in names if name not in mine])
        if not disks.shared:
            mine = {name: {**entry, "host": disks.mine.host, "rank": rank} for name, entry in mine.items()}
        files = {name: entry for part in gather_object([mine]) for name, entry in part.items()}
        complete = Completion(folder, manifest, files, later, self.settings.keep_checkpoints, self.best.step)
        if not disks.shared:
            publish_on_all(accelerator, disks, complete)
        elif later and accelerator.is_main_process:
            self._writer = Background(complete)
        elif accelerator.is_main_process:
            complete()
        accelerator.wait_for_everyone()
        return complete

    def _write_state(
        self, folder: Path, state: LiveState, manifest: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Draft]]:
        """(the manifest's entries of files that this process has written, what it is to write in the background)."""
        excluded = set(manifest["excluded"])
        if state.strategy_files == "deepspeed":
            write_deepspeed(self.state.model, folder, manifest["step"], exclude_frozen=bool(excluded))
            return {}, []
        drafts = drafts_of(state, excluded, self.accelerator.process_index)
        if self._in_background(state):
            return {}, [draft.copied() for draft in drafts]
        return {draft.name: write(draft, folder) for draft in drafts}, []

    def _in_background(self, state: LiveState) -> bool:
        asked = self.settings.checkpoint_in_background
        return asked and state.strategy_files == "whole" and self.disks(self.path).shared

    def _write_small(self, folder: Path) -> list[str]:
        """Returns the names of files that this process wrote and that are not named as its own."""
        names = write_random_states(self.accelerator, self.disks(self.path), folder)
        if not self.accelerator.is_main_process:
            return names
        module = self.accelerator.unwrap_model(self.state.model)
        config: Any = getattr(module, "config", None)
        if hasattr(config, "save_pretrained"):  # a model class of one's own may have none
            config.save_pretrained(folder / "model")
        if getattr(config, "is_encoder_decoder", False):  # how long its texts are, and how they are searched for
            module.generation_config.save_pretrained(folder / "model")
        self.state.tokenizer.save_pretrained(folder / "model")
        if lora_config(module):
            write_adapter_config(module, folder / "model")
        return names

    def _manifest(self, state: LiveState, metrics: StepMetrics) -> dict[str, Any]:
        steps, accelerator = self.steps, self.accelerator
        frozen = {n: list(whole_shape(p)) for n, p in state.module.named_parameters() if not p.requires_grad}
        with_adapter = lora_config(state.module) is not None
        epoch, position = divmod(metrics.step, steps.schedule.steps_per_epoch)
        return {
            "format": 1,
            "step": metrics.step,
            "epoch": epoch,
            "position": position,
            "saved_at": folders.later_than_all(self.path),
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "state": state.strategy_files,
            "strategy": state.strategy,
            "world": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "tied": tied_names(state.module),
            "optimizer": optimizer_facts(state),
            "buffers": [name for name, _ in persistent_buffers(state.module)],
            "frozen": [] if with_adapter else list(frozen),
            # an adapter's base weights are not trained, large, and lie where they came from
            "excluded": frozen if with_adapter else {},
            "base_model": self.facts["settings"].get("model_name_or_path"),
            "seeds": {"seed": self.settings.seed},
            "scheduler_steps": self.state.scheduler.scheduler.last_epoch,
            "loss_scale": scaler_state(accelerator, self.state.optimizer),
            "best": self.best.state(),
            "metrics": vars(metrics),
            "evaluations": _count_lines(self.evaluations) if accelerator.is_main_process else 0,
            **self.facts,
        }

    def notes(self) -> list[str]:
        """What is asked for and cannot be: a line each. Raises UserError, at the start and not at the first
        save, where checkpoints are asked for and this strategy's state cannot be saved."""
        if not (self.settings.checkpoint_every or self.settings.checkpoint_in_background):
            return []
        state = self.state.live()
        lines = []
        if self.settings.checkpoint_in_background and not self._in_background(state):
            why = "needs a disk that all machines share"
            if state.strategy_files != "whole":
                why = f"is for one process or data parallel, and this is {state.strategy}"
            lines = [f"--checkpoint_in_background {why}: training waits for saves"]
        if self.settings.checkpoint_every and not self.disks(self.path).shared:
            lines.append(self._note_of_disks(whole=state.strategy_files == "whole"))
        return lines

    def _note_of_disks(self, whole: bool) -> str:
        """What machines without a common disk mean for whoever wants to use the checkpoints."""
        first, *others = self.disks(self.path).all
        start = f"{' and '.join(disk.host for disk in (first, *others))} do not share {first.folder}"
        if whole:
            return f"{start}: checkpoints lie whole on {first.host}, and a resume sends them to the others by itself"
        commands = " && ".join(folders.copy_command(disk.host, disk.folder, Path(first.folder)) for disk in others)
        return (
            f"{start}: each keeps the files of its own processes. A resume on these machines brings them together by "
            f"itself; before `toolkit convert`, or a resume elsewhere, type on {first.host}: `{commands}`"
        )

    def wait(self) -> None:
        """Until what is being written in the background is on the disk."""
        if self._writer is not None:
            self._writer.finish()
            self._writer = None


def _count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)
