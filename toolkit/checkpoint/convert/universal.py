"""`toolkit convert --to universal`: DeepSpeed's own format for another number of processes, streamed.

    OUT/latest_universal                 names the tag
    OUT/TAG/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    OUT/TAG/zero/optimizer_state.pt
    OUT/TAG/mp_rank_00_model_states.pt   what stages 1 and 2 take counts from
    OUT/TAG/zero_pp_rank_0_mp_rank_00_model_states.pt   the same for stage 3

Unlike the folder that ds_to_universal.py makes, it is one for all stages: the loaders of stages 1 and 2 and of
stage 3 look for different files and keys, and both are there.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.convert import universal_files as files_of
from toolkit.checkpoint.convert.describe import gigabytes
from toolkit.checkpoint.convert.run import Options, progress_bar
from toolkit.checkpoint.convert.safe_folder import check_place, check_space, flush, made_beside
from toolkit.checkpoint.convert.universal_files import Copied, Small, Streamed, Writer
from toolkit.checkpoint.convert.universal_state import State, model_state, state_of, step_value
from toolkit.checkpoint.read.archive import open_archive, verify_member
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.read.torch_file import open_torch_file
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.errors import UserError, listing

_LATEST = "latest_universal"
_STAGE_1_2, _STAGE_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
_NEEDED = ("exp_avg", "exp_avg_sq")
_ELEMENTS = 1 << 18  # compared at a time


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a byte is written."""

    options: Options
    reader: CheckpointReader
    state: State
    tag: str
    small: list[Small]
    streamed: list[Streamed]
    copied: list[Copied]

    @property
    def files(self) -> list[Small | Streamed | Copied]:
        """All but `latest_universal`."""
        return [*self.small, *self.streamed, *self.copied]

    @property
    def size(self) -> int:
        """Bytes of the output."""
        return sum(file.size for file in self.files)


def plan(options: Options) -> Plan:
    """Opens and checks everything. Raises UserError for whatever is wrong with it; writes nothing."""
    check_place(options.out, options.overwrite, [options.checkpoint])
    reader = open_checkpoint(options.checkpoint)
    _check_moments(reader)
    _check_names(reader)
    state = state_of(reader)
    tag = state.files.folder.name if state.files is not None else f"global_step{reader.step or 0}"
    zero = f"{tag}/zero"
    small = [files_of.small(f"{zero}/optimizer_state.pt", state.optimizer.value, state.optimizer.blobs)]
    if state.step_dtype is not None:
        for name, step in reader.step_counts().items():
            blobs: list[bytes] = []
            value = step_value(step, state.step_dtype, blobs)
            small.append(files_of.small(f"{zero}/{name}/step.pt", value, blobs))
    copied = _model_files(state, tag)
    if not copied:
        content = model_state(reader)
        small += [files_of.small(f"{tag}/{name}", content.value, content.blobs) for name in (_STAGE_1_2, _STAGE_3)]
    return Plan(options, reader, state, tag, small, _streamed(reader, zero), copied)


def _check_moments(reader: CheckpointReader) -> None:
    if not reader.optimizer_state:
        raise UserError(
            f"{reader.path} holds no optimizer state that is known parameter by parameter, and the universal format is "
            "made of it: take a checkpoint of ZeRO-1, 2 or 3, or one of a run; for the weights alone leave --to out"
        )
    trained = [name for name in reader.weights if name not in reader.frozen and reader.weights[name].count]
    missing = [name for name in trained if not all(key in reader.optimizer_state.get(name, {}) for key in _NEEDED)]
    if missing:
        raise UserError(
            f"{reader.path} lacks {' or '.join(_NEEDED)} of {len(missing)} parameters ({listing(missing, 3)}): "
            "DeepSpeed loads the universal format for Adam and its kin only"
        )


def _check_names(reader: CheckpointReader) -> None:
    """Names become folders."""
    for name in (*reader.weights, *reader.buffers):
        if not name or name in (".", "..") or any(sign in name for sign in "/\\\0"):
            raise UserError(f"{reader.path}: a parameter is named {name!r}, which cannot be the name of a folder")


def _streamed(reader: CheckpointReader, zero: str) -> list[Streamed]:
    files = []
    for name, stored in reader.weights.items():
        moments = reader.optimizer_state.get(name, {})
        files.append(files_of.streamed(f"{zero}/{name}/fp32.pt", stored, whole=bool(moments)))
        files += [files_of.streamed(f"{zero}/{name}/{key}.pt", moment) for key, moment in moments.items()]
    for name, stored in reader.buffers.items():
        files.append(files_of.streamed(f"{zero}/{name}/fp32.pt", stored, whole=False))
    return files


def _model_files(state: State, tag: str) -> list[Copied]:
    """DeepSpeed's own, with a second name for the first one, so that every stage finds it."""
    if state.files is None:
        return []
    paths = [opened.file for opened in state.files.models]
    twin = {_STAGE_1_2: _STAGE_3, _STAGE_3: _STAGE_1_2}
    return [
        Copied(f"{tag}/{path.name}", path, f"{tag}/{twin[path.name]}" if path.name in twin else None) for path in paths
    ]


