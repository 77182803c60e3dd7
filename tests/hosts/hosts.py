"""Two hosts on one machine: namespaces with names, addresses and a link of their own, which leave nothing behind."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
ADDRESSES = {"one": "10.77.0.1", "two": "10.77.0.2"}
_NAMESPACES = ("--net", "--mount", "--uts")
_KEEPERS = "DISTDL_TESTS_KEEPERS"  # the variable that says which process keeps each host: one=123,two=124


class Host(NamedTuple):
    """The process that keeps a host, and its number as this process sees it."""

    keeper: subprocess.Popen[str]
    number: int

    def link(self, delay: float, loss: float) -> None:
        """From now on what this host sends takes so many seconds, and such a part of it is lost (1: all)."""
        assert self.keeper.stdin is not None
        self.keeper.stdin.write(f"{delay} {loss}\n")
        self.keeper.stdin.flush()


@contextmanager
def two_hosts() -> Iterator[dict[str, Host]]:
    """Make the hosts ``one`` and ``two``, and remove them with all that runs there; so, too, if this process is killed.

    As on Debian, each host's own name means 127.0.1.1 to itself.

    Raises: RuntimeError or OSError where namespaces or tunnel devices are not allowed.
    """
    with ExitStack() as stack:
        ends = dict(zip(ADDRESSES, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM), strict=True))
        for end in ends.values():
            stack.callback(end.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="distdl-hosts-")))
        hosts = {}
        for name, address in ADDRESSES.items():
            known = {"localhost": "127.0.0.1", **ADDRESSES, name: "127.0.1.1"}
            (folder / name).write_text("".join(f"{number} {host}\n" for host, number in known.items()))
            link = ends[name].fileno()
            hosts[name] = stack.enter_context(_host([name, address, str(folder / name), str(link)], link))
        yield hosts


@contextmanager
def _host(arguments: Sequence[str], link: int) -> Iterator[Host]:
    alone = [*_NAMESPACES, "--pid", "--fork", "--kill-child"]
    command = ["unshare", *alone, sys.executable, str(FOLDER / "host.py"), *arguments]
    pipe = subprocess.PIPE
    keeper = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, pass_fds=[link])
    try:
        assert keeper.stdout is not None
        said = keeper.stdout.readline()
        if not said:
            raise RuntimeError(keeper.communicate(timeout=20)[1].strip().rpartition("\n")[2])
        yield Host(keeper, int(said))
    finally:
        keeper.kill()
        keeper.communicate()


@functools.cache
def refusal() -> str:
    """Why there can be no two hosts here; empty if there can."""
    try:
        with two_hosts() as hosts:
            done = subprocess.run(inside("one", ["true"], variables(hosts)), capture_output=True, text=True, timeout=20)
            return done.stderr.strip()
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def variables(hosts: Mapping[str, Host]) -> dict[str, str]:
    """What a process has to have in its environment to start others on the hosts."""
    return {_KEEPERS: ",".join(f"{name}={host.number}" for name, host in hosts.items())}


def inside(name: str, command: Sequence[str], environment: Mapping[str, str], ends: bool = True) -> list[str]:
    """The command that runs a command on a host.

    Args:
        ends: whether it ends with the host. If so, it cannot start anything on the other one.
    """
    numbers = dict(entry.split("=") for entry in environment[_KEEPERS].split(","))
    return ["nsenter", "-t", numbers[name], *_NAMESPACES, *["--pid"] * ends, *command]


if __name__ == "__main__":  # in the place of ssh: hosts.py NAME COMMAND...
    started = inside(sys.argv[1], ["sh", "-c", " ".join(sys.argv[2:])], os.environ)
    os.execvp(started[0], started)
