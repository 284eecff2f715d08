"""Up to sixteen ranks on two hosts: seconds to the first step, and bytes sent in a step, against theory.

    python benchmarks/ranks.py --write          (about 20 minutes on 2 cores; root and iproute2)

The hosts are two network namespaces of this machine, so that all ranks share its cores: seconds grow with the number of
ranks more than on real hosts, bytes are the same. The model is a random BERT of 1.1M parameters in float32, with one
micro-batch per step, and, on 2 and 4 ranks, with eight: with the default of `--sync_each_batch` and with the other
value. `--write` puts the table into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import processor  # noqa: E402

from tests.hosts import ADDRESSES, TwoHosts  # noqa: E402

WAYS = {"DDP": "2node", "ZeRO-2": "2node_zero2", "ZeRO-3": "2node_zero3", "FSDP2": "2node_fsdp2"}
RANKS = (2, 4, 8, 16)
GLOBAL_BATCH = 32
COLUMNS = ("way", "ranks", "micro-batches", "seconds to the first step", "MB a rank and step: theory", "requested",
           "sent", "of these")  # fmt: skip
MANY = 8  # micro-batches
# in bytes of the model x (N - 1) / N, sent by one of N ranks in a ring (Rajbhandari et al. 2020, section 7): an
# all-reduce counts 2, a reduce-scatter and an all-gather 1 each
THEORY = {"DDP": 2.0, "ZeRO-2": 2.0, "ZeRO-3": 3.0, "FSDP2": 3.0}
WORDS = [f"w{number}" for number in range(2000)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/ranks.md")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    options = parser.parse_args()
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    with tempfile.TemporaryDirectory() as name, TwoHosts() as hosts:
        folder = Path(name)
        size, job = make_job(folder)
        for way in options.ways:
            file = WAYS[way]
            for ranks in options.ranks:
                words = [*job, "--config_file", f"accelerate_configs/{file}.yaml"]
                jobs = {"1": []}
                if ranks * MANY <= GLOBAL_BATCH:
                    eight = ["--per_device_batch_size", str(GLOBAL_BATCH // ranks // MANY)]
                    other = str(way != "FSDP2").lower()
                    jobs |= {
                        f"{MANY}": eight,
                        f"{MANY}, `--sync_each_batch {other}`": [
                            *eight,
                            "--sync_each_batch",
                            other,
                        ],
                    }
                for number, (batches, settings) in enumerate(jobs.items()):
                    result = run(
                        hosts, [*words, *settings], ranks, folder / f"{file}-{ranks}-{number}"
                    )
                    lines.append(row(way, ranks, batches, size, result))
                    print(lines[-1], flush=True)
    if options.write:
        note = (f"`python benchmarks/ranks.py`: two network namespaces share {processor()}, "
                f"gloo, {size / 1e6:.2f} MB of fp32 weights.")  # fmt: skip
        results = ROOT / "benchmarks" / "results" / "ranks.md"
        results.write_text(
            f"# Two hosts, up to sixteen ranks\n\n{note}\n\n" + "\n".join(lines) + "\n", "utf-8"
        )


def make_job(folder: Path) -> tuple[int, list[str]]:
    """(bytes of the trained weights, the settings of a run)."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(vocabulary), hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
                   intermediate_size=512))  # fmt: skip
    model.save_pretrained(folder / "model")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "model")
    generator = random.Random(0)
    rows = (
        f"{' '.join(generator.choices(WORDS, k=generator.randrange(5, 30)))},{'ab'[row % 2]}\n"
        for row in range(300)
    )
    (folder / "data.csv").write_text("text,label\n" + "".join(rows), encoding="utf-8")
    job = ["--model_name_or_path", folder / "model", "--train_file", folder / "data.csv", "--max_steps", "8",
           "--dropout", "0", "--mixed_precision", "no", "--report_to", "none",
           "--global_batch_size", str(GLOBAL_BATCH), "--per_device_batch_size", str(GLOBAL_BATCH // 2)]  # fmt: skip
    return sum(parameter.nbytes for parameter in model.parameters()), [str(word) for word in job]


def run(hosts: TwoHosts, job: list[str], ranks: int, output: Path) -> dict[str, Any]:
    """`requested`: collective -> bytes to send in a step; `sent`: bytes sent; `seconds` to the first step."""
    command = [sys.executable, "tests/ranks_worker.py", *job, "--main_process_ip", ADDRESSES["a"],
               "--rendezvous_timeout", "600", "--num_processes", str(ranks), "--output_dir", str(output)]  # fmt: skip
    for host, done in hosts.run_both(dict.fromkeys(ADDRESSES, command), 1500).items():
        if done.code:
            sys.exit(f"{host}: {done.err[-3000:]}")
    files = sorted(output.glob("sent-*.jsonl"))
    steps = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    sent = sum((lines[-1]["sent"] - lines[0]["sent"]) / (len(lines) - 1) for lines in steps)
    names = steps[0][-1]["asked"]
    requested = {
        name: statistics.median(line["asked"].get(name, 0) for line in steps[0]) for name in names
    }
    return {
        "sent": sent / ranks,
        "requested": requested,
        "seconds": float((output / "first_step_seconds").read_text()),
    }


def row(way: str, ranks: int, batches: str, size: int, result: dict[str, Any]) -> str:
    theory = THEORY[way] * size * (ranks - 1) / ranks
    largest = sorted(result["requested"].items(), key=lambda item: -item[1])[:2]
    collectives = ", ".join(f"{name} {count / 1e6:.2f}" for name, count in largest)
    requested = sum(result["requested"].values())
    numbers = " | ".join(f"{count / 1e6:.2f}" for count in (theory, requested, result["sent"]))
    return f"| {way} | {ranks} | {batches} | {result['seconds']:.0f} | {numbers} | {collectives} |"


if __name__ == "__main__":
    main()
