"""The `toolkit` command. Heavy libraries are imported by the subcommand that needs them."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit import __version__, launch
from toolkit.commands import clean, convert, init
from toolkit.commands import to_bigbird as to_bigbird_command
from toolkit.errors import Parser, UserError, did_you_mean
from toolkit.features.sweep import command as sweep
from toolkit.features.verify import command as verify
from toolkit.utils import cache
from toolkit.utils.files import templates

_LAUNCH_HELP = (
    "Runs alone, or on several processes: --config_file accelerate_configs/ddp.yaml, or "
    "`accelerate launch -m toolkit ...`, `torchrun --nproc_per_node 2 -m toolkit ...`."
)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="toolkit", description="Fine-tune encoders: data, prediction, checkpoints, reports.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"finetune-toolkit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    init.add_parser(commands)
    cache.add_parser(commands)
    _add_predict(commands)
    _add_evaluate(commands)
    _add_export(commands)
    commands.add_parser("prepare", help="tokenize a job's data ahead of time")
    commands.add_parser("estimate", help="the memory that a job takes on each process, by strategy")
    commands.add_parser("doctor", help="find what would keep a run from starting, here or between machines")
    convert.add_parser(commands)
    clean.add_parser(commands)
    to_bigbird_command.add_parser(commands)
    report = commands.add_parser("report", help="write a run's report.html again")
    report.add_argument("run", help="a run's folder")
    report.add_argument(
        "--explain",
        type=int,
        default=0,
        metavar="ROWS",
        help="show which words led to so many of the worst mistakes [0]",
    )
    _add_compare(commands)
    sweep.add_parser(commands)
    verify.add_parser(commands)
    return parser


def _add_compare(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="which of several runs is better, and what each took",
        description="Compares runs on the rows they predicted: metrics with intervals, paired tests, speed, memory.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    parser.add_argument("--output", metavar="FILE.html", help="also write one page with the curves over each other")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_predict(commands: argparse._SubParsersAction) -> None:
    predict = commands.add_parser(
        "predict",
        help="label every row of a file, or give it a title",
        description="Labels every row of FILE, or writes its title, exactly once, in its order and with its columns.",
        epilog=_LAUNCH_HELP,
        allow_abbrev=False,
    )
    predict.add_argument("model", help="a run's model folder, any classifier or encoder-decoder, or a hub name")
    predict.add_argument(
        "file", nargs="?", help="CSV, TSV, JSON, JSONL or Parquet, plain or .gz, or 'part-*.csv'; .txt: a text per line"
    )
    predict.add_argument(
        "--text", action="append", help="print the answer for this text (may be repeated); no FILE then"
    )
    predict.add_argument("--output", metavar="FILE", help="where to write [FILE.predictions.csv beside the input]")
    predict.add_argument("--overwrite", action="store_true", help="replace the output if it is there")
    predict.add_argument(
        "--probabilities", type=_probabilities, default="all", metavar="all|none|top-K", help="of which classes [all]"
    )
    predict.add_argument("--shard", metavar="3/64", help="label only this part of the file, beside others that do so")
    predict.add_argument("--join", action="store_true", help="only write the output of what the shards have finished")
    _add_reading(predict)


def _add_evaluate(commands: argparse._SubParsersAction) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="judge a classifier on labelled rows: metrics, a report, predictions",
        description="Writes a folder with eval.jsonl, predictions.jsonl and report.html: each row of FILE counts once.",
        epilog=_LAUNCH_HELP,
        allow_abbrev=False,
    )
    evaluate.add_argument("model", help="a run's model folder, any classifier, or a hub name")
    evaluate.add_argument("file", help="labelled rows: CSV, TSV, JSON, JSONL or Parquet")
    evaluate.add_argument("--output_dir", metavar="FOLDER", help="where to write [FILE.evaluation beside the input]")
    evaluate.add_argument("--overwrite", action="store_true", help="replace the output if it is there")
    evaluate.add_argument("--label_column", metavar="NAME", help="as in training, or found by its name, when not given")
    evaluate.set_defaults(text=None)
    _add_reading(evaluate)


def _add_reading(predict: argparse.ArgumentParser) -> None:
    """How a file is read, and how a model computes."""
    predict.add_argument("--text_column", metavar="NAME", help="found by its name when not given")
    predict.add_argument("--text_pair", metavar="NAME", help="the second text's column; as in training when not given")
    predict.add_argument("--encoding", default="utf-8", help="of CSV, TSV and JSON files [utf-8]")
    predict.add_argument(
        "--delimiter", metavar="CHARACTER", help="between cells; as the file's ending says if not given"
    )
    predict.add_argument(
        "--quoting", choices=("csv", "none"), help="none: a double quote is part of the text [as in training, or csv]"
    )
    predict.add_argument("--column_names", metavar="NAMES", help="of a file without a header: label,text")
    predict.add_argument("--max_length", type=int, metavar="TOKENS", help="the model's own limit when not given")
    predict.add_argument("--per_device_batch_size", type=int, default=64, metavar="SAMPLES", help="[64]")
    predict.add_argument(
        "--max_tokens_per_batch", type=int, default=16384, metavar="TOKENS", help="padding counted [16384]"
    )
    predict.add_argument(
        "--mixed_precision", choices=("auto", "no", "bf16", "fp16"), help="[the accelerate config's, or no]"
    )


def _probabilities(asked: str) -> str:
    if not re.fullmatch(r"all|none|top-[1-9]\d*", asked):
        raise argparse.ArgumentTypeError(f"{asked!r} is not all, none or top-3")
    return asked


def _add_export(commands: argparse._SubParsersAction) -> None:
    export = commands.add_parser(
        "export",
        help="turn a classifier into one that OpenVINO or ONNX Runtime computes, 8-bit if asked",
        description="Writes OUT, a folder that `toolkit predict` takes as any other. It is checked against MODEL on "
        "the validation rows of its run (or --validation_file), and not written where its answers differ.",
        allow_abbrev=False,
    )
    export.add_argument("model", help="a run's model folder, any classifier, or a hub name")
    export.add_argument("out", help="the folder to make")
    export.add_argument("--to", choices=("openvino", "onnx"), required=True, help="the runtime")
    export.add_argument("--int8", action="store_true", help="8-bit weights and activations, calibrated on real texts")
    export.add_argument("--max_drop", type=float, default=0.5, metavar="POINTS",
                        help="how far accuracy (of numbers: their variance) may fall, of 100 [0.5]")  # fmt: skip
    export.add_argument("--max_changed", type=float, default=2.0, metavar="POINTS",
                        help="how many answers may change, right or wrong, of 100 [2]")  # fmt: skip
    export.add_argument("--validation_file", metavar="FILE", help="to check on; the run's validation rows if not given")
    export.add_argument("--calibration_file", metavar="FILE", help="for --int8; the run's training rows if not given")
    for name in ("text_column", "text_pair", "label_column"):
        export.add_argument(f"--{name}", metavar="NAME", help="of these files")
    export.add_argument("--max_length", type=int, metavar="TOKENS", help="the model's own limit when not given")


def main() -> None:
    """Entry point of `toolkit` and `python -m toolkit`."""
    # the doctor and the estimate read launch options of a run, and start none; a sweep and verify hand them on
    takes_launch_options = sys.argv[1:2] in (["doctor"], ["estimate"], ["sweep"], ["verify"])
    launch.run(_run, module="toolkit", relaunches=not takes_launch_options)


def _run() -> None:
    arguments = sys.argv[1:]
    parser = build_parser()
    if not arguments:
        parser.print_help()
        return
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        hint = _OTHER_WAYS.get(arguments[0]) or did_you_mean(arguments[0], COMMANDS)
        raise UserError(f"there is no `toolkit {arguments[0]}`{hint}: {', '.join(COMMANDS)}")
    if arguments[0] in ("prepare", "estimate", "doctor"):  # they read their own settings
        COMMANDS[arguments[0]](arguments[1:])
    elif arguments[0] in ("sweep", "verify"):  # the rest is the recipe's
        COMMANDS[arguments[0]](parser.parse_known_args(arguments))
    else:
        options = parser.parse_args(arguments)
        COMMANDS[options.command](options)


def _task_settings(task: str, arguments: list[str], command: str, about: str) -> Any:
    from toolkit import config

    tasks = config.tasks()
    if task not in tasks:
        raise UserError(f"toolkit {command} {task}{did_you_mean(task, tasks)}: {', '.join(tasks)}")
    return config.parse(tasks[task], arguments, None, about, f"toolkit {command} [{'|'.join(tasks)}]")


def _begins_with_name(arguments: list[str]) -> bool:
    """Of a recipe or a model: no setting, and no file of settings."""
    return bool(arguments) and not re.search(r"^-|\.ya?ml$", arguments[0])


def _prepare(arguments: list[str]) -> None:
    """Makes the tokens a recipe with these settings would make; the recipe's name may come first."""
    task = arguments.pop(0) if _begins_with_name(arguments) else "cls"
    about = "Takes a recipe's settings and tokenizes its data, as its first run would."
    settings = _task_settings(task, arguments, "prepare", about)
    if settings.model.model_name_or_path is None or not (settings.data.train_file or settings.data.dataset_name):
        raise UserError("toolkit prepare needs --model_name_or_path and --train_file (or --dataset_name)")
    from toolkit.data.prepare import prepare_data
    from toolkit.data.tokens import load_tokenizer
    from toolkit.models.to_bigbird import long_model
    from toolkit.pretrained import load_config

    pretrained = settings.model if task == "cls" else long_model(settings.model, settings.data.max_length)
    data = prepare_data(settings, load_tokenizer(pretrained), load_config(pretrained))
    for split in (data.train, data.validation, data.test):
        if split is not None:
            lengths = split.lengths
            print(f"{split.name}: {len(split)} samples, {lengths.sum()} tokens, longest {lengths.max()}")
    for note in filter(None, (*data.notes, data.advice)):
        print(note)
    print(data.targets.describe())
    print(f"kept in {data.folder}")


