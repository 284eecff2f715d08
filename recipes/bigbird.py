"""Fine-tune a BigBird on long texts of up to 4096 tokens.

    python recipes/bigbird.py                                 the demo: IMDB reviews of more than 512 tokens
    python recipes/bigbird.py recipes/bigbird_zh_news.yaml    Chinese news
    python recipes/bigbird.py --train_file articles.csv --model_name_or_path bert-base-chinese --max_length 4096
    accelerate launch recipes/bigbird.py --config_file accelerate_configs/ddp.yaml

A BERT is converted to a BigBird with the same weights. `--help` lists the settings; a YAML file of them may come first.
recipes/cls.py shows what `evaluate_classifier` does, and docs/your-own-recipe.md how to change it.
"""

from toolkit import launch

launch.start(__name__)  # applies a --config_file after the script, before the slow imports below

import math
from functools import partial
from pathlib import Path

import toolkit
from toolkit import config

# Settings of the demo, for runs without data and model settings.
DEMO = Path(__file__).with_name("bigbird_demo.yaml")


def main() -> None:
    settings = config.parse(config.LongTaskSettings, demo=DEMO, description=__doc__)
    training = settings.training
    accelerator = toolkit.start_accelerator(settings)
    pretrained = toolkit.long_model(
        settings.model, settings.data.max_length, accelerator
    )  # positions for all tokens
    tokenizer, data = toolkit.load_data(settings, accelerator, pretrained)

    model = toolkit.load_classifier(pretrained, data.labels, training.seed)
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler, steps = toolkit.prepare(
        accelerator, training, model, optimizer, data.train, tokenizer
    )
    objective = toolkit.make_objective(settings, model, data)
    compute_metrics = partial(toolkit.classification_metrics, labels=data.labels)

    def evaluate(split: toolkit.Split) -> toolkit.Evaluation:
        objects = accelerator, model, split, tokenizer, steps.settings
        return toolkit.evaluate_classifier(*objects, objective.losses, data.labels, compute_metrics)

    run = toolkit.Run(
        accelerator, settings, data, tokenizer, steps, compute_metrics, recipe="bigbird"
    )
    run.resume(model, optimizer, scheduler, evaluate)
    for step in run.steps():  # one global batch, for any number of processes
        model.train()
        for batch in step.micro_batches(model):
            logits = model(**batch.inputs).logits  # (B, C)
            accelerator.backward(step.mean(objective(batch, logits)))
        grad_norm = accelerator.clip_grad_norm_(
            model.parameters(), training.max_grad_norm or math.inf
        )
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.after(step, grad_norm, evaluate)
    run.finish(evaluate)  # also on truncated texts (--compare_max_length)


if __name__ == "__main__":
    launch.run(main)
