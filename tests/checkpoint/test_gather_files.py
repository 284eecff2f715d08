"""toolkit/checkpoint/gather_files.py and publish.py: what is sent to whom, and what no disk has."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.checkpoint import folder as folders
from toolkit.checkpoint.disks import Disks, View, disks_of
from toolkit.checkpoint.gather_files import (
    Gathered,
    Held,
    _make_way,
    _not_whole,
    _summary,
    _written,
    gather_files,
    held,
    plan,
)
from toolkit.checkpoint.publish import Completion, begin_on_all, publish_on_all, settle_on_all
from toolkit.errors import UserError

FILES = {"a": {"bytes": 3, "host": "hostA", "rank": 0}, "b": {"bytes": 2_000_000, "host": "hostB", "rank": 1},
         "c": {"bytes": 5, "host": "hostC", "rank": 2}}  # fmt: skip


def disks(rank: int = 0, root: str = "/run/checkpoints") -> Disks:
    return disks_of([View(f"host{name}", name, root, (other,)) for other, name in enumerate("ABC")], rank)


def has(*names: str, **faults: str) -> Held:
    return Held(True, frozenset(names), faults)


def moves(on: dict[int, Held]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(move.name, move.reader, move.targets) for move in plan(FILES, on)[0]]


def test_each_sends_what_it_has() -> None:
    on = {0: has("a"), 1: has("b"), 2: has("c")}
    assert moves(on) == [("a", 0, (1, 2)), ("b", 1, (0, 2)), ("c", 2, (0, 1))]
    assert _summary(plan(FILES, on)[0], disks()) == (
        "1 file (3 bytes) from hostA to hostB and hostC, 1 file (2 MB) from hostB to hostA and hostC, "
        "1 file (5 bytes) from hostC to hostA and hostB"
    )


def test_nothing_is_sent_that_is_there() -> None:
    everything = has("a", "b", "c")
    assert plan(FILES, dict.fromkeys(range(3), everything)) == ([], [])
    assert moves({0: everything, 1: everything, 2: Held()}) == [(name, 0, (2,)) for name in "abc"]
    assert moves({0: has("a"), 1: everything, 2: everything}) == [("b", 1, (0,)), ("c", 1, (0,))]


def lost(on: dict[int, Held], files: dict[str, Any] = FILES, among: Disks | None = None) -> Gathered:
    folder = Path("/run/checkpoints/step-00000004")
    missing = plan(files, on)[1]
    return _not_whole(folder, {"files": files}, among or disks(), on, missing)


def test_a_machine_that_is_not_in_the_run_has_a_part() -> None:
    two = disks_of([View(f"host{name}", name, "/run/checkpoints", (other,)) for other, name in enumerate("AB")], 0)
    assert lost({0: has("a", "b"), 1: has("b")}, among=two).lacks == (
        "/run/checkpoints/step-00000004 lacks the files of rank 2, which lie on hostC: bring them together first: "
        "`rsync -a hostC:/run/checkpoints/step-00000004/ /run/checkpoints/step-00000004/`"
    )


def test_what_is_gone_or_cut_short_cannot_be_brought() -> None:
    gathered = lost({0: has("a"), 1: Held(), 2: has("c")})
    assert gathered == Gathered(fault="b, which rank 1 wrote, is gone from hostB:/run/checkpoints/step-00000004")
    gathered = lost({0: has("a"), 1: has(b="/x/b has 1 bytes and should have 2"), 2: has("c")})
    assert gathered == Gathered(fault="/x/b has 1 bytes and should have 2")
    files = {**FILES, "d": {"bytes": 1}}
    assert "step-00000004/d is missing" in lost({0: has("a", "b", "c"), 1: has(), 2: has()}, files).fault


def save(checkpoints: Path, note: str = "") -> Path:
    folder = checkpoints / "step-00000004"
    folders.begin(folder)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "weights").write_bytes(bytes(100))
    files = folders.described(folder, ["weights", "model/config.json"])
    folders.publish(folder, {"format": 1, "step": 4, "note": note, "files": files})
    return folder


def test_what_a_disk_has(tmp_path: Path) -> None:
    folder = save(tmp_path)
    manifest = folders.read_manifest(folder)
    assert held(folder, manifest) == Held(True, frozenset(["weights", "model/config.json"]))
    (folder / "weights").write_bytes(bytes(99))
    (folder / "model" / "config.json").unlink()
    found = held(folder, manifest)
    assert found.names == frozenset()
    assert found.faults == {"weights": f"{folder / 'weights'} has 99 bytes and should have 100"}


def test_a_folder_of_another_run_has_nothing_and_is_kept(tmp_path: Path) -> None:
    folder = save(tmp_path / "b", note="of another run")
    other = folders.read_manifest(save(tmp_path / "a"))
    assert held(folder, other) == Held()
    _make_way(folder, Held())
    (aside,) = (tmp_path / "b").glob("step-00000004.old-*")
    assert folders.fault_of(aside) == ""
    assert list(folder.iterdir()) == []
    assert folders.complete(tmp_path / "b") == []


def test_what_is_half_received_does_not_count(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "model" / ".tokenizer.json.77").write_text("half")
    found = held(folder, folders.read_manifest(folder))
    _make_way(folder, found)
    assert sorted(path.name for path in folder.rglob("*")) == ["config.json", "manifest.json", "model", "weights"]
    (folder / "manifest.json").unlink()
    _make_way(folder, Held())
    assert list(folder.iterdir()) == []


def test_a_received_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "model" / "config.json"
    with _written(path) as file:
        file.write(b"ab")
        assert not path.exists()
    assert path.read_bytes() == b"ab"
    fault = rf"{path}, which another machine .* cannot be written here: No space left"
    with pytest.raises(UserError, match=fault), _written(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [file.name for file in path.parent.iterdir()] == ["config.json"]
    assert path.read_bytes() == b"ab"


# one disk


def alone(is_main: bool = True) -> Any:
    return SimpleNamespace(is_main_process=is_main, process_index=0, wait_for_everyone=lambda: None)


def one_disk(folder: Path) -> Disks:
    return disks_of([View("hostA", "A", str(folder))], 0)


def test_on_one_disk_nothing_is_sent(tmp_path: Path) -> None:
    folder, said = save(tmp_path), list[str]()
    assert gather_files(alone(), one_disk(tmp_path), folder, said.append) == Gathered()
    (folder / "weights").unlink()
    gathered = gather_files(alone(), one_disk(tmp_path), folder, said.append)
    assert gathered == Gathered(fault=f"{folder / 'weights'} is missing")
    (folder / "manifest.json").unlink()
    assert "has no manifest.json" in gather_files(alone(), one_disk(tmp_path), folder, said.append).fault
    assert said == []


def test_half_a_checkpoint_on_one_disk(tmp_path: Path) -> None:
    folder = save(tmp_path)
    manifest = folders.read_manifest(folder)
    manifest["files"]["weights"] |= {"host": "hostB", "rank": 1}
    folders.publish(folder, manifest)
    (folder / "weights").unlink()
    gathered = gather_files(alone(), one_disk(tmp_path), folder, str)
    assert gathered.fault == ""
    assert f"{folder} lacks the files of rank 1, which lie on hostB" in gathered.lacks


# several disks, one process after the other


def completion(checkpoints: Path, step: int, **files: Any) -> Completion:
    manifest = {"format": 1, "step": step, "saved_at": float(step)}
    return Completion(folders.step_folder(checkpoints, step), manifest, files, [], keep=1, best_step=4)


def save_on_both(root: Path, step: int) -> None:
    """Rank 0's part first, as if rank 1 waited at each collective."""
    for rank, name in enumerate("ab"):
        among, accelerator = two_disks(rank), alone(is_main=rank == 0)
        checkpoints = root / name / "checkpoints"
        complete = completion(checkpoints, step, **{"weights": {"bytes": 1, "crc32": "0", "host": "hostB", "rank": 1}})
        begin_on_all(accelerator, among, complete.folder)
        (complete.folder / ("weights" if rank else "latest")).write_text("x")
        (complete.folder / "mp_rank_00_model_states.pt").write_text("also written here")
        publish_on_all(accelerator, among, complete)
        settle_on_all(accelerator, among, complete)


