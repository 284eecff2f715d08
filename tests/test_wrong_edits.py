"""What an edited recipe gets wrong is an error, or `toolkit verify` sees it; what trains the same is allowed.

Each edit of recipes/cls.py has the answer that it must get under its strategy:

    error              the checks of the loop, or torch, accelerate or DeepSpeed, end the run
    FIGURE             the figure by which `toolkit verify` sees it, in one of its runs: with other micro-batches, under
                       the strategy, resumed, or in fp16
    same               it trains as in one process to 1e-6
    hang               `toolkit verify` says so, after its time limit

Those that train the same and are wrong are in docs/your-own-recipe.md, What no check finds.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests import inputs
from tests.matrix import TINY, JobError, runs
from tests.runs import ROOT
from toolkit.features.verify.numbers import EVALUATION, LOSS, NORM, differences, numbers_of

IMPORT = "import toolkit\n"
OPTIMIZER = "    optimizer = toolkit.make_optimizer(model, training)\n"
PREPARE = "    model, optimizer, scheduler = run.prepare(model, optimizer)"
OBJECTIVE = "    objective = toolkit.make_objective("
EVALUATED = "            logits = model(**batch.inputs).logits.float()"
GATHER = "accelerator.gather_for_metrics((batch.ids, logits, losses))"
STEPS = "    for step in run.steps(evaluate):"
BATCHES = "        for batch in step.micro_batches(model):"
LOGITS = "            logits = model(**batch.inputs).logits  # (B, C)"
LOSSES = "            losses = objective(batch, logits)"
BACKWARD = "            accelerator.backward(step.mean(losses))"
CLIP = (
    "        step.grad_norm = accelerator.clip_grad_norm_(model.parameters(), training.clip_norm)\n"
)
STEP = "        optimizer.step()\n"
SCHEDULE = "        scheduler.step()\n"
ZERO = "        optimizer.zero_grad()\n"
SGD = "torch.optim.SGD(model.parameters(), lr=0.1)"
HEAD = "toolkit.unwrapped(model).classifier"
# a wrong edit -> (way to start, text of the recipe, what takes its place, the answer)
EDITS: dict[str, tuple[str, str, str]] = {
    "a parameter of the optimizer alone": (
        "single",
        OPTIMIZER,
        f"{OPTIMIZER}    optimizer.add_param_group(dict(params=[torch.nn.Parameter(torch.ones(3))]))\n",
    ),
    "a scheduler that is not stepped": ("single", SCHEDULE, ""),
    **{
        f"an optimizer that is not stepped: {way}": (way, STEP, "")
        for way in ("single", "zero2 x2")
    },
    "clipping after the step": ("single", f"{CLIP}{STEP}", f"{STEP}{CLIP}"),
    "learning rates between backward and step": (
        "zero2 x2",
        CLIP,
        f"        optimizer.param_groups[0]['lr'] = 0.1\n{CLIP}",
    ),
    "a second optimizer made before FSDP2": (
        "fsdp2 x2",
        PREPARE,
        f"    other, clip = {SGD}, accelerator.clip_grad_norm_\n"
        f"    accelerator.clip_grad_norm_ = lambda *values: (other.step(), clip(*values))[1]\n{PREPARE}",
    ),
    "a second optimizer that no checkpoint has": (
        "single",
        STEPS,
        f"    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n{STEPS}",
    ),
    "a second optimizer of shards": (
        "fsdp2 x2",
        STEPS,
        f"    accelerator.register_for_checkpointing({SGD})\n{STEPS}",
    ),
    "a hook that clips gradients": (
        "single",
        OPTIMIZER,
        f"    model.classifier.weight.register_hook(lambda each: each.clamp(-1e-3, 1e-3))\n{OPTIMIZER}",
    ),
    **{
        f"parameters used in some micro-batches: {way}": (
            f"{way} x2",
            OPTIMIZER,
            "    model.scale = Scale()\n" + OPTIMIZER,
        )
        for way in ("ddp", "zero2", "fsdp2")
    },
    **{
        f"a hook after prepare that clips: {way}": (
            way,
            OBJECTIVE,
            f"    next(model.parameters()).register_hook(lambda each: each.clamp(-1e-4, 1e-4))\n{OBJECTIVE}",
        )
        for way in ("zero3 x2", "fsdp2 x2")
    },
    "a hook of activations that clips": (
        "zero2 x2",
        BACKWARD,
        f"            logits.register_hook(lambda each: each.clamp(-1e-3, 1e-3))\n{BACKWARD}",
    ),
    "reentrant checkpoints": (
        "zero2 x2",
        OPTIMIZER,
        "    model.gradient_checkpointing_enable({'use_reentrant': True})\n"
        f"    model.enable_input_require_grads()\n{OPTIMIZER}",
    ),
    **{
        f"an evaluation in 16 bits: {way}": (
            way,
            EVALUATED,
            f"            model.bfloat16()\n{EVALUATED}",
        )
        for way in ("single", "fsdp2 x2")
    },
    "an evaluation with dropout": ("single", EVALUATED, f"            model.train()\n{EVALUATED}"),
    **{
        f"weights saved by hand: {way}": (
            f"{way} x2",
            ZERO,
            f"{ZERO}        toolkit.unwrapped(model).state_dict()\n",
        )
        for way in ("zero3", "fsdp2")
    },
    "two copies of the model": (
        "fsdp2 x2",
        ZERO,
        f"{ZERO}        __import__('copy').deepcopy(model)\n",
    ),
    **{
        f"a model that is prepared twice: {way}": (
            f"{way} x2",
            OPTIMIZER,
            f"    model = accelerator.prepare(model)\n{OPTIMIZER}",
        )
        for way in ("ddp", "zero3")
    },
    "weights loaded after a step": (
        "zero2 x2",
        ZERO,
        f"{ZERO}        {HEAD}.load_state_dict({HEAD}.state_dict())\n",
    ),
    "other weights loaded after a step": (
        "zero2 x2",
        ZERO,
        f"{ZERO}        {HEAD}.load_state_dict({{k: v / 2 for k, v in {HEAD}.state_dict().items()}})\n",
    ),
    "outputs that are not gathered": ("ddp x2", GATHER, "(batch.ids, logits, losses)"),
    "outputs without ids": ("single", "(batch.ids, logits, losses)", "(logits, losses)"),
    "outputs without ids that would hang": (
        "ddp x2",
        "(batch.ids, logits, losses)",
        "(logits, losses)",
    ),
    "two steps in one": ("single", STEP, STEP * 2),
    "hooks of accumulated gradients": (
        "single",
        OPTIMIZER,
        "    model.classifier.weight.register_post_accumulate_grad_hook(lambda each: each.grad.mul_(0.9))\n"
        f"{OPTIMIZER}",
    ),
    "a compiled part": (
        "single",
        OPTIMIZER,
        f"    model.bert.encoder = torch.compile(model.bert.encoder)\n{OPTIMIZER}",
    ),
    "tokens that no text has": (
        "single",
        OPTIMIZER,
        f"    run.tokenizer.add_tokens(['zzzz'])\n{OPTIMIZER}",
    ),
    "a loss without gradients": ("ddp x2", BACKWARD, BACKWARD.replace("losses", "losses.detach()")),
    "weights of another seed in each process": (
        "fsdp2 x2",
        OPTIMIZER,
        f"    torch.nn.init.constant_(model.classifier.weight, accelerator.process_index)\n{OPTIMIZER}",
    ),
    "weights in 16 bits after prepare": ("single", OBJECTIVE, f"    model.bfloat16()\n{OBJECTIVE}"),
    **{
        f"weights set after prepare: {way}": (
            way,
            OBJECTIVE,
            f"    torch.nn.init.zeros_({HEAD}.weight)\n{OBJECTIVE}",
        )
        for way in ("zero2 x2", "zero3 x2")
    },
    "gradients clipped with the loss scale of fp16": (
        "single",
        CLIP,
        f"        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)\n{CLIP}",
    ),
    "an Accelerator that does not see the others": (
        "ddp x2",
        "    accelerator = run.accelerator\n",
        "    accelerator = __import__('accelerate').Accelerator()\n",
    ),
    "a number of a shard after a step": (
        "fsdp2 x2",
        ZERO,
        f"{ZERO}        model.classifier.weight.norm().item()\n",
    ),
    "a number of a shard late": (
        "fsdp2 x2",
        ZERO,
        f"{ZERO}        if step.number == 3:\n            model.classifier.weight.norm().item()\n",
    ),
    "a plain backward in fp16": ("single", BACKWARD, "            step.mean(losses).backward()"),
    "a plain backward": ("zero2 x2", BACKWARD, "            step.mean(losses).backward()"),
    "clipping the scaled gradients of fp16": (
        "single",
        "accelerator.clip_grad_norm_(",
        "torch.nn.utils.clip_grad_norm_(",
    ),
    "clipping a part of the model under DeepSpeed": (
        "zero2 x2",
        "clip_grad_norm_(model.parameters()",
        "clip_grad_norm_(model.classifier.parameters()",
    ),
    "clipping by value under DeepSpeed": (
        "zero2 x2",
        CLIP,
        f"        accelerator.clip_grad_value_(model.parameters(), clip_value=1.0)\n{CLIP}",
    ),
    "a second pass under DeepSpeed": (
        "zero2 x2",
        CLIP,
        f"        next(iter(step.micro_batches(model)))\n{CLIP}",
    ),
    "a hook of a gradient under FSDP2": (
        "fsdp2 x2",
        OPTIMIZER,
        f"    model.classifier.weight.register_hook(lambda each: each * 0)\n{OPTIMIZER}",
    ),
    "gathering values of micro-batches": (
        "ddp x2",
        BACKWARD,
        "            accelerator.gather(logits.argmax(-1)[: 2 + accelerator.process_index * (step.number - 1)])\n"
        f"{BACKWARD}",
    ),
    "a gradient penalty under DeepSpeed": (
        "zero2 x2",
        LOSSES,
        "            losses = objective(batch, logits) + torch.autograd.grad("
        "logits.sum(), model.classifier.weight, create_graph=True)[0].square().sum()\n#",
    ),
    "a part of the model before the model under FSDP2": (
        "fsdp2 x2",
        LOGITS,
        f"            model.get_input_embeddings()(batch.inputs['input_ids'])\n{LOGITS}",
    ),
    "a model that torch compiles before the optimizer": (
        "single",
        OPTIMIZER,
        f"    model = torch.compile(model)\n{OPTIMIZER}",
    ),
    "a model that torch compiles after prepare": (
        "single",
        OBJECTIVE,
        f"    model = torch.compile(model)\n{OBJECTIVE}",
    ),
    "a step without a closure": (
        "single",
        OPTIMIZER,
        "    optimizer = type('Mine', (torch.optim.SGD,), {'step': lambda self: None})("
        "model.parameters(), lr=0.1)\n",
    ),
    "a clipping norm that DeepSpeed ignores": ("zero2 x2", "training.clip_norm", "0.05"),
    "clipping by torch, which DeepSpeed ignores": (
        "zero2 x2",
        "accelerator.clip_grad_norm_",
        "torch.nn.utils.clip_grad_norm_",
    ),
    "noise that differs between processes": (
        "ddp x2",
        CLIP,
        f"        [each.grad.add_(torch.randn_like(each)) for each in model.parameters()]\n{CLIP}",
    ),
    "clipping between two passes in fp16": (
        "single",
        CLIP,
        "        accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"
        f"        next(iter(step.micro_batches(model)))\n{CLIP}",
    ),
    "a second model loaded in shards": (
        "zero3 x2",
        LOSSES,
        "            losses = objective(batch, logits) + __import__('transformers').AutoModel.from_pretrained("
        "settings.model.model_name_or_path)(**batch.inputs).last_hidden_state.sum()\n#",
    ),
    **{
        f"parameters unused: {way}": (
            f"{way} x2",
            OPTIMIZER,
            f"    model.unused = torch.nn.Linear(2, 2)\n{OPTIMIZER}",
        )
        for way in ("ddp", "zero2", "fsdp2")
    },
    "a parameter outside the model under FSDP2": (
        "fsdp2 x2",
        LOSSES,
        "            losses = objective(batch, logits) * torch.nn.Parameter(torch.ones(1))\n#",
    ),
    "an optimizer that was not prepared": (
        "zero2 x2",
        OBJECTIVE,
        f"    optimizer = {SGD}\n{OBJECTIVE}",
    ),
    "requires_grad while training": (
        "ddp x2",
        BATCHES,
        f"        next(model.parameters()).requires_grad_(step.number < 3)\n{BATCHES}",
    ),
    "gradients changed under ZeRO": (
        "zero2 x2",
        CLIP,
        "        [each.grad.mul_(0.5) for each in model.parameters() if each.grad is not None]\n"
        f"{CLIP}",
    ),
    **{
        f"weights {what}: {way}": (f"{way} x2", ZERO, f"{ZERO}        {change}\n")
        for way in ("zero2", "zero3")
        for what, change in (
            ("clamped", f"{HEAD}.weight.data.clamp_(-1e-3, 1e-3)"),
            ("set", f"torch.nn.init.zeros_({HEAD}.weight)"),
        )
    },
    "weights set late under ZeRO": (
        "zero2 x2",
        ZERO,
        f"{ZERO}        if step.number == 3:\n            {HEAD}.weight.data.zero_()\n",
    ),
    "an average of weights under ZeRO-3": (
        "zero3 x2",
        ZERO,
        f"{ZERO}        [each.detach() * 0.1 for each in model.parameters()]\n",
    ),
    "a sharded parameter in the loop": (
        "zero3 x2",
        LOSSES,
        f"            losses = objective(batch, logits) + {HEAD}.bias.sum()\n#",
    ),
    "gradients reset in each micro-batch": (
        "single",
        LOGITS,
        f"            optimizer.zero_grad()\n{LOGITS}",
    ),
    "no zero_grad": ("single", ZERO, ""),
    "a mean over the micro-batch": (
        "single",
        BACKWARD,
        "            accelerator.backward(losses.mean())",
    ),
    "a part of the model": (
        "single",
        LOGITS,
        LOGITS.replace("model(", "model.bert(").replace(".logits", ".last_hidden_state[:, 0, :2]"),
    ),
    "a term added to the mean": (
        "single",
        BACKWARD,
        BACKWARD.replace("(losses)", "(losses) + 1e-3 * model.classifier.weight.square().sum()"),
    ),
    "accelerator.accumulate": (
        "single",
        LOGITS,
        f"            accelerator.accumulate(model).__enter__()\n{LOGITS}",
    ),
    "Adafactor under ZeRO": (
        "zero2 x2",
        OPTIMIZER,
        "    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)\n",
    ),
}
ANSWERS = {
    "error": (
        "a parameter of the optimizer alone",
        "a scheduler that is not stepped",
        "an optimizer that is not stepped: single",
        "an optimizer that is not stepped: zero2 x2",
        "a second optimizer of shards",
        "parameters used in some micro-batches: zero2",
        "parameters used in some micro-batches: fsdp2",
        "two copies of the model",
        "a model that is prepared twice: zero3",
        "outputs that are not gathered",
        "outputs without ids",
        "outputs without ids that would hang",
        "hooks of accumulated gradients",
        "a compiled part",
        "an evaluation in 16 bits: single",
        "an evaluation in 16 bits: fsdp2 x2",
        "an evaluation with dropout",
        "a plain backward",
        "clipping by value under DeepSpeed",
        "a second pass under DeepSpeed",
        "tokens that no text has",
        "a loss without gradients",
        "weights in 16 bits after prepare",
        "gathering values of micro-batches",
        "a gradient penalty under DeepSpeed",
        "a model that torch compiles before the optimizer",
        "a model that torch compiles after prepare",
        "a step without a closure",
        "clipping between two passes in fp16",
        "a second model loaded in shards",
        "parameters unused: ddp",
        "a plain backward in fp16",
        "requires_grad while training",
        "an optimizer that was not prepared",
        "a sharded parameter in the loop",
        "no zero_grad",
        "a mean over the micro-batch",
        "a part of the model",
        "accelerator.accumulate",
        "Adafactor under ZeRO",
    ),
    "fp16: gradient norm": (
        "clipping the scaled gradients of fp16",
        "gradients clipped with the loss scale of fp16",
    ),
    "hang": ("parameters used in some micro-batches: ddp",),
    "same": (
        "clipping after the step",
        "weights saved by hand: zero3",
        "weights saved by hand: fsdp2",
        "a model that is prepared twice: ddp",
        "weights loaded after a step",
        "reentrant checkpoints",
        "weights of another seed in each process",
        "a part of the model before the model under FSDP2",
        "an Accelerator that does not see the others",
        "a number of a shard after a step",
        "parameters unused: zero2",
        "a number of a shard late",
        "parameters unused: fsdp2",
        "a parameter outside the model under FSDP2",
        "an average of weights under ZeRO-3",
    ),
    "with ddp x2: loss": ("noise that differs between processes",),
    "with fsdp2 x2: loss": (
        "a second optimizer made before FSDP2",
        "a hook after prepare that clips: fsdp2 x2",
        "a hook of a gradient under FSDP2",
    ),
    "with other micro-batches: gradient norm": ("a term added to the mean",),
    "with other micro-batches: loss": (
        "a hook that clips gradients",
        "gradients reset in each micro-batch",
    ),
    "with zero2 x2: evaluation": ("weights set: zero2",),
    "with zero2 x2: gradient norm": (
        "clipping a part of the model under DeepSpeed",
        "clipping by torch, which DeepSpeed ignores",
    ),
    "with zero2 x2: loss": (
        "learning rates between backward and step",
        "other weights loaded after a step",
        "a hook of activations that clips",
        "weights set after prepare: zero2 x2",
        "a clipping norm that DeepSpeed ignores",
        "gradients changed under ZeRO",
        "weights clamped: zero2",
        "weights set late under ZeRO",
    ),
    "with zero2: loss": (
        "a second optimizer that no checkpoint has",
        "two steps in one",
    ),
    "with zero3 x2: evaluation": ("weights set: zero3",),
    "with zero3 x2: loss": (
        "a hook after prepare that clips: zero3 x2",
        "weights set after prepare: zero3 x2",
        "weights clamped: zero3",
    ),
}
SIZE = ["--per_device_batch_size", 5]
TOLERANCE = {LOSS: 1e-6, NORM: 1e-5, EVALUATION: 1e-6}
HALF_PRECISION = {LOSS: 0.1, NORM: 0.5}
TABLE = [*TINY, "--train_file", inputs.reviews, "--learning_rate", "5e-3", "--lr_scheduler_type", "constant",
         "--global_batch_size", 31, "--max_eval_samples", 32, "--max_steps", 8, "--eval_every", 4,
         "--checkpoint_every", 5]  # fmt: skip
SCALE = """
class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.ones(1))


