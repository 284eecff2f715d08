"""A teacher's logits for every training row, computed once and cached."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object

from toolkit.config import ModelSettings, TaskSettings
from toolkit.data.labels import Labels
from toolkit.data.prepare import Data
from toolkit.data.tokenizer import (
    choose_max_length,
    fingerprint,
    has_token_types,
    load_tokenizer,
)
from toolkit.data.tokens import LengthBuckets, Split
from toolkit.errors import UserError, first_line, listing
from toolkit.evaluation.answers import ClassAnswers, labels_of
from toolkit.evaluation.outputs import predict
from toolkit.evaluation.self_test import Loaded, check_self_test, folder_of
from toolkit.launch.precision import autocast
from toolkit.pretrained import load_config, model_digest
from toolkit.utils.cache import cache_folder, cached_folder, digest_of_text
from toolkit.utils.log import log_on_rank_0

_FILE = "logits.npy"


def add_teacher_logits(
    accelerator: Accelerator,
    settings: TaskSettings,
    name: str,
    data: Data,
    tokenizer: Any,
) -> Data:
    """Adds the logits of `--teacher` for every training row to the data as the column `teacher`; a
    collective. The digest of the data then depends on the teacher.

    Each row is computed exactly once, in any number of processes, unless the logits are cached.
    Raises UserError for a teacher with other labels or another tokenizer.
    """
    model = ModelSettings(model_name_or_path=name, tokenizer=settings.model.tokenizer)
    try:
        config = load_config(model)
        labels = labels_of(config)
        teacher_tokenizer = load_tokenizer(model)
        _require_same_tokens(config, teacher_tokenizer, data, tokenizer)
    except UserError as error:
        raise UserError(f"--teacher {name}: {first_line(error)}") from error
    order = _order_of_classes(labels, data.labels, name)
    rows = hashlib.sha256(data.train.rows.tobytes()).hexdigest()
    precision = accelerator.mixed_precision
    digest = digest_of_text(
        f"{model_digest(name)} {data.digest} {rows} {precision} {order}"
    )
    logits = np.zeros((0, 0), np.float32)
    if not all(gather_object([(cache_folder() / "teachers" / digest).is_dir()])):
        rows_of = f"{len(data.train)} training rows, once"
        log_on_rank_0(f"computing the outputs of {name} for {rows_of}")
        teacher = ClassAnswers(labels).load(model).to(accelerator.device)
        loaded = Loaded(folder_of(name), teacher_tokenizer, config, teacher)
        with autocast(accelerator):
            check_self_test(loaded, settings.model.self_test, precision)
        logits = _logits(accelerator, teacher, data.train, tokenizer, settings)[:, order]
    with cached_folder("teachers", digest, accelerator, f"{name} as teacher") as (
        folder,
        draft,
    ):
        if draft:
            np.save(draft / _FILE, logits)
    columns = data.train.columns | {"teacher": np.load(folder / _FILE, mmap_mode="r")}
    digest = digest_of_text(f"{data.digest} {digest}")
    return replace(data, train=replace(data.train, columns=columns), digest=digest)


def _logits(
    accelerator: Accelerator,
    teacher: Any,
    train: Split,
    tokenizer: Any,
    settings: TaskSettings,
) -> np.ndarray:
    """(N, C) float32, in the order of the split, on every rank."""
    training = settings.training.limit_tokens(
        accelerator.device.type, int(train.lengths.max())
    )
    size = training.per_device_eval_batch_size or 32
    split = replace(train, buckets=LengthBuckets.of_model(teacher.config))
    with autocast(accelerator):
        outputs = predict(
            accelerator,
            teacher,
            split,
            tokenizer,
            size,
            training.max_tokens_per_batch,
        )
    logits = torch.zeros(len(train), teacher.config.num_labels, device=accelerator.device)
    if outputs is not None:  # sorted by row
        places = np.searchsorted(np.sort(train.rows), train.rows)
        logits = torch.from_numpy(outputs[places]).to(accelerator.device)
    return broadcast(logits).cpu().numpy()


def _order_of_classes(teacher: Labels, labels: Labels, name: str) -> list[int]:
    """The index of the teacher's output for each class of the data."""
    if teacher.problem_type != labels.problem_type or set(teacher.names) != set(
        labels.names
    ):
        raise UserError(
            f"--teacher {name} has {listing(teacher.names)} ({teacher.problem_type}), and the data "
            f"have {listing(labels.names)} ({labels.problem_type}): fine-tune it on these, or "
            "correct its config's id2label"
        )
    return [teacher.names.index(each) for each in labels.names]


def _require_same_tokens(
    config: Any, teacher_tokenizer: Any, data: Data, tokenizer: Any
) -> None:
    """Raises UserError for a teacher that would read other tokens than the student's, or fewer: it
    gets the student's."""
    reads_types = "token_type_ids" in teacher_tokenizer.model_input_names
    has_types = reads_types and has_token_types(config)
    same_types = not data.text_pair or has_types == (data.train.token_types is not None)
    if fingerprint(teacher_tokenizer) != fingerprint(tokenizer) or not same_types:
        raise UserError(
            "it tokenizes texts differently (tokens or token types) than the student: choose a "
            "student with the teacher's tokenizer (the teacher's base model with "
            "--num_hidden_layers 3, say)"
        )
    choose_max_length(
        data.max_length, teacher_tokenizer, config, data.text_pair is not None
    )
