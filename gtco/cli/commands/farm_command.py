"""``gtco farm start | join | check``: a tuning farm, whose machines measure for
``gtco tune --farm``.

``start`` and ``join`` become Ray's own command, with the options that a farm needs. Ctrl-C ends it,
and the machine leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from gtco.cli import arguments
from gtco.cli.console import say, show
from gtco.cli.tables import Table
from gtco.support.errors import FarmError

PORT, CLIENTS = 6379, 10001  # Ray's own: of the cluster, and of its clients
MEMORY = 256 << 20  # bytes of Ray's store on a machine, where libraries pass through


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "farm", help="machines that measure for gtco tune --farm"
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    start = actions.add_parser("start", help="start a farm here, which machines can join")
    start.add_argument(
        "--port", type=arguments.positive, default=PORT, metavar="N", help=f"default {PORT}"
    )
    start.add_argument(
        "--client-port",
        type=arguments.positive,
        default=CLIENTS,
        metavar="N",
        help=f"the port of gtco tune --farm ray://HOST:N (default {CLIENTS})",
    )
    start.add_argument(
        "--logs", type=Path, metavar="FOLDER", help="where Ray keeps its logs (default /tmp/ray)"
    )
    join = actions.add_parser("join", help="let this machine measure for a farm")
    join.add_argument("address", metavar="HOST:PORT", help="of the machine that started the farm")
    join.add_argument(
        "--name", metavar="NAME", help="of this machine in the farm (default: its host name)"
    )
    check = actions.add_parser("check", help="the machines of a farm, their kinds and their noise")
    check.add_argument("farm", metavar="ray://HOST:PORT", help="of the farm's client port")
    check.add_argument("--json", action="store_true", help="as JSON")
    return parser


def main(options: argparse.Namespace) -> int:
    if options.action == "check":
        return check(options)
    become(start(options) if options.action == "start" else join(options))


def start(options: argparse.Namespace) -> list[str]:
    """The arguments of ``ray start`` for the machine that others join. It measures only if it joins
    too. Ray prints commands of its own, so gtco's are said first.
    """
    host = socket.gethostname()
    say(f"machines join by       gtco farm join {host}:{options.port}")
    say(f"measure on them by     gtco tune MODEL.onnx --farm ray://{host}:{options.client_port}")
    say("Ctrl-C ends the farm. What follows is Ray's text: its own commands are not needed")
    found = ["--head", f"--port={options.port}", f"--ray-client-server-port={options.client_port}"]
    found += ["--num-cpus=0", "--include-dashboard=false"]
    return found + ([f"--temp-dir={options.logs.absolute()}"] if options.logs else [])


def join(options: argparse.Namespace) -> list[str]:
    """The arguments of ``ray start`` for a machine that measures."""
    from gtco.machine.identity import identity
    from gtco.tuning.farm.machine import resource

    me = identity()
    name = options.name or me.host
    if not re.fullmatch(r"[\w.-]+", name):
        raise FarmError(f"--name {name}: give letters, digits, '.', '-' and '_'")
    say(f"this machine is of the kind {me.kind}: {me.name}, {me.cores} cores")
    resources = json.dumps({resource(me.kind, name): 1})
    return [f"--address={options.address}", "--num-cpus=1", f"--resources={resources}"]


def become(arguments: list[str]) -> NoReturn:
    """Replaces this process by ``ray start``. Its ports are open to other machines, so it asks for
    a token, which the first start makes.
    """
    from gtco.support.environment import ray_token
    from gtco.tuning.farm.connection import import_ray

    import_ray()
    beside = Path(sys.executable).with_name("ray")
    ray = str(beside) if beside.exists() else shutil.which("ray")
    if ray is None:
        raise FarmError("Ray is installed, and its command ray is not found on PATH")
    if not ray_token() and "--head" not in arguments:
        raise FarmError(
            "there is no token: copy the file ~/.ray/auth_token of the machine that started the "
            "farm to the same place here, readable for you alone"
        )
    os.umask(0o077)  # a token that Ray makes is for this user
    if not ray_token():
        # it prints the token, which nobody should see
        made = subprocess.run([ray, "get-auth-token", "--generate"], capture_output=True, text=True)
        if made.returncode or not ray_token():
            raise FarmError(f"ray get-auth-token --generate made no token: {made.stderr[-300:]}")
    common = ["--block", "--disable-usage-stats", f"--object-store-memory={MEMORY}"]
    ports = ["--min-worker-port=0", "--max-worker-port=0"]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    sys.stdout.flush()
    os.execve(ray, [ray, "start", *arguments, *common, *ports], environment)


def check(options: argparse.Namespace) -> int:
    from gtco.support.torchless import import_tvm

    import_tvm()
    from gtco.tuning.farm.check import check_farm

    found = check_farm(options.farm)
    if options.json:
        print(json.dumps([vars(machine) for machine in found], indent=2))
        return 0 if any(machine.ok for machine in found) else 1
    table = Table(f"machines of {options.farm}")
    for column in ("machine", "kind"):
        table.column(column)
    table.column("CPU", least=20)
    for column in ("cores", "governor", "noise", "GFLOP/s"):
        table.column(column, right=True)
    table.column("", least=10)
    for one in found:
        noise = "" if one.noise is None else f"{one.noise:.1%}"
        rate = "" if one.rate is None else f"{one.rate / 1e9:.0f}"
        cores = str(one.cores or "")
        table.row(one.name, one.kind, one.cpu, cores, one.governor, noise, rate, one.said)
    show(table)
    if not found:
        say("no machine has joined this farm: gtco farm join, on each of them")
    say("noise: how far two readings of one kernel are apart; above 10 % nothing is decided")
    return 0 if any(machine.ok for machine in found) else 1
