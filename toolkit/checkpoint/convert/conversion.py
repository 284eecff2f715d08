"""A conversion from beginning to end: which tensors, under which names, from where; and then the writing of them."""

from __future__ import annotations

import functools
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoint import lora
from toolkit.checkpoint.convert.model_files import CONFIG, check_config, files_beside, verify_names, write_files
from toolkit.checkpoint.convert.transfer import Output, Shard, into_shards, verify_numbers, write_shards
from toolkit.checkpoint.folder import MANIFEST
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.reader import FLOATS, CheckpointReader, TensorIndex, unchecked
from toolkit.demo import model_path
from toolkit.errors import UserError, listing
from toolkit.files import replace_folder, writing
from toolkit.units import size_text

if TYPE_CHECKING:  # numpy, which most conversions do without
    from toolkit.checkpoint.convert.casts import LoraDelta

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
# What conversions write: --overwrite removes nothing else.
_OURS = re.compile(
    r"(pytorch_)?model.*\.(safetensors|json)|adapter_(config\.json|model\.safetensors)|(generation_)?config\.json"
    r"|.*token.*\.(json|model)|vocab\.(txt|json)|merges\.txt|.*spiece\.model|sentencepiece.*|chat_template.*"
)
# Layers of wrapping that are no part of a model: torch.compile, FSDP, activation checkpointing.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


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
    dry_run: bool = False
    without_checksums: bool = False
    """Also from files in which damage cannot be seen."""


def convert(settings: ConvertSettings) -> list[str]:
    """Does what was asked, and returns the lines to print.

    Raises UserError for whatever is wrong; nothing is changed then.
    """
    _check_place(settings)
    reader = open_checkpoint(settings.checkpoint)
    tensors, deltas, folder = _select(settings, reader)
    if (without := unchecked([*reader.weights.values(), *tensors.values()])) and not settings.without_checksums:
        raise UserError(
            f"{listing(without, 3)} was saved without checksums (torch.serialization.set_crc32_options), so that "
            "damage in it cannot be seen: convert it all the same with --without_checksums"
        )
    is_adapter = lora.is_lora(reader) and not settings.merge_lora
    dtype = DTYPES[settings.dtype]
    config, files = files_beside(folder, is_adapter, dtype)
    if config is not None and folder is not None:
        shapes = {name: stored.shape for name, stored in tensors.items()}
        tied = clean_names([*shapes, *reader.tied])
        shapes |= {tied[other]: reader.weights[name].shape for other, name in reader.tied.items()}
        check_config(shapes, config, folder / CONFIG, str(reader.path))
    outputs = [Output(name, stored, written_dtype(stored, dtype), deltas.get(name)) for name, stored in tensors.items()]
    shards = into_shards(outputs, settings.max_shard_bytes, is_adapter)
    lines = _described(settings, shards, files) if settings.dry_run else _write(settings, reader, shards, files)
    note = f"weights only: {reader.path} has no config beside it; name a folder that has with --config_from"
    return lines if files else [note, *lines]


def _described(settings: ConvertSettings, shards: list[Shard], files: Iterable[str]) -> list[str]:
    size = size_text(sum(shard.layout.size for shard in shards))
    lines = [f"  {shard.name}: {size_text(shard.layout.size)}, {len(shard.outputs)} tensors" for shard in shards]
    return [f"would write {settings.out}: {size}, {settings.dtype}", *lines, *(f"  {name}" for name in files)]


def _write(
    settings: ConvertSettings, reader: CheckpointReader, shards: list[Shard], files: Mapping[str, Path | str]
) -> list[str]:
    began = time.monotonic()
    out, lines = settings.out, []
    # as `cp` does not; but what replaces another must be on the disk before that one is removed
    flushes = settings.sync or os.path.lexists(out)
    # what is about to go is looked at again: it may not be what it was
    spare = functools.partial(_refuse_foreign, out=out)
    with writing(out), replace_folder(out, settings.overwrite, flushes, spare) as draft:
        read = write_shards(draft, shards)
        write_files(draft, files)
        seconds = time.monotonic() - began
        if settings.verify:
            lines.append(verify_numbers(draft, shards))
        if settings.verify and CONFIG in files:
            shapes = {output.name: output.stored.shape for shard in shards for output in shard.outputs}
            lines.append(verify_names(draft, shapes, reader.tied))
    # a run's folder stands for its newest checkpoint, which need not be the best: say which it was
    named = f" ({reader.model_folder.resolve().parent.name})" if reader.model_folder else ""
    step = f" from step {reader.step}{named}" if reader.step is not None else ""
    size = size_text(sum(shard.layout.size for shard in shards))
    wrote = (
        f"wrote {out}{step}: {size} of {settings.dtype} in {len(shards)} file{'s' * (len(shards) > 1)}, "
        f"read {size_text(read)}, {seconds:.2f} s, {read / seconds / 1e9:.2f} GB/s"
    )
    return [*lines, wrote]


