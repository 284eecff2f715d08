"""Fine-tune a BigBird on long texts, read to their end: up to 4096 tokens.

    python recipes/bigbird.py                                 the demo: IMDB reviews of more than 512 tokens
    python recipes/bigbird.py recipes/bigbird_zh_news.yaml    Chinese news
    python recipes/bigbird.py --train_file articles.csv --model_name_or_path bert-base-chinese --max_length 4096
    accelerate launch recipes/bigbird.py --config_file accelerate_configs/ddp.yaml

A BERT becomes a BigBird of the same weights; a BigBird is taken as it is. `--help` lists the settings; a YAML
file of them may come first.
"""

from pathlib import Path

from toolkit import config, launch
from toolkit.checkpoint.model_folder import load_weights
from toolkit.data.prepare import prepare_data
from toolkit.data.tokens import load_tokenizer
from toolkit.evaluation import Best, evaluate
from toolkit.models.classifier import load_classifier
from toolkit.models.loss import sample_losses
from toolkit.models.to_bigbird import long_model
from toolkit.pretrained import load_config
from toolkit.report.run import Run
from toolkit.training.loop import Loop, make_schedule
from toolkit.training.optimizer import align_strategy, make_optimizer, make_scheduler

# What runs when neither data nor a model is named.
DEMO = Path(__file__).with_name("bigbird_demo.yaml")


def main() -> None:
    settings = config.parse(config.LongTaskSettings, demo=DEMO, description=__doc__)
    training = settings.training
    accelerator = launch.make_accelerator(training.mixed_precision)

    # A model with as many positions as the texts need, then the data, each made once per machine
    pretrained = long_model(settings.model, settings.data.max_length, accelerator)
    tokenizer = load_tokenizer(pretrained)
    data = prepare_data(settings, tokenizer, load_config(pretrained), accelerator)
    tokenizer.model_max_length = data.max_length  # saved with the model: it is to cut texts as they were cut here
    labels = data.labels
    best = Best(training.metric_for_best_model, labels.problem_type, training.early_stopping_patience)
    schedule = make_schedule(training, data.train, accelerator.num_processes)

    # Model and optimizer: the same weights in every process, then divided as the launch asks
    model = load_classifier(pretrained, labels, training.seed)
    optimizer = make_optimizer(model, training)
    scheduler = make_scheduler(optimizer, training, schedule.total_steps)
    align_strategy(accelerator, training, schedule)
    model, optimizer = accelerator.prepare(model, optimizer)

    # Train: each step is one global batch, however many processes share it
    run = Run(accelerator, settings, data, schedule, recipe="bigbird", model=model)
    loop = Loop(accelerator, model, optimizer, scheduler, data.train, tokenizer, training, schedule)
    run.start(loop, best)  # at the newest checkpoint of this run, where there is one
    evaluation = None
    for step in run.steps():
        for batch in step.micro_batches():
            logits = model(**batch.inputs).logits  # (B, C)
            losses = sample_losses(logits, batch.labels, labels.problem_type, training.label_smoothing_factor)
            step.backward(losses)  # (B,)
        metrics = step.update()
        run.step(metrics)

        if schedule.evaluates_after(step.number):
            evaluation = evaluate(accelerator, model, data.validation, tokenizer, labels, training)
            run.evaluated(evaluation, step.number)  # saves the model, where it is the best so far
        run.record(step, metrics)  # after a checkpoint, where one is due
        if step.stopping:
            run.stop()
            return

    # The saved model, on the test rows where there are any: on their beginnings, and on the whole texts
    if best.step != loop.done:
        load_weights(accelerator, model, run.model_folder)
    final = data.test or data.validation
    if best.step != loop.done or data.test or evaluation is None:
        evaluation = evaluate(accelerator, model, final, tokenizer, labels, training)
    if most := settings.long.compare_max_length:
        beginnings = final.cut(tokenizer, most, name=f"{final.name}_first_{most}")
        run.comparison(evaluate(accelerator, model, beginnings, tokenizer, labels, training), best.step, most)
    run.evaluation(evaluation, best.step)
    run.finish(evaluation)


if __name__ == "__main__":
    launch.run(main)
