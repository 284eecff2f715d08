"""Shared fixtures: caches of the session's own, a tiny BERT, small files."""

import gzip
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import inputs
from toolkit.utils import log

# Set before any test module imports `datasets`, which reads its folder once; processes started by tests inherit it.
_OURS = "TOOLKIT_TESTS_FOLDER" not in os.environ  # not so in a worker, or in a second import
_CACHE = Path(os.environ.get("TOOLKIT_TESTS_FOLDER") or tempfile.mkdtemp(prefix="toolkit-tests-"))
os.environ.update(
    TOOLKIT_TESTS_FOLDER=str(_CACHE),
    TOOLKIT_CACHE=str(_CACHE / "toolkit"),
    HF_DATASETS_CACHE=str(_CACHE / "datasets"),
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_WAIT_POLICY="PASSIVE",  # several workers share the cores
)

if (_worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    # with few cores, one for each worker and what it starts: threads of several that wait for each other take longest
    _cores = sorted(os.sched_getaffinity(0))
    if len(_cores) < 2 * int(os.environ["PYTEST_XDIST_WORKER_COUNT"]):
        os.sched_setaffinity(0, {_cores[int(_worker.removeprefix("gw")) % len(_cores)]})

# a shell's `&` leaves it ignored, and what tests start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

if not log.logger.handlers:  # pytest has handlers of its own, and tests read stderr
    log.add_handler()

REPOSITORY = Path(__file__).parent.parent
MODEL = SimpleNamespace(model_type="bert", max_position_embeddings=131, pad_token_id=0)
pytest_plugins = ["tests.hosts"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the whole first: they take longest, and no worker of several should wait for them at the end."""
    units = "commands data evaluation launch models objective report utils".split()
    whole = Path(__file__).parent
    items.sort(key=lambda item: (item.path.parent != whole, item.path.parent.name in units))


def pytest_unconfigure() -> None:
    if _OURS:
        shutil.rmtree(_CACHE, ignore_errors=True)


tiny_model = pytest.fixture(scope="session")(inputs.tiny_model)
sharp_model = pytest.fixture(scope="session")(inputs.sharp_model)
reviews = pytest.fixture(scope="session")(inputs.reviews)


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def toolkit_cache(tmp_path: Path, monkeypatch: Any) -> Path:
    """An empty cache for one test."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TOOLKIT_CACHE", str(cache))
    return cache


@pytest.fixture
def without_charts(monkeypatch: Any) -> None:
    """They take most of the time of a report.html."""
    from toolkit.report import curves

    monkeypatch.setattr(curves, "charts", lambda record: [])


@pytest.fixture
def no_launcher() -> Iterator[None]:
    """An environment in which nothing was launched, restored afterwards, whatever the test sets."""
    from toolkit.launch.options import clean_environment

    before = dict(os.environ)
    clean_environment(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def accelerator(no_launcher: None) -> Any:
    """Of one process, on the CPU."""
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """`write_rows("a.csv.gz", rows, encoding)` -> the path of a file in the format its name says."""

    import pandas as pd

    def write(name: str, rows: Sequence[Mapping[str, Any]], encoding: str = "utf-8") -> str:
        path, frame = tmp_path / name, pd.DataFrame(list(rows))
        kind = path.name.removesuffix(".gz").rpartition(".")[2]
        if kind == "parquet":
            content = frame.to_parquet(index=False)
        else:
            lines = [json.dumps(row, ensure_ascii=False) for row in rows]
            text = {
                "csv": frame.to_csv(index=False),
                "tsv": frame.to_csv(index=False, sep="\t"),
                "jsonl": "\n".join([*lines, ""]),
                "json": f"[{', '.join(lines)}]",
            }[kind]
            content = text.encode(encoding)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return str(path)

    return write


@pytest.fixture
def prepared(
    write_rows: Callable[..., str], tokenizer: Any, toolkit_cache: Path
) -> Callable[..., Any]:
    """`prepared(rows, validation_file=rows, seed=3, ...)` -> the data that is made of them."""
    from toolkit.config import TaskSettings, build
    from toolkit.data.prepare import prepare_data

    def run(train: list[Any], kind: Any = TaskSettings, **settings: Any) -> Any:
        model, reader = settings.pop("model", MODEL), settings.pop("tokenizer", tokenizer)
        name = settings.pop("train_name", "train_file.jsonl")
        settings["train_file"] = write_rows(name, train)
        for name in {"validation_file", "test_file"} & set(settings):
            settings[name] = write_rows(f"{name}.jsonl", settings[name])
        return prepare_data(build(kind, settings), reader, model)

    return run


@pytest.fixture(scope="session")
def tiny_job(tiny_model: Path, reviews: Path) -> list[str]:
    """Settings of a run whose losses can be compared; it wants its steps and its global batch."""
    return ["--model_name_or_path", str(tiny_model), "--train_file", str(reviews), "--per_device_batch_size", "4",
            "--dropout", "0", "--mixed_precision", "no", "--report_to", "none"]  # fmt: skip
