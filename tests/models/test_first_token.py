"""toolkit/models/first_token.py: computing only the first token in the last layer changes no number."""

import copy
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.models.bert import modeling_bert

from tests.jobs_worker import run_named_jobs
from tests.runs import WAYS
from toolkit.config import ModelSettings
from toolkit.models.classifier import load_saved_classifier
from toolkit.models.first_token import read_first_token_only
from toolkit.models.lora import add_lora

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 50,
}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make(family: str, attention: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SMALL, **OFF, num_labels=3, pad_token_id=0)
    return (
        AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)
        .double()
        .train()
    )


def width_of_last(model: Any, encoder: str = "bert", **options: Any) -> int:
    """How many positions (of 9, without `input_ids`) the last layer's feed-forward network computes."""
    dense = model.get_submodule(encoder).encoder.layer[-1].intermediate.dense
    with patch.object(dense, "forward", wraps=dense.forward) as forward:
        model(**{"input_ids": torch.ones(2, 9, dtype=torch.long), **options})
    return int(forward.call_args.args[0].shape[1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "camembert", "electra"])
@pytest.mark.parametrize("kind", ["padded", "unpadded", "recomputed", "lora"])
def test_same_logits_and_gradients(family: str, attention: str, kind: str) -> None:
    model = make(family, attention)
    shortened = copy.deepcopy(model)
    if kind == "recomputed":
        shortened.gradient_checkpointing_enable({"use_reentrant": False})
    assert read_first_token_only(shortened)
    inputs = {
        "input_ids": torch.randint(3, 50, (4, 17), generator=torch.Generator().manual_seed(1))
    }
    if kind == "lora":
        for each in (model, shortened):
            add_lora(each, ModelSettings(lora_r=2, lora_target_modules="all-linear"))
        moved = {
            name: weight + 0.1 * torch.randn_like(weight)
            for name, weight in model.state_dict().items()
        }
        shortened.load_state_dict(moved)
        model.load_state_dict(shortened.state_dict())
    if kind != "unpadded":
        inputs["attention_mask"] = (torch.arange(17) < torch.tensor([[17], [3], [9], [1]])).long()
    logits, expected = shortened(**inputs).logits, model(**inputs).logits
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for outputs in (logits, expected):
        outputs.square().sum().backward()
    for (name, mine), theirs in zip(shortened.named_parameters(), model.parameters(), strict=True):
        if theirs.requires_grad:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_the_last_layer_of_a_new_and_of_a_saved_model_computes_one_position(tmp_path: Path) -> None:
    model = make("bert", "sdpa")
    model.save_pretrained(tmp_path)
    read_first_token_only(model)
    for computes in (model, load_saved_classifier(ModelSettings(model_name_or_path=str(tmp_path)))):
        assert width_of_last(computes) == 1
        computes.bert(input_ids=torch.ones(2, 9, dtype=torch.long))
        assert width_of_last(computes) == 1


class Mean(torch.nn.Module):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states.mean(1)


def watch(model: Any, name: str, register: str) -> None:
    module = model.get_submodule(name)
    getattr(module, register)(lambda *passed: None)


