"""A farm on this machine: one Ray cluster, whose nodes are fake machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FAKES = Path(__file__).parent / "fakes"
TOKEN = "a-token-of-the-tests-that-is-long-enough"
STARTED = "Ray runtime started"
PATIENCE = 180.0  # seconds for a node to start
TRIES = 3  # a busy machine's nodes do not always find each other


class NodeError(Exception):
    """A node of Ray did not start."""


class Cluster:
    """``folders`` has the folder of each fake machine by its name, where files say how it behaves
    (``fakes/sitecustomize.py``).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folders: dict[str, Path] = {}
        self.port, self.clients = _free_ports(2)
        self.address = f"ray://127.0.0.1:{self.clients}"
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *machines: str) -> None:
        ports = f"--port {self.port} --client-port {self.clients} --logs {self.folder / 'r'}"
        self._launch("head", f"start {ports}")
        self._await("head")
        for name in machines:
            self.folders[name] = self.folder / name
            self._launch(name, f"join 127.0.0.1:{self.port} --name {name}")
            self._await(name)  # two nodes of one host that start together get in each other's way

    def kill(self, name: str) -> None:
        """Ends a machine at once, with everything that runs there."""
        node = self._nodes.pop(name)
        with suppress(ProcessLookupError):  # it has failed by itself
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def stop(self) -> None:
        for name in reversed(list(self._nodes)):
            self.kill(name)

    def _launch(self, name: str, command: str) -> None:
        folder = self.folder / name
        folder.mkdir()
        path = os.pathsep.join([str(FAKES), str(ROOT)])
        setting = {"PYTHONPATH": path, "FAKE_MACHINE": str(folder), "RAY_AUTH_TOKEN": TOKEN}
        # Ray's own are 30 and 5, which a busy machine exceeds
        setting |= {"RAY_raylet_start_wait_time_s": "120"}
        setting |= {"RAY_gcs_rpc_server_connect_timeout_s": "60"}
        with (folder / "log").open("wb") as log:
            self._nodes[name] = subprocess.Popen(
                [sys.executable, "-m", "gtco", "farm", *command.split()],
                env={**os.environ, **setting},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _await(self, name: str) -> None:
        log, end = self.folder / name / "log", time.monotonic() + PATIENCE
        while STARTED not in (said := log.read_text(errors="replace")):
            gone = self._nodes[name].poll() is not None
            if gone or time.monotonic() > end:
                raise NodeError(f"the node {name} did not start:\n{said}")
            time.sleep(0.1)


@contextmanager
def cluster(folder: Path, *machines: str) -> Iterator[Cluster]:
    """Each try has ports and folders of its own. The failure of the last is raised."""
    for number in range(1, TRIES + 1):
        made = Cluster(folder / str(number))
        made.folder.mkdir()
        try:
            try:
                made.start(*machines)
            except NodeError:
                if number == TRIES:
                    raise
                continue
            yield made
            return
        finally:
            made.stop()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return found
