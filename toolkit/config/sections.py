"""Settings: frozen dataclasses, one per section. Docstrings of fields, with their units, are the
text of `--help`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from toolkit.errors import UserError

ProblemType = Literal[
    "single_label_classification", "multi_label_classification", "regression"
]
SchedulerName = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]

_Section = TypeVar("_Section")
Pairs = tuple[tuple[str, str, str], ...]
"""(setting, setting, why they contradict each other)."""
Values = Mapping[str, Any]
"""{setting: value}, as they were given."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: type[_Section]) -> type[_Section]:
    """Makes a class a section of settings, in a user's recipe too; docstrings of its fields are
    shown in `--help`.

    A section may have `contradictions(values)`, which yields a line for each fault of settings that
    exclude or need each other (`conflict`, `needs`), and `alternatives`: pairs that contradict each
    other, of which one on the command line replaces the other of the file."""
    strict = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    return dataclass(frozen=True, kw_only=True, config=strict)(cls)  # type: ignore[return-value]


def conflict(values: Values, one: str, other: str, why: str) -> Iterator[str]:
    """A fault if both are given."""
    if values.get(one) is not None and values.get(other) is not None:
        yield f"--{one} and --{other} contradict each other ({why}): give one of them"


def needs(values: Values, name: str, other: str) -> Iterator[str]:
    """A fault if `name` is given without `other`."""
    if values.get(name) is not None and values.get(other) is None:
        yield f"--{name} is given without --{other}"