"""


def job(name: str, way: str, *more: Any) -> Path:
    """The run of an edit under a way. Raises JobError."""
    _, before, after = EDITS[name]
    text = (ROOT / "recipes" / "cls.py").read_text(encoding="utf-8")
    assert text.count(before) == 1, name
    text = text.replace(before, after).replace(
        IMPORT, f"import torch\n{IMPORT}{SCALE if 'Scale()' in after else ''}"
    )
    if "Scale()" in after:
        text = text.replace(
            LOSSES,
            f"{LOSSES} * (model.scale.value if step.number < 2 or accelerator.is_main_process else 1) #",
        )
        text = text.replace("model.scale.value if", "toolkit.unwrapped(model).scale.value if")
    if "no checkpoint has" in name:
        text = text.replace(STEP, f"{STEP}        other.step()\n")
    digest = hashlib.sha1(name.encode()).hexdigest()[:10]
    path = inputs.session_folder() / f"edited_{digest}.py"
    path.write_text(text, encoding="utf-8")
    label = " ".join([digest, *(str(word) for word in more if not callable(word))])
    words = [path, *TABLE, "--per_device_batch_size", 3, *more]
    return runs(way).run(label, "tests.edited_recipe", words, 90)


def difference(run: Path, reference: Path, after: int = 0) -> str:
    """The first figure that differs by more than rounding; empty if all are equal to 1e-6."""
    apart = differences(numbers_of(run, after), numbers_of(reference, after), TOLERANCE)
    return next((name for name, each in apart.items() if each > TOLERANCE[name]), "")


def answer_of(name: str) -> str:
    """`error`, `same`, or the run and the figure by which `toolkit verify` sees the edit."""
    way = EDITS[name][0]
    half = ["--mixed_precision", "fp16"] if "fp16" in name else []
    try:
        run = job(name, way, *half)
        if half:
            apart = differences(numbers_of(run), numbers_of(job(name, way)), HALF_PRECISION)
            far = [figure for figure, each in apart.items() if each > HALF_PRECISION[figure]]
            return f"fp16: {far[0]}" if far else "same"
        others = {
            f"with {way}": (way, "single", []),
            "with other micro-batches": ("single", "single", SIZE),
        }
        if way == "single":
            others = {
                "with other micro-batches": ("single", "single", SIZE),
                "with zero2": ("single", "zero2 x2", []),
            }
        for what, (one, other, words) in others.items():
            if figure := difference(job(name, other, *words), job(name, one)):
                return f"{what}: {figure}"
        resumed = job(name, way, "--resume", lambda: run / "checkpoints/step-00000005")
        figure = difference(resumed, run, after=5)
    except JobError as error:
        return "hang" if error.kind == "Ended" else "error"
    return f"resumed: {figure}" if figure else "same"


FAST = (
    "a scheduler that is not stepped",
    "clipping by value under DeepSpeed",
    "gradients reset in each micro-batch",
    "outputs without ids that would hang",
    "requires_grad while training",
    "weights saved by hand: fsdp2",
    "weights set: zero3",
)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        pytest.param(name, answer, marks=() if name in FAST else pytest.mark.slow, id=name)
        for answer, names in ANSWERS.items()
        for name in names
    ],
)
def test_the_answer_to_a_wrong_edit(name: str, answer: str) -> None:
    assert answer_of(name) == answer


def test_each_edit_has_an_answer() -> None:
    names = [name for names in ANSWERS.values() for name in names]
    assert sorted(names) == sorted(EDITS)
