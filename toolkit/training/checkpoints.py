"""When a run saves itself, what it saves, and how it goes on from that, under any launch."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed

from toolkit import launch
from toolkit.checkpoint import adapter
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.disks import Disks, find_disks
from toolkit.checkpoint.live import LiveState, live_state, persistent_buffers, tied_names, whole_shape
from toolkit.checkpoint.model_folder import save_model
from toolkit.checkpoint.model_folder import step_of as model_folder_step
from toolkit.checkpoint.publish import (
    Background,
    Completion,
    begin_on_all,
    publish_on_all,
    settle_on_all,
    why_not_written,
)
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.restore import restore
from toolkit.checkpoint.save import (
    Draft,
    drafts_of,
    optimizer_facts,
    random_file,
    set_random_states,
    write,
    write_deepspeed,
    write_random_states,
    written_by,
)
from toolkit.checkpoint.together import bring_together
from toolkit.config import TrainingSettings
from toolkit.errors import UserError
from toolkit.training.loop import Loop, Step, StepMetrics
from toolkit.training.optimizer import scaler_state, set_scaler, set_schedule
from toolkit.training.origin import Origin, or_older


class BestSoFar(Protocol):
    """What a checkpoint keeps of `toolkit.evaluation.Best`."""

    step: int

    @property
    def gives_up(self) -> bool: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def forget(self) -> None: ...


@dataclass(frozen=True)
class Saved:
    """What a checkpoint cost."""

    folder: Path
    seconds: float
    """That training stood still."""
    size: int
    """Bytes, over all processes."""


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    folder: Path
    step: int
    metrics: dict[str, Any] | None
    """The line of metrics.jsonl of that step."""
    evaluations: int
    """Lines that eval.jsonl had."""
    lines: list[str]
    """For the user."""


class Checkpoints:
    """The checkpoints of one run; every process calls every method.

    `facts` go into each manifest as they are: settings, versions, and `identity`, what a resumed run must
    have in common with it.
    """

    def __init__(self, loop: Loop, best: BestSoFar, run_folder: Path, origin: Origin, facts: dict[str, Any]) -> None:
        self.loop, self.best, self.facts, self.origin = loop, best, facts, origin
        self.accelerator: Accelerator = loop.accelerator
        self.settings: TrainingSettings = loop.settings
        self.path = run_folder / "checkpoints"
        self.evaluations = run_folder / "eval.jsonl"
        self._writer: Background | None = None
        self._disks: dict[Path, Disks] = {}

    def disks(self, checkpoints: Path) -> Disks:
        """Which processes find the same folder of checkpoints there. Found out once; all processes ask alike."""
        if checkpoints not in self._disks:
            self._disks[checkpoints] = find_disks(self.accelerator, checkpoints)
        return self._disks[checkpoints]

    # --- saving

    def after(self, step: Step, metrics: StepMetrics) -> Saved | None:
        """Saves where a checkpoint is due after this step, and says what it cost."""
        if self._writer is not None:
            self._writer.raise_if_failed()
        every, number = self.settings.checkpoint_every, step.number
        marked = number in (self.best.step, self.loop.schedule.total_steps) or self.best.gives_up
        if not step.stopping and not (every and (number % every == 0 or marked)):
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
        state = live_state(accelerator, self.loop.model, self.loop.optimizer)
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
            write_deepspeed(self.loop.model, folder, manifest["step"], exclude_frozen=bool(excluded))
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
        module = self.accelerator.unwrap_model(self.loop.model)
        module.config.save_pretrained(folder / "model")
        if module.config.is_encoder_decoder:  # how long its texts are, and how they are searched for
            module.generation_config.save_pretrained(folder / "model")
        self.loop.tokenizer.save_pretrained(folder / "model")
        if adapter.config_of(module):
            adapter.write_config(module, folder / "model")
        return names

    def _manifest(self, state: LiveState, metrics: StepMetrics) -> dict[str, Any]:
        loop, accelerator = self.loop, self.accelerator
        frozen = {n: list(whole_shape(p)) for n, p in state.module.named_parameters() if not p.requires_grad}
        with_adapter = adapter.config_of(state.module) is not None
        epoch, position = divmod(metrics.step, loop.schedule.steps_per_epoch)
        return {
            "format": 1,
            "step": metrics.step,
            "epoch": epoch,
            "position": position,
            "saved_at": folders.later_than_all(self.path),
            "saved": datetime.now(UTC).isoformat(timespec="seconds"),
            "state": state.strategy_files,
            "strategy": strategy_of(accelerator, state),
            "world": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
            "tied": tied_names(state.module),
            "optimizer": optimizer_facts(state),
            "buffers": [name for name, _ in persistent_buffers(state.module)],
            "frozen": [] if with_adapter else list(frozen),
            # an adapter's base weights are not trained, large, and lie where they came from
            "excluded": frozen if with_adapter else {},
            "base_model": self.facts["settings"].get("model_name_or_path"),
            "seeds": {"seed": loop.settings.seed},
            "scheduler_steps": loop.scheduler.last_epoch,
            "loss_scale": scaler_state(accelerator, loop.optimizer),
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
        state = live_state(self.accelerator, self.loop.model, self.loop.optimizer)
        lines = []
        if self.settings.checkpoint_in_background and not self._in_background(state):
            why = "needs a disk that all machines share"
            if state.strategy_files != "whole":
                why = f"is for one process or data parallel, and this is {strategy_of(self.accelerator, state)}"
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

    # --- resuming

    def resume(self) -> Resumed | None:
        """Puts the newest sound checkpoint's state into model, optimizer, schedule and random generators.

        Returns None where the run starts at step 0. Raises UserError when none of several is sound.
        """
        lines = [f"checkpoint {why}: skipped" for why in self.origin.skipped]
        if self.origin.aside is not None:
            self._set_aside(self.origin.aside)
        for place, folder in enumerate(self.origin.candidates, 1):
            fault = self._fault(folder, or_older(self.origin.candidates[place : place + 1]))
            if not fault:
                return self._resume_from(folder, lines)
            lines.append(f"checkpoint {folder.name}: {fault}: skipped")
        if lines and self.origin.candidates:
            raise UserError("no checkpoint is sound:\n  " + "\n  ".join(lines))
        for line in lines:
            launch.say(self.accelerator, line)
        return None

    def _set_aside(self, aside: Path) -> None:
        """Rank 0 has moved an old run aside: what lies of it on other disks goes with it."""
        if self.disks(self.path).owns_another and folders.newest_first(self.path):
            try:
                self.path.parent.rename(aside)
            except OSError as error:
                raise UserError(f"{self.path.parent} cannot be renamed to {aside}: {error.strerror}") from error

    def _fault(self, folder: Path, otherwise: str = "") -> str:
        """Why nothing can be read from a checkpoint, once it is whole on every disk: all processes are told alike.

        Raises UserError, which ends with `otherwise`, where it is half a checkpoint.
        """
        together = bring_together(
            self.accelerator, self.disks(folder.parent), folder, lambda line: launch.say(self.accelerator, line)
        )
        if together.lacks:
            raise UserError(together.lacks + otherwise)
        return together.fault or self._damage(folder)

    def _damage(self, folder: Path) -> str:
        """Each process of a disk reads a part of the files through, and so brings them into memory for the loading."""
        names, ranks = sorted(folders.read_manifest(folder)["files"]), self.disks(folder.parent).mine.ranks
        mine = names[ranks.index(self.accelerator.process_index) :: len(ranks)]
        faults = gather_object([folders.checksum_fault(folder, mine)])
        return next((fault for fault in faults if fault), "")

    def _resume_from(self, folder: Path, lines: list[str]) -> Resumed:
        loop, accelerator = self.loop, self.accelerator
        manifest = folders.read_manifest(folder)
        step = int(manifest["step"])
        changed = self._changed_since(manifest)
        _refuse_without_effect(folder, step, loop.schedule.total_steps, changed)
        self.best.restore(manifest["best"])
        lines += self._model_of_best(folder)
        self._restore(folder, step)
        owns = accelerator.process_index == self.disks(folder.parent).mine.owner
        if owns and folder.parent.resolve() == self.path.resolve():
            folders.point_best(self.path, self.best.step)
        set_schedule(loop.scheduler, int(manifest["scheduler_steps"]))
        set_scaler(accelerator, loop.optimizer, manifest["loss_scale"])
        loop.done = step
        self._set_randomness(folder, manifest)
        accelerator.wait_for_everyone()
        return Resumed(
            folder, step, manifest["metrics"], int(manifest["evaluations"]), [*lines, *self._told(folder, manifest)]
        )

    def _restore(self, folder: Path, step: int) -> None:
        loop = self.loop
        restore(live_state(self.accelerator, loop.model, loop.optimizer), open_checkpoint(folder), step)

    def _model_of_best(self, folder: Path) -> list[str]:
        """The run's model/ may be newer than the checkpoint, or not there: then it is made again from the
        best checkpoint. Where that is gone the next evaluation is the best one so far."""
        model_folder, step = self.evaluations.with_name("model"), self.best.step
        there = broadcast_object_list([model_folder_step(model_folder)])[0]
        if not step or there == step:
            return []
        best = folders.step_folder(folder.parent, step)  # the link may already name one after this checkpoint
        if self._fault(best, f". Or remove {best} to go on without the best model so far"):
            self.best.forget()
            return [f"the best model so far, of step {step}, is gone: the next evaluation counts as the best"]
        self._restore(best, step)
        save_model(self.accelerator, self.loop.model, self.loop.tokenizer, model_folder, step)
        return []

    def _set_randomness(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """The very dropout that would have come; in a world of another size, one that has not been yet."""
        loop, seed = self.loop, self.loop.settings.seed
        path = folder / random_file(self.accelerator.process_index)
        if manifest["world"] == self.accelerator.num_processes and path.is_file():
            states = json.loads(path.read_text(encoding="utf-8"))
            loop.randomness = lambda: set_random_states(states)
        else:
            loop.randomness = lambda: set_seed((seed + 1_000_003 * loop.done) % 2**31, device_specific=True)

    def _told(self, folder: Path, manifest: Mapping[str, Any]) -> list[str]:
        total = self.loop.schedule.total_steps
        by = f"{manifest['strategy']}, {manifest['world']} process{'es' * (manifest['world'] > 1)}"
        lines = [f"resuming from {folder}: step {manifest['step']} of {total} (saved by {by})"]
        changed = self._changed_since(manifest)
        if changed:
            lines.append(f"settings that changed since: {'; '.join(changed)}")
        return lines

    def _changed_since(self, manifest: Mapping[str, Any]) -> list[str]:
        changed = folders.differences(manifest["settings"], self.facts["settings"])
        return [line for line in changed if not line.startswith(_NOT_TOLD)]


def _refuse_without_effect(folder: Path, step: int, total: int, changed: list[str]) -> None:
    """A run that has taken all its steps can be shown again, not trained otherwise."""
    if step > total:
        raise UserError(
            f"{folder} has taken {step} steps, and the settings ask for {total} in all: raise --max_steps (or "
            "--num_train_epochs), choose another --output_dir, or pass --overwrite_output_dir"
        )
    if step == total and changed:
        raise UserError(
            f"{folder.parent.parent} is a finished run, in which what changed since would have no effect "
            f"({'; '.join(changed)}): choose another --output_dir, pass --overwrite_output_dir to move it aside, "
            "or raise --max_steps (or --num_train_epochs)"
        )


# Settings that say where and how often, not what is trained.
_NOT_TOLD = ("output_dir ", "overwrite_output_dir ", "resume ", "report_to ", "checkpoint_", "keep_checkpoints ")


def strategy_of(accelerator: Accelerator, state: LiveState) -> str:
    """As `CheckpointReader.strategy` names it."""
    if state.strategy_files == "slices":
        return "fsdp2"
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage:
        return f"zero{plugin.zero_stage}"
    return "ddp" if accelerator.num_processes > 1 else "single"


def _count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)
