"""What a checkpoint costs: a BERT-base of 110 million parameters under ZeRO-3 in two processes.

    python benchmarks/checkpoints.py      (about 6 minutes on 2 cores)

Prints a row: seconds that training waits for a save, in the background and not, seconds of a resume (from the start to
the first step, less those of a run that starts at step 0), and the peak resident memory of the largest process without
saves, with saves and in a resumed run. It measures the toolkit on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import toolkit

ROOT = Path(toolkit.__file__).resolve().parent.parent
STEPS = 4
SETTINGS = ["--config_file", "accelerate_configs/zero3.yaml", "--dropout", "0", "--report_to", "none",
            "--mixed_precision", "no", "--max_length", "8", "--global_batch_size", "2", "--eval_every", "1000",
            "--learning_rate", "1e-5"]  # fmt: skip
# the recipe, which also writes how long each save makes training wait
TIMED_RECIPE = """
import time
from recipes import cls
from toolkit import launch
from toolkit.training.checkpoints import Checkpoints

save = Checkpoints.save_if_due


def timed_save(self, *arguments, **options):
    before, started = self._saved_step, time.perf_counter()
    save(self, *arguments, **options)
    if self._saved_step != before and self.accelerator.is_main_process:
        with self.path.with_name("waits.txt").open("a") as file:
            print(time.perf_counter() - started, file=file)


Checkpoints.save_if_due = timed_save
if __name__ == "__main__":
    launch.run(cls.main)
"""


def main() -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as name:
        folder = Path(name)
        (folder / "timed.py").write_text(TIMED_RECIPE, encoding="utf-8")
        settings = [*SETTINGS, *write_job(folder)]
        plain = run(settings, folder / "plain", STEPS)
        saved = run([*settings, "--checkpoint_every", "1"], folder / "saved", STEPS)
        behind = run(
            [*settings, "--checkpoint_every", "2", "--checkpoint_in_background"],
            folder / "behind",
            STEPS,
        )
        waits = [f"{median_wait(folder / name):.2f}" for name in ("saved", "behind")]
        resumed = run([*settings, "--checkpoint_every", "100"], folder / "saved", STEPS + 1)
    peaks = [
        f"{max(line['peak_memory_bytes'] for line in lines) / 1e9:.2f}"
        for _, lines in (plain, saved, behind)
    ]
    last = resumed[1][-1]["peak_memory_bytes"] / 1e9
    print(
        "| save, s | in the background, s | resume, s | GB without saves | saving | in the background | resumed |"
    )
    print(
        f"| {' | '.join(waits)} | {resumed[0] - plain[0]:.1f} | {' | '.join(peaks)} | {last:.2f} |"
    )


def write_job(folder: Path) -> list[str]:
    """A random BERT-base and 40 short texts; returns their settings."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    vocabulary += [f"[unused{number}]" for number in range(30522 - len(vocabulary))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    BertModel(BertConfig()).save_pretrained(folder / "bert")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    rows = [
        f"{'abcdefghij'[number % 10]} {'abcdefghij'[number % 7]},{'xy'[number % 2]}"
        for number in range(40)
    ]
    (folder / "rows.csv").write_text(
        "\n".join(["text,label", *dict.fromkeys(rows)]), encoding="utf-8"
    )
    return ["--model_name_or_path", str(folder / "bert"), "--train_file", str(folder / "rows.csv")]


def run(settings: list[str], output: Path, steps: int) -> tuple[float, list[dict[str, float]]]:
    """(seconds to the first new line of metrics.jsonl, all lines)."""
    log = output / "metrics.jsonl"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    command = [
        sys.executable,
        str(output.with_name("timed.py")),
        *settings,
        "--max_steps",
        str(steps),
        "--output_dir",
        str(output),
    ]
    started, first = time.monotonic(), 0.0
    with tempfile.TemporaryFile() as errors:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors
        )
        while process.poll() is None:
            time.sleep(0.05)
            if not first and log.exists() and len(log.read_text().splitlines()) > before:
                first = time.monotonic() - started
        if process.returncode:
            errors.seek(0)
            sys.exit(errors.read().decode()[-3000:])
    return first, [json.loads(line) for line in log.read_text().splitlines()]


def median_wait(output: Path) -> float:
    """Seconds that training waited for a checkpoint."""
    lines = (output / "waits.txt").read_text(encoding="utf-8").splitlines()
    return statistics.median(map(float, lines))


if __name__ == "__main__":
    main()
