"""Checks within seconds whether the hub can be reached; the error lists the alternatives."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError

from toolkit.errors import UserError, first_line
from toolkit.utils.log import logger

_SECONDS = 5.0  # for each address of the host


@cache
def check_reachable(name: str, kind: Literal["model", "dataset"] = "model", copy: Path | None = None) -> None:
    """Asks the hub for a name once, because libraries retry each file for a minute. If the hub cannot be reached, the
    copy in the cache (`copy` for a data set) is used; raises UserError if there is none."""
    file = "config.json" if kind == "model" else "README.md"
    if constants.HF_HUB_OFFLINE or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return  # the libraries report a wrong name at once
    cached = isinstance(try_to_load_from_cache(name, file, repo_type=kind), str) or (copy is not None and copy.exists())
    if not cached:
        _log(f"{name}: fetching it from {constants.ENDPOINT} (set HF_ENDPOINT for another hub)")
    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=_SECONDS)
    except HfHubHTTPError:
        pass  # it answered: the libraries report the error
    except Exception as error:
        if not cached:
            setting = "model_name_or_path" if kind == "model" else "dataset_name"
            repository, folder = name if "/" in name else f"OWNER/{name}", name.rpartition("/")[2]
            raise UserError(
                f"--{setting} {name}: {constants.ENDPOINT} cannot be reached [{first_line(error)}]. In China use a "
                "mirror (export HF_ENDPOINT=https://hf-mirror.com), or ModelScope: pip install modelscope; modelscope "
                f"download --{kind} {repository} --local_dir {folder}; then name ./{folder}"
            ) from error
        _log(f"{name}: {constants.ENDPOINT} cannot be reached: using the copy in the cache")
        constants.HF_HUB_OFFLINE = kind == "model"


def _log(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.info(line)
