"""Fine-tune an encoder for classification or regression of texts.

    python recipes/cls.py                                     the demo: English film reviews
    python recipes/cls.py --train_file reviews.csv --model_name_or_path bert-base-chinese
    accelerate launch recipes/cls.py --config_file accelerate_configs/ddp.yaml
    accelerate launch recipes/cls.py recipes/cls_zh_reviews.yaml --config_file accelerate_configs/ddp.yaml

`--help` lists the settings; a YAML file of them may come first. To change the loss, the metrics, the optimizer or
the model, change this file; `toolkit verify THIS_FILE` then compares the losses under every strategy.
"""

from toolkit import launch

launch.start(__name__)  # applies a --config_file after the script, before the slow imports below

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import toolkit
from toolkit import config

# Settings of the demo, for runs without data and model settings.
DEMO = Path(__file__).with_name("cls_demo.yaml")


def main() -> None:
    settings = config.parse(config.TaskSettings, demo=DEMO, description=__doc__)
    training = settings.training
    accelerator = toolkit.start_accelerator(settings)
    tokenizer, data = toolkit.load_data(
        settings, accelerator
    )  # files -> columns -> tokens, once per machine
    labels = data.labels

    # Equal weights in every process, then sharded or copied to devices by the strategy
    model = toolkit.load_classifier(settings.model, labels, training.seed)
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler, steps = toolkit.prepare(
        accelerator, training, model, optimizer, data.train, tokenizer
    )
    objective = toolkit.make_objective(settings, model, data)  # with a teacher, R-Drop, FGM, if set

    def compute_metrics(
        logits: np.ndarray, truth: np.ndarray
    ) -> dict[str, Any]:  # (N, C), (N,) or (N, C)
        return toolkit.classification_metrics(logits, truth, labels)

    @torch.no_grad()
    def evaluate(split: toolkit.Split) -> toolkit.Evaluation:
        model.eval()
        outputs = toolkit.Outputs(accelerator, split)  # each sample exactly once
        for batch in toolkit.evaluation_batches(accelerator, split, tokenizer, steps.settings):
            logits = model(**batch.inputs).logits.float()  # (B, C)
            losses = objective.losses(logits, batch.labels)  # (B,)
            outputs.add(accelerator.gather_for_metrics(batch.padded(logits, losses)))
        return toolkit.classification_evaluation(outputs, labels, compute_metrics)

    # Train: each step is one global batch, for any number of processes
    run = toolkit.Run(accelerator, settings, data, tokenizer, steps, compute_metrics, recipe="cls")
    run.resume(
        model, optimizer, scheduler, evaluate
    )  # from the newest checkpoint of this run, if any
    for step in run.steps():
        model.train()
        for batch in step.micro_batches(
            model
        ):  # this process's; gradients are synchronised in the last one
            logits = model(**batch.inputs).logits  # (B, C)
            accelerator.backward(
                step.mean(objective(batch, logits))
            )  # its share of the mean over the global batch
        grad_norm = accelerator.clip_grad_norm_(
            model.parameters(), training.max_grad_norm or math.inf
        )
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.after(
            step, grad_norm, evaluate
        )  # logs, evaluates, saves the best model and checkpoints, when due
    run.finish(evaluate)  # evaluates the best model, on test rows if there are any


if __name__ == "__main__":
    launch.run(main)
