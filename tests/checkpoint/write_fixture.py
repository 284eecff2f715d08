"""Writes tests/checkpoint/written_by/VERSION: a checkpoint of this version, which later versions must read.

    python tests/checkpoint/write_fixture.py          for each release that changes the checkpoint's format

With a BERT of 3,000 weights with its tokenizer (`base`), the data, a checkpoint of step 2, its losses up to step 4.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from toolkit import __version__

ROOT = Path(__file__).parents[2]
STEP, LAST = 2, 4


def job(folder: Path) -> list[str]:
    """The settings of the run of the checkpoint in `folder`, without its steps."""
    name = folder.relative_to(ROOT)
    return ["--model_name_or_path", f"{name}/base", "--train_file", f"{name}/reviews.csv", "--global_batch_size", "8",
            "--per_device_batch_size", "4", "--max_length", "24", "--dropout", "0", "--mixed_precision", "no",
            "--learning_rate", "0.01", "--lr_scheduler_type", "constant", "--report_to", "none"]  # fmt: skip


def main() -> None:
    folder = Path(__file__).parent / "written_by" / __version__
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = ["good", "bad", "film", "book", "very", "the", "a", "not", "dull", "fine", "story", "and"]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]), encoding="utf-8")
    BertTokenizerFast(vocab=str(vocabulary), model_max_length=24).save_pretrained(folder / "base")
    vocabulary.unlink()
    torch.manual_seed(0)
    config = BertConfig(vocab_size=17, hidden_size=9, num_hidden_layers=2, num_attention_heads=3, intermediate_size=21,
                        max_position_embeddings=25, type_vocab_size=1)  # fmt: skip
    BertModel(config).save_pretrained(folder / "base")
    kinds = [("good", "fine", "pos"), ("bad", "dull", "neg")]
    rows = [
        f"the {words[place % 4]} {kinds[place % 2][place // 2 % 2]} story {'very ' * (place % 5)},{kinds[place % 2][2]}"
        for place in range(40)
    ]
    (folder / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n", encoding="utf-8")
    run = folder / "run"
    for steps in (STEP, LAST):
        words = [*job(folder), "--max_steps", str(steps), "--checkpoint_every", str(STEP)]
        command = [sys.executable, "recipes/cls.py", *words, "--output_dir", str(run.relative_to(ROOT))]
        subprocess.run(command, cwd=ROOT, check=True)
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    (run / "checkpoints" / f"step-{STEP:08d}").rename(folder / "checkpoint")
    shutil.rmtree(run)


if __name__ == "__main__":
    main()
