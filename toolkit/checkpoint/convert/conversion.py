"""A conversion from beginning to end: which tensors, under which names, from where; and then the writing of them."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint import lora
from toolkit.checkpoint.convert.model_files import (
    CONFIG,
    OTHERS_ATTRIBUTES,
    check_config,
    decisions_of_run,
    files_beside,
    is_known,
    verify_names,
    write_files,
)
from toolkit.checkpoint.convert.transfer import Output, Shard, into_shards, verify_numbers, write_shards
from toolkit.checkpoint.folder import MANIFEST
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.reader import FLOATS, CheckpointReader, TensorIndex
from toolkit.demo import model_path
from toolkit.errors import UserError, listing
from toolkit.utils.files import replace_folder, writing
from toolkit.utils.units import size_text

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
# What conversions write: --overwrite removes nothing else.
_OURS = re.compile(
    r"(pytorch_)?model.*\.(safetensors|json)|adapter_(config\.json|model\.safetensors)|(generation_)?config\.json"
    r"|decisions\.json|.*token.*\.(json|model)|vocab\.(txt|json)|merges\.txt|.*spiece\.model|sentencepiece.*|chat_template.*"
)
# Layers of wrapping that are no part of a model: torch.compile, FSDP, activation checkpointing, Lightning's strategies.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
# Of the language model that a classifier's adapter was trained on.
_LANGUAGE_HEADS = ("cls.", "lm_head.", "vocab_", "discriminator_predictions.", "generator_")


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
    prefix: str = ""
    """Take only the tensors whose names begin so, by the rest of their names."""
    merge_lora: bool = False
    keep_tied: bool = False
    """Write tied weights under each of their names, for classes that do not tie them themselves."""
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
    reader, dtype = _model_of(open_checkpoint(settings.checkpoint), settings.prefix), DTYPES[settings.dtype]
    reader = _without_attribute(reader, _config_folder(settings, reader))
    adapter = _adapter_config(settings, reader)
    deltas: dict[str, lora.LoraDelta] = {}
    names: dict[str, str] = {}
    if is_adapter := adapter is not None and not settings.merge_lora:
        held = lora.adapter_tensors(reader, adapter)
    else:
        held, deltas = _whole(settings, reader, adapter)
        names = {lora.merged_name(other): lora.merged_name(name) for other, name in reader.tied.items()}
    tied = {other: name for other, name in names.items() if name in held and other not in held}
    _refuse_unchecked(settings, [*reader.weights.values(), *held.values()])
    folder = adapter.path.parent if adapter and is_adapter else _config_folder(settings, reader)
    head = None if is_adapter or adapter is None else held.get(adapter.head(held) or "")
    config, files = files_beside(folder, is_adapter, dtype, head.shape[0] if head else None)
    files |= decisions_of_run(reader.model_folder, reader.step) if files else {}
    with_tied = held | {other: held[name] for other, name in tied.items()}
    if config is not None and folder is not None:
        shapes = {name: stored.shape for name, stored in with_tied.items()}
        check_config(shapes, config, folder / CONFIG, str(reader.path))
    if settings.keep_tied:
        deltas |= {other: deltas[name] for other, name in tied.items() if name in deltas}
        held, tied = with_tied, {}
    outputs = [Output(name, stored, written_dtype(stored, dtype), deltas.get(name)) for name, stored in held.items()]
    shards = into_shards(outputs, settings.max_shard_bytes, is_adapter)
    lines = _described(settings, shards, files) if settings.dry_run else _write(settings, reader, shards, files, tied)
    if not files:
        lines.insert(
            0, f"weights only: {reader.path} has no config beside it; name a folder that has with --config_from"
        )
    if tied:
        pairs = listing(f"{other} (tied to {name})" for other, name in tied.items())
        lines.append(f"left out: {pairs}, which from_pretrained ties again; --keep_tied writes it too")
    return lines


def _refuse_unchecked(settings: ConvertSettings, tensors: Iterable[TensorIndex]) -> None:
    """Files of torch.save whose writer was told to leave checksums out: damage in them cannot be seen."""
    members = {span.member for stored in tensors for span in stored.spans}
    files = sorted({each.file for each in members if each.crc32 is None and each.file.suffix != ".safetensors"})
    if files and not settings.without_checksums:
        raise UserError(
            f"{listing(files, 3)} was saved without checksums (torch.serialization.set_crc32_options), so that "
            "damage in it cannot be seen: convert it all the same with --without_checksums"
        )


def _described(settings: ConvertSettings, shards: list[Shard], files: Iterable[str]) -> list[str]:
    size = size_text(sum(shard.layout.size for shard in shards))
    lines = [f"  {shard.name}: {size_text(shard.layout.size)}, {len(shard.outputs)} tensors" for shard in shards]
    return [f"would write {settings.out}: {size}, {settings.dtype}", *lines, *(f"  {name}" for name in files)]


def _write(
    settings: ConvertSettings,
    reader: CheckpointReader,
    shards: list[Shard],
    files: Mapping[str, Path | str],
    tied: Collection[str],
) -> list[str]:
    """`tied`: the names that are left out."""
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
            lines.append(verify_names(draft, shapes, tied))
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


def _model_of(reader: CheckpointReader, prefix: str) -> CheckpointReader:
    """The tensors whose names begin with `prefix`, if any is given, by the model's own names.

    Raises UserError where there are none, or the checkpoint holds several models and none is named.
    """
    prefix = prefix and prefix.rstrip(".") + "."
    states = reader.details.get("states")
    if isinstance(states, list) and not any(prefix.startswith(state) for state in states if state):
        raise UserError(f"{reader.path} holds tensors under {listing(states)}: take those of one with --prefix NAME")
    if not prefix:
        return with_model_names(reader)
    names = {name: name.removeprefix(prefix) for name in _names(reader) if name.startswith(prefix)}
    if not names:
        begin = listing(sorted({f"{name.partition('.')[0]}." for name in _names(reader)}), 5)
        raise UserError(f"{reader.path} holds nothing under --prefix {prefix}: its names begin with {begin}")
    return with_model_names(_renamed_reader(reader, names))


def _names(reader: CheckpointReader) -> list[str]:
    return [*reader.weights, *reader.buffers, *reader.excluded, *reader.tied]


def with_model_names(reader: CheckpointReader) -> CheckpointReader:
    """The same by the model's own names: without wrappers, and without a `module.` that all have.

    Raises UserError when the checkpoint holds two tensors under one name.
    """
    names = {name: _WRAPPERS.sub("", name) for name in _names(reader)}
    while names and all(short.startswith("module.") for short in names.values()):
        names = {name: short.removeprefix("module.") for name, short in names.items()}
    return _renamed_reader(reader, names)


def _without_attribute(reader: CheckpointReader, folder: Path | None) -> CheckpointReader:
    """The same without the `model.` or `net.` that all names have, where they are of a Hugging Face model, whose config
    is in `folder`, in a module of one's own. Safetensors leave tied names out: a Llama's own may all begin so."""
    names = _names(reader)
    prefix = next((prefix for prefix in OTHERS_ATTRIBUTES if all(name.startswith(prefix) for name in names)), "")
    if not prefix or folder is None or not (folder / CONFIG).is_file():
        return reader
    files = {span.member.file.suffix for stored in reader.weights.values() for span in stored.spans}
    if ".safetensors" in files and not is_known(folder):
        return reader
    return _without_attribute(_renamed_reader(reader, {name: name.removeprefix(prefix) for name in names}), folder)


def _renamed_reader(reader: CheckpointReader, names: Mapping[str, str]) -> CheckpointReader:
    """The same by other names, and without the tensors that have none. Raises UserError for two under one name."""
    if lost := {other: name for other, name in reader.tied.items() if other in names and name not in names}:
        # the name under which a tied one is stored is left out, and this one is not
        weights = {**reader.weights, **{other: reader.weights[name] for other, name in lost.items()}}
        tied = {other: name for other, name in reader.tied.items() if other not in lost}
        reader = dataclasses.replace(reader, weights=weights, tied=tied)
    stored = [name for name in (*reader.weights, *reader.buffers, *reader.excluded) if name in names]
    twice = sorted(name for name, count in Counter(names[name] for name in stored).items() if count > 1)
    if twice:
        raise UserError(f"{reader.path} holds several tensors under one name: {listing(twice)}")
    tables = {field: {names[name]: found for name, found in getattr(reader, field).items() if name in names}
              for field in ("weights", "buffers", "excluded")}  # fmt: skip
    return dataclasses.replace(
        reader,
        **tables,  # type: ignore[arg-type]
        tied={names[other]: names[name] for other, name in reader.tied.items() if {other, name} <= names.keys()},
        frozen=frozenset(names[name] for name in reader.frozen if name in names),
        optimizer_state={names[name]: kept for name, kept in reader.optimizer_state.items() if name in names},
    )


def _adapter_config(settings: ConvertSettings, reader: CheckpointReader) -> lora.AdapterConfig | None:
    """Of a checkpoint with LoRA."""
    if not (reader.weights or reader.buffers):
        raise UserError(f"{reader.path} holds no weights")
    if not lora.is_lora(reader):
        if settings.merge_lora:
            raise UserError(f"{reader.path} holds no LoRA adapter: leave --merge_lora out")
        return None
    home = reader.path if reader.path.is_dir() else reader.path.parent
    is_adapters_folder = (home / lora.ADAPTER_CONFIG).is_file()
    if is_adapters_folder and not settings.merge_lora:
        raise UserError(
            f"{home} is an adapter's folder already, which PeftModel.from_pretrained(base, FOLDER) loads; to make a "
            f"whole model of it: toolkit convert {home} OUT --merge_lora --base_model FOLDER"
        )
    folder = home if is_adapters_folder else _having(lora.ADAPTER_CONFIG, reader.model_folder) or settings.config_from
    return lora.read_adapter_config(folder, reader)


def _config_folder(settings: ConvertSettings, reader: CheckpointReader) -> Path | None:
    """Where the model's config is: with LoRA the folder of the adapter's may have none."""
    if lora.is_lora(reader):
        return _having(CONFIG, settings.config_from, reader.model_folder, settings.base_model)
    return settings.config_from or _having(CONFIG, reader.model_folder)


def _having(name: str, *folders: Path | None) -> Path | None:
    """The first folder that has something of this name."""
    return next((folder for folder in folders if folder is not None and os.path.lexists(folder / name)), None)


def written_dtype(stored: TensorIndex, wanted: str) -> str:
    """Floating numbers become `wanted`; whole numbers and truth values stay as they are."""
    return wanted if stored.dtype in FLOATS else stored.dtype


def _whole(
    settings: ConvertSettings, reader: CheckpointReader, adapter: lora.AdapterConfig | None
) -> tuple[dict[str, TensorIndex], dict[str, lora.LoraDelta]]:
    """(every parameter and buffer of a plain model, by its names and in its order; what LoRA adds to them). With LoRA
    the trained heads stand in place of the old ones.

    Raises UserError when a parameter is neither in the checkpoint nor in the base model.
    """
    held: dict[str, TensorIndex] = {**reader.weights, **reader.buffers}
    wanted: dict[str, tuple[int, ...] | None] = dict(reader.excluded)
    if adapter is None:
        held |= _from_base(settings, reader, held, wanted)
        return held, {}
    factors = lora.factors_of(held, reader.path)
    held = {lora.merged_name(name): stored for name, stored in held.items() if lora.stays(name)}
    wanted = {lora.merged_name(name): shape for name, shape in wanted.items() if lora.stays(name)}
    wanted = {name: shape for name, shape in (dict.fromkeys(factors) | wanted).items() if name not in held}
    adapter.check_mergeable(bool(wanted))
    named = adapter.content.get("base_model_name_or_path")
    if named and not reader.excluded:  # of a folder from elsewhere: for the message, nothing is read from there
        reader = dataclasses.replace(reader, details={"base_model": named, **reader.details})
    from_base = _from_base(settings, reader, held, wanted)
    others = _LANGUAGE_HEADS if adapter.head(held) else ()
    held |= {name: stored for name, stored in from_base.items() if not name.startswith(others)}
    return held, {name: adapter.delta(name, held[name], *pair) for name, pair in factors.items()}


def _from_base(
    settings: ConvertSettings,
    reader: CheckpointReader,
    held: Collection[str],
    wanted: Mapping[str, tuple[int, ...] | None],
) -> dict[str, TensorIndex]:
    """What the base model adds to the parameters that a checkpoint holds.

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
    if reader.excluded:
        return {name: known[name] for name in wanted}
    there = {*held, *map(lora.merged_name, reader.tied)}
    return {name: stored for name, stored in known.items() if name not in there}


def _renamed(known: dict[str, TensorIndex], names: Collection[str]) -> dict[str, TensorIndex]:
    """The base model's tensors by the model's names: as they are, or with one prefix (`bert.`) more or less."""
    more = Counter(prefix for prefix, _, rest in (name.partition(".") for name in names) if rest in known)
    less = Counter(prefix for prefix, _, rest in (name.partition(".") for name in known) if rest in names)
    ways = [known]
    ways += [{f"{prefix}.{name}": stored for name, stored in known.items()} for prefix, _ in more.most_common(1)]
    ways += [
        {name.removeprefix(f"{prefix}."): stored for name, stored in known.items()} for prefix, _ in less.most_common(1)
    ]
    return max(ways, key=lambda way: sum(name in way for name in names))  # the first of equals
