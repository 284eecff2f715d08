"""Starts Python programs as forks of a process that has imported what recipes import, the slowest part of a start.

    python tests/fork_server.py SOCKET [MODULE...]     the modules to import, instead of the default ones

Each line from the Unix socket is a JSON object {"argv": [...], "env": {...}, "folder": PATH, "cwd": PATH, "cores":
[...], "largest_file": BYTES or null, "inside": the arguments of `enter` or null}; the answer is a line with its process
id. The folder gets the output (`out`, `err`) and at the end the exit code (`code`); a pipe `in` there is the input. The
server ends when its last connection is closed. A Python program that the new process starts (Popen) is a fork, too.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_IMPORTED = ("datasets", "deepspeed", "sklearn.metrics", "sklearn.model_selection", "sklearn.multiclass",
             "sklearn.feature_extraction.text", "sklearn.linear_model", "toolkit.report.html", "toolkit.report.card",
             "toolkit.features.baselines.baselines", "toolkit.features.compare.command",
             "toolkit.features.decisions.decisions",
             "matplotlib.backends.backend_svg", "toolkit.launch.launcher", "recipes.cls", "recipes.bigbird",
             "recipes.title", "toolkit.api", "toolkit.run", "toolkit.training.prepare", "toolkit.models.to_bigbird",
             "torch.distributed.checkpoint.state_dict", "torch.utils.tensorboard", "deepspeed.launcher.runner",
             "deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.runtime.zero.muon.muon_optimizer",
             "deepspeed.module_inject.auto_ep_layer", "tests.runs")  # fmt: skip
_execute_child = subprocess.Popen._execute_child


def serve(listener: socket.socket) -> None:
    clients: dict[socket.socket, Any] = {}
    running: dict[int, Path] = {}
    while True:
        for ready in select.select([listener, *clients], [], [], 0.02 if running else None)[0]:
            if ready is listener:
                client = listener.accept()[0]
                clients[client] = client.makefile("rw")
                continue
            line = ""
            with contextlib.suppress(OSError):
                line = clients[ready].readline()
            if not line.endswith("\n"):  # its process was killed, while it wrote perhaps
                del clients[ready]
                if not clients:
                    return
                continue
            request = json.loads(line)
            folder = Path(request["folder"])
            child = os.fork()
            if not child:
                start(request, folder)
            for name in ("out", "err"):
                (folder / name).touch()
            running[child] = folder
            with contextlib.suppress(OSError):
                print(child, file=clients[ready], flush=True)
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                folder = running.pop(child)
                with contextlib.suppress(OSError):  # its folder is removed
                    (folder / "draft").write_text(str(os.waitstatus_to_exitcode(status)))
                    (folder / "draft").rename(folder / "code")


def start(request: dict[str, Any], folder: Path) -> NoReturn:
    os.setsid()
    os.chdir(request["cwd"])
    if request["cores"]:
        os.sched_setaffinity(0, request["cores"])
    pipe = folder / "in"
    os.dup2(os.open(pipe if pipe.exists() else os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(("out", "err"), 1):
        os.dup2(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    if largest := request["largest_file"]:  # beyond it EFBIG: Python ignores the signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    if request["inside"] is not None:
        enter(**request["inside"])
    become([sys.executable, *request["argv"]], request["env"])


def enter(space: str, name: str, binds: Mapping[str, str]) -> None:
    """As `ip netns exec SPACE` with this host name, and the files of `binds` (path -> source) mounted."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: Any) -> None:
        encoded = [os.fsencode(one) if isinstance(one, str) else one for one in arguments]
        if getattr(libc, function)(*encoded):
            raise OSError(ctypes.get_errno(), f"{function}{arguments}")

    call("setns", os.open(f"/var/run/netns/{space}", os.O_RDONLY), 0x40000000)  # CLONE_NEWNET
    call("unshare", 0x00020000 | 0x04000000)  # CLONE_NEWNS, CLONE_NEWUTS
    call("mount", "none", "/", None, 1 << 14 | 1 << 19, None)  # MS_REC, MS_SLAVE
    for path, source in {"/etc/hosts": f"/etc/netns/{space}/hosts", **binds}.items():
        call("mount", source, path, None, 1 << 12, None)  # MS_BIND
    socket.sethostname(name)
    platform._uname_cache = None


def become(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Continues as `python ...` would."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    if threads := env.get("OMP_NUM_THREADS"):  # torch reads it on import
        sys.modules["torch"].set_num_threads(int(threads))
    if "TESTS_WITHOUT_PAGES" in env:  # the slowest parts of a short run
        original = sys.modules["toolkit.report.summary"].write_pages
        write = functools.partial(write_pages, original, env["TESTS_WITHOUT_PAGES"])
        for name in ("toolkit.report.summary", "toolkit.run"):
            sys.modules[name].write_pages = write
        if baselines := sys.modules.get("toolkit.features.baselines.feature"):
            baselines.FEATURE.results = lambda *_: ()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    words = [word for word in command[1:] if word != "-u"]
    code = 0
    try:
        if words[0] == "-m":
            sys.path[0], sys.argv = str(Path.cwd()), words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0], sys.argv = str(Path(words[0]).parent.resolve()), words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_pages(write: Any, names: str, folder: Path, best_step: int) -> None:
    """In place of `toolkit.report.summary.write_pages`: for other runs than `names` (by commas) an empty page, which
    marks the run as finished."""
    if folder.name in names.split(","):
        write(folder, best_step)
    else:
        (folder / "report.html").touch()


def is_python(command: Any) -> bool:
    """A script, or a module with -m."""
    if not isinstance(command, (list, tuple)):
        return False
    program, *words = [str(word) for word in command if word != "-u"]
    return program == sys.executable and words != [] and words[0].endswith((".py", "-m"))


def execute_child(self: Any, args: Any, *others: Any) -> Any:
    """In place of `Popen._execute_child`. Order of its arguments: ..., cwd, env, ..., six pipe ends, restore_signals,
    ..., start_new_session, process_group."""
    env, pipes, new_session = others[5], others[9:15], others[-2]
    streams = dict(enumerate((pipes[0], pipes[3], pipes[5])))  # its streams
    if not is_python(args) or (pipes[1], pipes[2], pipes[4]) != (-1,) * 3:
        return _execute_child(self, args, *others)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        if new_session:
            os.setsid()
        for stream, end in streams.items():
            if end != -1:
                os.dup2(end, stream)
        become([str(word) for word in args], os.environ.copy() if env is None else env)
    self.pid, self._child_created = child, True
    return None


def warm_up() -> None:
    """What every run would do again."""
    from deepspeed.utils import nvtx
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from toolkit.utils.features import features

    features()
    get_checkpoint_conversion_mapping("bert")
    importlib.metadata.version = functools.cache(importlib.metadata.version)
    nvtx.enable_nvtx = False  # names for a profiler, thousands in a step


if __name__ == "__main__":
    unix_socket = socket.socket(socket.AF_UNIX)
    unix_socket.bind(sys.argv[1])
    unix_socket.listen()  # before the slow imports: whoever started this waits in the queue, or its end is seen
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if not Path("/proc/driver/nvidia").exists():
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it on import
    for module in sys.argv[2:] or _IMPORTED:
        importlib.import_module(module)
    if not sys.argv[2:]:
        warm_up()
    for module in [name for name in sys.modules if name.startswith("recipes.")]:
        del sys.modules[module]  # a test may write a module of that name
    subprocess.Popen._execute_child = execute_child
    # for torchrun's log it searches all modules, a second with so many imports
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = str
    gc.freeze()  # ZeRO-3 collects garbage at each start
    serve(unix_socket)
