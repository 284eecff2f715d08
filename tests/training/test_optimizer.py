"""toolkit/training/optimizer.py and prepare.py: parameter groups, optimizers, the config of each strategy."""

import copy
import functools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import DynamoBackend
from torch.optim.lr_scheduler import StepLR
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.faults import refusal
from tests.models.test_classifier import FAMILIES, SIZES
from tests.splits import of_lengths
from toolkit.checkpoint.state import LiveState
from toolkit.config import ModelSettings, TrainingSettings
from toolkit.data.labels import Labels
from toolkit.models.classifier import load_classifier
from toolkit.models.layers import freeze_layers
from toolkit.training import optimizer as module
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.optimizer import (
    Lion,
    make_optimizer,
    make_scheduler,
    parameter_groups,
)
from toolkit.training.prepare import align_strategy, explain_config_errors
from toolkit.training.steps import make_schedule


def tiny(model_type: str) -> torch.nn.Module:
    sizes = FAMILIES.get(model_type, SIZES)
    config = AutoConfig.for_model(model_type, max_position_embeddings=40, num_labels=3, **sizes)
    return AutoModelForSequenceClassification.from_config(config)


def groups_of(
    groups: list[dict[str, Any]], model: torch.nn.Module, key: str = "weight_decay"
) -> dict[str, float]:
    """Parameter name -> its decay, or another value of its group; fails for a parameter in two groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, float] = {}
    for group in groups:
        for parameter in group["params"]:
            assert names[id(parameter)] not in values
            values[names[id(parameter)]] = group[key]
    return values


@pytest.mark.parametrize("model_type", FAMILIES)
def test_groups_of_every_family(model_type: str) -> None:
    """Vectors are biases and norms. Sharded parameters have other shapes: the groups depend on names only."""
    model = tiny(model_type)
    expected = {
        name: 0.1 if parameter.ndim > 1 else 0.0 for name, parameter in model.named_parameters()
    }
    assert groups_of(parameter_groups(model, 0.1), model) == expected
    for parameter in model.parameters():
        parameter.data = torch.zeros(0)
    assert groups_of(parameter_groups(model, 0.1), model) == expected


def test_norms_are_recognized_by_name_and_frozen_parameters_left_out() -> None:
    names = ("norm", "q_norm", "attn_norm", "final_layernorm", "input_layer_norm", "rmsnorm")
    model = torch.nn.ModuleDict(
        {name: torch.nn.RMSNorm(4) for name in names} | {"enormous": torch.nn.Linear(4, 4)}
    )
    decays = groups_of(parameter_groups(model, 0.1), model)
    assert {name for name, decay in decays.items() if decay} == {"enormous.weight"}
    model = tiny("bert")
    model.base_model.requires_grad_(False)  # type: ignore[operator, union-attr]
    decays = groups_of(parameter_groups(model, 0.1), model)
    assert decays == {"classifier.weight": 0.1, "classifier.bias": 0.0}


@pytest.mark.parametrize("model_type", [*FAMILIES, "big_bird"])
def test_layerwise_lr_decay(model_type: str) -> None:
    model = tiny(model_type)
    groups = parameter_groups(model, 0.1, learning_rate=1.0, layer_decay=0.5)
    rates = groups_of(groups, model, "lr")
    layers = 1 if model_type == "albert" else 2  # one layer, used twice
    for name in dict(model.named_parameters()):
        if "embed" in name:
            expected = 0.5 ** (layers + 1)
        elif layer := re.search(r"layers?\.(\d)|layer_groups", name):
            expected = 0.5 if not layer[1] or layer[1] == "1" else 0.25
        else:
            expected = 1.0
        assert rates[name] == expected, name
    assert groups[0]["lr"] == 1.0  # the rate that a run logs
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}


@pytest.mark.parametrize(
    ("options", "setting"),
    [({"layer_decay": 0.9}, "--layerwise_lr_decay 0.9"), ({"gradual": True}, "--unfreeze_every"),
     ({"muon": True}, "--optimizer muon")],
)  # fmt: skip
def test_a_model_without_layers(options: dict[str, Any], setting: str) -> None:
    refusal(
        parameter_groups,
        torch.nn.Linear(2, 2),
        0.1,
        1.0,
        **options,
        says=[setting, "no list of layers"],
    )


UNFREEZING: dict[str, Any] = {"learning_rate": 0.5, "unfreeze_every": 3, "warmup_steps": 2}


@pytest.mark.parametrize("decay", [None, 0.5])
@pytest.mark.parametrize("resumed_at", [0, 3, 5])
def test_layers_are_unfrozen_from_the_head_down(decay: float | None, resumed_at: int) -> None:
    """Each with the learning rate that it has at that step without `unfreeze_every`; also in a resumed run."""
    model = tiny("bert")
    settings = TrainingSettings(**UNFREEZING, layerwise_lr_decay=decay)
    plain = TrainingSettings(**UNFREEZING | {"unfreeze_every": None}, layerwise_lr_decay=decay)
    optimizers = [make_optimizer(model, each) for each in (settings, plain)]
    refusal(module.custom_scheduler, optimizers[0], StepLR, says=["--unfreeze_every"])
    gradual, usual = (
        make_scheduler(*pair, 14) for pair in zip(optimizers, (settings, plain), strict=True)
    )
    module.set_schedule(gradual, resumed_at)
    module.set_schedule(usual, resumed_at)
    for step in range(resumed_at, 14):
        rates, expected = (groups_of(each.param_groups, model, "lr") for each in optimizers)
        for name, rate in rates.items():
            turn = (
                3
                if "embeddings" in name
                else 2
                if "layer.0" in name
                else 1
                if "layer.1" in name
                else 0
            )
            assert rate == (expected[name] if step >= 3 * turn else 0), (name, step)
        assert gradual.get_last_lr()[0] == usual.get_last_lr()[0]  # a run logs the head's
        for scheduler in (gradual, usual):
            scheduler.scheduler.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "lion"}, {"optimizer": "sgd", "optimizer_args": "momentum=0.9"}, {"optimizer": "muon"},
     {"optimizer": "adafactor"}, {"optimizer": "torch.optim.RMSprop"}],
)  # fmt: skip
def test_a_frozen_layer_does_not_change(options: dict[str, Any]) -> None:
    """Not even by decay and momentum; its moments are updated from the first step on."""
    model, settings = tiny("bert"), TrainingSettings(**UNFREEZING, weight_decay=0.3, **options)
    optimizer = make_optimizer(model, settings)
    scheduler = make_scheduler(optimizer, settings, 20)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        scheduler.scheduler.step()
    unchanged = {
        name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])
    }
    assert unchanged == {name for name in before if "layer.0" in name or "embeddings" in name}
    assert len(optimizer.state) == len(before)


def test_unfreezing_with_frozen_layers_and_with_lora(tiny_model: Path) -> None:
    model = tiny("bert")
    freeze_layers(model, 1, "tiny")
    turns = {
        group[module.DISTANCE]
        for group in make_optimizer(model, TrainingSettings(**UNFREEZING)).param_groups
    }
    assert turns == {0, 1}
    settings = ModelSettings(model_name_or_path=str(tiny_model), lora_r=2)
    adapted = load_classifier(
        settings, Labels("single_label_classification", ("a", "b"), ("label",)), 1
    )
    turn_of = groups_of(
        make_optimizer(adapted, TrainingSettings(**UNFREEZING)).param_groups,
        adapted,
        module.DISTANCE,
    )
    assert turn_of == {
        name: 2 if "layer.0" in name else 1 if "layer.1" in name else 0 for name in turn_of
    }
    assert set(turn_of.values()) == {0, 1, 2}


def test_muon_trains_the_matrices_of_layers() -> None:
    model, settings = (
        tiny("bert"),
        TrainingSettings(learning_rate=0.25, weight_decay=0.1, optimizer="muon"),
    )
    optimizer = make_optimizer(model, settings)
    hidden = groups_of(optimizer.param_groups, model, module.HIDDEN)
    assert hidden == {
        name: ".layer." in name and each.ndim == 2 for name, each in model.named_parameters()
    }
    copies = {
        key: torch.nn.Parameter(each.detach().clone())
        for key, each in ((id(e), e) for e in model.parameters())
    }
    others = [
        {**group, "params": [copies[id(each)] for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    oracles = [
        torch.optim.Muon(
            [group for group in others if group[module.HIDDEN]], adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([group for group in others if not group[module.HIDDEN]]),
    ]
    for step in range(3):
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
            copies[id(parameter)].grad = parameter.grad.clone()
        for each in (optimizer, *oracles):
            each.step()
    assert all(torch.equal(parameter, copies[id(parameter)]) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({}, torch.optim.AdamW, {"fused": True}),
        (
            {"optimizer_args": "betas=(0.8,0.95), eps=1e-6"},
            torch.optim.AdamW,
            {"betas": (0.8, 0.95), "eps": 1e-6},
        ),
        ({"optimizer_args": "foreach=True"}, torch.optim.AdamW, {"foreach": True, "fused": False}),
        (
            {"optimizer": "SGD", "optimizer_args": "momentum=0.9,nesterov=True"},
            torch.optim.SGD,
            {"nesterov": True},
        ),
        ({"optimizer": "lion"}, Lion, {"betas": (0.9, 0.99)}),
        ({"optimizer": "adafactor"}, torch.optim.Adafactor, {}),
        ({"optimizer": "torch.optim.RMSprop"}, torch.optim.RMSprop, {}),
    ],
)
def test_optimizers_by_name(options: dict[str, Any], kind: type, expected: dict[str, Any]) -> None:
    optimizer = make_optimizer(
        tiny("bert"), TrainingSettings(learning_rate=0.25, weight_decay=0.1, **options)
    )
    assert type(optimizer) is kind
    assert optimizer.defaults["lr"] == 0.25
    assert {name: optimizer.defaults[name] for name in expected} == expected
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": "adamm"},
            r"--optimizer adamm .*adamw\?.* adamw, adafactor, lion, muon, sgd",
        ),
        ({"optimizer": "torch.optim.Nothing"}, "cannot be imported"),
        ({"optimizer": "no.such.Thing"}, "cannot be imported: No module named 'no'"),
        ({"optimizer": "torch.nn.Linear"}, "is not a torch.optim.Optimizer"),
        (
            {"optimizer": "sgd", "optimizer_args": "momentun=0.9"},
            "momentun'.*; SGD takes momentum, dampening",
        ),
        ({"optimizer": "torch.optim.Muon"}, "only supports 2D parameters.*--optimizer muon"),
        ({"optimizer": "torch.optim.LBFGS"}, "--optimizer torch.optim.LBFGS"),
        ({"optimizer_args": "lr=1e-3"}, "--learning_rate"),
        ({"optimizer_args": "fused=True,foreach=True"}, "--optimizer_args fused=True"),
        ({"optimizer_args": "eps=f(1)"}, "write momentum=0.9"),
        ({"optimizer_args": "0.9"}, "each argument needs a name"),
        ({"optimizer_args": "eps=1)("}, "write momentum=0.9"),
        ({"optimizer_args": "**{}"}, "write momentum=0.9"),
    ],
)
def test_an_optimizer_that_cannot_be_made(options: dict[str, Any], message: str) -> None:
    refusal(make_optimizer, tiny("bert"), TrainingSettings(**options), match=message)


def test_lion_is_its_papers_algorithm() -> None:
    """Algorithm 2 of Chen et al., 2023, in numpy."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([weight], lr=0.1, weight_decay=0.5)
    expected, momentum = np.array([1.0, -2.0]), np.zeros(2)
    for gradient in ([0.3, -0.1], [-2.0, 0.0], [0.5, 0.5]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        direction = np.sign(0.9 * momentum + 0.1 * np.array(gradient))
        expected = expected - 0.1 * (direction + 0.5 * expected)
        momentum = 0.99 * momentum + 0.01 * np.array(gradient)
    assert weight.detach().numpy() == pytest.approx(expected)


def accelerator_with(
    config: Any = None, processes: int = 2, stage: int = 2, is_fsdp2: bool = False
) -> Any:
    """The attributes of an accelerator that are read before it prepares a model; with a DeepSpeed config or without."""
    plugin = None if config is None else SimpleNamespace(deepspeed_config=config, zero_stage=stage)
    state = SimpleNamespace(
        deepspeed_plugin=plugin, dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO)
    )
    return SimpleNamespace(state=state, num_processes=processes, gradient_accumulation_steps=1, is_fsdp2=is_fsdp2,
                           ddp_handler=None, device=torch.device("cpu"), is_main_process=True, scaler=None,
                           mixed_precision="no")  # fmt: skip


