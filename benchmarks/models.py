"""The speed of the models of docs/models.md compared with BERT-base: forward and backward of 8 x 128 tokens, in
fp32 on a CPU, with random weights of the published sizes. Nothing is downloaded.

    python benchmarks/models.py                       every model, some minutes
    python benchmarks/models.py ModernBERT-base ...   these only; benchmarks/results/models.md keeps the other rows

Model and BERT-base take turns; a row has the medians of processor time (user and system) as a ratio."""

from __future__ import annotations

import platform
import re
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

BATCH, LENGTH, ROUNDS = 8, 128, 3
PAGE = Path(__file__).parent / "results" / "models.md"
# fmt: off
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
# name -> (class of the config, non-default settings), from the config.json of the named model on the hub
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT-base": ("Bert", {**BASE, "vocab_size": 21128}),  # bert-base-chinese, -wwm, MacBERT
    "DistilBERT": ("DistilBert", {"vocab_size": 30522}),
    "ALBERT-base": ("Albert", {**BASE, "embedding_size": 128, "vocab_size": 30000}),
    "ELECTRA-base": ("Electra", {**BASE, "embedding_size": 768, "vocab_size": 21128}),
    "ERNIE-3.0-base": ("Ernie", {**BASE, "vocab_size": 40000, "max_position_embeddings": 2048, "use_task_id": True}),
    "RoBERTa-base": ("Roberta", {**BASE, "vocab_size": 50265, "max_position_embeddings": 514}),
    "XLM-R-base": ("XLMRoberta", {**BASE, "vocab_size": 250002, "max_position_embeddings": 514}),
    "DeBERTa-v3-base": ("DebertaV2", {**BASE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
                        "position_buckets": 256, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
                        "share_att_key": True, "type_vocab_size": 0}),
    "ModernBERT-base": ("ModernBert", {}),
    "chinese-modernbert-large": ("ModernBert", {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
                                 "intermediate_size": 2624, "vocab_size": 32000}),
    "mmBERT-small": ("ModernBert", {"hidden_size": 384, "num_attention_heads": 6, "vocab_size": 256000}),
    "mmBERT-base": ("ModernBert", {"vocab_size": 256000}),
    "EuroBERT-210m": ("EuroBert", {}),
    "nomic-bert-2048": ("NomicBert", {}),
    "gte-multilingual-base": ("Gte", {}),
    "Longformer-base-4096": ("Longformer", {**BASE, "vocab_size": 50265, "max_position_embeddings": 4098}),
    "BigBird-base": ("BigBird", {**BASE, "vocab_size": 50358, "max_position_embeddings": 4096}),
    "Qwen3-0.6B": ("Qwen3", {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}),
}
# fmt: on


def make(name: str) -> Any:
    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(num_labels=2, **sizes)
    config.pad_token_id = 1
    return getattr(transformers, f"{kind}ForSequenceClassification")(config).train()


def seconds_of(model: Any) -> float:
    """Processor time of one forward and backward."""
    ids = torch.randint(5, 20000, (BATCH, LENGTH))
    before = resource.getrusage(resource.RUSAGE_SELF)
    model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        labels=torch.zeros(BATCH, dtype=torch.long),
    ).loss.backward()
    after = resource.getrusage(resource.RUSAGE_SELF)
    model.zero_grad()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(name: str, bert: Any) -> str:
    model = make(name)
    counts = [
        sum(p.numel() for p in part.parameters()) / 1e6
        for part in (model, model.get_input_embeddings())
    ]
    seconds_of(model)  # warm-up
    pairs = [(seconds_of(bert), seconds_of(model)) for _ in range(ROUNDS)]
    base, seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    spread = f"{min(b / a for a, b in pairs):.2f} to {max(b / a for a, b in pairs):.2f}"
    return f"| {name} | {counts[0]:.0f}M | {counts[1]:.0f}M | {seconds:.2f} | {seconds / base:.2f} | {spread} |"


def main() -> None:
    torch.manual_seed(0)
    head = (f"# Speed of architectures\n\n`python benchmarks/models.py`: {__doc__.partition(chr(10) * 2)[0]}\n\n"
            f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, "
            f"{torch.get_num_threads()} thread, {ROUNDS} rounds\n\n| model | parameters | of them token embeddings | "
            "processor seconds | beside BERT-base | of the rounds |\n|---|---|---|---|---|---|\n")  # fmt: skip
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    lines = {
        name: line for line, name in re.findall(r"^(\| ([\w.-]+) \| \d.*)$", old, re.MULTILINE)
    }
    bert = make("BERT-base")
    seconds_of(bert)
    for name in sys.argv[1:] or MODELS:
        lines[name] = measure(name, bert)
        print(lines[name], flush=True)
        PAGE.write_text(
            head + "\n".join(lines[name] for name in MODELS if name in lines) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
