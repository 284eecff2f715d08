"""Labels a data set with Spark and a saved model folder; needs only transformers.

    pip install pyspark pandas pyarrow torch transformers     (and Java)
    spark-submit spark_label.py MODEL new.csv labelled

MODEL is a run's `model/` folder on a disk that all workers share, or a hub name; the output is a folder of Parquet
files with all columns of the input, `prediction` and `probability`.
"""

import argparse
from collections.abc import Iterator

import pandas as pd
import pyspark.sql
from pyspark.sql.types import DoubleType, StringType, StructField, StructType


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("file", help="FILE.csv, FILE.jsonl, or a Parquet file or folder")
    parser.add_argument("output", help="a folder")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--batch_size", type=int, default=64)
    options = parser.parse_args()
    model_name, text_column, batch_size = options.model, options.text_column, options.batch_size

    def label(tables: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        """The rows of one partition: the model is loaded once for all of them."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_name)
        task = pyspark.TaskContext.get()  # tasks of a machine share its GPUs
        gpus = torch.cuda.device_count()
        device = f"cuda:{task.partitionId() % gpus}" if task and gpus else "cpu"
        model = AutoModelForSequenceClassification.from_pretrained(model_name).eval().to(device)
        if model.config.problem_type not in (None, "single_label_classification"):
            raise ValueError(f"{model_name} is not a classifier of single labels")
        for table in tables:
            for start in range(0, len(table), batch_size):
                rows = table[start : start + batch_size]
                texts = (
                    rows[text_column].fillna("").astype(str).tolist()
                )  # Spark reads an empty cell as null
                with torch.inference_mode():
                    inputs = tokenizer(
                        texts, truncation=True, padding=True, return_tensors="pt"
                    ).to(device)
                    probabilities = (
                        model(**inputs).logits.float().softmax(-1).cpu().numpy()
                    )  # (B, C)
                names = [model.config.id2label[place] for place in probabilities.argmax(1)]
                yield rows.assign(
                    prediction=names, probability=probabilities.max(1).astype("float64")
                )

    spark = pyspark.sql.SparkSession.builder.getOrCreate()
    kind = options.file.rpartition(".")[2]
    if kind == "csv":  # quotes and line breaks within a cell, as pandas and `toolkit` read them
        rows = spark.read.csv(options.file, header=True, multiLine=True, quote='"', escape='"')
    else:
        rows = (spark.read.json if kind == "jsonl" else spark.read.parquet)(options.file)
    added = [StructField("prediction", StringType()), StructField("probability", DoubleType())]
    schema = StructType(
        [*rows.schema.fields, *added]
    )  # `rows.schema.add` would change the schema of `rows`
    rows.mapInPandas(label, schema).write.mode("errorifexists").parquet(options.output)


if __name__ == "__main__":
    main()