AUTO: dict[str, Any] = {"gradient_clipping": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
                        "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}  # fmt: skip
SETTINGS = TrainingSettings(global_batch_size=32, per_device_batch_size=8, max_grad_norm=0.5)


class Small(torch.nn.Sequential):
    config = SimpleNamespace(hidden_size=8)

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))


def align(
    accelerator: Any,
    settings: TrainingSettings = SETTINGS,
    model: Any = None,
    optimizer: Any = None,
) -> None:
    schedule = make_schedule(settings, of_lengths(np.full(100, 8)), accelerator.num_processes)
    model = model or Small()
    optimizer = optimizer or torch.optim.SGD(parameter_groups(model, 0.1), lr=0.1)
    align_strategy(accelerator, model, optimizer, settings, schedule)


@pytest.mark.parametrize(
    ("norm", "broadcast"), [(torch.nn.BatchNorm1d, True), (torch.nn.LayerNorm, False)]
)
def test_only_running_means_are_broadcast(norm: Any, broadcast: bool) -> None:
    """Not a BERT's position ids, which are equal in every process."""
    accelerator, model = accelerator_with(None), tiny("bert")
    model.extra = norm(3)
    accelerator.ddp_handler = SimpleNamespace()
    align(accelerator, model=model)
    assert accelerator.ddp_handler.broadcast_buffers == broadcast


