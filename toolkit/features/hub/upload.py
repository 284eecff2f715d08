"""The repository of a run and the upload of its model. Only `huggingface_hub` reads the token."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

from huggingface_hub import HfApi, auth_check, constants, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from toolkit import __version__
from toolkit.errors import UserError, first_line


def create_repository(name: str, private: bool | None) -> str:
    """Creates the repository if it does not exist, and returns OWNER/NAME. Raises UserError if the token does not
    allow it, or the hub does not answer."""
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push_to_hub: HF_HUB_OFFLINE is set: unset it, or upload the run's model/ from elsewhere")
    if not get_token():
        raise UserError("--push_to_hub needs a token with write access: export HF_TOKEN=..., or `hf auth login`")
    try:
        repository = str(HfApi().create_repo(name, private=private, exist_ok=True).repo_id)
        with contextlib.suppress(RepositoryNotFoundError):  # an endpoint that has no such check
            auth_check(repository, write=True)  # `create_repo` accepts a token that cannot write to an existing one
        return repository
    except Exception as error:  # of the library, of its checks and of the network below it
        why = f"cannot create {name} on {constants.ENDPOINT} [{first_line(error)}]"
        remedy = "check --hub_model_id, HF_TOKEN (it needs write access) and HF_ENDPOINT"
        raise UserError(f"--push_to_hub: {why}: {remedy}") from error


def upload(folder: Path, name: str, private: bool | None) -> str:
    """Uploads model/ of a run folder, and returns a line with its URL, or, on failure, with the command to retry."""
    model = folder / "model"
    try:
        name = create_repository(name, private)
        message = f"{folder.resolve().name}, by finetune-toolkit {__version__}"
        commit = HfApi().upload_folder(repo_id=name, folder_path=model, commit_message=message)
    except Exception as error:  # a failed upload must not fail the run
        again = shlex.join(["hf", "upload", name, str(model)])
        return f"  the model was not uploaded [{first_line(error)}]; to upload it: {again}"
    return f"  uploaded: {commit.commit_url}"
