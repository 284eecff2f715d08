"""Runs a classifier of `toolkit export` by OpenVINO or ONNX Runtime, with the interface of a torch
model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from toolkit.errors import UserError, first_line
from toolkit.utils.extras import require_extra

FILES = {"openvino": "openvino_model.xml", "onnx": "model.onnx"}
"""File names of graphs, as in optimum and text-embeddings-inference."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_PACKAGES = {"openvino": "openvino", "onnx": "onnxruntime"}
Compute = Callable[[dict[str, np.ndarray]], np.ndarray]
"""(B, S) int64 inputs by name -> (B, C) float32 logits."""


def export_format(folder: Path) -> str | None:
    """`openvino` or `onnx`, for a folder with such a graph and without torch weights; None
    otherwise."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return None
    return next((kind for kind, name in FILES.items() if (folder / name).is_file()), None)


@contextlib.contextmanager
def no_statistics() -> Iterator[None]:
    """Turns off the usage statistics of openvino and nncf: from its import on, openvino sends them
    to Google Analytics without asking, in a process forked beside threads, for which a command may
    wait forever at its end."""
    with mock.patch.dict(os.environ, {"CI": "true", "NNCF_CI": "1"}):
        yield


class ExportedClassifier(torch.nn.Module):
    """Takes the inputs of a batch, and returns an object with `logits` (B, C) float32."""

    def __init__(self, folder: Path, config: Any) -> None:
        """Raises UserError if the runtime is not installed or cannot read the file."""
        super().__init__()
        kind = str(export_format(folder))
        require_extra(kind, kind, _PACKAGES[kind])
        self.config = config
        self.path = folder / FILES[kind]
        open_graph = {"openvino": _openvino, "onnx": _onnxruntime}[kind]
        try:
            self.inputs, self._compute = open_graph(self.path)
        except Exception as error:  # the runtimes raise various types
            raise UserError(
                f"{self.path} cannot be read: {first_line(error)}; export the model again"
            ) from error

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        ids = inputs["input_ids"]
        inputs.setdefault("attention_mask", torch.ones_like(ids))
        inputs.setdefault("token_type_ids", torch.zeros_like(ids))
        try:
            logits = self._compute({name: inputs[name].cpu().numpy() for name in self.inputs})
        except Exception as error:  # the runtimes raise various types
            batch = " x ".join(map(str, ids.shape))
            raise UserError(
                f"{self.path} cannot compute {batch} tokens: {first_line(error)[:300]}"
            ) from error
        return SimpleNamespace(logits=torch.from_numpy(logits).to(ids.device))


def _openvino(path: Path) -> tuple[list[str], Compute]:
    with no_statistics():
        import openvino

    threads = torch.get_num_threads()
    # two halves of a batch in parallel are faster than the batch on all cores
    streams = min(2, threads)
    # float32 on all hardware (but for int8 weights), as when the export was checked
    hints = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": streams,
    }
    compiled = openvino.Core().compile_model(path, "CPU", hints)
    requests = [compiled.create_infer_request() for _ in range(streams)]

    def compute(arrays: dict[str, np.ndarray]) -> np.ndarray:
        parts = {name: np.array_split(array, streams) for name, array in arrays.items()}
        started = [number for number, part in enumerate(parts["input_ids"]) if len(part)]
        for number in started:
            requests[number].start_async({name: parts[name][number] for name in parts})
        for number in started:
            requests[number].wait()
        return np.concatenate([requests[number].get_tensor("logits").data for number in started])

    return [port.any_name for port in compiled.inputs], compute


def _onnxruntime(path: Path) -> tuple[list[str], Compute]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def compute(arrays: dict[str, np.ndarray]) -> np.ndarray:
        logits: np.ndarray = session.run(["logits"], arrays)[0]
        return logits

    return [port.name for port in session.get_inputs()], compute
