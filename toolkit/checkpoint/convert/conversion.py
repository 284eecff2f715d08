"""`toolkit convert`: which tensors are written under which names, from the checkpoint or the base model."""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint import lora
from toolkit.checkpoint.convert import model_files
from toolkit.checkpoint.convert.model_files import CONFIG
from toolkit.checkpoint.convert.transfer import Output, Shard, split_into_shards, verify_numbers, write_shards
from toolkit.checkpoint.folder import first_with, step_number
from toolkit.checkpoint.read.open import open_checkpoint
from toolkit.checkpoint.tensor_index import FLOATS, CheckpointReader, TensorIndex, model_checksum
from toolkit.demo import model_path
from toolkit.errors import UserError, listing, size_text
from toolkit.utils.files import explain_write_errors, replace_folder

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
# The names that conversions write: --overwrite removes nothing else.
_WRITTEN = re.compile(
    r"(pytorch_)?model[^/]*\.(safetensors|json)|adapter_(config\.json|model\.safetensors)|(generation_)?config\.json"
    r"|decisions\.json|[^/]*token[^/]*\.(json|model)|vocab\.(txt|json)|merges\.txt|([^/]*spiece|spm)\.model"
    r"|(sentencepiece|chat_template)[^/]*|modules\.json|(config_)?sentence_[\w-]+\.json|(pre)?processor_config\.json"
    r"|\d_[A-Z][^/]*/(config\.json|model\.safetensors|pytorch_model\.bin)"
)
# Of torch.compile, FSDP, activation checkpointing and Lightning's strategies.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
# Parameters of a language model that its classifier lacks.
_LANGUAGE_HEADS = ("cls.", "lm_head.", "vocab_", "discriminator_predictions.", "generator_")


@dataclass(frozen=True)
class ConvertSettings:
    """The arguments of `toolkit convert`."""

    checkpoint: Path
    out: Path
    dtype: str = "fp32"
    """A key of `DTYPES`."""
    max_shard_bytes: int = 5 * 10**9
    config_from: Path | None = None
    base_model: Path | None = None
    prefix: str = ""
    """Converts only the tensors with this prefix, and removes it from their names."""
    merge_lora: bool = False
    keep_tied: bool = False
    """Writes tied weights under each of their names, for classes that do not tie them themselves."""
    overwrite: bool = False
    verify: bool = False
    sync: bool = False
    """Flushes the output to the disk; always done if it replaces another."""
    dry_run: bool = False
    without_checksums: bool = False
    """Also converts files without checksums, in which damage cannot be detected."""


def convert(settings: ConvertSettings) -> list[str]:
    """Converts a checkpoint, and returns the lines to print. Raises UserError, and has changed nothing then."""
    opened, dtype = open_checkpoint(settings.checkpoint), DTYPES[settings.dtype]
    _check_output(settings)
    averages = _averages(opened)
    reader = _select_model(dataclasses.replace(opened, weights={**opened.weights, **averages}), settings.prefix)
    folder = _config_folder(settings, reader)
    reader = _strip_attribute(reader, folder)
    adapter = _adapter_config(settings, reader)
    stored, deltas, tied = [*reader.weights.values()], dict[str, lora.LoraDelta](), dict[str, str]()
    is_adapter = adapter is not None and not settings.merge_lora
    if adapter is not None and is_adapter:
        tensors, folder = lora.adapter_tensors(reader, adapter), adapter.path.parent
    else:
        reader, deltas = _full_model(settings, reader, adapter)
        tensors = dict(reader.weights)
        tied = {other: name for other, name in reader.tied.items() if name in tensors and other not in tensors}
    _check_checksums_exist(settings, [*stored, *tensors.values()])
    name_of_head = lora.classifier_head if adapter is None else adapter.head
    head = None if is_adapter else tensors.get(name_of_head(tensors) or "")
    config, files = model_files.copied_files(folder, is_adapter, dtype, head.shape[0] if head else None)
    foreign: list[str] = []
    if folder not in (reader.model_folder, reader.path):
        files.pop(model_files.DECISIONS, None)  # of that folder's own weights
        foreign = [name for name in files if name.endswith((".safetensors", ".bin"))]
    files |= model_files.decisions_of_run(reader.model_folder, reader.step) if files else {}
    with_tied = tensors | {other: tensors[name] for other, name in tied.items()}
    if config is not None and folder is not None:
        shapes = {name: tensor.shape for name, tensor in with_tied.items()}
        model_files.check_config(shapes, config, folder / CONFIG, str(reader.path))
    if settings.keep_tied:
        deltas |= {other: deltas[name] for other, name in tied.items() if name in deltas}
        tensors, tied = with_tied, {}
    outputs = [Output(name, tensor, written_dtype(tensor, dtype), deltas.get(name)) for name, tensor in tensors.items()]
    shards = split_into_shards(outputs, settings.max_shard_bytes, is_adapter)
    lines = [] if files else [f"weights only: {reader.path} has no config; pass a folder that has one as --config_from"]
    if foreign:
        lines.append(f"{listing(foreign)} of {folder} is copied with its own weights: the checkpoint has none for it")
    if averages:
        lines.append("the weights are their moving averages (--ema_decay), as in the run's model/")
    lines += _dry_run(settings, shards, files) if settings.dry_run else _write(settings, reader, shards, files, tied)
    if tied:
        pairs = listing(f"{other} (tied to {name})" for other, name in tied.items())
        lines.append(f"left out: {pairs}, which from_pretrained ties again; --keep_tied writes it too")
    return lines


