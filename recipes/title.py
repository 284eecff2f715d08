"""Fine-tune a BigBird encoder with a decoder to write the titles of long texts.

    python recipes/title.py                                   the demo: titles of English news
    python recipes/title.py recipes/title_zh_news.yaml        titles of Chinese news
    python recipes/title.py --train_file articles.csv --model_name_or_path bert-base-chinese --max_length 4096
    accelerate launch recipes/title.py --config_file accelerate_configs/ddp.yaml

`--help` lists the settings; a YAML file of them may come first.
"""

from pathlib import Path

from toolkit import config, launch
from toolkit.checkpoint.model_folder import load_weights
from toolkit.data.prepare import prepare_titles
from toolkit.data.tokens import load_tokenizer
from toolkit.evaluation import Best
from toolkit.evaluation.titles import evaluate_titles
from toolkit.models.loss import token_losses
from toolkit.models.title_model import load_title_model
from toolkit.models.to_bigbird import long_model
from toolkit.pretrained import load_config
from toolkit.report.run import Run
from toolkit.training.loop import Loop, make_schedule
from toolkit.training.optimizer import align_strategy, make_optimizer, make_scheduler

# What runs when neither data nor a model is named.
DEMO = Path(__file__).with_name("title_demo.yaml")


def main() -> None:
    settings = config.parse(config.TitleSettings, demo=DEMO, description=__doc__)
    training, generation = settings.training, settings.generation
    accelerator = launch.make_accelerator(training.mixed_precision)

    # An encoder with as many positions as the texts need, then texts and titles, each made once per machine
    pretrained = long_model(settings.model, settings.data.max_length, accelerator)
    tokenizer = load_tokenizer(pretrained)
    data = prepare_titles(settings, tokenizer, load_config(pretrained), accelerator)
    tokenizer.model_max_length = data.max_length  # saved with the model: it is to cut texts as they were cut here
    best = Best(training.metric_for_best_model, "title_generation", training.early_stopping_patience)
    schedule = make_schedule(training, data.train, accelerator.num_processes)

    # Model and optimizer: the same weights in every process, then divided as the launch asks
    model = load_title_model(
        settings.model, pretrained, generation, tokenizer, settings.data.max_target_length, training.seed
    )
    optimizer = make_optimizer(model, training)
    scheduler = make_scheduler(optimizer, training, schedule.total_steps)
    align_strategy(accelerator, training, schedule)
    model, optimizer = accelerator.prepare(model, optimizer)

    # Train: each step is one global batch, and its loss the mean over the tokens of all its titles
    run = Run(accelerator, settings, data, schedule, recipe="title", model=model)
    loop = Loop(accelerator, model, optimizer, scheduler, data.train, tokenizer, training, schedule)
    run.start(loop, best)  # at the newest checkpoint of this run, where there is one
    evaluation = None
    for step in run.steps():
        for batch in step.micro_batches():
            logits = model(**batch.inputs, use_cache=False).logits  # (B, T, V)
            losses = token_losses(logits, batch.labels, training.label_smoothing_factor)
            step.backward(losses)  # (B,) sums over each title's tokens
        metrics = step.update()
        run.step(metrics)

        if schedule.evaluates_after(step.number):
            evaluation = evaluate_titles(accelerator, model, data.validation, tokenizer, generation, training)
            run.evaluated(evaluation, step.number)  # saves the model, where it is the best so far
        run.record(step, metrics)  # after a checkpoint, where one is due
        if step.stopping:
            run.stop()
            return

    # The last evaluation is of the saved model, on the test rows where there are any
    if best.step != loop.done:
        load_weights(accelerator, model, run.model_folder)
    if best.step != loop.done or data.test or evaluation is None:
        evaluation = evaluate_titles(accelerator, model, data.test or data.validation, tokenizer, generation, training)
        run.evaluation(evaluation, best.step)
    run.finish(evaluation)


if __name__ == "__main__":
    launch.run(main)
