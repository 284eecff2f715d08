"""Fine-tune a BigBird on long texts of up to 4096 tokens.

    python recipes/bigbird.py                                 the demo: long IMDB reviews
    python recipes/bigbird.py recipes/bigbird_zh_news.yaml    Chinese news
    python recipes/bigbird.py --train_file news.csv --model_name_or_path bert-base-chinese
    accelerate launch recipes/bigbird.py --config_file accelerate_configs/ddp.yaml

A BERT is converted to a BigBird with the same weights. `--help` lists the settings; a YAML file of
them may come first. docs/your-own-recipe.md says how to change the loop.
"""

from pathlib import Path

import toolkit
from toolkit import config, launch

# Settings of the demo, for runs without data and model settings.
DEMO = Path(__file__).with_name("bigbird_demo.yaml")


def main() -> None:
    settings = config.parse(config.LongTaskSettings, demo=DEMO, description=__doc__)
    training = settings.training
    run = toolkit.Run(settings)  # processes and precision, as the config file says
    accelerator = run.accelerator
    # with positions for all tokens
    pretrained = toolkit.long_model(settings.model, settings.data.max_length, accelerator)
    data = run.load_data(pretrained)  # files -> columns -> tokens, once per machine
    model = toolkit.load_classifier(pretrained, data.labels, training.seed)
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler = run.prepare(model, optimizer)  # copied or sharded
    objective = toolkit.make_objective(settings, model, data)

    def evaluate(split: toolkit.Split) -> toolkit.Evaluation:
        outputs = run.outputs(split)
        for batch in outputs.batches(model):  # each sample once; no dropout, no gradients
            logits = model(**batch.inputs).logits.float()  # (B, C)
            losses = objective.losses(logits, batch.labels)  # (B,)
            outputs.add(accelerator.gather_for_metrics((batch.ids, logits, losses)))
        return outputs.evaluation(toolkit.classification_metrics)

    for step in run.steps(evaluate):  # resumes; logs, evaluates and saves when due
        for batch in step.micro_batches(model):
            logits = model(**batch.inputs).logits  # (B, C)
            accelerator.backward(step.mean(objective(batch, logits)))
        step.grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.finish(evaluate)  # also on truncated texts (--compare_max_length)


if __name__ == "__main__":
    launch.run(main)  # applies a --config_file given after the script
