"""toolkit/training/{optimizer,prepare,schedule}.py: parameter groups, optimizers, the config of
each strategy, steps and evaluations; `--torch_compile`: equal numbers, refused where useless."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from safetensors.torch import load_file
from transformers import AutoConfig, BertConfig, BertModel, BigBirdConfig, BigBirdModel
from transformers import AutoModelForSequenceClassification as Classifier

from tests.faults import refusal
from tests.matrix import REVIEWS, runs
from tests.models.test_classifier import FAMILIES, SIZES
from tests.runs import losses_of
from tests.splits import of_lengths
from toolkit.config import TrainingSettings
from toolkit.training.fsdp import _choose_units
from toolkit.training.optimizer import make_optimizer, make_scheduler, parameter_groups
from toolkit.training.prepare import compile_layers
from toolkit.training.schedule import make_schedule, max_micro_batches
from toolkit.training.steps import Step
from toolkit.training.zero import _refuse_unusable, _set_config


def tiny(model_type: str) -> Any:
    sizes = FAMILIES.get(model_type, SIZES)
    config = AutoConfig.for_model(model_type, max_position_embeddings=40, num_labels=3, **sizes)
    return Classifier.from_config(config)


def by_name(model: torch.nn.Module, key: str = "weight_decay", **options: Any) -> dict[str, float]:
    """Parameter name -> a value of its group; fails for a parameter in two groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, float] = {}
    for group in parameter_groups(model, 0.1, **options):
        for parameter in group["params"]:
            assert names[id(parameter)] not in values
            values[names[id(parameter)]] = group[key]
    return values


@pytest.mark.parametrize("model_type", [*FAMILIES, "big_bird"])
def test_groups_of_every_family(model_type: str) -> None:
    """Vectors are biases and norms. Sharded parameters have other shapes: the groups depend on names only."""
    model = tiny(model_type)
    expected = {name: 0.1 * (each.ndim > 1) for name, each in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = torch.zeros(0)
    assert by_name(model) == expected
    layers = 1 if model_type == "albert" else 2  # one layer, used twice
    for name, rate in by_name(model, "lr", learning_rate=1.0, layer_decay=0.5).items():
        distance = 0
        if "embed" in name:
            distance = layers + 1
        elif layer := re.search(r"layers?\.(\d)|layer_groups", name):
            distance = layers - int(layer[1] or 0)
        assert rate == 0.5**distance, name
    groups = parameter_groups(model, 0.1, learning_rate=1.0, layer_decay=0.5)
    assert groups[0]["lr"] == 1.0  # the rate that a run logs


def test_norms_are_recognized_by_name_and_frozen_parameters_left_out() -> None:
    names = ("norm", "q_norm", "attn_norm", "final_layernorm", "input_layer_norm", "rmsnorm")
    parts: dict[str, torch.nn.Module] = {name: torch.nn.RMSNorm(4) for name in names}
    decays = by_name(torch.nn.ModuleDict({**parts, "enormous": torch.nn.Linear(4, 4)}))
    assert {name for name, decay in decays.items() if decay} == {"enormous.weight"}
    model = tiny("bert")
    model.base_model.requires_grad_(False)
    assert by_name(model) == {"classifier.weight": 0.1, "classifier.bias": 0.0}


# others, and their arguments: tests/test_sameness.py
def test_an_optimizer_that_cannot_be_made() -> None:
    for options, message in (
        ({"optimizer": "adamm"}, r"adamw\?.* adamw, adafactor, sgd"),
        ({"optimizer_args": "lr=1e-3"}, "--learning_rate"),
        ({"optimizer_args": "eps=f(1)"}, "write momentum=0.9"),
        ({"optimizer_args": "0.9"}, "each argument needs a name"),
    ):
        refusal(make_optimizer, tiny("bert"), TrainingSettings(**options), match=message)


def accelerator_with(config: Any = None, stage: int = 2, is_fsdp2: bool = False) -> Any:
    """The attributes of an accelerator of two processes that are read before it prepares a model; with a DeepSpeed
    config or without."""
    plugin = None
    if config is not None:
        plugin = SimpleNamespace(deepspeed_config=config, zero_stage=stage)
    dynamo = SimpleNamespace(backend=DynamoBackend.NO)
    state = SimpleNamespace(deepspeed_plugin=plugin, dynamo_plugin=dynamo)
    return SimpleNamespace(state=state, num_processes=2, gradient_accumulation_steps=2, is_fsdp2=is_fsdp2,
                           ddp_handler=None, device=torch.device("cpu"), is_main_process=True, scaler=None,
                           mixed_precision="no")  # fmt: skip


EXPECTED = {
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 8,
    "train_batch_size": 32,
}
AUTO: dict[str, Any] = {**dict.fromkeys(EXPECTED, "auto"), "zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("value", ["auto", 64])
def test_the_settings_win_over_the_deepspeed_config(value: Any, capsys: Any) -> None:
    """In one line; a setting that is auto is not named."""
    settings = TrainingSettings(global_batch_size=32, per_device_batch_size=8, max_grad_norm=0.5)
    config = {**AUTO, "train_batch_size": value, "gradient_clipping": 1.0}
    _set_config(accelerator_with(config), settings, config)
    assert config.items() >= EXPECTED.items()
    (line,) = capsys.readouterr().err.splitlines()
    assert "gradient_clipping" in line
    assert ("train_batch_size" in line) == (value == 64)


def test_a_deepspeed_config_that_no_run_can_use() -> None:
    for config in (
        {"optimizer": {"type": "AdamW"}},
        {"scheduler": {"type": "WarmupLR"}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
        {"zero_optimization": {"stage": 0}},
    ):
        refusal(_refuse_unusable, {**AUTO, **config}, says=["the DeepSpeed config"])


LAYERS = {"bert": "BertLayer", "roberta": "RobertaLayer", "electra": "ElectraLayer", "albert": "AlbertLayerGroup",
          "deberta-v2": "DebertaV2Layer", "distilbert": "TransformerBlock", "modernbert": "ModernBertEncoderLayer",
          "big_bird": "BigBirdLayer"}  # fmt: skip


@pytest.mark.parametrize("model_type", LAYERS)
def test_fsdp_gathers_layer_by_layer(model_type: str) -> None:
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=["BertEmbeddings"])
    _choose_units(plugin, tiny(model_type))
    assert plugin.transformer_cls_names_to_wrap == [LAYERS[model_type]]


def test_steps_and_evaluations() -> None:
    """Of a hundred samples; the last step is evaluated."""
    for options, steps_per_epoch, evaluations in (
        ({}, 4, [4, 8, 12]),
        ({"num_train_epochs": 0.3}, 4, [2]),
        ({"max_steps": 7, "num_train_epochs": 1}, 4, [4, 7]),
        ({"global_batch_size": 1000}, 1, [1, 2, 3]),
        ({"eval_every": 5}, 4, [5, 10, 12]),
    ):
        schedule = make_schedule(TrainingSettings(**options), of_lengths(np.full(100, 8)))
        assert (schedule.steps_per_epoch, schedule.total_steps) == (
            steps_per_epoch,
            evaluations[-1],
        )
        run: Any = SimpleNamespace(schedule=schedule)
        numbers = range(1, schedule.total_steps + 1)
        assert [n for n in numbers if Step(run, n, np.zeros(0), [], 1).evaluates] == evaluations


def test_a_text_longer_than_any_batch() -> None:
    train = of_lengths(np.array([8, 100, 30]))
    says = ("--max_tokens_per_batch 99", "100 tokens", "--max_length 99")
    refusal(max_micro_batches, TrainingSettings(max_tokens_per_batch=99), train, 1, says=says)
    max_micro_batches(TrainingSettings(max_tokens_per_batch=100), train, 1)


def test_a_scheduler_is_one_of_the_prepared_optimizer() -> None:
    optimizer, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2))
    make = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=9)
    own = make(optimizer)
    prepared = Accelerator(cpu=True).prepare(optimizer)
    assert make_scheduler(prepared, TrainingSettings(), 9, own).scheduler is own
    for wrong in (make(other), make):
        says = ["run.prepare(model, optimizer, scheduler)"]
        refusal(make_scheduler, prepared, TrainingSettings(), 9, wrong, says=says)


