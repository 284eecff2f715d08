"""Which tensors a conversion writes, under which names, and from where."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.checkpoint.reader import ITEM_BYTES, CheckpointReader, Member, TensorIndex
from toolkit.errors import UserError, listing

if TYPE_CHECKING:  # numpy, which a look at a checkpoint does without
    from toolkit.checkpoint.convert.lora_delta import Delta

# Layers of wrapping that are no part of a model: torch.compile, FSDP, activation checkpointing.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True)
class Output:
    """A tensor to write."""

    name: str
    stored: TensorIndex
    delta: Delta | None = None
    """What a LoRA adapter adds."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def dtype(self, wanted: str) -> str:
        """Floating numbers become `wanted`; whole numbers and truth values stay as they are."""
        return wanted if self.stored.dtype in ("F64", "F32", "F16", "BF16") else self.stored.dtype

    def size(self, wanted: str) -> int:
        """Bytes."""
        return self.stored.count * ITEM_BYTES[self.dtype(wanted)]


@dataclass(frozen=True)
class Selection:
    """What is written, in the model's order."""

    outputs: list[Output]
    checked: list[Member] = field(default_factory=list)
    """Members whose numbers enter a sum: to be checked although they are not copied."""
    is_adapter: bool = False


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Name in the checkpoint -> the model's own: without wrappers, and without a prefix that all have."""
    cleaned = {name: _WRAPPERS.sub("", name) for name in names}
    while cleaned and all(short.startswith("module.") for short in cleaned.values()):
        cleaned = {name: short.removeprefix("module.") for name, short in cleaned.items()}
    return cleaned


def tensors_of(reader: CheckpointReader) -> tuple[dict[str, TensorIndex], dict[str, tuple[int, ...]]]:
    """(parameters and buffers, parameters left out of the checkpoint with their shapes), by the model's names.

    Raises UserError when the checkpoint holds no tensor, or two under one name.
    """
    stored = {**reader.weights, **reader.buffers}
    names = clean_names([*stored, *reader.excluded])
    if not stored:
        raise UserError(f"{reader.path} holds no weights")
    if len(set(names.values())) < len(names):
        twice = sorted({name for name in names.values() if list(names.values()).count(name) > 1})
        raise UserError(f"{reader.path} holds several tensors under one name: {listing(twice)}")
    held = {names[name]: tensor for name, tensor in stored.items()}
    return held, {names[name]: tuple(shape) for name, shape in reader.excluded.items()}


def select(reader: CheckpointReader, base: CheckpointReader | None) -> Selection:
    """Every parameter and buffer of a plain model; those left out of the checkpoint come from `base`.

    A tied parameter is written once, under the name that the checkpoint keeps it by: `from_pretrained`
    ties the others to it. Raises UserError when a parameter is neither in the checkpoint nor in `base`.
    """
    held, excluded = tensors_of(reader)
    tied = clean_names([*held, *reader.tied])
    supplied = from_base(reader, base, held, excluded, {tied[name] for name in reader.tied})
    return Selection([Output(name, tensor) for name, tensor in {**held, **supplied}.items()])


def from_base(
    reader: CheckpointReader,
    base: CheckpointReader | None,
    held: Collection[str],
    wanted: Mapping[str, tuple[int, ...] | None],
    tied: Collection[str] = (),
) -> dict[str, TensorIndex]:
    """What the base model's folder adds to the parameters that a checkpoint holds, under the model's names.

    A base model's names may lack the prefix of a model with a head (`bert.`), or have it where the model
    has none. DeepSpeed does not write down which parameters it leaves out: then everything of the base
    model is taken that the checkpoint does not hold.

    Args:
        held: names in the checkpoint, those of `tied` apart.
        wanted: parameters that are known to be left out -> shape, or None where the checkpoint does not say.

    Raises:
        UserError: no base model is given, or it lacks a wanted parameter, or has it in another shape.
    """
    if base is None:
        named = reader.details.get("base_model") or ""
        if wanted:
            raise UserError(
                f"{reader.path} leaves {len(wanted)} frozen parameters out ({listing(wanted, 3)}): "
                f"say where the base model{named and f', {named},'} is with --base_model FOLDER"
            )
        return {}
    known = _renamed({**base.weights, **base.buffers}, {*held, *wanted})
    missing = [name for name in wanted if name not in known]
    if missing:
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
    return {name: tensor for name, tensor in known.items() if name not in held and name not in tied}


def _renamed(known: Mapping[str, TensorIndex], names: Collection[str]) -> dict[str, TensorIndex]:
    """The base model's tensors by the model's names: as they are, or with one prefix more or less."""
    prefixes = sorted({name.split(".")[0] + "." for name in (*known, *names)})
    ways = [dict(known)]
    ways += [{prefix + name: tensor for name, tensor in known.items()} for prefix in prefixes]
    ways += [{name.removeprefix(prefix): tensor for name, tensor in known.items()} for prefix in prefixes]
    return max(ways, key=lambda way: sum(name in way for name in names))  # the first of equals
