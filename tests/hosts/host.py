"""A host of its own, as long as its standard input is open: ``host.py NAME ADDRESS HOSTS LINK``, run by ``unshare``.

It is the first process of a PID namespace, so all processes of the host end with it. Its network is a tunnel device
whose packets go through this process, and then through a pair of sockets to the process of the other host. So nothing
is left of it, and the link can be bad where the kernel has no ``netem``. Each line of standard input says how the link
is from now on, in this direction: ``SECONDS LOSS``, how long a packet takes, and which part of them is lost.

Args:
    NAME, ADDRESS: of this host.
    HOSTS: a file that stands here in the place of ``/etc/hosts``.
    LINK: the number of the open socket.
"""

from __future__ import annotations

import fcntl
import os
import queue
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

DEVICE = "link0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LARGEST = 65536


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    name, address, hosts, number = sys.argv[1:]
    run("hostname", name)
    run("mount", "--bind", hosts, "/etc/hosts")
    run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    run("ip", "link", "set", "lo", "up")
    tunnel = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    run("ip", "address", "add", f"{address}/24", "dev", DEVICE)
    run("ip", "link", "set", DEVICE, "up")

    link = socket.socket(fileno=int(number))
    chance = random.Random(name)
    state = [0.0, 0.0]
    packets: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def read() -> None:
        while True:
            packet = os.read(tunnel, _LARGEST)
            if chance.random() >= state[1]:
                packets.put((time.monotonic() + state[0], packet))

    def send() -> None:
        while True:
            due, packet = packets.get()
            time.sleep(max(due - time.monotonic(), 0.0))
            link.send(packet)

    def receive() -> None:
        while True:
            os.write(tunnel, link.recv(_LARGEST))

    for work in (read, send, receive):
        threading.Thread(target=work, daemon=True).start()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # (it inherits processes whose parents have ended)
    print(os.readlink("/proc/self"), flush=True)  # its number outside
    for line in sys.stdin:
        state[:] = map(float, line.split())


if __name__ == "__main__":
    main()
