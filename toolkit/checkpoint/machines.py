"""Nodes that share no disk: checkpoints are complete on rank 0's disk, and files are sent from and to other nodes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from toolkit import launch
from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.save import bytes_of
from toolkit.checkpoint.tensor_index import read_into
from toolkit.errors import UserError, size_text
from toolkit.launch.network import node_id
from toolkit.utils.files import flush_path

_CHUNK = 16 << 20  # bytes


def remote_ranks(accelerator: Accelerator, folder: Path) -> dict[int, int]:
    """The ranks that do not share rank 0's disk at `folder` -> the lowest rank of their node. Collective; creates the
    folder on each."""
    nodes: list[str] = gather_object([node_id()])
    if len(set(nodes)) == 1:
        return {}
    probe = folder / broadcast_object_list([f"{folders.PROBE}{secrets.token_hex(8)}"])[0]
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        probe.open("xb").close()
    accelerator.wait_for_everyone()
    # an NFS client remembers for a minute that the folder was missing, unless it fails to create it
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    shared: list[bool] = gather_object([os.access(probe, os.F_OK)])
    if accelerator.is_main_process:
        probe.unlink()
    sharing = {node for node, shares in zip(nodes, shared, strict=True) if shares}
    return {rank: nodes.index(node) for rank, node in enumerate(nodes) if node not in sharing}


def collect_files(
    accelerator: Accelerator, remote: Mapping[int, int], folder: Path, written: Sequence[Mapping[str, Any]]
) -> None:
    """Sends the files of `remote_ranks` to the same folder on rank 0's disk. `written`: by rank, the manifest entries.
    Collective."""
    for rank in remote:
        for name, entry in written[rank].items():
            _send(accelerator, folder / name, int(entry["bytes"]), rank, [0])
    accelerator.wait_for_everyone()
    if remote.get(accelerator.process_index) == accelerator.process_index:
        folders.prune(folder.parent, sys.maxsize, 0)  # this copy, and those of killed runs: they have no manifest


@contextlib.contextmanager
def local_copy(accelerator: Accelerator, folder: Path, copies: Path) -> Iterator[Path]:
    """Yields this rank's path of a checkpoint on rank 0's disk. A node that does not have the same checkpoint at that
    path receives a copy under `copies`, removed afterwards. Collective."""
    manifest = broadcast_object_list([folders.read_manifest(folder) if accelerator.is_main_process else None])[0]
    has_checkpoint = not folders.find_fault(folder) and folders.read_manifest(folder) == manifest
    processes: list[Any] = gather_object([(node_id(), socket.gethostname(), has_checkpoint)])
    nodes_with_it = {node for node, _, has_it in processes if has_it}
    writers = {node: rank for rank, (node, *_) in reversed(list(enumerate(processes))) if node not in nodes_with_it}
    writer = writers.get(node_id())
    path = folder if writer is None else copies / f"{folders.SENT}{writer}" / folder.name
    is_writer = accelerator.process_index == writer
    if writers:
        size = size_text(sum(entry["bytes"] for entry in manifest["files"].values()))
        hosts = ", ".join(processes[rank][1] for rank in writers.values())
        launch.log_on_main(accelerator, f"sending {folder.name} ({size}) to {hosts}")
        if is_writer:
            folders.create_empty(path)
        for name, entry in manifest["files"].items():
            _send(accelerator, (path if is_writer else folder) / name, int(entry["bytes"]), 0, list(writers.values()))
        if is_writer:
            folders.publish(path, manifest)
    accelerator.wait_for_everyone()
    yield path
    accelerator.wait_for_everyone()
    if is_writer:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # unless another checkpoint is in use there


def _send(accelerator: Accelerator, path: Path, size: int, reader: int, writers: Sequence[int]) -> None:
    """Broadcasts a file of `size` bytes from rank `reader` to `writers`, which write it at `path`. Collective."""
    rank = accelerator.process_index
    buffer = torch.empty(min(_CHUNK, size), dtype=torch.uint8)
    try:
        with contextlib.ExitStack() as stack:
            if rank in writers:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("xb"))
            for start in range(0, size, _CHUNK):
                block = buffer[: min(_CHUNK, size - start)]
                if rank == reader:
                    read_into(path, start, bytes_of(block))
                block = block.to(accelerator.device)
                torch.distributed.broadcast(block, src=reader)
                if rank in writers:
                    file.write(bytes_of(block))
        if rank in writers:
            flush_path(path)
    except OSError as error:
        fault = f"{path} cannot be sent between machines: {error.strerror or error}"
        raise UserError(f"{fault}. Free some space on that disk, and run the same command again") from error
