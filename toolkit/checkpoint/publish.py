"""The last part of a save: from its end on the checkpoint counts, on every disk of the run."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.disks import Disks
from toolkit.checkpoint.save import Draft, write
from toolkit.errors import UserError


@dataclass(frozen=True)
class Completion:
    """What is left to do when every process's files are on the disk."""

    folder: Path
    manifest: dict[str, Any]
    files: dict[str, dict[str, Any]]
    drafts: list[Draft]
    keep: int
    best_step: int

    def __call__(self) -> None:
        """On one disk, by one process."""
        late = {draft.name: write(draft, self.folder) for draft in self.drafts}
        folders.publish(self.folder, {**self.manifest, "files": {**self.files, **late}})
        self.point()
        folders.prune(self.folder.parent, self.keep)

    def point(self) -> None:
        checkpoints = self.folder.parent
        folders.point(checkpoints, "last", self.folder)
        if self.manifest["step"] == self.best_step:
            folders.point(checkpoints, "best", self.folder)


# The order below is what a kill at any moment needs: rank 0's disk says what counts, so that a checkpoint is
# complete on the others before, and is no longer complete on the others only after, it is so there.


def begin_on_all(accelerator: Accelerator, disks: Disks, folder: Path) -> None:
    """An empty folder on every disk; all processes call this."""
    if accelerator.is_main_process:
        folders.begin(folder)
    accelerator.wait_for_everyone()
    if not disks.shared:
        if disks.owns_another:
            folders.begin(folder)
        accelerator.wait_for_everyone()


def publish_on_all(accelerator: Accelerator, disks: Disks, complete: Completion) -> None:
    """Rank 0's manifest on every disk, and on its own last; all processes call this."""
    name = complete.folder.name
    lie = {disk.host: str(Path(disk.folder, name)) for disk in disks.all}
    manifest = {**complete.manifest, "disks": lie, "files": complete.files}
    manifest = broadcast_object_list([manifest])[0]
    if disks.owns_another:
        ranks = disks.mine.ranks
        # DeepSpeed's use_node_local_storage writes on each machine what rank 0 writes, too
        folders.remove_others(complete.folder, [n for n, e in complete.files.items() if e["rank"] in ranks])
        folders.publish(complete.folder, manifest)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folders.publish(complete.folder, manifest)
    accelerator.wait_for_everyone()


def settle_on_all(accelerator: Accelerator, disks: Disks, complete: Completion) -> None:
    """Links, and what is to go, as rank 0's disk has it; all processes call this."""
    going: list[Path] = []
    if accelerator.is_main_process:
        complete.point()
        going = folders.superfluous(complete.folder.parent, complete.keep)
        for folder in going:
            (folder / folders.MANIFEST).unlink(missing_ok=True)
    names: list[str] = broadcast_object_list([[folder.name for folder in going]])[0]
    if disks.owns_another:
        complete.point()
        for name in names:
            folders.remove(complete.folder.with_name(name))
    accelerator.wait_for_everyone()
    for folder in going:
        folders.remove(folder)


class Background:
    """One thread that completes a checkpoint; its failure is the next step's."""

    def __init__(self, complete: Completion) -> None:
        self._complete = complete
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._complete()
        except Exception as error:
            shutil.rmtree(self._complete.folder, ignore_errors=True)  # the disk may be full
            self._error = error

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise UserError(
                f"the checkpoint {self._complete.folder} could not be written: {self._error}; those before it are "
                "untouched"
            ) from self._error

    def finish(self) -> None:
        self._thread.join()
        self.raise_if_failed()


def why_not_written(error: OSError | RuntimeError) -> str | None:
    """None for what is no failure of the disk. PyTorch, which writes DeepSpeed's files, says it in its own way."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    first = str(error).split("\n")[0]
    known = ("PytorchStreamWriter", "inline_container", "iostream")
    return f"is the disk full? PyTorch says: {first}" if any(word in first for word in known) else None
