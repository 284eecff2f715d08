"""The private names of docs/compatibility.md are in the installed packages; the error for a missing one names it."""

import importlib.metadata
import importlib.util
import re
import types
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY
from tests.faults import refusal
from toolkit.utils.compat import TESTED, require

# module (not imported) -> names that its source must contain
NAMES = {
    "accelerate.commands.launch": ("_validate_launch_command",),
    "torch._dynamo.exc": ("FailOnRecompileLimitHit", "TorchDynamoException"),
    "torch._functorch.config": ("force_non_lazy_backward_lowering", "donated_buffer"),
    "torch._inductor.choices": ("get_flex_attention_bwd_configs",),
    "torch._inductor.virtualized": ("set_choices_handler",),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.amp.grad_scaler": ("_step_supports_amp_scaling",),
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.runtime.zero.stage_1_and_2": (
        "single_partition_of_fp32_groups", "round_robin_bit16_groups", "round_robin_bit16_offsets",
        "real_dp_process_group", "update_lp_params"),
    "deepspeed.runtime.zero.stage3": (
        "fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat", "fp16_partitioned_groups",
        "fp16_groups", "grad_position", "get_param_id", "checkpoint_event_prologue",
        "checkpoint_event_epilogue"),
    "deepspeed.runtime.zero.partition_parameters": (
        "ds_tensor", "ds_numel", "ds_shape", "ds_process_group"),
    "deepspeed.runtime.fp16.loss_scaler": (
        "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"),
    "transformers.integrations.deepspeed": ("_hf_deepspeed_config_weak_ref",),
    "transformers.utils.output_capturing": ("_CAN_RECORD_REGISTRY", "_can_record_outputs"),
    "transformers.models.big_bird.modeling_big_bird": (
        "BigBirdModel", "BigBirdAttention", "_bigbird_block_rand_mask",
        "_bigbird_block_rand_mask_with_head", "_get_rand_attn_plan"),
    "transformers.models.bert.modeling_bert": (
        "BertForSequenceClassification",),
    "datasets.arrow_dataset": ("_fingerprint",),
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES)
def test_installed_packages_have_the_private_names(module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} is gone"
    source = Path(str(spec.origin)).read_text(encoding="utf-8")
    assert [name for name in NAMES[module] if not re.search(rf"\b{name}\b", source)] == []


def test_torch_has_the_compiled_private_names() -> None:
    for owner, name in ((torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"),
                        (torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward")):  # fmt: skip
        assert require(owner, name, "torch") is not None


@pytest.mark.parametrize("page", ["compatibility.md", "compatibility.zh.md"])
def test_both_pages_list_every_name(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    assert [
        name for names in NAMES.values() for name in names if not re.search(rf"[`.]{name}`", text)
    ] == []


def test_require() -> None:
    assert require(torch.distributed, "distributed_c10d._world", "torch") is not None
    gone = types.SimpleNamespace(__name__="deepspeed.comm.torch")
    parts = [f"deepspeed {importlib.metadata.version('deepspeed')} has no deepspeed.comm.torch.build_shm_op",
             f"pip install 'deepspeed=={TESTED['deepspeed']}'"]  # fmt: skip
    refusal(require, gone, "build_shm_op", "deepspeed", says=parts)
