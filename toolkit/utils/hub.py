"""The hub: reached within seconds, or a line on what else there is."""

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

_SECONDS = 5.0  # each address of a host is tried for so long


@cache
def reach(name: str, kind: Literal["model", "dataset"] = "model", copy: Path | None = None) -> None:
    """Asks the hub for a name once, before libraries try a minute for each file. Without an answer a copy in the cache
    (`copy`, of a data set) is taken; raises UserError where there is none."""
    file = "config.json" if kind == "model" else "README.md"
    if constants.HF_HUB_OFFLINE or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return  # the libraries say at once what is wrong with it
    cached = isinstance(try_to_load_from_cache(name, file, repo_type=kind), str) or (copy is not None and copy.exists())
    if not cached:
        _say(f"{name}: fetching it from {constants.ENDPOINT} (HF_ENDPOINT names another hub)")
    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=_SECONDS)
    except HfHubHTTPError:
        pass  # it answered: the libraries say what
    except Exception as error:
        if not cached:
            setting = "model_name_or_path" if kind == "model" else "dataset_name"
            owned, folder = name if "/" in name else f"OWNER/{name}", name.rpartition("/")[2]
            raise UserError(
                f"--{setting} {name}: {constants.ENDPOINT} cannot be reached [{first_line(error)}]. In China use a "
                "mirror (export HF_ENDPOINT=https://hf-mirror.com), or ModelScope: pip install modelscope; modelscope "
                f"download --{kind} {owned} --local_dir {folder}; then name ./{folder}"
            ) from error
        _say(f"{name}: {constants.ENDPOINT} cannot be reached, so the copy in the cache is taken")
        constants.HF_HUB_OFFLINE = kind == "model"


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.info(line)
