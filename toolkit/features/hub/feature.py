"""`--push_to_hub`: the settings, the hooks, and the upload. Only `huggingface_hub` reads the token."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from toolkit import __version__
from toolkit.config.parse import has_section, section_in
from toolkit.config.sections import Pairs, TrainingSettings, section
from toolkit.errors import UserError, first_line
from toolkit.utils.features import Feature


@section
class HubSettings:
    """Upload of the model to the hub, with the token of HF_TOKEN or of `hf auth login`."""

    alternatives: ClassVar[Pairs] = (
        ("push_to_hub", "folds", "folds train models to check labels, and none to publish"),
    )

    push_to_hub: bool = False
    """Upload model/ when the run has ended."""
    hub_model_id: str | None = None
    """The repository: NAME or OWNER/NAME; default: the name of output_dir."""
    hub_private_repo: bool | None = None
    """Make a new repository private; default: the owner's setting."""

    @staticmethod
    def contradictions(values: Mapping[str, Any]) -> Iterator[str]:
        if str(values.get("push_to_hub", False)).lower() == "true":
            if not (values.get("hub_model_id") or values.get("output_dir")):
                yield "--push_to_hub needs --hub_model_id NAME, or an --output_dir, whose name the repository takes"
        else:
            for name in ("hub_model_id", "hub_private_repo"):
                if values.get(name) is not None:
                    yield f"--{name} has no effect without --push_to_hub true"


class HubFeature(Feature):
    """Creates the repository when a run begins, and uploads the model when it has ended."""

    switches = ("push_to_hub",)

    def sections(self, settings_class: type) -> Mapping[str, type]:
        return {"hub": HubSettings} if has_section(settings_class, TrainingSettings) else {}

    def run_settings(self, settings: Any, data: Any, accelerator: Any) -> Any:
        if accelerator.is_main_process:
            create_repository(_name(settings), section_in(settings, HubSettings).hub_private_repo)
        return settings

    def finished(self, folder: Path, settings: Any) -> Sequence[str]:
        return [upload(folder, _name(settings), section_in(settings, HubSettings).hub_private_repo)]


def _name(settings: Any) -> str:
    return (
        section_in(settings, HubSettings).hub_model_id
        or Path(settings.training.output_dir).resolve().name
    )


def create_repository(name: str, private: bool | None) -> str:
    """Creates the repository if it does not exist, and returns OWNER/NAME. Raises UserError where the token does not
    allow it, or the hub does not answer."""
    from huggingface_hub import HfApi, auth_check, constants, get_token
    from huggingface_hub.errors import RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise UserError(
            "--push_to_hub: HF_HUB_OFFLINE is set: unset it, or upload the run's model/ from elsewhere"
        )
    if not get_token():
        raise UserError(
            "--push_to_hub needs a token with write access: export HF_TOKEN=..., or `hf auth login`"
        )
    try:
        repository = str(HfApi().create_repo(name, private=private, exist_ok=True).repo_id)
        with contextlib.suppress(RepositoryNotFoundError):  # an endpoint that has no such check
            auth_check(
                repository, write=True
            )  # `create_repo` accepts a token that cannot write to an existing one
        return repository
    except Exception as error:  # of the library, of its checks and of the network below it
        why = f"cannot create {name} on {constants.ENDPOINT} [{first_line(error)}]"
        remedy = "check --hub_model_id, HF_TOKEN (it needs write access) and HF_ENDPOINT"
        raise UserError(f"--push_to_hub: {why}: {remedy}") from error


def upload(folder: Path, name: str, private: bool | None) -> str:
    """Uploads model/ of a run folder, and returns a line with its URL, or, on failure, with the command to retry."""
    from huggingface_hub import HfApi

    model = folder / "model"
    try:
        name = create_repository(name, private)
        message = f"{folder.resolve().name}, by finetune-toolkit {__version__}"
        commit = HfApi().upload_folder(repo_id=name, folder_path=model, commit_message=message)
    except Exception as error:  # a failed upload must not fail the run
        again = shlex.join(["hf", "upload", name, str(model)])
        return f"  the model was not uploaded [{first_line(error)}]; to upload it: {again}"
    return f"  uploaded: {commit.commit_url}"


FEATURE = HubFeature()
