"""`toolkit prepare [RECIPE] --name value ...`: tokenizes and caches the data of a recipe with these settings."""

from __future__ import annotations

from toolkit.errors import UserError
from toolkit.utils.features import Command


def run(arguments: list[str]) -> None:
    from toolkit.config.parse import begins_with_name, parse_recipe

    task = arguments.pop(0) if begins_with_name(arguments) else "cls"
    description = "Tokenizes and caches a recipe's data, as its first run would; takes the recipe's settings."
    settings = parse_recipe(task, arguments, "prepare", description)
    if settings.model.model_name_or_path is None or not (settings.data.train_file or settings.data.dataset_name):
        raise UserError("toolkit prepare needs --model_name_or_path and --train_file (or --dataset_name)")
    from toolkit.config.sections import LongTrainingSettings
    from toolkit.data.prepare import prepare_data
    from toolkit.data.tokens import load_tokenizer
    from toolkit.models.to_bigbird import long_model
    from toolkit.pretrained import load_config

    is_long = isinstance(settings.training, LongTrainingSettings)
    pretrained = long_model(settings.model, settings.data.max_length) if is_long else settings.model
    data = prepare_data(settings, load_tokenizer(pretrained), load_config(pretrained))
    for name, split in data.splits.items():
        print(f"{name}: {len(split)} samples, {split.lengths.sum()} tokens, longest {split.lengths.max()}")
    for note in filter(None, (*data.notes, data.advice)):
        print(note)
    print(data.targets.describe())
    print(f"cached in {data.folder}")


COMMAND = Command("prepare", "tokenize a job's data ahead of time", run)
