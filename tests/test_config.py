"""toolkit/config/: a YAML file and the command line -> settings, with every fault at once."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.faults import refusal
from toolkit.config import TaskSettings, build, flat, parse, sections_of, tasks
from toolkit.config.parse import _OTHER_NAMES, fields_of

NAMED = ["--train_file", "t.csv", "--model_name_or_path", "m"]
SECTIONS = sections_of(TaskSettings).values()
ALL_NAMES = [field.name for section in SECTIONS for field in dataclasses.fields(section)]
RECIPE_FILES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
YamlFile = Callable[..., str]


@pytest.fixture
def yaml_file(tmp_path: Path) -> YamlFile:
    def write(text: str, name: str = "my.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def demo(yaml_file: YamlFile) -> Path:
    data = "model_name_or_path: demo:m\ndataset_name: demo:d\n"
    return Path(yaml_file(f"{data}learning_rate: 1.0e-4\nwarmup_ratio: 0.1\n", "demo.yaml"))


def test_the_command_line_wins_over_the_file(yaml_file: YamlFile) -> None:
    settings = parse(TaskSettings, [yaml_file("seed: 1\nmax_length: 99\n"), "--seed", "3"])
    assert (settings.training.seed, settings.data.max_length) == (3, 99)
    assert settings.training.learning_rate == 5e-5  # neither names it
    settings = parse(TaskSettings, [yaml_file("max_steps: 9\n"), "--num_train_epochs", "2"])
    assert (settings.training.max_steps, settings.training.num_train_epochs) == (None, 2)


def test_forms_of_words_and_yaml(yaml_file: YamlFile) -> None:
    for words, name, value in (
        ("--seed=7", "seed", 7),
        ("--seed 1 --seed 2", "seed", 2),
        ("--gradient_checkpointing", "gradient_checkpointing", True),
        ("--gradient_checkpointing false", "gradient_checkpointing", False),
        ("--label_column a,b,c", "label_column", "a,b,c"),
        ("output_dir: ~/runs", "output_dir", str(Path.home() / "runs")),
        ("learning_rate: 1e-5", "learning_rate", 1e-5),  # a string in YAML 1.1
        ("max_length: null", "max_length", None),
        ("text_column: 文本", "text_column", "文本"),
        ("mixed_precision: no", "mixed_precision", "no"),  # false in YAML 1.1
    ):
        arguments = words.split() if words.startswith("--") else [yaml_file(words)]
        assert flat(parse(TaskSettings, arguments))[name] == value


def test_all_faults_at_once_with_the_nearest_names(yaml_file: YamlFile) -> None:
    path = yaml_file("sead: 1\nlearnin_rate: 1\nlr_scheduler_type: linnear\n")
    wrong = "--seed x --max_length 1 --dropout 1.0 --test_file"
    words = [path, *"--max-length 5 --batchsize=3 --zzz 9 stray".split(), *NAMED, *wrong.split()]
    says = [
        "sead (did you mean seed?)", "learnin_rate (did you mean learning_rate?)",
        "--max-length (did you mean max_length?)", "--zzz", "'stray'", "--test_file",
        "--lr_scheduler_type 'linnear'", "--seed 'x'", "--max_length '1'", "--dropout",
    ]  # fmt: skip
    refusal(parse, TaskSettings, words, says=says, match="^11 faults:", lines=12)
    match = r"'1', '2', '3' and 1 more .*'part-\*.csv'"
    refusal(parse, TaskSettings, [*NAMED, *"1234"], match=match)
    words = ["--per_device_train_batch_size", "8"]
    refusal(parse, TaskSettings, words, says=["(did you mean per_device_batch_size?)"])
    assert set(_OTHER_NAMES.values()) <= set(ALL_NAMES)


WRONG = """--seed=-1 --seed=3.5 --seed= --learning_rate=0 --learning_rate=nan --global_batch_size=0
    --validation_split=1 --warmup_ratio=1.1 --dropout=-0.1 --mixed_precision=fp32
    --drop_empty_text=maybe"""
WRONG_IN_YAML = """seed: [1]
train_file: 5
label_column: ['a', 'b']
global_batch_size: true
loss: true"""


@pytest.mark.parametrize("text", [*WRONG.split(), *WRONG_IN_YAML.split("\n")])
def test_wrong_values_name_the_setting(yaml_file: YamlFile, text: str) -> None:
    word = text if text.startswith("--") else yaml_file(text)
    (name,) = re.findall(r"\w+", text)[:1]
    refusal(parse, TaskSettings, [word], match=f"--{name} ")


def test_files_that_are_not_settings(yaml_file: YamlFile) -> None:
    for text, says in (
        ("- a\n", "name: value"),
        ("seed: 1\nseed: 2\n", "seed is given twice"),
        ("a: [\n", "not valid YAML"),
        ("data:\n  train_file: a.csv\n", "data"),
    ):
        path = yaml_file(text)
        refusal(parse, TaskSettings, [path], says=[says, path])
        for name in "no.yaml", "my.csv":
            refusal(parse, TaskSettings, [name], says=[name])
        refusal(parse, TaskSettings, ["--seed", "3", path], says=[f"{path!r} is not a setting"])


def test_contradictions_name_both_settings() -> None:
    for words, other in (
        ("train_file=t dataset_name=d", ""),
        ("warmup_ratio=0.1 warmup_steps=0", ""),
        ("validation_file=v", "train_file"),
        ("dataset_config_name=c", "dataset_name"),
        ("loss=focal label_smoothing_factor=0.1", ""),
        ("problem_type=regression label_smoothing_factor=0.1", ""),
        ("focal_gamma=1", "loss"),
        ("freeze_layers=0 lora_r=8", ""),
        ("num_hidden_layers=2 lora_r=8", ""),
        ("reinit_layers=1 lora_r=8", ""),
        ("r_drop_alpha=1 teacher=t", ""),
        ("fgm_epsilon=1 teacher=t", ""),
        ("lora_target_modules=key", "lora_r"),
        ("distillation_alpha=0.5", "teacher"),
        ("fgm_epsilon=1 per_device_batch_size=auto", ""),
    ):
        values = dict(word.split("=") for word in words.split())
        refusal(
            build, TaskSettings, values, says=[f"--{name}" for name in (*values, *other.split())]
        )


def test_the_demo_fills_what_was_not_given(demo: Path) -> None:
    """Where no data and no model is named; half a job is not mixed with it."""
    settings = parse(TaskSettings, ["--seed", "3", "--learning_rate", "1e-3"], demo)
    assert (settings.model.model_name_or_path, settings.data.dataset_name) == ("demo:m", "demo:d")
    assert (settings.training.learning_rate, settings.training.seed) == (1e-3, 3)
    settings = parse(TaskSettings, NAMED, demo)
    assert (settings.training.learning_rate, settings.training.warmup_ratio) == (5e-5, None)
    assert settings.data.dataset_name is None
    model, file = "model_name_or_path", "train_file"
    halves = {file: model, "dataset_name": model, model: file, "test_file": file}
    for named, missing in halves.items():
        refusal(parse, TaskSettings, [f"--{named}", "x"], demo, match=f"--{missing}")


@pytest.mark.parametrize("task", tasks())
def test_names_are_unique_over_the_sections_and_described(task: str) -> None:
    """They share one flat name space: of two alike one would be lost."""
    sections = sections_of(tasks()[task]).values()
    fields = [field for section in sections for field in fields_of(section).items()]
    assert sorted(flat(build(tasks()[task], {}))) == sorted(name for name, _ in fields)
    assert [name for name, field in fields if not field.description] == []
    # --help groups them by it
    assert len({section.__doc__ for section in sections}) == len(sections)


def test_help_lists_all_settings_with_their_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(TaskSettings, ["--seed", "1", "--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert re.findall(r"^  --(\w+) ", shown, re.M) == ALL_NAMES
    assert "--learning_rate NUMBER The peak learning rate. [5e-05]" in " ".join(shown.split())


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda path: path.name)
def test_every_shipped_settings_file_parses(path: Path) -> None:
    settings = parse(tasks()[path.name.split("_")[0]], [str(path)])
    assert settings.model.model_name_or_path
    assert settings.data.train_file or settings.data.dataset_name
