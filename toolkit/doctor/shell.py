"""The shell this was typed in: variables that change what is started, silently."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from toolkit.doctor.finding import Finding, plain

AREA = "shell"
_LEFT_OVER = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE|TORCHELASTIC_.*|ACCELERATE_.*|FSDP_.*)$"
)
# set by people for their own use of accelerate, and harmless
_MEANT = ("ACCELERATE_LOG_LEVEL", "ACCELERATE_DISABLE_RICH")
COMMUNICATION = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "FI_")
DEVICES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def check(env: Mapping[str, str], interfaces: Sequence[str], config_given: bool) -> list[Finding]:
    """Of an environment; `interfaces` are those of the machine, up or not."""
    return [
        *left_over(env),
        *communication(env),
        *named_interfaces(env, interfaces),
        *([] if config_given else default_config(_default_config(env))),
        *proxies(env),
    ]


def left_over(env: Mapping[str, str]) -> list[Finding]:
    """Variables a launcher sets: in a shell they make every start believe that it was launched."""
    names = sorted(name for name in env if _LEFT_OVER.match(name) and name not in _MEANT)
    if not names:
        return []
    text = f"this shell holds a launcher's variables: {', '.join(f'{name}={env[name]}' for name in names)}"
    return [Finding(AREA, "launcher", "warn", plain(text), f"unset {' '.join(names)}")]


def communication(env: Mapping[str, str]) -> list[Finding]:
    """What NCCL, gloo and the choice of devices are told."""
    told = environment_of(env, (*COMMUNICATION, *DEVICES))
    found = [f"{name}={value}" for name, value in told.items()]
    if "NCCL_DEBUG" not in env and not found:
        return []
    return [Finding(AREA, "variables", "note", plain(", ".join(found)))]


def named_interfaces(env: Mapping[str, str], interfaces: Sequence[str]) -> list[Finding]:
    """NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME must name what is there."""
    found = []
    for variable, chosen in (
        ("NCCL_SOCKET_IFNAME", nccl_interfaces(env.get("NCCL_SOCKET_IFNAME", ""), interfaces)),
        ("GLOO_SOCKET_IFNAME", gloo_interfaces(env.get("GLOO_SOCKET_IFNAME", ""), interfaces)),
    ):
        if not env.get(variable) or chosen:
            continue
        others = [name for name in interfaces if name != "lo"]
        text = f"{variable} is {env[variable]!r}, and no interface here is called so ({', '.join(interfaces)})"
        remedy = f"unset {variable}" + "".join(f", or `export {variable}={name}`" for name in others[:1])
        found.append(Finding(AREA, variable, "fail", plain(text), remedy))
    return found


def nccl_interfaces(value: str, interfaces: Sequence[str]) -> list[str]:
    """Those that NCCL takes: `eth` means all that begin so, `=eth0` that one, `^docker` all but those."""
    exclude, rest = value.startswith("^"), value.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    names = [name.split(":")[0] for name in rest.split(",") if name]
    fits = [
        name for name in interfaces if any(name == wanted if exact else name.startswith(wanted) for wanted in names)
    ]
    return [name for name in interfaces if name not in fits] if exclude else fits


def gloo_interfaces(value: str, interfaces: Sequence[str]) -> list[str]:
    """Gloo takes exact names; one that is missing is an error to it."""
    names = [name for name in value.split(",") if name]
    return names if all(name in interfaces for name in names) else []


def default_config(path: Path | None) -> list[Finding]:
    """The user's own accelerate config, which `accelerate launch` merges in without a word."""
    if path is None:
        return []
    text = f"`accelerate launch` without --config_file takes {path}, and does not say so"
    return [Finding(AREA, "accelerate", "note", text, "--config_file accelerate_configs/single.yaml (or another)")]


def _default_config(env: Mapping[str, str]) -> Path | None:
    home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    folder = Path(os.path.expandvars(home)).expanduser() / "accelerate"
    return next((path for name in ("yaml", "json") if (path := folder / f"default_config.{name}").is_file()), None)


def proxies(env: Mapping[str, str]) -> list[Finding]:
    """Downloads use them; torch between machines does not."""
    found = {name: value for name in _PROXIES if (value := env.get(name) or env.get(name.upper()))}
    if not found:
        return []
    text = ", ".join(f"{name}={_without_password(value)}" for name, value in found.items())
    return [Finding(AREA, "proxy", "note", plain(f"{text}: for downloads; machines talk to each other without it"))]


def _without_password(value: str) -> str:
    if "@" not in value:
        return value
    parts = urlsplit(value)
    return f"{parts.scheme}://***@{parts.hostname}" if parts.scheme else "***"


def environment_of(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Those variables of an environment that begin with one of `names`, sorted."""
    return {name: env[name] for name in sorted(env) if name.startswith(tuple(names))}