def _estimate(arguments: list[str]) -> None:
    """Of a recipe (`bigbird` or recipes/bigbird.py, and its settings), or of a model for recipes/cls.py."""
    task = "cls"
    if _begins_with_name(arguments):
        name = arguments.pop(0)
        if re.fullmatch(r"(.*/)?(cls|bigbird|title)(\.py)?", name):
            task = Path(name).stem
        else:
            arguments = ["--model_name_or_path", name, *arguments]
    processes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    processes.add_argument("--num_processes", type=int, default=2)
    launched, arguments = processes.parse_known_args(arguments)
    about = (
        "Takes a recipe's name or a model's, and the settings of a recipe; prints what a run takes of the memory of "
        "each of --num_processes N processes [2] under every strategy. Trains nothing."
    )
    settings = _task_settings(task, arguments, "estimate", about)
    if settings.model.model_name_or_path is None:
        demo_file = str(templates() / "recipes" / f"{task}_demo.yaml")
        settings = _task_settings(task, [demo_file, *arguments], "estimate", about)
    from toolkit.features.estimate.command import run

    run(task, settings, launched.num_processes)


def _report(options: argparse.Namespace) -> None:
    from toolkit.report.html import write_report_of_folder

    if options.explain < 0:
        raise UserError(f"--explain {options.explain}: give the number of rows, 5 say")
    print(write_report_of_folder(options.run, options.explain))


def _later(module: str, name: str) -> Callable[[Any], Any]:
    """A function of `toolkit.MODULE`, which is imported when it is called."""
    return lambda given: getattr(importlib.import_module(f"toolkit.{module}"), name)(given)


_OTHER_WAYS = {
    "train": " (recipes train: python recipes/cls.py --help)",
}
COMMANDS: dict[str, Callable[[Any], None]] = {
    "init": init.run,
    "predict": _later("features.predict.command", "predict_file"),
    "evaluate": _later("features.evaluate.command", "evaluate_file"),
    "export": _later("features.export.command", "export"),
    "prepare": _prepare,
    "estimate": _estimate,
    "cache": cache.run,
    "convert": convert.run,
    "clean": clean.run,
    "to-bigbird": to_bigbird_command.run,
    "report": _report,
    "compare": _later("features.compare.command", "run"),
    "sweep": lambda parsed: sweep.run(*parsed),
    "verify": lambda parsed: verify.run(*parsed),
    "doctor": lambda arguments: sys.exit(_later("features.doctor.command", "run")(arguments)),
}


if __name__ == "__main__":
    main()