WORDS = [*REVIEWS, *"--learning_rate 3e-3 --lr_scheduler_type constant --eval_every 4".split()]
WORDS += ["--per_device_batch_size", 5, "--global_batch_size", 22]


def test_unsuitable_models_and_strategies() -> None:
    bert, sparse = BertModel(BertConfig(**SIZES)), BigBirdModel(BigBirdConfig(**SIZES))
    writer = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    zero3 = accelerator_with({}, stage=3)
    refusal(compile_layers, zero3, bert, says=["--torch_compile", "ZeRO-3 gathers each weight"])
    refusal(compile_layers, accelerator_with(), sparse, says=["BigBird"])
    refusal(compile_layers, accelerator_with(), writer, says=["grows with each token of a title"])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["single", "ddp x2", "zero2 x2", "fsdp2 x2"])
def test_runs_resume_with_and_without_it(way: str) -> None:
    def run(name: str, *more: Any) -> Path:
        return runs(way).run(f"compile {name}", "recipes.cls", [*WORDS, *more])

    on = ["--torch_compile"]
    whole = run("no", "--max_steps", 8)
    for name, first, second in (("on", [], on), ("off", on, [])):
        half = run(f"half {name}", *first, "--max_steps", 4, "--checkpoint_every", 4)
        last = half / "checkpoints" / "last"
        resumed = run(f"resumed {name}", *second, "--max_steps", 8, "--resume", last)
        assert losses_of(half) + losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-5)
        weights = [load_file(each / "model" / "model.safetensors") for each in (resumed, whole)]
        assert weights[0].keys() == weights[1].keys()
    assert "torch_compile: on a CPU" in runs(way).log("compile resumed on")
