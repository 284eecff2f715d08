"""`--push_to_hub`: the settings and the hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config.parse import has_section, section_in
from toolkit.config.sections import TrainingSettings, section
from toolkit.utils.features import Feature


@section
class HubSettings:
    """Upload of the model to the hub, with the token of HF_TOKEN or of `hf auth login`."""

    push_to_hub: bool = False
    """Upload model/ when the run has ended."""
    hub_model_id: str | None = None
    """The repository: NAME or OWNER/NAME; default: the name of output_dir."""
    hub_private_repo: bool | None = None
    """Make a new repository private; default: the owner's setting."""


class HubFeature(Feature):
    """Creates the repository when a run begins, and uploads the model when it has ended."""

    switches = ("push_to_hub",)
    exclusive = (("push_to_hub", "folds", "folds train models to check labels, and none to publish"),)

    def sections(self, settings_class: type) -> Mapping[str, type]:
        return {"hub": HubSettings} if has_section(settings_class, TrainingSettings) else {}

    def faults(self, values: Mapping[str, Any]) -> Iterable[str]:
        if str(values.get("push_to_hub", False)).lower() == "true":
            if not (values.get("hub_model_id") or values.get("output_dir")):
                yield "--push_to_hub needs --hub_model_id NAME, or an --output_dir, whose name the repository takes"
        else:
            for name in ("hub_model_id", "hub_private_repo"):
                if values.get(name) is not None:
                    yield f"--{name} has no effect without --push_to_hub true"

    def run_settings(self, settings: Any, data: Any, accelerator: Any) -> Any:
        if accelerator.is_main_process:
            from toolkit.features.hub.upload import create_repository

            create_repository(_name(settings), section_in(settings, HubSettings).hub_private_repo)
        return settings

    def finished(self, folder: Path, settings: Any) -> Sequence[str]:
        from toolkit.features.hub.upload import upload

        return [upload(folder, _name(settings), section_in(settings, HubSettings).hub_private_repo)]


def _name(settings: Any) -> str:
    return section_in(settings, HubSettings).hub_model_id or Path(settings.training.output_dir).resolve().name


FEATURE = HubFeature()
