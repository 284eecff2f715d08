"""The machine that a page was measured on, and the page."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from toolkit.utils.files import replace_folder

INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "avx512_bf16", "avx512_vnni": "avx512_vnni", "avx512f": "AVX-512",
                "avx2": "AVX2"}  # fmt: skip
"""Flags of /proc/cpuinfo, the most capable first: the speed of bf16 and of 8 bits depends on them."""


def processor() -> str:
    """`AMD EPYC (avx512_bf16), 2 cores`."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    info = Path("/proc/cpuinfo")
    for line in reversed(info.read_text(encoding="utf-8").splitlines() if info.is_file() else []):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = set(value.split())
    best = next((f" ({words})" for flag, words in INSTRUCTIONS.items() if flag in flags), "")
    return f"{name}{best}, {cores()} cores"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu() -> str:
    """Its name, which another process reads: CUDA does not survive a fork. Empty without one."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def hardware() -> str:
    return ", ".join(filter(None, [processor(), gpu()]))


def write_rows(path: str | None, rows: Iterable[Mapping[str, Any]]) -> None:
    """Figures for benchmarks/gpu_report.py, a JSON object a line: column -> text or number."""
    if path:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        Path(path).write_text(lines, encoding="utf-8")


BY_HAND = "<!-- below: measured by hand -->\n"


def write_page(path: Path, text: str) -> None:
    """Replaces a page, except what follows the line BY_HAND."""
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    _, mark, rest = before.partition(BY_HAND)
    path.write_text("\n".join([text, mark + rest]) if mark else text, encoding="utf-8")


def random_bert(layers: int, hidden: int = 768) -> Path:
    """A BERT with random weights and the demo's tokenizer, in $BENCHMARK_FOLDER or the temporary
    folder; made by another process, so that this one stays small."""
    code = """
import sys, torch
from transformers import AutoTokenizer, BertConfig, BertModel
from toolkit.demo import model_path
folder, layers, hidden = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(model_path("demo:minilm"))
config = BertConfig(vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers,
                    num_attention_heads=hidden // 64, intermediate_size=4 * hidden)
BertModel(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
"""
    parent = Path(os.environ.get("BENCHMARK_FOLDER") or tempfile.gettempdir())
    folder = parent / f"random-bert-{layers}-{hidden}"
    if not folder.is_dir():
        with replace_folder(folder) as draft:
            words = [str(draft), str(layers), str(hidden)]
            subprocess.run([sys.executable, "-c", code, *words], check=True)
    return folder
