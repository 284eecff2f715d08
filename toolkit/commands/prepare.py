"""`toolkit prepare [RECIPE] --name value ...`: tokenizes and caches the data of a recipe with these
settings."""

from __future__ import annotations

from toolkit.errors import UserError
from toolkit.utils.features import Command


def run(arguments: list[str]) -> None:
    from toolkit.config.parse import parse, tasks

    known = tasks()
    usage = f"toolkit prepare [{'|'.join(known)}]"
    description = "Tokenizes and caches a recipe's data, as its first run would."
    task = "cls"
    if arguments and arguments[0] in known:
        task = arguments.pop(0)
    settings = parse(known[task], arguments, None, description, usage)
    has_data = settings.data.train_file or settings.data.dataset_name
    if settings.model.model_name_or_path is None or not has_data:
        raise UserError("pass --model_name_or_path and --train_file (or --dataset_name)")
    from toolkit.config.sections import LongTrainingSettings
    from toolkit.data.prepare import prepare_data
    from toolkit.data.tokenizer import load_tokenizer
    from toolkit.models.to_bigbird import long_model
    from toolkit.pretrained import load_config

    pretrained = settings.model
    if isinstance(settings.training, LongTrainingSettings):
        pretrained = long_model(settings.model, settings.data.max_length)
    model_config = load_config(pretrained)
    data = prepare_data(settings, load_tokenizer(pretrained), model_config)
    for name, split in data.splits.items():
        lengths = split.lengths
        print(
            f"{name}: {len(split)} samples, {lengths.sum()} tokens, longest {lengths.max()}"
        )
    for note in data.notes:
        print(note)
    print(data.targets.describe())
    print(f"cached in {data.folder}")


COMMAND = Command("prepare", "tokenize a job's data ahead of time", run)
