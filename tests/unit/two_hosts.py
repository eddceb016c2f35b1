"""Two "hosts" on one machine: namespaces with a host name and a network each, joined by a cable, and jobs across them.

    with two_hosts() as hosts:                          # skips where the machine does not allow it
        hosts.torchrun([script], ranks_per_host=2, seconds=25)

Each host is a process that waits in a UTS and a network namespace of its own; one user namespace around both makes
privileges unnecessary. Nothing has to be undone: the namespaces, and the veth pair in them, go with their last process.
The hosts end when their standard input does, and the kernel kills what runs on them with its parent, so nothing
outlives this process, however it ends.

Processes still see each other in /proc, as on no two machines: what can't cross hosts must refuse by the host names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO

import attrs
import pytest

INTERFACE = "k3veth"
ADDRESSES = ("10.199.73.1", "10.199.73.2")  # of the cable's ends; nothing else is in these networks
NAMES = ("k3comm-host-a", "k3comm-host-b")
PORT = "29400"  # free, since the network is new
TOOLS = ("unshare", "nsenter", "setpriv", "ip")  # util-linux and iproute2
_HOLD = "import socket, sys; socket.sethostname(sys.argv[1]); print('here', flush=True); sys.stdin.read()"
_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
_SET_UP = 10.0  # s, for what takes some milliseconds


class NotAllowed(Exception):
    """This machine makes no namespaces, or lacks a tool for it."""


@attrs.frozen
class Ended:
    """A process that has ended, or was killed at the deadline (`code` None), and what it printed."""

    code: int | None
    output: str


@attrs.frozen
class Hosts:
    """Two hosts; made by `two_hosts`.

    Attributes:
        holders: the ids of the processes that keep them.
    """

    holders: tuple[int, int]

    def run(self, commands: Sequence[Sequence[str]], *, seconds: float, **variables: str) -> list[Ended]:
        """Runs a command on each host, at the same time; what has not ended after so many seconds is killed."""
        # GLOO_SOCKET_IFNAME: the caller's own is the way between ranks of one host.
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **variables}
        with ExitStack() as stack:
            files: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
            processes = [
                stack.enter_context(_process([*_on(holder), *_WITH_PARENT, *command], file, environment))
                for holder, command, file in zip(self.holders, commands, files, strict=True)
            ]
            end = time.monotonic() + seconds
            codes: list[int | None] = []
            for process in processes:
                try:
                    codes.append(process.wait(max(0.0, end - time.monotonic())))
                except subprocess.TimeoutExpired:
                    codes.append(None)
            texts = []
            for file in files:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return [Ended(code, text) for code, text in zip(codes, texts, strict=True)]

    def torchrun(self, program: Sequence[str], *, ranks_per_host: int, seconds: float, **variables: str) -> list[Ended]:
        """A job over both hosts: torchrun on each. `program`: a script and its arguments."""
        return self.run(
            [
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
                    *("--nproc-per-node", str(ranks_per_host), "--local-addr", address),
                    *("--master-addr", ADDRESSES[0], "--master-port", PORT),
                    *("--no-python", *_WITH_PARENT, sys.executable, *program),
                ]
                for node, address in enumerate(ADDRESSES)
            ],
            seconds=seconds,
            **variables,
        )


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two hosts, gone at the end. Skips the test, with the reason, where they can't be had."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(_made())
        except NotAllowed as error:
            pytest.skip(f"no two hosts here: {error}")
        yield hosts


@contextmanager
def _made() -> Iterator[Hosts]:
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise NotAllowed(f"the tool {tool} is not installed")
    new = ["unshare", "--net", "--uts"]
    with _held([*new, "--user", "--map-root-user"], NAMES[0]) as first:
        inside = ["nsenter", "--target", str(first), "--user", "--preserve-credentials", "--"]
        with _held([*inside, *new], NAMES[1]) as second:
            cable = f"link add name {INTERFACE} type veth peer name {INTERFACE} netns {second}\n"
            for holder, address, more in zip((first, second), ADDRESSES, (cable, ""), strict=True):
                up = f"link set {INTERFACE} up\nlink set lo up\n"
                _ip(holder, f"{more}address add {address}/30 dev {INTERFACE}\n{up}")
            yield Hosts((first, second))


@contextmanager
def _held(launch: Sequence[str], name: str) -> Iterator[int]:
    """A process in new namespaces that waits for the end; its id."""
    command = [*launch, sys.executable, "-S", "-c", _HOLD, name]
    with _process(command, subprocess.PIPE, dict(os.environ), stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.readline().decode(errors="replace").strip()
        if said != "here":
            raise NotAllowed(said or f"{launch[0]} ended without a word")
        yield process.pid


@contextmanager
def _process(
    command: Sequence[str], output: IO[bytes] | int, environment: dict[str, str], stdin: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended when the block is left."""
    with subprocess.Popen(command, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def _on(holder: int) -> list[str]:
    return ["nsenter", "--target", str(holder), "--user", "--net", "--uts", "--preserve-credentials", "--"]


def _ip(holder: int, batch: str) -> None:
    done = subprocess.run(
        [*_on(holder), "ip", "-batch", "-"], input=batch.encode(), capture_output=True, timeout=_SET_UP, check=False
    )
    if done.returncode:
        raise NotAllowed(f"ip: {' '.join(done.stderr.decode(errors='replace').split())}")