@section
class PretrainedSettings:
    """The pretrained model."""

    model_name_or_path: str | None = None
    """A folder or a hub name that transformers' Auto classes load."""
    tokenizer: Literal["jieba"] | None = None
    """`jieba` for a vocabulary of Chinese words, as in chinese-bigbird-base; default: the model's
    tokenizer."""
    do_lower_case: bool | None = None
    """Lower-case the texts, for a vocabulary without capitals (bert-base-chinese); default: as the
    model's tokenizer."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Overrides every dropout probability of the model, and LoRA's."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    attn_implementation: str | None = None
    """`sdpa`, `eager`, `flash_attention_2`, ...: as in `from_pretrained`; for BigBird `auto`,
    `full`, `eager`, ..."""
    self_test: Literal["error", "warn", "off"] = "error"
    """If a model folder (or a teacher's) answers otherwise than when it was saved, by its
    self_test.json."""


@section
class ModelSettings(PretrainedSettings):
    """The pretrained model and how it is adapted."""

    problem_type: ProblemType | None = None
    """The type of the labels; default: inferred from the label column."""
    lora_r: int | None = Field(default=None, ge=1)
    """The rank of LoRA, usually 8 or 16: only its matrices and the head are trained. Off by
    default."""
    lora_alpha: int | None = Field(default=None, ge=1)
    """LoRA's output is scaled by lora_alpha / lora_r; default: twice the rank."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the input of LoRA's matrices; `dropout` overrides it."""
    lora_target_modules: str | None = None
    """Layers with LoRA, `query,value` or `all-linear`; default: peft's choice for the
    architecture."""
    freeze_layers: int | None = Field(default=None, ge=0)
    """Freeze the embeddings and this many of the first layers; 0 freezes only the embeddings."""
    reinit_layers: int | None = Field(default=None, ge=1)
    """Reinitialize this many of the last layers, which may be specialized for the pretraining
    task."""
    num_hidden_layers: int | None = Field(default=None, ge=1)
    """Keep this many of the pretrained layers, evenly spaced."""

    @staticmethod
    def contradictions(values: Values) -> Iterator[str]:
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
            yield from needs(values, name, "lora_r")
        for name in ("freeze_layers", "reinit_layers", "num_hidden_layers"):
            yield from conflict(values, name, "lora_r", "LoRA trains only its own matrices")


@section
class ObjectiveSettings:
    """The loss, and imbalanced classes."""

    loss: Literal["cross_entropy", "focal"] = "cross_entropy"
    """The loss of classes; focal (Lin et al., 2017) gives rows with confident correct predictions
    less weight."""
    focal_gamma: float = Field(default=2.0, ge=0)
    """The exponent of `--loss focal`; 0 is the cross entropy."""
    class_weights: str | None = None
    """Weights of the loss by class: `balanced`, or `A=2.0,B=0.5` (others 1)."""
    pos_weight: str | None = None
    """Multi-label: the weight of positive labels: `balanced`, or `A=3,B=10` (others 1)."""
    sampling: Literal["balanced", "sqrt"] | None = None
    """Draw rows with replacement: classes equally often, or in proportion to the square root of
    their rows."""

    r_drop_alpha: float | None = Field(default=None, gt=0)
    """R-Drop: the weight of the divergence between two forward passes with different dropout;
    doubles the compute."""
    fgm_epsilon: float | None = Field(default=None, gt=0)
    """FGM: the norm of adversarial perturbations of the embeddings; doubles the compute."""

    @property
    def gamma(self) -> float | None:
        """`focal_gamma` for the focal loss, else None."""
        return self.focal_gamma if self.loss == "focal" else None

    @staticmethod
    def contradictions(values: Values) -> Iterator[str]:
        if values.get("focal_gamma") is not None and values.get("loss") != "focal":
            yield "--focal_gamma has no effect without --loss focal"
        for name in ("r_drop_alpha", "fgm_epsilon"):
            if (
                values.get(name) is not None
                and values.get("per_device_batch_size") == "auto"
            ):
                yield f"--per_device_batch_size auto measures one pass, and --{name} takes two"


@section
class TextSettings:
    """Where the texts are."""

    alternatives: ClassVar[Pairs] = (
        ("train_file", "dataset_name", "name the files or the data set"),
        ("validation_file", "dataset_name", "a data set has its own splits"),
        ("test_file", "dataset_name", "a data set has its own splits"),
        (
            "validation_file",
            "validation_split",
            "rows are held out only without such a file",
        ),
    )

    train_file: str | None = None
    """CSV, TSV, JSON, JSONL, Parquet, also .gz, .bz2; several by a pattern, 'part-*.csv'; .txt: a
    text a line, or fastText's lines; a folder: CLASS/NAME.txt."""
    validation_file: str | None = None
    """Evaluated during training; default: a part of the training rows is held out."""
    test_file: str | None = None
    """Evaluated once, at the end, with the best model."""
    dataset_name: str | None = None
    """A data set on the hub, or a folder that `datasets.load_dataset` reads; instead of files."""
    dataset_config_name: str | None = None
    """The configuration of `dataset_name`."""
    text_column: str | None = None
    """`title,text` joins two columns with the separator token; default: inferred from names and
    content."""
    encoding: str = "utf-8"
    """The encoding of CSV, TSV and JSON files; `gb18030` for GBK."""
    encoding_errors: Literal["strict", "replace"] = "strict"
    """Bytes that are not in this encoding: an error, or each replaced by U+FFFD."""
    delimiter: str | None = None
    """The delimiter of CSV, TSV and .txt files, `tab`, or `none`: a text is a line; default: by the
    ending. Cells between delimiters of several characters have no quotes."""
    quoting: Literal["csv", "none"] = "csv"
    """CSV and TSV files: csv: cells may be in double quotes; none: a double quote is part of the
    text."""
    sample_by: Literal["line", "paragraph"] = "line"
    """.txt files: a text is a line, or all lines up to a blank one."""
    column_names: str | None = None
    """Column names of CSV and TSV files without a header line: `label,text`."""
    validation_split: float = Field(default=0.1, gt=0, lt=1)
    """The part of the training rows that is held out when there is no validation file."""
    drop_empty_text: bool = False
    """Leave out rows whose text, title or label is empty or blank; otherwise they are an error."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens; longer texts are truncated. Default: the model's limit."""
    max_train_samples: int | None = Field(default=None, ge=1)
    """For a quick test: the number of training rows, drawn by `data_seed`."""
    max_eval_samples: int | None = Field(default=None, ge=1)
    """For a quick test: the number of rows of each evaluated split, drawn by `data_seed`."""
    data_seed: int | None = Field(default=None, ge=0, lt=2**31)
    """The seed that draws rows to hold out or for a quick test; default: `seed`, which decides
    their order."""

    @property
    def header(self) -> list[str]:
        """The names in `column_names`."""
        return [
            name.strip() for name in (self.column_names or "").split(",") if name.strip()
        ]

    @staticmethod
    def contradictions(values: Values) -> Iterator[str]:
        yield from needs(values, "dataset_config_name", "dataset_name")
        if values.get("dataset_name") is None:
            yield from needs(values, "validation_file", "train_file")
            yield from needs(values, "test_file", "train_file")


@section
class DataSettings(TextSettings):
    """Where the texts and labels are."""

    label_column: str | None = None
    """Several, `a,b,c`: multi-label for 0/1, regression for other numbers; default: inferred from
    the name."""
    label_separator: str | None = None
    """Between the names in one cell of several labels, `|`; default: cells are JSON lists."""
    text_pair: str | None = None
    """The column of a second text, for pairs: `[CLS] text [SEP] pair [SEP]`."""
    truncation_side: Literal["left", "right"] | None = None
    """The end of a text that is dropped if it is longer than `max_length`; default: the
    tokenizer's, mostly right."""
    head_tokens: int | None = Field(default=None, ge=1)
    """Of a text longer than `max_length` read this many of the first tokens, and the last ones."""

    @staticmethod
    def contradictions(values: Values) -> Iterator[str]:
        yield from TextSettings.contradictions(values)
        yield from conflict(values, "head_tokens", "truncation_side", "it reads both ends")
        yield from conflict(values, "head_tokens", "text_pair", "it is for single texts")


@section
class LongTextSettings:
    """The comparison with truncated texts."""

    compare_max_length: int | None = Field(default=None, ge=2)
    """Tokens; at the end the saved model is also evaluated on the same texts truncated to this
    length."""


@section
class TrainingSettings:
    """Optimization, evaluation and checkpoints."""

    tokens_on_gpu: ClassVar[int | None] = None
    """The default of `max_tokens_per_batch` there."""
    alternatives: ClassVar[Pairs] = (
        ("warmup_ratio", "warmup_steps", "they set the same thing"),
    )

    output_dir: str | None = None
    """The run's folder; default: a new one under runs/."""
    overwrite_output_dir: bool = False
    """If the folder contains a run, rename it to NAME.old-TIME instead of ending with an error."""
    num_train_epochs: float = Field(default=3.0, gt=0)
    """Passes over the training rows."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; overrides the number of epochs."""
    global_batch_size: int = Field(default=32, ge=1)
    """Samples per optimizer step, over all processes and micro-batches."""
    per_device_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 32
    """Maximum samples of a micro-batch on one process, or `auto`: what fits. Determines gradient
    accumulation."""
    per_device_eval_batch_size: int | None = Field(default=None, ge=1)
    """Maximum samples of an evaluation batch; default: twice `per_device_batch_size`."""
    max_tokens_per_batch: int | None = Field(default=None, ge=2)
    """Maximum tokens of a micro-batch with padding, in evaluation too: fewer samples of long texts.
    Default: 2048 on a CPU, on a GPU no limit, or 16384 in recipes for long texts."""
    group_by_length: bool = True
    """Put texts of similar length into the same batch."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """The peak learning rate."""
    optimizer: str = "adamw"
    """adamw, adafactor, sgd, or any torch optimizer: `MODULE.CLASS`."""
    optimizer_args: str | None = None
    """Its arguments except the learning rate and weight decay: `momentum=0.9`,
    `betas=(0.9,0.95),eps=1e-6`."""
    layerwise_lr_decay: float | None = Field(default=None, gt=0, le=1)
    """The ratio of a layer's learning rate to that of the layer above, e.g. 0.95; the head has
    `learning_rate`."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay; not applied to biases and norms."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Evaluate and save an exponential moving average of the weights with this decay per step:
    0.99, 0.999."""
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    """Warm-up, as a fraction of all optimizer steps."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Warm-up in optimizer steps; instead of the ratio."""
    lr_scheduler_type: SchedulerName = "linear"
    """The schedule after the warm-up, counted in optimizer steps."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """The norm to which the gradient of all parameters is clipped; 0: no clipping."""
    label_smoothing_factor: float = Field(default=0.0, ge=0, lt=1)
    """For single-label classification, and for titles."""
    seed: int = Field(default=42, ge=0, lt=2**31)
    """Seeds the split, the order of samples, the new head and dropout."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """auto: the accelerate config's bf16 or fp16, else what rank 0's hardware computes
    fastest."""
    half_precision_gradients: bool = False
    """Reduce gradients between processes in bf16 (fp16 with mixed_precision fp16): half the
    traffic. Each process's gradient is rounded to 16 bits before the sum."""
    sync_each_batch: bool | None = None
    """Reduce gradients after each micro-batch, not once a step: less memory, more traffic. By
    default under FSDP2."""
    torch_compile: bool = False
    """Compile each layer with torch.compile, for GPUs: a minute's start, then fewer kernels. Slower
    on a CPU."""
    logging_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between gathering losses; default: 1 on a CPU, about a second of steps on
    GPUs."""
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    """The lowest level that is logged to stderr; default: `info`, or the application's
    configuration."""
    language: Literal["en", "zh"] = "en"
    """The language of the lines that a run prints, of its report.html and its model card; errors
    stay English."""
    save_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The dtype of the weights in the saved model."""
    eval_every: int | None = Field(default=None, ge=1)
    """Optimizer steps between evaluations; default: once an epoch."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Optimizer steps between checkpoints; default: only at a stop signal."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept, in addition to the best one."""
    checkpoint_in_background: bool = False
    """Write checkpoints while training continues; needs memory for a copy on rank 0, 12 bytes a
    parameter."""
    resume: Literal["auto", "no"] | str = "auto"
    """auto: continue from the newest complete checkpoint in output_dir; no; or a checkpoint's
    folder."""
    metric_for_best_model: str | None = None
    """In eval.jsonl; default: macro F1, micro F1 (multi-label), loss (regression, pretraining) or
    rougeL (titles)."""
    greater_is_better: bool | None = None
    """Whether a greater value is better; default: true unless its name ends in loss, error, mse,
    mae or perplexity."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without improvement of the metric."""
    report_to: str = "auto"
    """Trackers: tensorboard, wandb, mlflow, swanlab, trackio (several: a,b) or none; auto:
    tensorboard if installed."""
    run_name: str | None = None
    """The run's name in trackers; default: the folder's name."""
    project: str | None = None
    """The project in trackers (mlflow's experiment); default: the recipe's name."""

    @property
    def clip_norm(self) -> float:
        """`max_grad_norm`, for `accelerator.clip_grad_norm_`; infinity for no clipping."""
        return self.max_grad_norm or math.inf

    @property
    def micro_batch_size(self) -> int:
        """`per_device_batch_size` as a number. Raises UserError for `auto` in a recipe that does
        not resolve it."""
        if self.per_device_batch_size == "auto":
            raise UserError(
                "--per_device_batch_size auto needs `run.prepare`: pass a number"
            )
        return self.per_device_batch_size

    @staticmethod
    def contradictions(values: Values) -> Iterator[str]:
        warms_up = values.get("warmup_steps") or values.get("warmup_ratio")
        if warms_up and values.get("lr_scheduler_type") == "constant":
            yield "--lr_scheduler_type constant has no warm-up: use constant_with_warmup"
        if not values.get("label_smoothing_factor"):
            return
        for name in ("problem_type", "loss"):
            value = values.get(name)
            if value in ("regression", "multi_label_classification", "focal"):
                yield f"--label_smoothing_factor has no effect with --{name} {value}"

    def limit_tokens(self, device: str, longest: int) -> Self:
        """Sets the default of `max_tokens_per_batch` for this device and texts of at most `longest`
        tokens."""
        default = default_tokens_per_batch(device, self.tokens_on_gpu)
        if self.max_tokens_per_batch is not None or default is None:
            return self
        return dataclasses.replace(self, max_tokens_per_batch=max(default, longest))


@section
class LongTrainingSettings(TrainingSettings):
    """Optimization, evaluation and checkpoints, for long texts."""

    tokens_on_gpu: ClassVar[int | None] = 16384


def default_tokens_per_batch(device: str, on_gpu: int | None) -> int | None:
    """The default of `max_tokens_per_batch`: a CPU's caches do not hold more activations
    (docs/scaling.md)."""
    return 2048 if device == "cpu" else on_gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The settings of a recipe on labelled texts."""

    targets: ClassVar[str] = "toolkit.data.labels:Labels"
    """`MODULE:CLASS` of what the model learns to predict (`toolkit.data.targets.Targets`)."""

    model: ModelSettings
    data: DataSettings
    objective: ObjectiveSettings
    training: TrainingSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongTaskSettings(TaskSettings):
    """The same on long texts."""

    training: LongTrainingSettings
    long: LongTextSettings
