"""A DeepSpeed checkpoint as a `CheckpointReader`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read.deepspeed_files import Files, open_files, optimizer_of
from toolkit.checkpoint.read.deepspeed_layout import Owned, owned_by_stage_1_or_2, owned_by_stage_3
from toolkit.checkpoint.read.torch_file import TorchFile
from toolkit.checkpoint.read.unpickle import Tensor
from toolkit.checkpoint.reader import ITEM_BYTES, CheckpointReader, Span, TensorIndex, step_counts
from toolkit.errors import UserError


def open_deepspeed(path: Path, tag_folder: Path, model_folder: Path | None = None) -> CheckpointReader:
    """Opens a tag folder of save_checkpoint (ZeRO stage 0 to 3). `path`: as the user named it.

    Raises UserError where a file is missing, damaged, of another save, or the sizes do not add up.
    """
    files = open_files(tag_folder)
    stage = _stage(files)
    owned = Owned() if stage == 0 else owned_by_stage_3(files) if stage == 3 else owned_by_stage_1_or_2(files)
    module = _Module(files, owned)
    _check_step(files, owned)
    return CheckpointReader(
        path=path,
        strategy=f"zero{stage}" if stage else "ddp" if files.world > 1 else "single",
        world=files.world,
        step=_whole(files.model.content.get("global_steps")),
        weights=module.in_order({**owned.weights, **module.frozen}),
        buffers=module.buffers,
        tied=module.tied,
        frozen=frozenset(module.frozen if stage else ()),
        excluded=module.excluded,
        optimizer_state=owned.kept,
        optimizer_scalars=owned.scalars,
        engine_dtype=module.dtype(),
        model_folder=model_folder,
        details=_details(files, stage, owned),
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _stage(files: Files) -> int:
    stages: set[int] = set()
    for opened in files.optimizers:
        state = optimizer_of(opened)
        plain = 1 if "single_partition_of_fp32_groups" in state else None  # BF16_Optimizer does not say
        stage = state.get("zero_stage", plain)
        if stage not in (1, 2, 3):
            raise UserError(f"{opened.file}: its ZeRO stage is {str(stage)[:20]!r}: not a ZeRO file, or damaged")
        stages.add(stage)
        _check_partitions(files, opened, state.get("partition_count"))
    if len(stages) > 1:
        raise UserError(f"{files.folder} holds files of several ZeRO stages ({stages}): two saves lie in one folder")
    stage = stages.pop() if stages else 0
    if stage == 0 and files.model.content.get("param_shapes") is not None:
        raise UserError(f"{files.folder}: the optimizer files *_optim_states.pt are missing; copy the folder again")
    if (stage == 3) != (files.model.file.name.startswith("zero_pp_rank_")):
        raise UserError(f"{files.model.file} is not the model file of ZeRO-{stage}: two saves lie in one folder")
    return stage


def _check_partitions(files: Files, opened: TorchFile, counts: Any) -> None:
    counts = counts if type(counts) is list else [counts]
    if any(type(count) is not int for count in counts) or len(set(counts)) > 1:
        raise UserError(
            f"{opened.file}: its partition counts {counts[:4]} (experts divided otherwise?) are not supported"
        )
    if counts[0] != len(files.optimizers):
        raise UserError(
            f"{opened.file} was saved by {counts[0]} processes and {len(files.optimizers)} optimizer files are there: "
            "some are missing, or files of two saves lie in one folder"
        )


def _check_step(files: Files, owned: Owned) -> None:
    taken, most = _whole(files.model.content.get("global_steps")), max(step_counts(owned.scalars).values(), default=0)
    if taken is not None and most > taken:
        raise UserError(
            f"{files.model.file} is of optimizer step {taken} and {files.optimizers[0].file} of step {most:g}: "
            "they are of different saves; copy the folder again or take another checkpoint"
        )


def _details(files: Files, stage: int, owned: Owned) -> dict[str, object]:
    content = files.model.content
    state = optimizer_of(files.optimizers[0]) if files.optimizers else {}
    groups = content.get("param_shapes") or []
    return {
        "folder": files.folder,
        "zero_stage": stage,
        "ds_version": content.get("ds_version"),
        "groups": [len(group) for group in groups],
        "partition_count": state.get("partition_count"),
        "bf16_optimizer": bool(state) and "zero_stage" not in state,
        "adam_step": max(step_counts(owned.scalars).values(), default=None),
        "masters": bool(owned.weights),
        "files": len(files.models) + len(files.optimizers),
    }


class _Module:
    """What of the model's own state counts: all that the optimizer does not own."""

    def __init__(self, files: Files, owned: Owned) -> None:
        self.files, self.owned, content = files, owned, files.model.content
        self.tensors = {name: tensor for name, tensor in content["module"].items() if type(tensor) is Tensor}
        names = set(content.get("buffer_names") or ())
        self.buffers = {name: self._stored(name) for name in self.tensors if name in names}
        self.tied = self._tied()
        self.excluded: dict[str, tuple[int, ...]] = {}
        self.frozen = {**self._fragments(), **dict(self._whole())}
        for other, name in self.tied.items():
            if name not in self.owned.weights and name not in self.frozen and name not in self.excluded:
                raise UserError(f"{files.model.file}: {other} is tied to {name}, which is not there: damaged?")

    def _stored(self, name: str) -> TensorIndex:
        return self.files.model.stored(name, self.tensors[name])

    def _tied(self) -> dict[str, str]:
        """Other name -> name."""
        shared = self.files.model.content.get("shared_params")
        if type(shared) is dict:
            weights = self.owned.weights
            return {b if a in weights and b not in weights else a: a if a in weights else b for a, b in shared.items()}
        return tied_tensors({name: tensor for name, tensor in self.tensors.items() if name not in self.buffers})

    def _fragments(self) -> dict[str, TensorIndex]:
        """Frozen parameters as stages 2 (whole) and 3 (a part in each rank's file) write them."""
        shapes = self.files.model.content.get("frozen_param_shapes") or {}
        held = [model.content.get("frozen_param_fragments") for model in self.files.models]
        found = {}
        for name, shape in shapes.items():
            if held[0] is None:
                self.excluded[name] = shape
                continue
            missing = next((m for m, part in zip(self.files.models, held, strict=True) if name not in part), None)
            if missing:
                raise UserError(f"{missing.file}: it lacks its part of {name}: of another save, or damaged")
            found[name] = self._fragment(name, shape, [part[name] for part in held])
        return found

    def _fragment(self, name: str, shape: tuple[int, ...], parts: list[Any]) -> TensorIndex:
        """Chained, each part without the padding at its end."""
        spans, left = [], math.prod(shape)
        for model, part in zip(self.files.models, parts, strict=True):
            span = model.stored(name, part).spans[0]
            spans.append(Span(span.member, span.start, min(span.count, left)))
            left -= spans[-1].count
        if left or len({part.dtype for part in parts}) > 1 or len({part.count for part in parts}) > 1:
            raise UserError(
                f"{self.files.model.file} and its siblings hold parts of {name} that do not make shape "
                f"{list(shape)}: they are of different saves, or one is damaged"
            )
        return TensorIndex(name, shape, parts[0].dtype, tuple(span for span in spans if span.count))

    def _whole(self) -> Iterator[tuple[str, TensorIndex]]:
        """What lies in `module` alone: all under stage 0, frozen parameters under stage 1."""
        shapes = self.files.model.content.get("frozen_param_shapes") or {}
        for name, tensor in self.tensors.items():
            if name in self.owned.weights or name in self.buffers or name in self.tied or name in shapes:
                continue
            if len(self.files.models) > 1 and tensor.shape == (0,):
                raise UserError(f"{self.files.model.file}: {name} is a placeholder, and no file holds its part")
            yield name, self._stored(name)

    def in_order(self, weights: Mapping[str, TensorIndex]) -> dict[str, TensorIndex]:
        """As the model names them, whatever order the groups have."""
        ordered = {name: weights[name] for name in self.tensors if name in weights}
        return {**ordered, **weights}

    def dtype(self) -> str:
        """What most trained parameters are computed in."""
        names = set(self.owned.weights) or set(self.frozen)
        floats = Counter(
            tensor.dtype for name, tensor in self.tensors.items() if name in names and tensor.dtype in _ENGINE_DTYPES
        )
        return floats.most_common(1)[0][0] if floats else "F32"


_ENGINE_DTYPES = ("F32", "BF16", "F16")


def tied_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Other name -> first name of tensors that are the same elements of the same storage."""
    first: dict[object, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        if tensor.count * ITEM_BYTES[tensor.dtype]:
            place = (tensor.storage.key, tensor.offset, tensor.shape, tensor.stride, tensor.dtype)
            if first.setdefault(place, name) != name:
                tied[name] = first[place]
    return tied
