"""A DeepSpeed checkpoint as a `CheckpointReader`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.read.deepspeed_files import Files, is_sharded, open_files, optimizer_of, partition_counts
from toolkit.checkpoint.read.deepspeed_layout import Owned, owned_by_optimizer
from toolkit.checkpoint.read.unpickle import Tensor
from toolkit.checkpoint.read.weights_reader import main_dtype, tied_tensors
from toolkit.checkpoint.reader import CheckpointReader, Span, TensorIndex
from toolkit.errors import UserError


def open_deepspeed(path: Path, tag_folder: Path, model_folder: Path | None = None) -> CheckpointReader:
    """Opens a tag folder of save_checkpoint (ZeRO stage 0 to 3). `path`: as the user named it.

    Raises UserError where a file is missing, damaged, of another save, or the sizes do not add up.
    """
    files = open_files(tag_folder)
    stage = _stage(files)
    owned = owned_by_optimizer(files, stage) if stage else Owned()
    module, step = _Module(files, owned), files.model.content.get("global_steps")
    return CheckpointReader(
        path=path,
        strategy=f"zero{stage}" if stage else "ddp" if files.world > 1 else "single",
        world=files.world,
        step=step if type(step) is int else None,
        weights=module.in_order({**owned.weights, **module.frozen}),
        buffers=module.buffers,
        tied=module.tied,
        frozen=frozenset(module.frozen if stage else ()),
        excluded=module.excluded,
        optimizer_state=owned.kept,
        optimizer_scalars=owned.scalars,
        engine_dtype=main_dtype(
            module.tensors[name].dtype for name in owned.weights or module.frozen if name in module.tensors
        ),
        model_folder=model_folder,
        details={
            "zero_stage": stage,
            "ds_version": files.model.content.get("ds_version"),
            "groups": [len(group) for group in files.model.content.get("param_shapes") or []],
            "files": len(files.models) + len(files.optimizers),
        },
    )


def _stage(files: Files) -> int:
    """ZeRO's, alike in all files. Raises UserError."""
    found = set()
    for opened in files.optimizers:
        state, counts = optimizer_of(opened), partition_counts(opened)
        plain = 1 if "single_partition_of_fp32_groups" in state else None  # BF16_Optimizer does not say
        stage = state.get("zero_stage", plain)
        if stage not in (1, 2, 3):
            raise UserError(f"{opened.file}: its ZeRO stage is {str(stage)[:20]!r}: not a ZeRO file, or damaged")
        if any(count != files.world for count in counts):
            raise UserError(
                f"{opened.file} was saved by {counts[:4]} processes and {files.world} optimizer files are there: some "
                "are missing, or files of two saves lie in one folder (or experts are divided otherwise, which is not "
                "supported)"
            )
        found.add(stage)
    stage = max(found, default=0)
    if stage == 0 and files.model.content.get("param_shapes") is not None:
        raise UserError(f"{files.folder}: the optimizer files *_optim_states.pt are missing; copy the folder again")
    if len(found) > 1 or (stage == 3) != is_sharded(files.model):
        raise UserError(f"{files.folder} holds files of several ZeRO stages: two saves lie in one folder")
    return stage


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
            else:
                found[name] = self._fragment(name, shape, [part.get(name) for part in held])
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
