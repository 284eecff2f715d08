"""Labels a data set with Ray Data and a saved model folder; needs only transformers.

    pip install 'ray[data]' torch transformers
    python ray_label.py MODEL new.csv labelled

MODEL is a run's `model/` folder on a disk that all workers share, or a hub name; the output is a folder of Parquet
files with all columns of the input, `prediction` and `probability`. --num_gpus 1 gives each worker a GPU.
"""

import argparse

import numpy as np
import ray
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class Label:
    """Loads the model once in each worker; called with a batch of rows."""

    def __init__(self, model: str, text_column: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = (
            AutoModelForSequenceClassification.from_pretrained(model).eval().to(self.device)
        )
        self.text_column = text_column
        if self.model.config.problem_type not in (None, "single_label_classification"):
            raise ValueError(f"{model} is not a classifier of single labels")

    @torch.inference_mode()
    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        texts = [str(text) for text in batch[self.text_column]]
        inputs = self.tokenizer(texts, truncation=True, padding=True, return_tensors="pt").to(
            self.device
        )
        probabilities = self.model(**inputs).logits.float().softmax(-1).cpu().numpy()  # (B, C)
        names = [self.model.config.id2label[place] for place in probabilities.argmax(1)]
        return {
            **batch,
            "prediction": np.array(names, dtype=object),
            "probability": probabilities.max(1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("file", help="FILE.csv, FILE.jsonl, or a Parquet file or folder")
    parser.add_argument("output", help="a folder")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--num_gpus", type=float, default=0, help="of each worker")
    options = parser.parse_args()
    read = {"csv": ray.data.read_csv, "jsonl": ray.data.read_json}.get(
        options.file.rpartition(".")[2]
    )
    rows = (read or ray.data.read_parquet)(options.file)
    labelled = rows.map_batches(
        Label,
        fn_constructor_args=(options.model, options.text_column),
        batch_size=options.batch_size,
        compute=ray.data.ActorPoolStrategy(size=options.workers),
        num_gpus=options.num_gpus,
    )
    labelled.write_parquet(options.output)


if __name__ == "__main__":
    main()