def described(plan: Plan) -> list[str]:
    """What `--dry_run` prints."""
    parameters = len(plan.reader.optimizer_state)
    return [
        f"would write {plan.options.out}: {gigabytes(plan.size)}, DeepSpeed's universal format",
        f"  {plan.tag}/zero: {parameters} parameters with their moments, {len(plan.streamed) + len(plan.small)} files",
        *(f"  {file.path}: {gigabytes(file.size)}" for file in plan.copied),
        f"  {_LATEST}",
        *notes(plan),
    ]


def notes(plan: Plan) -> list[str]:
    """What DeepSpeed makes of the format, where that may surprise."""
    reader, lines = plan.reader, []
    frozen = [*(name for name in reader.frozen if reader.weights[name].count), *reader.excluded]
    unloaded = [
        f"{len(names)} {what}" for what, names in (("frozen parameters", frozen), ("buffers", reader.buffers)) if names
    ]
    if unloaded:
        lines.append(
            f"DeepSpeed does not load {' and '.join(unloaded)} from this format: your script must (see docs/convert.md)"
        )
    if not plan.state.has_settings:
        lines.append(f"{reader.path} does not hold the optimizer's settings (lr): they stay as your script sets them")
    if plan.state.differing:
        lines.append(
            "at stage 3 DeepSpeed loads one set of settings for all parameter groups: what differs between them "
            f"({', '.join(plan.state.differing)}) stays as your script sets it"
        )
    if plan.state.step_dtype not in (None, "int"):
        lines.append(
            "at stage 3 DeepSpeed gives all sub-groups one and the same step, and torch's Adam then counts it once for "
            "each: part them after loading (see docs/convert.md)"
        )
    return lines


def write(plan: Plan) -> list[str]:
    """Converts, and returns the lines to print. Raises UserError; `out` is then as it was before."""
    began, verified, verifying = time.monotonic(), [], 0.0
    options = plan.options
    check_space(options.out, plan.size)
    with made_beside(options.out, options.flushes) as draft:
        read = _fill(plan, draft)
        (draft / _LATEST).write_text(plan.tag, encoding="utf-8")
        if options.verify:
            if options.flushes:
                flush(draft)
            started = time.monotonic()
            verified = [_verify(plan, draft)]
            verifying = time.monotonic() - started
    seconds = time.monotonic() - began - verifying
    wrote = (
        f"wrote {options.out}: {gigabytes(plan.size)} in DeepSpeed's universal format, read {gigabytes(read)}, "
        f"{seconds:.2f} s, {read / seconds / 1e9:.2f} GB/s"
    )
    how = 'load it with {"checkpoint": {"load_universal": true}} in DeepSpeed\'s config and '
    return [*notes(plan), *verified, wrote, f"{how}engine.load_checkpoint({str(options.out)!r})"]


def _fill(plan: Plan, draft: Path) -> int:
    """Writes all files but `latest_universal`, and returns the bytes that were read for them."""
    from toolkit.checkpoint.convert.transfer import Target, transfer

    for path in {Path(file.path).parent for file in plan.files}:
        (draft / path).mkdir(parents=True, exist_ok=True)
    writer, targets = Writer(draft), []
    with ExitStack() as stack:
        stack.callback(writer.close)
        for file in plan.streamed:
            sink = writer.sink(file.path, checked=True)
            targets.append(Target(file.stored.name, file.stored, file.dtype, -1, file.layout.data[0], sink=sink))
        for copy in plan.copied:
            sink = writer.sink(copy.path, checked=False)
            for stored in copy.members():
                place = stored.spans[0].member.offset
                targets.append(Target(stored.name, stored, "U8", -1, place, sink=sink))
        progress = stack.enter_context(progress_bar(plan.size, "converting"))
        read = transfer(targets, progress=progress)
        for small in plan.small:
            files_of.finish(writer, small)
        for file in plan.streamed:
            files_of.finish(writer, file)
        for copy in plan.copied:
            files_of.copy_rest(writer, copy)
            files_of.link_twin(draft, copy)
    return read


def _verify(plan: Plan, draft: Path) -> str:
    """Reads every file again: its checksums, and its numbers against the checkpoint's."""
    from toolkit.checkpoint.convert.verify import forget

    with progress_bar(plan.size, "verifying") as progress:
        for file in plan.files:
            path = draft / file.path
            forget(path)
            if path.stat().st_size != file.size:
                raise UserError(f"{path} is not of the size that was written: the disk is faulty")
            for member in open_archive(path).members.values():
                verify_member(member)
            if isinstance(file, Streamed):
                _compare(file, path)
            progress(file.size)
    return f"verified: {len(plan.streamed)} tensors are the checkpoint's, bit for bit"


def _compare(file: Streamed, path: Path) -> None:
    """Raises UserError where a number is another one than the checkpoint's."""
    from toolkit.checkpoint.convert.casts import Caster

    caster, written = Caster(_ELEMENTS), open_torch_file(path)
    found = written.stored("param", written.content["param"])
    same = found.shape == file.stored.shape and found.dtype == file.dtype
    for first in range(0, file.stored.count, _ELEMENTS) if same else ():
        count = min(_ELEMENTS, file.stored.count - first)
        expected = caster.cast(memoryview(file.stored.read(first, count)), file.stored.dtype, file.dtype)
        same = same and found.read(first, count) == expected
    if not same:
        raise UserError(f"{path} differs from {file.stored.name} of the checkpoint")
