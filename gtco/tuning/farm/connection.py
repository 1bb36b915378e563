"""The connection to a farm: a Ray cluster whose machines have a custom resource each. Whoever holds
that resource has the machine to himself. Ray queues those who wait for it, in the order that they
came.

Ray's client, and Ray within its cluster, exchange pickles, so whoever may send a message to a port
of the cluster may run code there. gtco therefore connects to this machine alone (loopback: the
cluster is here, or a tunnel leads to it), or with Ray's token. The functions that run on machines
are named and not sent, and what they are given and give back is text and bytes.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gtco.support.environment import ray_token, use_ray_token
from gtco.support.errors import FarmError, installing
from gtco.support.version import __version__
from gtco.tuning.farm import machine as there

PORT = 10001  # port of Ray's client server
POLL = 1.0  # seconds between two looks at who is there
LONGEST = 1800.0  # seconds that a machine may be in other hands, or say nothing
NAMESPACE = "gtco"
ATTEMPTS = 3


class MachineLost(Exception):
    """The machine left the farm, or does not answer: another one may."""


@dataclass(frozen=True, order=True)
class FarmMachine:
    """A machine that is there now: its kind (:attr:`gtco.machine.identity.Identity.kind`), as it
    said when it joined, and its name in the farm.
    """

    kind: str
    name: str

    @property
    def resource(self) -> str:
        return there.resource(self.kind, self.name)


def check_address(address: str) -> str:
    """The address as Ray takes it. Raises :class:`FarmError` for one that is none, and for another
    machine's without a token.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not address.startswith("ray://") or not host or not port.isdigit():
        raise FarmError(
            f"--farm {address}: give the address of Ray's client server, as ray://HOST:{PORT}"
        )
    if not loopback(host) and not ray_token():
        raise FarmError(
            f"--farm {address}: {host} is another machine, and there is no token. Whoever reaches "
            "the ports of a Ray cluster may run code there, so give both machines the token that "
            "gtco farm start made (RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token), or make a tunnel: "
            f"ssh -L {port}:localhost:{port} {host}, and --farm ray://localhost:{port}"
        )
    return address


def loopback(host: str) -> bool:
    """True for a name or an address of this machine that no other one reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def import_ray() -> Any:
    """Ray; raises :class:`FarmError` if it is not installed."""
    use_ray_token()
    try:
        import grpc  # noqa: F401  of the extra ray[client]
        import ray
    except ImportError as error:
        raise FarmError(
            f"a farm needs Ray ({error}): {installing('farm')}, or pip install 'ray[client]'"
        ) from error
    return ray


class Farm:
    """A connection; a context manager. Several threads may use it. Raises :class:`FarmError` if the
    farm is not reached.
    """

    def __init__(self, address: str) -> None:
        check_address(address)
        self.address, self.ray = address, import_ray()
        if self.ray.is_initialized():
            raise FarmError(
                "this process is connected to a Ray cluster already: tune in a process of its own"
            )
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        try:
            self._connect()
        except Exception as error:  # Ray raises whatever its layers do
            said = " ".join(str(error).split())[-300:] or type(error).__name__
            raise FarmError(
                f"the farm {address} is not reached ({said}): is it started (gtco farm start), "
                f"with the same Ray ({self.ray.__version__}) and Python, and is the token the same?"
            ) from error
        self._answer = self.ray.remote(there.answer)

    def _connect(self) -> None:
        """Ray starts a process for each client, and gives up if its machine is busy just then."""
        for attempt in range(ATTEMPTS):
            try:
                self.ray.init(
                    self.address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                )
                return
            except ConnectionAbortedError:
                self.ray.shutdown()
                if attempt == ATTEMPTS - 1:
                    raise

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):  # the farm may be gone
            self.ray.shutdown()

    def machines(self) -> list[FarmMachine]:
        """The machines that are there now, sorted."""
        try:
            nodes = self.ray.nodes()
        except Exception as error:
            raise FarmError(
                f"the farm {self.address} does not answer any more ({type(error).__name__}); what "
                "was measured is in the records, and the same command goes on from them"
            ) from error
        found = [
            FarmMachine(*known)
            for node in nodes
            if node.get("Alive")
            for name in node.get("Resources", {})
            if (known := there.parts(name)) is not None
        ]
        return sorted(set(found))

    def ask(self, machine: FarmMachine, request: str, libraries: Sequence[bytes] = ()) -> object:
        """The answer of a machine, when its turn comes: others may measure there before. Raises
        :class:`MachineLost`, and :class:`FarmError` where gtco fails on the machine.
        """
        exceptions = self.ray.exceptions
        task = self._answer.options(
            num_cpus=0, resources={machine.resource: 1}, max_retries=0, name="gtco"
        ).remote(request, *libraries)
        begin = time.monotonic()
        try:
            while not self.ray.wait([task], timeout=POLL)[0]:
                if machine not in self.machines():
                    raise MachineLost("it left the farm")
                if time.monotonic() - begin > LONGEST:
                    raise MachineLost(f"it did not answer in {LONGEST:.0f} s")
            return self.ray.get(task)
        except exceptions.RayTaskError as error:
            last = str(error).strip().splitlines()[-1:]
            raise FarmError(
                f"gtco fails on the machine {machine.name} of the farm ({' '.join(last)}): is gtco "
                f"{__version__} installed there?"
            ) from error
        except exceptions.RayError as error:  # its process, its node or the cluster is gone
            raise MachineLost(f"it died ({type(error).__name__})") from error
        finally:
            with suppress(Exception):  # nobody waits for it any more
                self.ray.cancel(task, force=True)
