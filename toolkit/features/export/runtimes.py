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
    kinds = [kind for kind, name in FILES.items() if (folder / name).is_file()]
    return kinds[0] if kinds else None


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
        """Raises UserError if the runtime is not installed."""
        super().__init__()
        kind = str(export_format(folder))
        require_extra(kind, kind, _PACKAGES[kind])
        self.config = config
        open_graph = {"openvino": _openvino, "onnx": _onnxruntime}[kind]
        self.inputs, self._compute = open_graph(folder / FILES[kind])

    def forward(self, **inputs: torch.Tensor) -> SimpleNamespace:
        ids = inputs["input_ids"]
        inputs.setdefault("attention_mask", torch.ones_like(ids))
        inputs.setdefault("token_type_ids", torch.zeros_like(ids))
        logits = self._compute({name: inputs[name].cpu().numpy() for name in self.inputs})
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
        samples = len(arrays["input_ids"])
        parts = np.array_split(np.arange(samples), min(streams, samples))
        running = requests[: len(parts)]
        for request, part in zip(running, parts, strict=True):
            request.start_async({name: array[part] for name, array in arrays.items()})
        for request in running:
            request.wait()
        return np.concatenate([request.get_tensor("logits").data for request in running])

    return [port.any_name for port in compiled.inputs], compute


def _onnxruntime(path: Path) -> tuple[list[str], Compute]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"]
    )

    def compute(arrays: dict[str, np.ndarray]) -> np.ndarray:
        logits: np.ndarray = session.run(["logits"], arrays)[0]
        return logits

    return [port.name for port in session.get_inputs()], compute