def test_tensors_become_contiguous() -> None:
    """A checkpoint views them as one row of elements."""
    model = Small()
    model[0].weight = torch.nn.Parameter(weight := torch.randn(7, 5).T)
    model.register_buffer("table", torch.arange(3.0).expand(4, 3))
    align(accelerator_with(), model=model)
    live = LiveState(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))
    saved = {each.name: each.values.tolist() for each in live.weights()}
    assert saved["0.weight"] == weight.flatten().tolist()
    assert saved["table"] == 4 * [0, 1, 2]
    model.register_buffer("rotation", torch.ones(2, dtype=torch.complex64))
    live = LiveState(model, None, torch.device("cpu"))
    alone = SimpleNamespace(_custom_objects=[])
    run: Any = SimpleNamespace(
        settings=replace(SETTINGS, checkpoint_every=1), live=lambda: live, accelerator=alone
    )
    refusal(Checkpoints.notes, run, match=r"rotation \(torch.complex64\): of a dtype")


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_auto_becomes_the_values_of_the_settings(stage: int | None) -> None:
    config = (
        None
        if stage is None
        else AUTO | {"zero_optimization": {"stage": stage, "offload_optimizer": None}}
    )
    align(accelerator := accelerator_with(config, stage=stage or 0))
    assert accelerator.gradient_accumulation_steps == 2
    gathers = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    assert config is None or config == {
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": 32,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **gathers},
    }


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [
        ("communication_data_type", "fp32", "--half_precision_gradients"),
        ("gradient_clipping", 1.0, "--max_grad_norm 0.5"),
        ("train_batch_size", 64, "--global_batch_size 32"),
        ("train_micro_batch_size_per_gpu", 4, "--per_device_batch_size 8"),
        ("gradient_accumulation_steps", 4, "the settings need 2"),
        ("optimizer", {"type": "AdamW"}, "remove it"),
        ("scheduler", {"type": "WarmupLR"}, "remove it"),
        ("managed_gradient_accumulation", False, "write true"),
        ("gradient_allreduce_op", "sum", 'write "mean"'),
        ("data_types.grad_accum_dtype", "bf16", "remove it"),
        ("checkpoint.writer", {"decoupled": True}, "remove it"),
        ("activation_checkpointing", {"cpu_checkpointing": True}, "--gradient_checkpointing true"),
        ("zero_optimization.compute_grad_norm", False, "write true"),
        ("zero_optimization.offload_optimizer.super_offload", True, "--optimizer"),
        ("zero_optimization.offload_optimizer.device", "nvme", 'write "cpu"'),
    ],
)
def test_a_contradiction_names_both_sides(key: str, value: Any, setting: str) -> None:
    settings, config = replace(SETTINGS, half_precision_gradients=True), copy.deepcopy(AUTO)
    *sections, name = key.split(".")
    functools.reduce(lambda part, section: part.setdefault(section, {}), sections, config)[name] = (
        value
    )
    refusal(align, accelerator_with(config), settings, says=[f'"{key}"', setting])


