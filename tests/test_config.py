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
from toolkit.errors import UserError

NAMED = ["--train_file", "t.csv", "--model_name_or_path", "m"]
ALL_NAMES = [
    field.name
    for section in sections_of(TaskSettings).values()
    for field in dataclasses.fields(section)
]
RECIPE_FILES = sorted((REPOSITORY / "recipes").glob("*.yaml"))


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str, name: str = "my.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.fixture
def demo(yaml_file: Callable[..., str]) -> Path:
    text = "model_name_or_path: demo:m\ndataset_name: demo:d\nlearning_rate: 1.0e-4\nwarmup_ratio: 0.1\n"
    return Path(yaml_file(text, "demo.yaml"))


def fault_of(arguments: list[str], demo: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        parse(TaskSettings, arguments, demo)
    return str(caught.value)


def test_the_command_line_wins_over_the_file(yaml_file: Callable[..., str]) -> None:
    settings = parse(TaskSettings, [yaml_file("seed: 1\nmax_length: 99\n"), "--seed", "3"])
    assert (settings.training.seed, settings.data.max_length) == (3, 99)
    assert settings.training.learning_rate == 5e-5  # neither names it
    settings = parse(TaskSettings, [yaml_file("max_steps: 9\n"), "--num_train_epochs", "2"])
    assert (settings.training.max_steps, settings.training.num_train_epochs) == (None, 2)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (["--seed=7"], "seed", 7),
        (["--learning_rate", "3e-5"], "learning_rate", 3e-5),
        (["--num_train_epochs", "0.5"], "num_train_epochs", 0.5),
        (["--gradient_checkpointing"], "gradient_checkpointing", True),
        (["--gradient_checkpointing", "false"], "gradient_checkpointing", False),
        (["--group_by_length=no"], "group_by_length", False),
        (["--label_column", "a,b,c"], "label_column", "a,b,c"),
        (["--text_column", "内容"], "text_column", "内容"),
        (["--seed", "1", "--seed", "2"], "seed", 2),
        ("output_dir: ~/runs", "output_dir", str(Path.home() / "runs")),
        ("learning_rate: 1e-5", "learning_rate", 1e-5),  # a string in YAML 1.1
        ("gradient_checkpointing: yes", "gradient_checkpointing", True),
        ("max_length: null", "max_length", None),
        ("text_column: 文本", "text_column", "文本"),
        ("mixed_precision: no", "mixed_precision", "no"),  # false in YAML 1.1
    ],
)
def test_forms_of_the_command_line_and_of_yaml(
    yaml_file: Callable[..., str], given: list[str] | str, name: str, value: object
) -> None:
    arguments = [yaml_file(given + "\n")] if isinstance(given, str) else given
    assert flat(parse(TaskSettings, arguments))[name] == value


def test_all_faults_at_once_with_the_nearest_names(yaml_file: Callable[..., str]) -> None:
    path = yaml_file("sead: 1\nlearnin_rate: 1\nlr_scheduler_type: linnear\n")
    wrong = ["--seed", "x", "--max_length", "1", "--dropout", "1.0", "--test_file"]
    words = [path, "--max-length", "5", "--batchsize=3", "--zzz", "9", "stray", *NAMED, *wrong]
    says = [
        "sead (did you mean seed?)", "learnin_rate (did you mean learning_rate?)",
        "--max-length (did you mean max_length?)", "--zzz", "'stray'", "--test_file",
        "--lr_scheduler_type 'linnear'", "--seed 'x'", "--max_length '1'", "--dropout",
    ]  # fmt: skip
    fault = refusal(parse, TaskSettings, words, says=says, match="^11 faults:", lines=12)
    assert "'5'" not in fault  # the value of an unknown name
    refusal(
        parse, TaskSettings, [*NAMED, *"1234"], match=r"'1', '2', '3' and 1 more .*'part-\*.csv'"
    )