# changes of a BERT after which it computes every position
CHANGES: dict[str, Callable[[Any], Any]] = {
    "config.output_hidden_states": lambda model: setattr(
        model.config, "output_hidden_states", True
    ),
    "config.output_attentions": lambda model: setattr(model.config, "output_attentions", True),
    "hook on the last layer": lambda model: watch(
        model, "bert.encoder.layer.2", "register_forward_hook"
    ),
    "hook before its output": lambda model: watch(
        model, "bert.encoder.layer.2.output", "register_forward_pre_hook"
    ),
    "hook on its gradient": lambda model: watch(
        model, "bert.encoder.layer.2", "register_full_backward_hook"
    ),
    "hook on the encoder": lambda model: watch(model, "bert.encoder", "register_forward_hook"),
    "hook on the base model": lambda model: watch(model, "bert", "register_forward_hook"),
    "hook on the head": lambda model: watch(model, "bert.pooler", "register_forward_pre_hook"),
    "another head": lambda model: setattr(model.bert, "pooler", Mean()),
    "a layer more": lambda model: model.bert.encoder.layer.append(
        copy.deepcopy(model.bert.encoder.layer[0])
    ),
    "the last layer twice": lambda model: model.bert.encoder.layer.append(
        model.bert.encoder.layer[-1]
    ),
    "a layer fewer": lambda model: model.bert.encoder.layer.pop(-1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_position_where_it_may_be_read(change: str) -> None:
    reference = make("bert", "eager")
    model = copy.deepcopy(reference)
    assert read_first_token_only(model)
    for each in (model, reference):
        CHANGES[change](each)
    assert width_of_last(model) == 9
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        model(input_ids=ids)[0], reference(input_ids=ids)[0], rtol=1e-12, atol=1e-12
    )


def test_every_position_where_a_call_returns_it() -> None:
    model = make("roberta", "eager")
    assert read_first_token_only(model)
    for options in (
        {"output_hidden_states": [-1]},
        {"output_hidden_states": True},
        {"output_attentions": True},
    ):
        assert width_of_last(model, "roberta", **options) == 9
        # transformers' hooks remain, inactive
        assert (
            width_of_last(model, "roberta", output_hidden_states=False, output_attentions=None) == 1
        )
    model.classifier = Mean()
    assert width_of_last(model, "roberta") == 9


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_model_in_fsdp2(family: str, one_process: None) -> None:
    """`fully_shard` gives the model a subclass, in a module of torch."""
    model = make(family, "sdpa")
    assert read_first_token_only(model)
    mesh = DeviceMesh("cpu", [0])
    for part in (*model.base_model.encoder.layer, model):
        fully_shard(part, mesh=mesh)
    assert width_of_last(model, family) == 1


def test_copied_pickled_compiled_and_with_lora(tmp_path: Path) -> None:
    model = make("roberta", "sdpa").eval()
    assert read_first_token_only(model)
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids).logits
    torch.save(model, tmp_path / "model.pt")
    for each, width in (
        (copy.deepcopy(model), 1),
        (torch.load(tmp_path / "model.pt", weights_only=False), 9),
    ):
        assert width_of_last(each, "roberta") == width
        torch.testing.assert_close(each(input_ids=ids).logits, expected)
    states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids).logits, expected)
    torch.testing.assert_close(
        compiled(input_ids=ids, output_hidden_states=True).hidden_states[-1], states
    )
    torch._dynamo.reset()
    adapted = add_lora(model, ModelSettings(lora_r=2)).eval()
    assert width_of_last(adapted, "base_model.model.roberta") == 1
    torch.testing.assert_close(
        adapted(input_ids=ids, output_hidden_states=True).hidden_states[-1], states
    )
    assert states.shape == (2, 9, 24)


class Doubled(modeling_bert.BertSelfAttention):
    def forward(self, hidden_states: torch.Tensor, *args: object, **options: object) -> object:
        return super().forward(2 * hidden_states, *args, **options)


def test_an_unknown_layer_or_architecture_is_not_changed() -> None:
    """As after a change in transformers."""
    model = make("bert", "sdpa").eval()
    model.bert.encoder.layer[-1].attention.self.__class__ = Doubled
    ids = torch.arange(3, 20)[None]
    expected = model(input_ids=ids).logits
    with pytest.warns(UserWarning, match="in an unknown way"):
        assert not read_first_token_only(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    config = transformers.DistilBertConfig(
        dim=24, n_layers=1, n_heads=2, hidden_dim=30, vocab_size=50
    )
    assert not read_first_token_only(transformers.DistilBertForSequenceClassification(config))


def main() -> None:
    """recipes/cls.py, which writes the widths of the feed-forward networks in OUTPUT_DIR/widths.json."""
    from recipes import cls

    forward, widths = modeling_bert.BertIntermediate.forward, Counter[str]()

    def count(layer: Any, states: torch.Tensor) -> torch.Tensor:
        widths["one" if states.shape[1] == 1 else "all"] += 1
        return forward(layer, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_bert.BertIntermediate, "forward", count)
        cls.main()
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[-1], "widths.json").write_text(json.dumps(widths))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["single", "ddp x2", "zero3 x2", "fsdp2 x2"])
def test_hooks_of_strategies_do_not_disable_it(
    way: str, tiny_model: Path, reviews: Path, tmp_path: Path
) -> None:
    job = ["tests.models.test_first_token", "--model_name_or_path", tiny_model, "--train_file", reviews, "--max_steps",
           2, "--report_to", "none", "--per_device_batch_size", 8]  # fmt: skip
    jobs = {
        "plain": job,
        "recomputed": [*job, "--gradient_checkpointing"],
        "lora": [*job, "--lora_r", 2],
    }
    layers = AutoConfig.from_pretrained(tiny_model).num_hidden_layers
    for kind, run in run_named_jobs(tmp_path, WAYS[way], jobs).items():
        widths = json.loads((run / "widths.json").read_text())
        # after two forward passes of loading
        assert widths["all"] == (layers - 1) * widths["one"] + 2 * layers > 2 * layers, kind
