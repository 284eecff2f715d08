"""`--push_to_hub` with a fake of the hub's API on this machine."""

import base64
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.runs import CLASSIFIER, Finished, fork
from toolkit.config import TaskSettings, build
from toolkit.errors import UserError

TOKEN = "hf_notARealTokenOfAnybody"


class Hub(ThreadingHTTPServer):
    """Accepts repositories and commits, and records them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None, Any]] = []
        self.refuses = ""
        """Requests whose path ends with this are refused."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        refuses = self.server.refuses and self.path.endswith(self.server.refuses)
        self._answer(403 if refuses else 200, {"error": "no right to write"} if refuses else {})

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        hub, lines = self.server, [json.loads(line) for line in body.splitlines() if line.strip()]
        hub.requests.append((self.path, self.headers.get("Authorization"), lines))
        if hub.refuses and self.path.endswith(hub.refuses):
            self._answer(403, {"error": "no right to write"})
        elif self.path == "/api/repos/create":
            self._answer(200, {"url": f"{hub.url}/me/{lines[0]['name']}"})
        elif self.path == "/api/validate-yaml":  # the front matter of README.md
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            mode = {"uploadMode": "regular", "shouldIgnore": False}  # not LFS
            self._answer(
                200, {"files": [{"path": file["path"], **mode} for file in lines[0]["files"]]}
            )
        else:  # a commit
            files = [line["value"] for line in lines if line["key"] == "file"]
            hub.files |= {file["path"]: base64.b64decode(file["content"]) for file in files}
            commit = f"{hub.url}/me/reviews/commit/{'0' * 40}"
            self._answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": commit})


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def hub(server: Hub) -> Hub:
    server.files, server.requests, server.refuses = {}, [], ""
    return server


def push(hub: Hub, job: list[str], *more: str, token: str = TOKEN) -> Finished:
    """Starts a run of one step that pushes, without the token of whoever runs the tests."""
    early = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1",
             "HF_HOME": os.environ["TOOLKIT_TESTS_FOLDER"]}  # fmt: skip
    words = [
        "recipes/cls.py",
        *job,
        "--max_steps",
        "1",
        "--global_batch_size",
        "8",
        "--push_to_hub",
        "true",
        *more,
    ]
    with fork(words, {"HF_TOKEN": token}, imported=CLASSIFIER, early=early) as process:
        return process.finish(120)


@pytest.mark.multiprocess
def test_one_of_two_processes_uploads_the_model(
    hub: Hub, tiny_job: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "reviews"
    finished = push(hub, tiny_job, "--output_dir", str(folder), "--hub_private_repo", "true",
                    "--config_file", "accelerate_configs/ddp.yaml").succeeded()  # fmt: skip
    assert f"{hub.url}/me/reviews/commit/" in finished.out
    saved = {path.relative_to(folder / "model").as_posix(): path.read_bytes()
             for path in (folder / "model").rglob("*") if path.is_file()}  # fmt: skip
    assert {"README.md", "model.safetensors", "config.json"} <= set(saved)
    uploaded = {name: content for name, content in hub.files.items() if name != ".gitattributes"}
    assert uploaded == saved
    created = [content[0] for path, _, content in hub.requests if path == "/api/repos/create"]
    assert {(each["name"], each.get("visibility")) for each in created} == {("reviews", "private")}
    assert sum(path.endswith("/commit/main") for path, _, _ in hub.requests) == 1
    assert {authorization for _, authorization, _ in hub.requests} == {f"Bearer {TOKEN}"}
    assert TOKEN not in finished.out + finished.err
    assert not [
        path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()
    ]


def test_a_refused_upload_does_not_fail_the_run(
    hub: Hub, tiny_job: list[str], tmp_path: Path
) -> None:
    folder, hub.refuses = tmp_path / "run", "/commit/main"
    finished = push(
        hub, tiny_job, "--output_dir", str(folder), "--hub_model_id", "me/reviews"
    ).succeeded()
    (line,) = [line for line in finished.out.splitlines() if "not uploaded" in line]
    assert line.endswith(f"hf upload me/reviews {folder}/model")
    assert "403" in line
    assert (folder / "model" / "README.md").is_file()
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize(
    ("refuses", "token", "named"),
    [
        ("", "", "HF_TOKEN"),
        ("/create", TOKEN, "--hub_model_id"),
        ("/auth-check/write", TOKEN, "--hub_model_id"),
    ],
)
def test_missing_rights(
    refuses: str, token: str, named: str, hub: Hub, tiny_job: list[str], tmp_path: Path
) -> None:
    hub.refuses = refuses
    finished = push(hub, tiny_job, "--output_dir", str(tmp_path / "run"), token=token)
    finished.says_in_one_line("--push_to_hub", named)
    assert TOKEN not in finished.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("values", "named"), [
    ({"push_to_hub": True}, "--hub_model_id"), ({"hub_model_id": "me/x"}, "--push_to_hub"),
])  # fmt: skip
def test_settings_that_contradict_each_other(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        build(TaskSettings, {"train_file": "x.csv", "model_name_or_path": "x", **values})