def _check_place(settings: ConvertSettings) -> None:
    """Raises UserError when the output cannot be written, or writing it would destroy something."""
    out = settings.out
    if not out.name or out.name == "..":
        raise UserError(f"the output {str(out)!r} is no name of a folder to make: toolkit convert CHECKPOINT OUT")
    inside = next((folder for folder in out.absolute().parents if (folder / MANIFEST).is_file()), None)
    if inside is not None:
        raise UserError(f"{out} lies in the checkpoint {inside}, and would be removed with it: name another folder")
    for path in (settings.checkpoint, settings.config_from, settings.base_model):
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise UserError(f"{out} holds {path}, which is to be read: name another folder for the output")
    if not os.path.lexists(out):
        return
    if not settings.overwrite:
        raise UserError(f"{out} is already there: name another folder, or replace it with --overwrite")
    if not out.is_dir() or out.is_symlink():
        raise UserError(f"{out} is not a folder: --overwrite replaces only folders")
    _refuse_foreign(out, out)


def _refuse_foreign(folder: Path, out: Path) -> None:
    """Raises UserError when what is to be removed is not of a conversion. `out`: its name, for the message."""
    foreign = sorted(path.name for path in folder.iterdir() if not (_OURS.fullmatch(path.name) and path.is_file()))
    if foreign:
        raise UserError(
            f"{out} holds {listing(foreign, 3)}, which a conversion does not write and --overwrite would remove: name "
            "another folder, or take that away yourself"
        )


# which tensors

_Tensors = dict[str, TensorIndex]
_Shapes = dict[str, tuple[int, ...] | None]


def _select(settings: ConvertSettings, reader: CheckpointReader) -> tuple[_Tensors, dict[str, LoraDelta], Path | None]:
    """(what is written, in the model's order; what LoRA adds to some of it; the folder of its config)."""
    own = reader.model_folder
    if not lora.is_lora(reader):
        if settings.merge_lora:
            raise UserError(f"{reader.path} holds no LoRA adapter: leave --merge_lora out")
        return *_whole(settings, reader), settings.config_from or _having(CONFIG, own)
    if (settings.checkpoint / lora.ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{settings.checkpoint} is an adapter's folder already, which PeftModel.from_pretrained(base, FOLDER) "
            "loads; to merge it, convert the run's checkpoint with --merge_lora"
        )
    config = lora.read_adapter_config(_having(lora.ADAPTER_CONFIG, own) or settings.config_from, reader)
    if not settings.merge_lora:
        return lora.adapter_tensors(reader, _tensors_of(reader)[0], config), {}, config.path.parent
    # an adapter's folder has no config of the model
    return *_whole(settings, reader, config), _having(CONFIG, settings.config_from, own, settings.base_model)


def _having(name: str, *folders: Path | None) -> Path | None:
    """The first folder that has a file of this name."""
    return next((folder for folder in folders if folder is not None and (folder / name).is_file()), None)


def written_dtype(stored: TensorIndex, wanted: str) -> str:
    """Floating numbers become `wanted`; whole numbers and truth values stay as they are."""
    return wanted if stored.dtype in FLOATS else stored.dtype


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Name in the checkpoint -> the model's own: without wrappers, and without a prefix that all have."""
    cleaned = {name: _WRAPPERS.sub("", name) for name in names}
    while cleaned and all(short.startswith("module.") for short in cleaned.values()):
        cleaned = {name: short.removeprefix("module.") for name, short in cleaned.items()}
    return cleaned


def _tensors_of(reader: CheckpointReader) -> tuple[_Tensors, _Shapes]:
    """(parameters and buffers, parameters left out of the checkpoint with their shapes), by the model's names.

    Raises UserError when the checkpoint holds no tensor, or two under one name.
    """
    stored = {**reader.weights, **reader.buffers}
    names = clean_names([*stored, *reader.excluded])
    if not stored:
        raise UserError(f"{reader.path} holds no weights")
    twice = sorted(name for name, count in Counter(names.values()).items() if count > 1)
    if twice:
        raise UserError(f"{reader.path} holds several tensors under one name: {listing(twice)}")
    held = {names[name]: tensor for name, tensor in stored.items()}
    return held, {names[name]: tuple(shape) for name, shape in reader.excluded.items()}