WRONG = {  # setting -> values on the command line
    "seed": ["-1", "3.5", "", "2147483648"],
    "learning_rate": ["0", "-1e-5", "nan", "inf"],
    "global_batch_size": ["0"],
    "validation_split": ["0", "1"],
    "validation_file": [""],
    "warmup_ratio": ["1.1"],
    "dropout": ["-0.1"],
    "mixed_precision": ["fp32"],
    "drop_empty_text": ["maybe"],
}
WRONG_IN_YAML = {
    "seed": ["x", "[1]", "null"],
    "train_file": ["5"],
    "label_column": ["['a', 'b']"],
    "global_batch_size": ["true"],
    "weight_decay": ["false"],
    "loss": ["true"],
}


@pytest.mark.parametrize(
    ("name", "value", "in_yaml"),
    [
        *((name, value, False) for name, values in WRONG.items() for value in values),
        *((name, value, True) for name, values in WRONG_IN_YAML.items() for value in values),
    ],
)
def test_wrong_values_name_the_setting(
    yaml_file: Callable[..., str], name: str, value: str, in_yaml: bool
) -> None:
    words = [yaml_file(f"{name}: {value}")] if in_yaml else [f"--{name}", value]
    refusal(parse, TaskSettings, words, match=f"--{name} ")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n", "name: value"),
        ("seed: 1\nmax_length: 8\nseed: 2\n", "seed is given twice"),
        ("a: [\n", "not valid YAML"),
        ("seed: 1\0\n", "not valid YAML"),
        ("data:\n  train_file: a.csv\n", "data"),
    ],
)
def test_files_that_are_not_settings(yaml_file: Callable[..., str], text: str, part: str) -> None:
    path = yaml_file(text)
    refusal(parse, TaskSettings, [path], says=[part, path])


def test_the_file_must_be_there_and_come_first(
    yaml_file: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "gbk.yaml").write_bytes("text_column: 内容\n".encode("gb18030"))
    for name in "no.yaml", "my.csv", "gbk.yaml":
        assert name in fault_of([str(tmp_path / name)])
    path = yaml_file("seed: 1")
    assert f"{path!r} is not a setting" in fault_of(["--seed", "3", path])


CONTRADICTIONS = [
    (("train_file", "dataset_name"), {"train_file": "t", "dataset_name": "d"}),
    (("validation_file", "dataset_name"), {"validation_file": "v", "dataset_name": "d"}),
    (("test_file", "dataset_name"), {"test_file": "t", "dataset_name": "d"}),
    (("warmup_ratio", "warmup_steps"), {"warmup_ratio": 0.1, "warmup_steps": 0}),
    (("validation_file", "validation_split"), {"train_file": "t", "validation_file": "v", "validation_split": 0.2}),
    (("validation_file", "train_file"), {"validation_file": "v"}),
    (("test_file", "train_file"), {"test_file": "v"}),
    (("dataset_config_name", "dataset_name"), {"train_file": "t", "dataset_config_name": "c"}),
    (("label_smoothing_factor", "loss"), {"loss": "focal", "label_smoothing_factor": 0.1}),
    (("label_smoothing_factor", "problem_type"), {"problem_type": "regression", "label_smoothing_factor": 0.1}),
    (("label_smoothing_factor", "problem_type"),
     {"problem_type": "multi_label_classification", "label_smoothing_factor": 0.1}),
    (("focal_gamma", "loss"), {"focal_gamma": 1}),
    (("freeze_layers", "lora_r"), {"freeze_layers": 0, "lora_r": 8}),
    (("num_hidden_layers", "lora_r"), {"num_hidden_layers": 2, "lora_r": 8}),
    *(((name, "lora_r"), {name: value})
      for name, value in {"lora_alpha": 3, "lora_dropout": 0.5, "lora_target_modules": "key"}.items()),
    (("distillation_alpha", "teacher"), {"distillation_alpha": 0.5}),
    (("fgm_epsilon", "per_device_batch_size"), {"fgm_epsilon": 1, "per_device_batch_size": "auto"}),
]  # fmt: skip


