"""The machine that a page was measured on, and the page."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

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


def hardware() -> str:
    """The processor, and the GPU if there is one, which another process reads: CUDA does not survive a fork."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    gpu = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(filter(None, [processor(), gpu.stdout.strip()]))


BY_HAND = "<!-- below: measured by hand -->\n"


def write_page(path: Path, text: str) -> None:
    """Replaces a page, except what follows the line BY_HAND."""
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    _, mark, rest = before.partition(BY_HAND)
    path.write_text("\n".join([text, mark + rest]) if mark else text, encoding="utf-8")


def random_bert(folder: Path, layers: int) -> Path:
    """A BERT-base of so many layers with random weights, and the demo's tokenizer; made by another
    process, so that this one stays small."""
    code = """
import sys, torch
from transformers import AutoTokenizer, BertConfig, BertModel
from toolkit.demo import model_path
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(model_path("demo:minilm"))
config = BertConfig(vocab_size=len(tokenizer), num_hidden_layers=int(sys.argv[2]))
BertModel(config).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""
    if not folder.is_dir():
        subprocess.run([sys.executable, "-c", code, str(folder), str(layers)], check=True)
    return folder