def two_disks(rank: int) -> Disks:
    return disks_of([View(f"host{name}", name, f"/{name}/checkpoints", (r,)) for r, name in enumerate("AB")], rank)


def test_every_disk_gets_rank_0s_manifest(tmp_path: Path) -> None:
    save_on_both(tmp_path, 4)
    a, b = (tmp_path / name / "checkpoints" / "step-00000004" for name in "ab")
    assert (a / "manifest.json").read_bytes() == (b / "manifest.json").read_bytes()
    manifest = folders.read_manifest(a)
    assert manifest["disks"] == {"hostA": "/A/checkpoints/step-00000004", "hostB": "/B/checkpoints/step-00000004"}
    assert sorted(path.name for path in b.iterdir()) == ["manifest.json", "weights"]  # and nothing that rank 0 wrote
    assert folders.fault_of(b) == ""
    assert "lacks the files of rank 1" in folders.fault_of(a)
    for name in ("best", "last"):
        assert (b.parent / name).readlink() == Path("step-00000004")


def test_a_shared_disk_has_no_hosts_in_its_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-00000004"
    begin_on_all(alone(), one_disk(folder.parent), folder)
    completion(folder.parent, 4, weights={"bytes": 0, "crc32": "0"})()
    assert "disks" not in folders.read_manifest(folder)
    shutil.rmtree(folder)
