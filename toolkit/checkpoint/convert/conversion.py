"""A conversion from beginning to end: what is decided, and then what is written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.convert import model_files
from toolkit.checkpoint.convert.model_files import CONFIG, ModelFiles
from toolkit.checkpoint.convert.select import (
    ADAPTER_CONFIG,
    Selection,
    clean_names,
    is_lora,
    read_adapter_config,
    select_adapter,
    select_merged,
    select_plain,
)
from toolkit.checkpoint.convert.transfer import Shard, into_shards, write_shards
from toolkit.checkpoint.folder import MANIFEST
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.errors import UserError, listing
from toolkit.files import replace_folder, writing
from toolkit.units import size_text

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_BAR_FROM_BYTES = 10**9  # smaller ones are done before a bar would be read
# What conversions write: --overwrite removes nothing else.
_OURS = re.compile(
    r"(pytorch_)?model.*\.(safetensors|json)|adapter_(config\.json|model\.safetensors)|(generation_)?config\.json"
    r"|.*token.*\.(json|model)|vocab\.(txt|json)|merges\.txt|.*spiece\.model|sentencepiece.*|chat_template.*"
)


@dataclass(frozen=True)
class ConvertSettings:
    """What `toolkit convert` was asked for."""

    checkpoint: Path
    out: Path
    dtype: str = "fp32"
    """A key of `DTYPES`."""
    max_shard_bytes: int = 5 * 10**9
    config_from: Path | None = None
    base_model: Path | None = None
    merge_lora: bool = False
    overwrite: bool = False
    verify: bool = False
    sync: bool = False
    """Wait until the output is on the disk; always so where it replaces another."""


@dataclass(frozen=True)
class Conversion:
    """Everything that is decided before a byte is written."""

    settings: ConvertSettings
    reader: CheckpointReader
    selection: Selection
    shards: list[Shard]
    files: ModelFiles

    @property
    def size(self) -> int:
        """Bytes of the output."""
        return self.files.size + self.shards_size

    @property
    def shards_size(self) -> int:
        return sum(shard.layout.size for shard in self.shards)


def plan(settings: ConvertSettings) -> Conversion:
    """Opens and checks everything. Raises UserError for whatever is wrong with it; writes nothing."""
    inputs = [settings.checkpoint, settings.config_from, settings.base_model]
    _check_place(settings.out, settings.overwrite, [path for path in inputs if path is not None])
    reader = open_checkpoint(settings.checkpoint)
    selection, config_folder = _select(settings, reader)
    files = model_files.find(config_folder, selection.is_adapter)
    if files.config is not None and files.folder is not None:
        shapes = {output.name: output.stored.shape for output in selection.outputs}
        tied = clean_names([*shapes, *reader.tied])
        shapes |= {tied[other]: reader.weights[name].shape for other, name in reader.tied.items()}
        model_files.check_config(shapes, files.config, files.folder / CONFIG, str(reader.path))
    shards = into_shards(selection.outputs, DTYPES[settings.dtype], settings.max_shard_bytes, selection.is_adapter)
    return Conversion(settings, reader, selection, shards, files)


def _check_place(out: Path, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Raises UserError when `out` cannot be written, or writing it would destroy something.

    `inputs`: files and folders that are read. None may lie in a folder that is to be replaced.
    """
    if not out.name or out.name == "..":
        raise UserError(f"the output {str(out)!r} is no name of a folder to make: toolkit convert CHECKPOINT OUT")
    inside = next((folder for folder in out.absolute().parents if (folder / MANIFEST).is_file()), None)
    if inside is not None:
        raise UserError(f"{out} lies in the checkpoint {inside}, and would be removed with it: name another folder")
    for path in inputs:
        if path.resolve().is_relative_to(out.resolve()):
            raise UserError(f"{out} holds {path}, which is to be read: name another folder for the output")
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise UserError(f"{out} is already there: name another folder, or replace it with --overwrite")
    if not out.is_dir() or out.is_symlink():
        raise UserError(f"{out} is not a folder: --overwrite replaces only folders")
    foreign = sorted(path.name for path in out.iterdir() if not (_OURS.fullmatch(path.name) and path.is_file()))
    if foreign:
        raise UserError(
            f"{out} holds {listing(foreign, 3)}, which a conversion does not write and --overwrite would remove: name "
            "another folder, or take that away yourself"
        )


def _select(settings: ConvertSettings, reader: CheckpointReader) -> tuple[Selection, Path | None]:
    """(what is written, the folder of its config)."""
    own = reader.model_folder
    if not is_lora(reader):
        if settings.merge_lora:
            raise UserError(f"{reader.path} holds no LoRA adapter: leave --merge_lora out")
        return select_plain(reader, _open_base(settings, reader)), settings.config_from or _having(CONFIG, own)
    if (settings.checkpoint / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{settings.checkpoint} is an adapter's folder already, which PeftModel.from_pretrained(base, FOLDER) "
            "loads; to merge it, convert the run's checkpoint with --merge_lora"
        )
    config = read_adapter_config(_having(ADAPTER_CONFIG, own) or settings.config_from, reader)
    if not settings.merge_lora:
        return select_adapter(reader, config), config.path.parent
    # an adapter's folder has no config of the model
    folder = _having(CONFIG, settings.config_from, own, settings.base_model)
    return select_merged(reader, config, _open_base(settings, reader)), folder


