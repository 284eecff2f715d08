"""Fine-tune an encoder to classify texts, or to grade them with a number.

    python recipes/cls.py                                     the demo: English film reviews
    python recipes/cls.py --train_file reviews.csv --model_name_or_path bert-base-chinese
    accelerate launch recipes/cls.py --config_file accelerate_configs/ddp.yaml
    accelerate launch recipes/cls.py recipes/cls_zh_reviews.yaml --config_file accelerate_configs/ddp.yaml

`--help` lists the settings; a YAML file of them may come first. To change the loss, the metrics, the optimizer or
the model, change this file; `toolkit verify THIS_FILE` then compares the losses under every strategy.
"""

from toolkit import launch

launch.start(__name__)  # a --config_file behind the script is followed before the imports below take seconds

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

import toolkit
from toolkit import config

# What runs when neither data nor a model is named.
DEMO = Path(__file__).with_name("cls_demo.yaml")


def main() -> None:
    settings = config.parse(config.TaskSettings, demo=DEMO, description=__doc__)
    training = settings.training
    accelerator = toolkit.start_accelerator(settings)
    tokenizer, data = toolkit.load_data(settings, accelerator)  # files -> columns -> tokens, once per machine
    labels = data.labels

    # The same weights in every process, then placed as the launch asks
    model = toolkit.load_classifier(settings.model, labels, training.seed)
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler, steps = toolkit.prepare(accelerator, training, model, optimizer, data.train, tokenizer)
    objective = toolkit.make_objective(settings, model, data)  # a teacher, R-Drop, FGM: where the settings have them

    def compute_metrics(logits: np.ndarray, truth: np.ndarray) -> dict[str, Any]:  # (N, C), (N,) or (N, C)
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

    # Train: each step is one global batch, however many processes compute it
    run = toolkit.Run(accelerator, settings, data, tokenizer, steps, compute_metrics, recipe="cls")
    run.resume(model, optimizer, scheduler, evaluate)  # at the newest checkpoint of this run, where there is one
    for step in run.steps():
        model.train()
        for batch in step.micro_batches(model):  # this process's; gradients are synchronised in the last one
            logits = model(**batch.inputs).logits  # (B, C)
            accelerator.backward(step.mean(objective(batch, logits)))  # its part of the mean over the global batch
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.max_grad_norm or math.inf)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.after(step, grad_norm, evaluate)  # logs, evaluates, saves the best model and checkpoints: where due
    run.finish(evaluate)  # of the best model, on the test rows where there are any


if __name__ == "__main__":
    launch.run(main)
