"""Fine-tune an encoder for classification or regression of texts.

    python recipes/cls.py                                     the demo: English film reviews
    python recipes/cls.py --train_file reviews.csv --model_name_or_path bert-base-chinese
    accelerate launch recipes/cls.py --config_file accelerate_configs/ddp.yaml
    python recipes/cls.py recipes/cls_zh_reviews.yaml         Chinese book reviews

`--help` lists the settings; a YAML file of them may come first. To change the loss, the metrics,
the optimizer or the model, change this file; `toolkit verify THIS_FILE` then compares the losses
under every strategy.
"""

from pathlib import Path

import toolkit
from toolkit import config, launch

# Settings of the demo, for runs without data and model settings.
DEMO = Path(__file__).with_name("cls_demo.yaml")


def main() -> None:
    settings = config.parse(config.TaskSettings, demo=DEMO, description=__doc__)
    training = settings.training
    run = toolkit.Run(settings)  # processes and precision, as the config file says
    accelerator = run.accelerator
    data = run.load_data()  # files -> columns -> tokens, once per machine
    model = toolkit.load_classifier(settings.model, data.labels, training.seed)
    optimizer = toolkit.make_optimizer(model, training)
    model, optimizer, scheduler = run.prepare(model, optimizer)  # copied or sharded
    objective = toolkit.make_objective(settings, model, data)  # with a teacher, R-Drop, FGM, if set

    def evaluate(split: toolkit.Split) -> toolkit.Evaluation:
        outputs = run.outputs(split)
        for batch in outputs.batches(model):  # each sample once; no dropout, no gradients
            logits = model(**batch.inputs).logits.float()  # (B, C)
            losses = objective.losses(logits, batch.labels)  # (B,)
            outputs.add(accelerator.gather_for_metrics((batch.ids, logits, losses)))
        return outputs.evaluation(toolkit.classification_metrics)

    for step in run.steps(evaluate):  # resumes; logs, evaluates and saves when due
        for batch in step.micro_batches(model):  # this process's part of the global batch
            logits = model(**batch.inputs).logits  # (B, C)
            losses = objective(batch, logits)  # (B,)
            accelerator.backward(step.mean(losses))  # their share of the mean over the global batch
        step.grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.finish(evaluate)  # the best model, on test rows if there are any


if __name__ == "__main__":
    launch.run(main)  # applies a --config_file given after the script
