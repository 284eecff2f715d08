"""A conversion from beginning to end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.convert import check_config, lora, model_files
from toolkit.checkpoint.convert.describe import gigabytes
from toolkit.checkpoint.convert.outputs import Selection, clean_names, select
from toolkit.checkpoint.convert.safe_folder import check_place, check_space, flush, flushing, made_beside
from toolkit.checkpoint.convert.shards import Shard, divide, write_index
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.errors import UserError

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_BAR_FROM_BYTES = 10**9  # smaller ones are done before a bar would be read


@dataclass(frozen=True)
class Options:
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

    @property
    def flushes(self) -> bool:
        """As `cp` does not; but what replaces another must be on the disk before that one is removed."""
        return self.sync or os.path.lexists(self.out)


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a byte is written."""

    options: Options
    reader: CheckpointReader
    selection: Selection
    shards: list[Shard]
    files: model_files.ModelFiles

    @property
    def size(self) -> int:
        """Bytes of the output."""
        return sum(shard.layout.size for shard in self.shards) + self.files.size


def plan(options: Options) -> Plan:
    """Opens and checks everything. Raises UserError for whatever is wrong with it; writes nothing."""
    inputs = [options.checkpoint, options.config_from, options.base_model]
    check_place(options.out, options.overwrite, [path for path in inputs if path is not None])
    reader = open_checkpoint(options.checkpoint)
    base = _open_base(options, reader)
    selection, config_folder = _select(options, reader, base)
    files = model_files.find(config_folder, selection.is_adapter)
    if files.config is not None and files.folder is not None:
        shapes = {output.name: output.shape for output in selection.outputs}
        tied = clean_names([*shapes, *reader.tied])
        shapes |= {tied[other]: reader.weights[name].shape for other, name in reader.tied.items()}
        check_config.check(shapes, files.config, files.folder / model_files.CONFIG, str(reader.path))
    dtype = DTYPES[options.dtype]
    shards = divide(selection.outputs, dtype, options.max_shard_bytes, selection.is_adapter)
    return Plan(options, reader, selection, shards, files)


def _select(options: Options, reader: CheckpointReader, base: CheckpointReader | None) -> tuple[Selection, Path | None]:
    """(what is written, the folder of its config)."""
    own = reader.model_folder
    if not lora.is_lora(reader):
        if options.merge_lora:
            raise UserError(f"{reader.path} holds no LoRA adapter: leave --merge_lora out")
        return select(reader, base), options.config_from or _having(model_files.CONFIG, own)
    if (options.checkpoint / lora.CONFIG).is_file():
        raise UserError(
            f"{options.checkpoint} is an adapter's folder already, which PeftModel.from_pretrained(base, FOLDER) "
            "loads; to merge it, convert the run's checkpoint with --merge_lora"
        )
    config = lora.read_config(_having(lora.CONFIG, own) or options.config_from, reader)
    if not options.merge_lora:
        return lora.select_adapter(reader, config), config.path.parent
    # an adapter's folder has no config of the model
    folder = _having(model_files.CONFIG, options.config_from, own, options.base_model)
    return lora.select_merged(reader, config, base), folder


def _having(name: str, *folders: Path | None) -> Path | None:
    """The first folder that has a file of this name."""
    return next((folder for folder in folders if folder is not None and (folder / name).is_file()), None)


def _open_base(options: Options, reader: CheckpointReader) -> CheckpointReader | None:
    """What has the parameters that the checkpoint leaves out: as named, or as the run noted."""
    if options.base_model is not None:
        return open_checkpoint(options.base_model)
    if not reader.excluded or (lora.is_lora(reader) and not options.merge_lora):
        return None
    folder = Path(located(str(reader.details.get("base_model", ""))))
    return open_checkpoint(folder) if (folder / model_files.CONFIG).is_file() else None


def located(name: str) -> str:
    """A demo model's name -> its folder, asked of a process of its own: the answer needs large libraries."""
    if not name.startswith("demo:"):
        return name
    program = "import sys; from toolkit.demo import model_path; print(model_path(sys.argv[1]))"
    asked = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else name


