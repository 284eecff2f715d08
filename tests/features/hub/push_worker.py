"""recipes/cls.py with a fake of the hub's API: requests are lines of the file HUB; the one named REFUSED is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from recipes import cls
from toolkit import launch
from toolkit.features.hub import upload


class FakeHub:
    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> Any:
        self._record("create_repo", repo_id, private=private)
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        self._record(
            "upload_folder", repo_id, folder=str(folder_path), files=[path.name for path in folder_path.iterdir()]
        )
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit")

    def _record(self, name: str, repo_id: str, **request: Any) -> None:
        with Path(os.environ["HUB"]).open("a") as file:
            file.write(json.dumps({"name": name, "repo_id": repo_id, **request}) + "\n")
        if name == os.environ["REFUSED"]:
            raise PermissionError("403: no right to write")


def main() -> None:
    upload.HfApi = FakeHub  # type: ignore[misc,assignment]
    upload.get_token = lambda: os.environ["HF_TOKEN"]
    upload.constants = SimpleNamespace(HF_HUB_OFFLINE=False, ENDPOINT="https://hub")  # type: ignore[assignment]
    cls.main()


if __name__ == "__main__":
    launch.run(main)