@pytest.mark.parametrize(
    ("config", "fault"),
    [({"zero_optimization": {"overlap_com": True}}, "overlap_com"),
     ({"zero_optimization": {"reduce_bucket_size": "many"}}, "reduce_bucket_size"), ({"nebula": {}}, "nebula")],
)  # fmt: skip
def test_a_config_that_deepspeed_refuses(
    config: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "mine.json")
    refusal(
        explain_config_errors()(DeepSpeedConfig),
        {"train_batch_size": 1, **config},
        says=["mine.json", fault],
    )


def test_an_optimizer_in_host_memory_is_not_replaced() -> None:
    config: dict[str, Any] = AUTO | {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    }
    align(accelerator_with(config))
    assert (
        config["zero_force_ds_cpu_optimizer"] is False
    )  # otherwise accelerate makes an Adam of this SGD
    config["zero_force_ds_cpu_optimizer"] = True
    refusal(align, accelerator_with(config), says=["zero_force_ds_cpu_optimizer", "SGD"])
    model = Small()
    align(accelerator_with(config), model=model, optimizer=torch.optim.AdamW(model.parameters()))


def test_all_faults_are_reported_and_the_config_does_not_change() -> None:
    config = AUTO | {"gradient_clipping": 1.0, "train_batch_size": 64, "optimizer": {}}
    before, model = dict(config), Small()
    options = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    refusal(
        align,
        accelerator_with(config),
        **options,
        match=r"^3 faults:",
        lines=4,
    )
    assert config == before