def described(plan: Plan) -> list[str]:
    """What `--dry_run` prints."""
    counts = {shard.name: len(shard.outputs) for shard in plan.shards}
    lines = [f"would write {plan.options.out}: {gigabytes(plan.size)}, {plan.options.dtype}"]
    lines += [f"  {shard.name}: {gigabytes(shard.layout.size)}, {counts[shard.name]} tensors" for shard in plan.shards]
    others = [path.name for path in plan.files.copied]
    if plan.files.config is not None:
        others.insert(0, model_files.CONFIG)
    if plan.selection.is_adapter:
        others.insert(0, lora.CONFIG)
    lines += [f"  {name}" for name in others]
    return [*lines, *notes(plan)]


def notes(plan: Plan) -> list[str]:
    """What the user should know of the output."""
    if plan.selection.is_adapter or plan.files.config is not None:
        return []
    return [f"weights only: {plan.reader.path} has no config beside it; name a folder that has with --config_from"]


def write(plan: Plan) -> list[str]:
    """Converts, and returns the lines to print. Raises UserError; `out` is then as it was before."""
    began = time.monotonic()
    options, verified, verifying = plan.options, [], 0.0
    check_space(options.out, plan.size)
    flushes = options.flushes
    with made_beside(options.out, flushes) as draft:
        read = _stream(plan, draft, flushes)
        write_index(draft, plan.shards, DTYPES[options.dtype])
        plan.files.write(draft, DTYPES[options.dtype], plan.selection.is_adapter)
        if flushes:
            flush(draft)
        if options.verify:
            started = time.monotonic()
            verified = _verify(plan, draft)
            verifying = time.monotonic() - started
    seconds = time.monotonic() - began - verifying
    files = f"{len(plan.shards)} file" + ("s" if len(plan.shards) > 1 else "")
    wrote = (
        f"wrote {options.out}{_step(plan.reader)}: {gigabytes(plan.size)} of {options.dtype} in {files}, "
        f"read {gigabytes(read)}, "
        f"{seconds:.2f} s, {read / seconds / 1e9:.2f} GB/s"
    )
    return [*notes(plan), *verified, wrote]


def _step(reader: CheckpointReader) -> str:
    """A run's folder stands for its newest checkpoint, which need not be the best: say which it was."""
    if reader.step is None:
        return ""
    folder = f" ({reader.model_folder.resolve().parent.name})" if reader.model_folder else ""
    return f" from step {reader.step}{folder}"


def _stream(plan: Plan, draft: Path, flushes: bool) -> int:
    """Writes the shards, and returns the bytes that were read for them."""
    from toolkit.checkpoint.convert import transfer

    dtype = DTYPES[plan.options.dtype]
    with ExitStack() as stack:
        targets, files = [], []
        for shard in plan.shards:
            files.append(_create(draft / shard.name, shard, stack))
            for output in shard.outputs:
                place = shard.layout.offsets[output.name]
                target = transfer.Target(
                    output.name, output.stored, output.dtype(dtype), files[-1], place, output.delta
                )
                targets.append(target)
        progress = stack.enter_context(progress_bar(sum(shard.layout.size for shard in plan.shards), "converting"))
        if flushes:
            stack.enter_context(flushing(files))
        return transfer.transfer(targets, plan.selection.checked, progress)


def _create(path: Path, shard: Shard, stack: ExitStack) -> int:
    """Descriptor of a new file of its full size that holds its header."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    stack.callback(os.close, file)
    os.ftruncate(file, shard.layout.size)
    header = shard.layout.header()
    done = 0
    while done < len(header):
        done += os.pwrite(file, header[done:], done)
    return file


def _verify(plan: Plan, draft: Path) -> list[str]:
    from toolkit.checkpoint.convert.verify import verify

    with progress_bar(sum(shard.layout.size for shard in plan.shards), "verifying") as progress:
        count, merged = verify(draft, plan.shards, progress)
    said = f"verified: {count - merged} tensors are the checkpoint's, bit for bit"
    if merged:
        said += f"; {merged} merged ones agree to rounding"
    lines = [said]
    if plan.files.config is not None:
        shapes: Mapping[str, tuple[int, ...]] = {
            output.name: output.shape for shard in plan.shards for output in shard.outputs
        }
        lines.append("verified: " + check_config.check_built(draft, shapes, plan.reader.tied))
    return lines


@contextmanager
def progress_bar(size: int, what: str) -> Iterator[Callable[[int], object]]:
    """Gives what is to be called with the bytes done since; a bar is shown where there are many."""
    if size < _BAR_FROM_BYTES:
        yield lambda done: None
        return
    from tqdm import tqdm

    with tqdm(total=size, desc=what, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update
