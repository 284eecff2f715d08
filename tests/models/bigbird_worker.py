"""Started by tests/models/test_bigbird_ways.py on two processes: trains a small BigBird and compares the losses
with those of transformers' attention in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import BigBirdConfig, BigBirdForSequenceClassification

from toolkit import launch
from toolkit.models import bigbird
from toolkit.models.classifier import freeze_unused

LENGTHS = (1024, 50, 1100, 1024)  # a short batch would make transformers' own attention full for the rest


def make() -> Any:
    torch.manual_seed(3)
    config = BigBirdConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, sep_token_id=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BigBirdForSequenceClassification(config).train()


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(3, 50, (2, length), generator=generator), "labels": torch.tensor([0, 1])}
        for length in LENGTHS
    ]


def losses(model: Any, optimizer: Any, backward: Any, device: Any) -> list[float]:
    found = []
    for inputs in batches():
        model_of_batch = model(inputs["input_ids"].to(device), labels=inputs["labels"].to(device))
        backward(model_of_batch.loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(model_of_batch.loss.item())
    return found


def reference_losses() -> list[float]:
    """transformers' attention, set back to sparse after each short batch."""
    model = make()
    model.register_forward_pre_hook(lambda *_: model.bert.set_attention_type("block_sparse"))
    return losses(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.Tensor.backward, "cpu")


def main() -> None:
    expected = reference_losses()
    accelerator = launch.make_accelerator("no")
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = 0.0
    model = bigbird.install(copy.deepcopy(make()))
    freeze_unused(model)
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(used, lr=0.1))
    found = losses(model, optimizer, accelerator.backward, accelerator.device)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    print("the same losses", flush=True)


if __name__ == "__main__":
    launch.run(main)