@pytest.mark.parametrize(("names", "given"), CONTRADICTIONS)
def test_contradictions_name_both_settings(
    names: tuple[str, str], given: dict[str, object]
) -> None:
    refusal(build, TaskSettings, given, says=[f"--{name}" for name in names])


def test_the_demo_fills_what_was_not_given_where_no_data_and_no_model_is_named(demo: Path) -> None:
    settings = parse(TaskSettings, ["--seed", "3", "--learning_rate", "1e-3"], demo)
    assert (settings.model.model_name_or_path, settings.data.dataset_name) == ("demo:m", "demo:d")
    assert (settings.training.learning_rate, settings.training.seed) == (1e-3, 3)
    settings = parse(TaskSettings, NAMED, demo)
    assert (settings.training.learning_rate, settings.training.warmup_ratio) == (5e-5, None)
    assert settings.data.dataset_name is None


@pytest.mark.parametrize(
    ("given", "lacks", "silent"),  # on what the user has not given
    [("train_file", "model_name_or_path", "test_file"), ("dataset_name", "model_name_or_path", "train_file"),
     ("model_name_or_path", "train_file", "test_file"), ("validation_file", "train_file", "dataset_name"),
     ("test_file", "train_file", "dataset_name")],
)  # fmt: skip
def test_a_half_of_a_job_is_not_mixed_with_the_demo(
    given: str, lacks: str, silent: str, demo: Path
) -> None:
    fault = fault_of([f"--{given}", "x"], demo)
    assert f"--{lacks}" in fault
    assert f"--{silent}" not in fault


def test_flat_is_what_build_takes() -> None:
    settings = build(TaskSettings, {"train_file": "t", "seed": 3, "dropout": 0.0})
    defaults = flat(build(TaskSettings, {}))
    given = {name: value for name, value in flat(settings).items() if value != defaults[name]}
    assert build(TaskSettings, given) == settings


@pytest.mark.parametrize("task", tasks())
def test_names_are_unique_over_the_sections_and_described(task: str) -> None:
    """They share one flat name space: of two alike one would be lost."""
    sections = sections_of(tasks()[task]).values()
    fields = [field for section in sections for field in fields_of(section).items()]
    assert sorted(flat(build(tasks()[task], {}))) == sorted(name for name, _ in fields)
    assert [name for name, field in fields if not field.description] == []
    assert len({section.__doc__ for section in sections}) == len(
        sections
    )  # --help groups them by it


def test_help_lists_all_settings_with_their_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(TaskSettings, ["--seed", "1", "--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert re.findall(r"^  --(\w+) ", shown, re.M) == ALL_NAMES
    assert "--learning_rate NUMBER The peak learning rate. [5e-05]" in " ".join(shown.split())


def test_the_run_contract_names_exist() -> None:
    contract = """model_name_or_path train_file validation_file test_file dataset_name text_column label_column
        max_length output_dir num_train_epochs max_steps learning_rate weight_decay warmup_ratio lr_scheduler_type
        max_grad_norm seed gradient_checkpointing early_stopping_patience metric_for_best_model global_batch_size
        per_device_batch_size eval_every dropout"""
    assert sorted(set(contract.split()) - set(ALL_NAMES)) == []


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda path: path.name)
def test_every_shipped_settings_file_parses(path: Path) -> None:
    settings = parse(tasks()[path.name.split("_")[0]], [str(path)])
    assert settings.model.model_name_or_path
    assert settings.data.train_file or settings.data.dataset_name


def test_other_trainers_names_lead_to_settings_that_exist() -> None:
    assert set(_OTHER_NAMES.values()) <= set(ALL_NAMES)
    assert "(did you mean per_device_batch_size?)" in fault_of(
        ["--per_device_train_batch_size", "8"]
    )