def _having(name: str, *folders: Path | None) -> Path | None:
    """The first folder that has a file of this name."""
    return next((folder for folder in folders if folder is not None and (folder / name).is_file()), None)


def _open_base(settings: ConvertSettings, reader: CheckpointReader) -> CheckpointReader | None:
    """What has the parameters that the checkpoint leaves out: as named, or as the run noted."""
    if settings.base_model is not None:
        return open_checkpoint(settings.base_model)
    folder = located(str(reader.details.get("base_model", ""))) if reader.excluded else Path()
    return open_checkpoint(folder) if reader.excluded and (folder / CONFIG).is_file() else None


def located(name: str) -> Path:
    """A demo model's name -> its folder, asked of a process of its own: the answer needs large libraries."""
    if not name.startswith("demo:"):
        return Path(name)
    program = "import sys; from toolkit.demo import model_path; print(model_path(sys.argv[1]))"
    asked = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=False)
    return Path(asked.stdout.strip() if asked.returncode == 0 else name)


def described(conversion: Conversion) -> list[str]:
    """What `--dry_run` prints."""
    settings, files = conversion.settings, conversion.files
    lines = [f"would write {settings.out}: {size_text(conversion.size)}, {settings.dtype}"]
    for shard in conversion.shards:
        lines.append(f"  {shard.name}: {size_text(shard.layout.size)}, {len(shard.outputs)} tensors")
    configs = [ADAPTER_CONFIG] * conversion.selection.is_adapter + [CONFIG] * (files.config is not None)
    lines += [f"  {name}" for name in (*configs, *(path.name for path in files.copied))]
    return [*lines, *_notes(conversion)]


def _notes(conversion: Conversion) -> list[str]:
    """What the user should know of the output."""
    if conversion.selection.is_adapter or conversion.files.config is not None:
        return []
    path = conversion.reader.path
    return [f"weights only: {path} has no config beside it; name a folder that has with --config_from"]


def write(conversion: Conversion) -> list[str]:
    """Converts, and returns the lines to print. Raises UserError; `out` is then as it was before."""
    began = time.monotonic()
    settings, dtype, verified, verifying = conversion.settings, DTYPES[conversion.settings.dtype], [], 0.0
    _check_space(settings.out, conversion.size)
    # as `cp` does not; but what replaces another must be on the disk before that one is removed
    flushes = settings.sync or os.path.lexists(settings.out)
    with writing(settings.out), replace_folder(settings.out, settings.overwrite, flushes) as draft:
        with _progress_bar(conversion.shards_size, "converting") as progress:
            read = write_shards(draft, conversion.shards, dtype, conversion.selection.checked, progress)
        conversion.files.write(draft, dtype, conversion.selection.is_adapter)
        if settings.verify:
            started = time.monotonic()
            verified = _verify(conversion, draft)
            verifying = time.monotonic() - started
    seconds = time.monotonic() - began - verifying
    files = f"{len(conversion.shards)} file" + ("s" if len(conversion.shards) > 1 else "")
    wrote = (
        f"wrote {settings.out}{_step(conversion.reader)}: {size_text(conversion.size)} of {settings.dtype} in {files}, "
        f"read {size_text(read)}, {seconds:.2f} s, {read / seconds / 1e9:.2f} GB/s"
    )
    return [*_notes(conversion), *verified, wrote]


def _check_space(out: Path, needed: int) -> None:
    """Raises UserError when the disk of `out` has not `needed` bytes left."""
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder} has {size_text(free)} left and the output needs {size_text(needed)}: free some space"
        )


def _step(reader: CheckpointReader) -> str:
    """A run's folder stands for its newest checkpoint, which need not be the best: say which it was."""
    if reader.step is None:
        return ""
    folder = f" ({reader.model_folder.resolve().parent.name})" if reader.model_folder else ""
    return f" from step {reader.step}{folder}"


def _verify(conversion: Conversion, draft: Path) -> list[str]:
    from toolkit.checkpoint.convert.verify import verify

    with _progress_bar(conversion.shards_size, "verifying") as progress:
        count, merged = verify(draft, conversion.shards, progress)
    rounded = f"; {merged} merged ones agree to rounding" if merged else ""
    lines = [f"verified: {count - merged} tensors are the checkpoint's, bit for bit{rounded}"]
    if conversion.files.config is not None:
        shapes = {output.name: output.stored.shape for output in conversion.selection.outputs}
        lines.append("verified: " + model_files.check_built(draft, shapes, conversion.reader.tied))
    return lines


@contextmanager
def _progress_bar(size: int, what: str) -> Iterator[Callable[[int], object]]:
    """Gives what is to be called with the bytes done since; a bar is shown where there are many."""
    if size < _BAR_FROM_BYTES:
        yield lambda done: None
        return
    from tqdm import tqdm

    with tqdm(total=size, desc=what, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update