def _whole(
    settings: ConvertSettings, reader: CheckpointReader, config: lora.AdapterConfig | None = None
) -> tuple[_Tensors, dict[str, LoraDelta]]:
    """Every parameter and buffer of a plain model, and what LoRA (with a `config`) adds to some of them.

    With LoRA the trained heads stand in place of the old ones. Raises UserError when a parameter is neither in the
    checkpoint nor in the base model.
    """
    held, left_out = _tensors_of(reader)
    # a tied parameter is written once, by the name that the checkpoint has: `from_pretrained` ties the others to it
    names = clean_names([*held, *reader.tied])
    tied = {names[name] for name in reader.tied}
    if config is None:
        return held | _from_base(settings, reader, held, left_out, tied), {}
    factors = lora.factors_of(held, reader.path)
    plain = {lora.merged_name(name): tensor for name, tensor in held.items() if lora.stays(name)}
    wanted: _Shapes = dict.fromkeys(factors)
    wanted |= {lora.merged_name(name): shape for name, shape in left_out.items() if lora.stays(name)}
    wanted = {name: shape for name, shape in wanted.items() if name not in plain}
    config.check_mergeable(bool(wanted))
    plain |= _from_base(settings, reader, plain, wanted, {lora.merged_name(name) for name in tied})
    return plain, {name: _delta(name, plain[name], *pair, config) for name, pair in factors.items()}


def _delta(
    name: str, weight: TensorIndex, a: TensorIndex, b: TensorIndex, is_embedding: bool, config: lora.AdapterConfig
) -> LoraDelta:
    from toolkit.checkpoint.convert.casts import LoraDelta

    layer = name.removesuffix(".weight")
    delta = LoraDelta(
        a, b, config.scaling(layer, a.shape[0]), is_embedding or bool(config.content.get("fan_in_fan_out"))
    )
    if delta.shape != weight.shape or a.shape[0] != b.shape[1]:
        raise UserError(
            f"the adapter of {layer} is of shape {list(delta.shape)} and its weight of {list(weight.shape)}"
        )
    return delta


def _from_base(
    settings: ConvertSettings,
    reader: CheckpointReader,
    held: Collection[str],
    wanted: _Shapes,
    tied: Collection[str] = (),
) -> _Tensors:
    """What the base model adds to the parameters that a checkpoint holds (`held`; `tied` are other names of them).

    `wanted`: those that are known to be left out -> shape, or None where the checkpoint does not say. DeepSpeed does
    not write down which it leaves out: then everything of the base model is taken that the checkpoint does not hold.
    Raises UserError when there is no base model, or it lacks a wanted parameter, or has it in another shape.
    """
    named = str(reader.details.get("base_model") or "")
    folder = settings.base_model
    if folder is None and reader.excluded and named and (noted := Path(model_path(named)) / CONFIG).is_file():
        folder = noted.parent
    if folder is None and wanted:
        raise UserError(
            f"{reader.path} leaves {len(wanted)} frozen parameters out ({listing(wanted, 3)}): "
            f"say where the base model{named and f', {named},'} is with --base_model FOLDER"
        )
    if folder is None:
        return {}
    base = open_checkpoint(folder)
    known = _renamed({**base.weights, **base.buffers}, {*held, *wanted})
    if missing := [name for name in wanted if name not in known]:
        raise UserError(
            f"--base_model {base.path} lacks {len(missing)} of the {len(wanted)} parameters that "
            f"{reader.path} leaves out: {listing(missing, 5)}"
        )
    for name, shape in wanted.items():
        if shape is not None and known[name].shape != shape:
            raise UserError(
                f"{name} is of shape {list(known[name].shape)} in {base.path} and of {list(shape)} in the model of "
                f"{reader.path}: --base_model is not the model that was trained"
            )
    taken = wanted if reader.excluded else [name for name in known if name not in held and name not in tied]
    return {name: known[name] for name in taken}


def _renamed(known: Mapping[str, TensorIndex], names: Collection[str]) -> _Tensors:
    """The base model's tensors by the model's names: as they are, or with one prefix (`bert.`) more or less."""
    prefixes = sorted({name.split(".")[0] + "." for name in (*known, *names)})
    ways = [dict(known)]
    ways += [{prefix + name: tensor for name, tensor in known.items()} for prefix in prefixes]
    ways += [{name.removeprefix(prefix): tensor for name, tensor in known.items()} for prefix in prefixes]
    return max(ways, key=lambda way: sum(name in way for name in names))  # the first of equals