def written_dtype(tensor: TensorIndex, dtype: str) -> str:
    """`dtype` for floating tensors; integers and bools are not cast."""
    return dtype if tensor.dtype in FLOATS else tensor.dtype


def _check_checksums_exist(settings: ConvertSettings, tensors: Iterable[TensorIndex]) -> None:
    """Raises UserError for files of torch.save that were saved without checksums."""
    members = {span.member for tensor in tensors for span in tensor.spans}
    files = sorted({each.file for each in members if each.crc32 is None and each.file.suffix != ".safetensors"})
    if files and not settings.without_checksums:
        raise UserError(
            f"{listing(files, 3)} was saved without checksums (torch.serialization.set_crc32_options): damage in it "
            "cannot be detected; pass --without_checksums to convert it nevertheless"
        )


def _check_output(settings: ConvertSettings) -> None:
    """Raises UserError when the output cannot be written, or writing it would destroy other files."""
    out = settings.out
    if not out.name or out.name == "..":
        raise UserError(f"the output {str(out)!r} is not a name for a new folder: toolkit convert CHECKPOINT OUT")
    if inside := next((folder for folder in out.resolve().parents if step_number(folder) is not None), None):
        raise UserError(f"{out} is in the checkpoint {inside}, and would be removed with it: name another folder")
    for path in (settings.checkpoint, settings.config_from, settings.base_model):
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise UserError(f"{out} contains the input {path}: name another folder for the output")
    if not os.path.lexists(out):
        return
    if not settings.overwrite or not out.is_dir() or out.is_symlink():
        raise UserError(f"{out} already exists: name another folder, or pass --overwrite to replace a folder")
    _check_removable(out, out)


