"""Jobs, ways to run them, and their results: each pair is run once in a test run, by whichever test needs it first.

    run = runs("zero3 x2")["r-drop"]                         the run's folder, of a job of the table JOBS
    run = runs("ddp x3").run("mine", "recipes.cls", words)   of any other job; --output_dir is added
    runs("ddp x3").log("mine")                               what rank 0 printed
    with pytest.raises(JobError, match="--loss"):           an exception of a job is its result

A way is a file of accelerate_configs/ and a number of processes: "zero3_offload x2", "fsdp2 x3"; or "single". Its
processes are started once, with the environment variables of torchrun, and run one job after another
(tests/matrix_rank.py). All workers of xdist share them and the results. A job that hangs, or fails on some ranks
only, has failed, and the next one gets new processes. A word may be a function, called when the job is run: for a file
that must be made, or for the run of another job.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests import inputs
from tests.runs import ROOT, Process, fork, forked, free_port, words_of

WAYS = ("single", "ddp x2", "zero1 x2", "zero2 x2", "zero3 x2", "fsdp2 x2", "ddp x3")
Words = Sequence[Any]


@dataclass(frozen=True)
class Job:
    """A recipe's module and its arguments. `reference`: the job whose numbers it must have, by default itself under
    "single". `pages`: ways under which it writes a report and a model card, which take long."""

    recipe: str
    words: Words
    reference: str = ""
    pages: Sequence[str] = ()


def teacher(job: str) -> Callable[[], Path]:
    return lambda: runs("single")[job] / "model"


QUIET = ["--dropout", 0, "--mixed_precision", "no", "--report_to", "none"]
TINY = ["--model_name_or_path", inputs.tiny_model, *QUIET]
REVIEWS = [*TINY, "--train_file", inputs.reviews, "--global_batch_size", 12]
# 190 rows to train on: clipping bites, the schedule warms up and decays, the two sizes divide neither each other nor
# the data, the last batch of the epoch is incomplete, and the next epoch begins
PLAIN = [*TINY, "--train_file", inputs.reviews, "--global_batch_size", 22, "--warmup_ratio", 0.2, "--max_grad_norm",
         0.5, "--weight_decay", 0.1, "--max_steps", 10, "--eval_every", 5, "--learning_rate", "3e-3",
         "--per_device_eval_batch_size", 7]  # fmt: skip
# the best step is not the last: its weights are loaded at the end. (At 5e-2 a spike of the loss increases rounding
# differences between micro-batches, under one strategy, to 3e-5.)
LORA = [*PLAIN, "--max_steps", 10, "--eval_every", 4, "--learning_rate", "2e-2", "--lr_scheduler_type",
        "constant_with_warmup", "--per_device_batch_size", 6, "--lora_r", 3, "--lora_alpha", 5,
        "--lora_target_modules", "query,dense", "--metric_for_best_model", "loss"]  # fmt: skip
# uneven classes; an epoch of 2 steps, the last of 14 samples, and a step of the next one
FEW = [*TINY, "--train_file", inputs.uneven_reviews, "--text_column", "text", "--learning_rate", "5e-3",
       "--lr_scheduler_type", "constant", "--global_batch_size", 22, "--per_device_batch_size", 6, "--max_eval_samples",
       21, "--max_train_samples", 36, "--max_steps", 3, "--eval_every", 3]  # fmt: skip
ONE_LABEL = [*FEW, "--label_column", "label"]
SEVERAL_LABELS = [*FEW, "--label_column", "tags", "--label_separator", "|"]
PAIRS = [*ONE_LABEL, "--model_name_or_path", inputs.masked_model]
PAIRS += "--text_pair other --max_length 120".split()
# 48 texts of 100 to 1500 tokens. Attention is sparse above 704 tokens, and which tokens a text's attention reaches then
# depends on how far its batch is padded: the micro-batches are the same ones on 1, 2 and 3 processes (6 of 2 texts)
LONG = ["--model_name_or_path", inputs.sharp_model, *QUIET, "--train_file", partial(inputs.long_split, "train"),
        "--validation_file", partial(inputs.long_split, "validation"), "--max_steps", 4, "--eval_every", 4,
        "--learning_rate", "3e-3", "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", 1,
        "--max_grad_norm", 0.5, "--weight_decay", 0.1, "--global_batch_size", 12, "--per_device_eval_batch_size", 3,
        "--seed", 42]  # fmt: skip
SPARSE = [*LONG, "--max_length", 4096, "--per_device_batch_size", 2, "--compare_max_length", 64]
# titles of 4 to 16 tokens, of very uneven length
TITLES = ["--model_name_or_path", inputs.sharp_model, *QUIET, "--train_file", partial(inputs.titles, "train"),
          "--validation_file", partial(inputs.titles, "validation"), "--max_steps", 4, "--eval_every", 4,
          "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", 2, "--learning_rate", "1e-2",
          "--max_length", 640, "--max_target_length", 16, "--num_beams", 2, "--global_batch_size", 13,
          "--per_device_batch_size", 3, "--per_device_eval_batch_size", 4]  # fmt: skip
MASKED = ["--model_name_or_path", inputs.masked_model, *QUIET, "--train_file", inputs.reviews, "--text_column", "text",
          "--max_train_samples", 40, "--max_eval_samples", 16, "--max_steps", 5, "--eval_every", 5,
          "--global_batch_size", 11, "--per_device_batch_size", 3, "--per_device_eval_batch_size", 5,
          "--learning_rate", "3e-3", "--lr_scheduler_type", "constant", "--max_length", 48, "--whole_word_mask",
          "true", "--mlm_probability", 0.4]  # fmt: skip

# most texts are read in several windows
SPANS = [*TINY, "--train_file", partial(inputs.spans, "train"), "--validation_file",
         partial(inputs.spans, "validation"), "--max_length", 24, "--stride", 7, "--max_steps", 8, "--eval_every", 4,
         "--learning_rate", "6e-3", "--global_batch_size", 22, "--per_device_batch_size", 6, "--max_grad_norm", 0.5,
         "--weight_decay", 0.1, "--per_device_eval_batch_size", 7, "--lr_scheduler_type", "constant"]  # fmt: skip

LABELLED = [*TINY, "--max_steps", 4, "--global_batch_size", 12, "--per_device_batch_size", 5]
KINDS = ("six classes", "multi-label", "regression", "several numbers")

# Every optional technique that may stand beside others, on classes or, with `pos_weight`, on several labels.
TECHNIQUES: dict[str, Words] = {
    "r-drop": ["--r_drop_alpha", 1.0], "fgm": ["--fgm_epsilon", 0.5],
    "teacher": ["--teacher", teacher("few")], "ema": ["--ema_decay", 0.6],
    "layer decay": ["--layerwise_lr_decay", 0.8], "frozen layer": ["--freeze_layers", 1],
    "new layer": ["--reinit_layers", 1], "class weights": ["--class_weights", "balanced"],
    "pos_weight": ["--pos_weight", "balanced"], "focal": ["--loss", "focal", "--focal_gamma", 1],
    "smoothing": ["--label_smoothing_factor", 0.1], "lora": ["--lora_r", 3],
    "recomputed": ["--gradient_checkpointing"],
}  # fmt: skip


def classifier(*techniques: str) -> Job:
    """A short run of the classifier with these techniques."""
    several = "pos_weight" in techniques
    words = [word for name in techniques for word in TECHNIQUES[name]]
    if several and "teacher" in techniques:
        words[words.index("--teacher") + 1] = teacher("several labels")
    return Job("recipes.cls", [*(SEVERAL_LABELS if several else ONE_LABEL), *words])


def labelled(kind: str) -> Job:
    """With all that a run writes of this kind of labels."""
    files = ["--train_file", partial(inputs.labelled, kind, "train")]
    files += ["--test_file", partial(inputs.labelled, kind, "test")]
    if kind == "several numbers":
        files += ["--label_column", "length,good"]
    return Job("recipes.cls", [*LABELLED, *files], pages=["ddp x2"])


JOBS: dict[str, Job] = {
    "plain": Job("recipes.cls", [*PLAIN, "--per_device_batch_size", 3]),
    "one micro-batch": Job("recipes.cls", [*PLAIN, "--per_device_batch_size", 22], reference="plain"),
    "lora best step": Job("recipes.cls", LORA, pages=["single"]),
    "few": classifier(),
    "several labels": Job("recipes.cls", SEVERAL_LABELS),
    **{name: classifier(name) for name in TECHNIQUES},
    "all frozen": Job("recipes.cls", [*ONE_LABEL, "--freeze_layers", 2]),  # FSDP2's root has all that is trained
    "any length": Job("recipes.cls", [*ONE_LABEL, "--group_by_length", "false"]),
    "sampling": Job("recipes.cls", [*ONE_LABEL, "--sampling", "sqrt", "--max_tokens_per_batch", 300]),
    "rmsprop": Job("recipes.cls", [*ONE_LABEL, "--optimizer", "torch.optim.RMSprop", "--optimizer_args", "alpha=0.9",
                                   "--layerwise_lr_decay", 0.8, "--freeze_layers", 1, "--reinit_layers", 1]),
    "momentum": Job("recipes.cls", [*ONE_LABEL, "--optimizer", "sgd", "--optimizer_args", "momentum=0.9",
                                    "--learning_rate", "5e-2", "--layerwise_lr_decay", 0.7]),
    "adafactor": Job("recipes.cls", [*ONE_LABEL, "--optimizer", "adafactor"]),
    "two terms": classifier("r-drop", "fgm"),
    "weights": classifier("class weights", "focal", "ema"),
    "lora recomputed": classifier("lora", "recomputed", "class weights"),
    "pairs": Job("recipes.cls", PAIRS),
    **{kind: labelled(kind) for kind in KINDS},
    "long": Job("recipes.bigbird", SPARSE),
    "long recomputed": Job("recipes.bigbird", [*SPARSE, "--gradient_checkpointing", "true"], reference="long"),
    # full attention, and 9 to 12 micro-batches a step on one process, 5 or 6 on two
    "long by tokens": Job("recipes.bigbird", [*LONG, "--max_length", 704, "--per_device_batch_size", 12,
                                               "--max_tokens_per_batch", 1250]),
    "title": Job("recipes.title", TITLES),
    "pretraining": Job("recipes.pretrain", MASKED, pages=["single"]),
    "pretraining bigbird": Job("recipes.pretrain", [*MASKED, "--model_name_or_path", inputs.masked_bigbird]),
}  # fmt: skip
for name in ("pairs", "lora recomputed", "two terms", "sampling"):
    words = [*JOBS[name].words, "--padding_free", "true"]
    JOBS[f"padding-free {name}"] = Job("recipes.cls", words, reference=name)
JOBS["spans"] = Job("recipes.ner", SPANS, pages=["single"])


_GRACE_SECONDS = 10.0  # for the other ranks, when one has failed


class JobError(Exception):
    """A job has failed under a way. `kind`: the exception's class; `message`: its text."""

    def __init__(self, where: str, kind: str, message: str, details: str = "") -> None:
        super().__init__(f"{where}: {kind}: {message}\n{details}".rstrip())
        self.kind, self.message = kind, message