def test_configs_and_attentions_with_which_no_run_can_train() -> None:
    config = AUTO | {
        "zero_optimization": {"stage": 0}
    }  # with which DeepSpeed returns no gradient norm
    refusal(align, accelerator_with(config, stage=0), says=["zero_optimization.stage", "ddp.yaml"])
    accelerator, model = accelerator_with(None), tiny("bert")
    model.config._attn_implementation = (
        "flash_attention_2"  # transformers raises in the first forward pass
    )
    refusal(
        align,
        accelerator,
        model=model,
        says=["--attn_implementation flash_attention_2", "--mixed_precision bf16"],
    )
    accelerator.mixed_precision = "bf16"
    align(accelerator, model=model)
    accelerator.device, model.config._attn_implementation = torch.device("cuda"), "flex_attention"
    model.config.attention_probs_dropout_prob = 0.1
    refusal(
        align,
        accelerator,
        model=model,
        says=["--attn_implementation flex_attention", "--dropout 0"],
    )
    accelerator.state.dynamo_plugin.backend = (
        DynamoBackend.INDUCTOR
    )  # renames weights: `_orig_mod.`
    refusal(align, accelerator, says=["dynamo_backend: INDUCTOR", "--torch_compile"])


LAYERS = {"bert": "BertLayer", "roberta": "RobertaLayer", "electra": "ElectraLayer", "albert": "AlbertLayerGroup",
          "deberta-v2": "DebertaV2Layer", "distilbert": "TransformerBlock", "modernbert": "ModernBertEncoderLayer",
          "big_bird": "BigBirdLayer"}  # fmt: skip


@pytest.mark.parametrize("model_type", LAYERS)
def test_fsdp_gathers_layer_by_layer(model_type: str, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator, plugin = (
        accelerator_with(None),
        SimpleNamespace(transformer_cls_names_to_wrap=["BertLayer"]),
    )
    accelerator.is_fsdp2, accelerator.state.fsdp_plugin = True, plugin
    align(accelerator, model=tiny(model_type))
    assert plugin.transformer_cls_names_to_wrap == [LAYERS[model_type]]
    assert ("fsdp_transformer_layer_cls_to_wrap" in capsys.readouterr().err) == (
        model_type != "bert"
    )