def _check_removable(folder: Path, out: Path) -> None:
    """Raises UserError when a folder has files that no conversion writes. `out`: its name, for the message."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    files = {name: path for name, path in paths.items() if path.is_symlink() or not path.is_dir()}
    foreign = sorted(name for name, path in files.items() if not (_WRITTEN.fullmatch(name) and path.is_file()))
    if foreign:
        content = f"{out} contains {listing(foreign, 3)}, which no conversion writes and --overwrite would remove"
        raise UserError(f"{content}: name another folder, or move them away")


def _dry_run(settings: ConvertSettings, shards: list[Shard], files: Iterable[str]) -> list[str]:
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
    out, lines = settings.out, []
    # an existing folder is removed only after its replacement is on the disk
    flush = settings.sync or os.path.lexists(out)
    # the existing folder is checked again before it is removed: it may have changed
    with (
        explain_write_errors(out),
        replace_folder(out, settings.overwrite, flush, lambda old: _check_removable(old, out)) as draft,
    ):
        write_shards(draft, shards)
        model_files.write_files(draft, files)
        if settings.verify:
            lines.append(verify_numbers(draft, shards))
        if settings.verify and CONFIG in files:
            shapes = {output.name: output.tensor.shape for shard in shards for output in shard.outputs}
            lines.append(model_files.verify_names(draft, shapes, tied))
    step = f" from step {reader.step}" if reader.step is not None else ""
    size = size_text(sum(shard.layout.size for shard in shards))
    files_written = f"{len(shards)} file{'s' * (len(shards) > 1)}"
    return [*lines, f"wrote {out}{step}: {size} of {settings.dtype} in {files_written}"]


def _averages(reader: CheckpointReader) -> dict[str, TensorIndex]:
    """Parameter name -> its moving average, in a checkpoint of a run with `--ema_decay`."""
    if reader.details.get("settings", {}).get("ema_decay") is None:  # a run resumed without it keeps a stale average
        return {}
    return {name: state["ema"] for name, state in reader.optimizer_state.items() if "ema" in state}


def _select_model(reader: CheckpointReader, prefix: str) -> CheckpointReader:
    """The tensors whose names begin with `prefix`, by the model's names.

    Raises UserError if there are none, or the checkpoint has several models and `prefix` is empty.
    """
    prefix = prefix and prefix.rstrip(".") + "."
    states = reader.details.get("states")
    if isinstance(states, list) and not any(prefix.startswith(state) for state in states if state):
        raise UserError(f"{reader.path} has tensors under {listing(states)}: choose one with --prefix NAME")
    names = model_names(reader, prefix)
    if prefix and not names:
        prefixes = listing(sorted({f"{name.partition('.')[0]}." for name in reader.names()}), 5)
        raise UserError(f"{reader.path} has no tensors under --prefix {prefix}: its names begin with {prefixes}")
    return reader.renamed(names)


def model_names(reader: CheckpointReader, prefix: str = "") -> dict[str, str]:
    """The checkpoint's name -> the model's: without `prefix`, wrappers, and a `module.` that all names have."""
    names = {name: _WRAPPERS.sub("", name.removeprefix(prefix)) for name in reader.names() if name.startswith(prefix)}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {name: short.removeprefix("module.") for name, short in names.items()}
    return names


def _strip_attribute(reader: CheckpointReader, folder: Path | None) -> CheckpointReader:
    """Strips `model.` or `net.`, of a user's module around a Hugging Face model with a config in `folder`, if all names
    have it. In safetensors, which omit tied names, those of a plain Llama may all begin with `model.`."""
    names = reader.names()
    attributes = model_files.MODULE_ATTRIBUTES
    prefix = next((each for each in attributes if all(name.startswith(each) for name in names)), "")
    if not prefix or folder is None or not (folder / CONFIG).is_file():
        return reader
    files = {span.member.file.suffix for tensor in reader.weights.values() for span in tensor.spans}
    if ".safetensors" in files and not model_files.is_known_type(folder):
        return reader
    return _strip_attribute(reader.renamed({name: name.removeprefix(prefix) for name in names}), folder)


def _config_folder(settings: ConvertSettings, reader: CheckpointReader) -> Path | None:
    """The folder with the model's config; with LoRA the adapter's folder may have none."""
    if reader.has_lora:
        return first_with(CONFIG, settings.config_from, reader.model_folder, settings.base_model)
    return settings.config_from or first_with(CONFIG, reader.model_folder)


def _adapter_config(settings: ConvertSettings, reader: CheckpointReader) -> lora.AdapterConfig | None:
    """None for a checkpoint without LoRA."""
    if not reader.weights:
        raise UserError(f"{reader.path} has no weights")
    if not reader.has_lora:
        files = {span.member.file for tensor in reader.weights.values() for span in tensor.spans}
        if any(file.stem == "adapter_model" for file in files):
            raise UserError(f"{reader.path} is an adapter of another kind than LoRA: only peft can load or merge it")
        if settings.merge_lora:
            raise UserError(f"{reader.path} has no LoRA adapter: drop --merge_lora")
        return None
    folder = reader.path if reader.path.is_dir() else reader.path.parent
    if not (folder / lora.ADAPTER_CONFIG).is_file():  # not a folder that peft saved
        with_config = first_with(lora.ADAPTER_CONFIG, reader.model_folder) or settings.config_from
        return lora.read_adapter_config(with_config, reader)
    if not settings.merge_lora:
        hint = f"for the merged model: toolkit convert {folder} OUT --merge_lora --base_model FOLDER"
        raise UserError(f"{folder} is an adapter's folder, which PeftModel.from_pretrained(base, FOLDER) loads; {hint}")
    return lora.read_adapter_config(folder, reader)


def _full_model(
    settings: ConvertSettings, reader: CheckpointReader, adapter: lora.AdapterConfig | None
) -> tuple[CheckpointReader, dict[str, lora.LoraDelta]]:
    """(the checkpoint with all parameters and buffers of a model without LoRA, with the trained heads; what LoRA adds
    to them). Raises UserError when a parameter is neither in the checkpoint nor in the base model."""
    if adapter is None:
        from_base = _from_base(settings, reader, reader.excluded)
        return dataclasses.replace(reader, weights={**reader.weights, **from_base}), {}
    factors = lora.find_factors(reader.weights, reader.path)
    reader = reader.renamed({name: lora.merged_name(name) for name in reader.names() if lora.in_merged_model(name)})
    omitted: dict[str, tuple[int, ...] | None] = {**dict.fromkeys(factors), **reader.excluded}
    missing = {name: shape for name, shape in omitted.items() if name not in reader.weights}
    adapter.check_mergeable(bool(missing))
    base = adapter.content.get("base_model_name_or_path")
    if base and not reader.excluded:  # only for the message: nothing is read from there
        reader = dataclasses.replace(reader, details={"base_model": base, **reader.details})
    from_base = _from_base(settings, reader, missing)
    others = _LANGUAGE_HEADS if adapter.head(reader.weights) else ()
    weights = {**reader.weights, **{name: from_base[name] for name in from_base if not name.startswith(others)}}
    deltas = {name: adapter.delta(name, weights[name], *pair) for name, pair in factors.items()}
    return dataclasses.replace(reader, weights=weights), deltas


def _from_base(
    settings: ConvertSettings,
    reader: CheckpointReader,
    missing: Mapping[str, tuple[int, ...] | None],
) -> dict[str, TensorIndex]:
    """The base model's tensors that a checkpoint lacks.

    `missing`: parameters that the checkpoint omits -> shape, or None if it does not record them. If it records
    nothing, as DeepSpeed's, all of the base model's tensors are taken that it lacks. Raises UserError when there is no
    base model, or it lacks a missing parameter, or has it in another shape.
    """
    base_name = str(reader.details.get("base_model") or "")
    folder = settings.base_model
    if folder is None and reader.excluded and base_name and first_with(CONFIG, Path(model_path(base_name))):
        folder = Path(model_path(base_name))
        trained_on = reader.details.get("identity", {}).get("model")
        if Path(base_name).is_dir() and trained_on and model_checksum(folder) != trained_on:
            raise UserError(
                f"{folder} is not the base model that {reader.path} was trained on: its files have changed. Pass the "
                "folder of that model as --base_model FOLDER"
            )
    if folder is None and missing:
        raise UserError(
            f"{reader.path} lacks {len(missing)} frozen parameters ({listing(missing, 3)}): pass the folder of the "
            f"base model{base_name and f', {base_name},'} as --base_model FOLDER"
        )
    if folder is None:
        return {}
    base = open_checkpoint(folder)
    known = _match_prefix(base.weights, {*reader.weights, *missing})
    if absent := [name for name in missing if name not in known]:
        counts = f"{len(absent)} of the {len(missing)} parameters that {reader.path} omits"
        raise UserError(f"--base_model {base.path} lacks {counts}: {listing(absent, 5)}")
    for name, shape in missing.items():
        if shape is not None and known[name].shape != shape:
            shapes = f"{list(known[name].shape)} in {base.path} and {list(shape)} in {reader.path}"
            raise UserError(f"{name} has shape {shapes}: --base_model is not the model that was trained")
    if reader.excluded:
        return {name: known[name] for name in missing}
    stored = {*reader.weights, *reader.tied}
    return {name: tensor for name, tensor in known.items() if name not in stored}


def _match_prefix(base: Mapping[str, TensorIndex], names: Collection[str]) -> Mapping[str, TensorIndex]:
    """The base model's tensors, with a prefix (`bert.`) added or removed if more of them then match `names`."""
    added = Counter(prefix for prefix, _, rest in (name.partition(".") for name in names) if rest in base)
    removed = Counter(prefix for prefix, _, rest in (name.partition(".") for name in base) if rest in names)
    choices = [base]
    choices += [{f"{prefix}.{name}": base[name] for name in base} for prefix, _ in added.most_common(1)]
    choices += [{name.removeprefix(f"{prefix}."): base[name] for name in base} for prefix, _ in removed.most_common(1)]
    return max(choices, key=lambda choice: sum(name in choice for name in names))  # the first of equals