class Way:
    """One way to start a recipe, and the results of its jobs. Its processes are forks of
    tests/fork_server.py, which every xdist worker knows by a file and can use, one at a time."""

    def __init__(self, name: str) -> None:
        strategy, _, processes = name.partition(" x")
        file = f"accelerate_configs/{strategy}.yaml"
        assert (ROOT / file).is_file(), f"there is no {strategy}"
        self.name, self.processes = name, int(processes or 1)
        self._config_file = file if processes else ""
        self._folder = inputs.session_folder() / "matrix" / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._started = self._folder / "processes.json"
        self._lock = FileLock(self._folder / ".lock")

    def __getitem__(self, name: str) -> Path:
        """The folder of the run of this job. Raises JobError."""
        return self.run(name, JOBS[name].recipe, JOBS[name].words)

    def run(self, name: str, recipe: Any, words: Words, seconds: float = 240) -> Path:
        """The folder of this job's run; a name belongs to one job. Raises JobError."""
        folder, job = self._folder / name, words_of([recipe, *words])

        def make(reports: Path) -> None:
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that was killed
            with self._lock:
                failure = self._run([*job, "--output_dir", str(folder)], reports, seconds)
            (reports / "result.json").write_text(json.dumps({"job": job, "failure": failure}))

        reports = inputs.shared(self._reports(name), make)
        result = json.loads((reports / "result.json").read_text())
        assert result["job"] == job, f"{name} is the name of two jobs"
        if result["failure"]:
            raise JobError(f"{name} under {self.name}", *result["failure"])
        return folder

    def log(self, name: str) -> str:
        """What rank 0 printed in this job."""
        file = inputs.shared_folder(self._reports(name)) / "rank0.log"
        return file.read_text(encoding="utf-8", errors="replace")

    def _reports(self, name: str) -> str:
        return f"reports of {self.name}, {name}"

    def _run(self, job: list[str], reports: Path, seconds: float) -> list[str]:
        """Runs the `main` of a module, with arguments, on all ranks, which print to the folder `reports`. Returns
        class, text and traceback of the first exception, or nothing. A rank that was killed, or did not end within
        `seconds`, is one, too."""
        ranks = self._living() or self._start()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        line = {"job": job, "reports": str(reports), "seconds": seconds, "cores": cores}
        for process in ranks:
            process.write_line(json.dumps(line))
        failures = self._wait(ranks, reports, seconds)
        missing = [rank for rank in range(len(ranks)) if rank not in failures]
        if missing:
            self._stop(ranks)
            log = reports / f"rank{missing[0]}.log"
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            failures[len(ranks)] = ["Ended", f"ranks {missing} did not end the job", text[-4000:]]
        return next((failure for failure in failures.values() if failure), [])

    def _wait(self, ranks: list[Process], reports: Path, seconds: float) -> dict[int, list[str]]:
        """The failure, or nothing, of each rank that has reported."""
        deadline = time.monotonic() + seconds
        while True:
            # before the reports: one may report and end
            ended = [process.poll() is not None for process in ranks]
            found = {}
            for rank in range(len(ranks)):
                if (file := reports / f"rank{rank}.json").exists():
                    found[rank] = json.loads(file.read_text())
            if any(found.values()) or any(ended):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if len(found) == len(ranks) or time.monotonic() > deadline or all(ended):
                return found
            time.sleep(0.01)

    def _living(self) -> list[Process]:
        if not self._started.exists():
            return []
        ranks = [forked(Path(folder), pid) for folder, pid in json.loads(self._started.read_text())]
        if all(process.poll() is None for process in ranks):
            return ranks
        self._stop(ranks)
        return []

    def _start(self) -> list[Process]:
        pages = ",".join(job for job in JOBS if self.name in JOBS[job].pages)
        script, count = ["tests/matrix_rank.py"], str(self.processes)
        env = {"TESTS_WITHOUT_PAGES": pages, "OMP_NUM_THREADS": "1"}
        if self._config_file:
            script.append(self._config_file)
            env |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        ranks = []
        for rank in map(str, range(self.processes)):
            place = {"RANK": rank, "LOCAL_RANK": rank} if self._config_file else {}
            ranks.append(fork(script, env | place, stdin=True))
        started = [(str(process.folder), process.pid) for process in ranks]
        self._started.write_text(json.dumps(started))
        return ranks

    def _stop(self, ranks: list[Process]) -> None:
        for process in ranks:
            process.kill_session()
        self._started.unlink(missing_ok=True)


@cache
def runs(way: str) -> Way:
    return Way(way)
