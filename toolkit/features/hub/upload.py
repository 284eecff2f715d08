"""The repository of a run, and the upload of its model. The token stays with `huggingface_hub`, which reads it."""

from __future__ import annotations

import shlex
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token

from toolkit import __version__
from toolkit.errors import UserError, first_line


def make_repository(name: str, private: bool | None) -> str:
    """OWNER/NAME, made where there is none. Raises UserError where this token, or this machine, cannot: before the
    run, rather than at its end."""
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push_to_hub: HF_HUB_OFFLINE is set: unset it, or upload the run's model/ from elsewhere")
    if not get_token():
        raise UserError("--push_to_hub needs a token that may write: export HF_TOKEN=..., or `hf auth login`")
    try:
        return str(HfApi().create_repo(name, private=private, exist_ok=True).repo_id)
    except Exception as error:  # of the library, of its checks and of the network below it
        raise UserError(
            f"--push_to_hub: {constants.ENDPOINT} gives no repository {name} [{first_line(error)}]: check "
            "--hub_model_id, HF_TOKEN (it must be one that may write) and HF_ENDPOINT"
        ) from error


def upload(folder: Path, name: str, private: bool | None) -> str:
    """Uploads model/ of a run's folder: a line on where it is, or, where that fails, on how to do it again."""
    model = folder / "model"
    try:
        name = make_repository(name, private)
        message = f"{folder.resolve().name}, by finetune-toolkit {__version__}"
        commit = HfApi().upload_folder(repo_id=name, folder_path=model, commit_message=message)
    except Exception as error:  # the run is whole without it
        again = shlex.join(["hf", "upload", name, str(model)])
        return f"  the model was not uploaded [{first_line(error)}]; to upload it: {again}"
    return f"  uploaded: {commit.commit_url}"
