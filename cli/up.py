"""`baton up`: router, prefill and decode nodes on this machine, supervised.

    check the port -> prepare the model -> start all -> wait until each is ready -> ready line
    -> until Ctrl-C, SIGTERM, or the death of the router or of the last decode node -> stop all

stdout carries one line, when everything is ready; all else goes to stderr. A node that dies is named with the
end of its log; the others go on for as long as requests can be answered. Nothing outlives the supervisor.
"""

import argparse
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from cli.options import add_config, config_from, environment_names
from cli.ports import free_ports, require_free
from cli.processes import Child, stop_all
from cli.up_config import (
    NODE_HOST,
    Ports,
    UpConfig,
    child_environment,
    command_lines,
    node_names,
    reachable,
)
from common.errors import ConfigError, ModelLoadError, NodeFailed

STOP_GRACE_S = 4.0  # SIGKILL then takes milliseconds: within the 5 s that `up` promises
POLL_S = 0.1
PROBE_TIMEOUT_S = 2.0


def configure(parser: argparse.ArgumentParser) -> None:
    add_config(parser, UpConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args, UpConfig)
    if config.up.port:
        require_free(config.up.port, config.up.host, "--port")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    environ = child_environment(os.environ, environment_names(UpConfig))
    if not _prepare_model(config, environ, stop):
        return 130
    own_folder = not config.up.run_dir
    folder = Path(tempfile.mkdtemp(prefix="baton-up-") if own_folder else config.up.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    started = Supervisor(config, folder, environ, stop)
    exit_code = 1
    try:
        exit_code = started.supervise()
    finally:
        killed = stop_all(started.children, grace_s=STOP_GRACE_S)
        if killed:
            _say(f"had to be killed: {', '.join(killed)}")
        if own_folder and exit_code in (0, 130):
            shutil.rmtree(folder, ignore_errors=True)
    return exit_code


class Supervisor:
    """The processes of one `up`, from start to stop."""

    def __init__(
        self, config: UpConfig, folder: Path, environ: dict[str, str], stop: threading.Event
    ) -> None:
        names = node_names(config)
        router_port, control, *nodes = free_ports(2 + len(names))
        self.ports = Ports(config.up.port or router_port, control, tuple(nodes))
        self.config = config
        self.environ = environ
        self.stop = stop
        lines = command_lines(config, self.ports, os.cpu_count() or 1)
        self.children = [Child(name, words, folder / f"{name}.log") for name, words in lines.items()]
        self._reported: set[str] = set()

    def supervise(self) -> int:
        """Runs until it is told to stop (0, or 130 before everything was ready) or cannot go on (1)."""
        _say(f"logs in {self.children[0].log.parent}; ports: {self._describe_ports()}")
        for child in self.children:
            child.start(self.environ, echo=self.config.up.verbose)
        if not self._wait_ready():
            return 130
        print(self.ready_line(), flush=True)
        while not self.stop.wait(POLL_S):
            self._report_deaths()
            if not self._can_answer():
                _say("cannot answer requests any more; stopping")
                return 1
        _say("stopping")
        return 0

    def _wait_ready(self) -> bool:
        """False when told to stop. Raises NodeFailed when a process ends or the deadline passes."""
        deadline_s = time.monotonic() + self.config.up.start_timeout_s
        waiting = dict(zip((c.name for c in self.children), self._addresses(), strict=True))
        reasons: dict[str, list[str]] = {}
        while waiting:
            for name, (host, port) in list(waiting.items()):
                reasons[name] = not_ready_reasons(host, port)
                if not reasons[name]:
                    del waiting[name]
            if self.stop.is_set():
                return False
            self._raise_if_ended()
            if time.monotonic() > deadline_s:
                raise NodeFailed(self._still_waiting(waiting, reasons))
            if waiting:
                self.stop.wait(POLL_S)
        return True

    def _raise_if_ended(self) -> None:
        """While starting, no process may end. One that found its input wrong (2) makes it our input."""
        ended = [child for child in self.children if child.exit_code() is not None]
        if ended:
            error = ConfigError if any(child.exit_code() == 2 for child in ended) else NodeFailed
            raise error("\n".join(child.how_it_ended() for child in ended))

    def _still_waiting(self, waiting: dict[str, tuple[str, int]], reasons: dict[str, list[str]]) -> str:
        late = "; ".join(f"{name}: {', '.join(reasons[name])}" for name in waiting)
        return f"not ready after {self.config.up.start_timeout_s:.0f} s (--start-timeout-s): {late}"

    def _addresses(self) -> list[tuple[str, int]]:
        router = (reachable(self.config.up.host), self.ports.http)
        return [router, *((NODE_HOST, port) for port in self.ports.nodes)]

    def _describe_ports(self) -> str:
        ports = (self.ports.http, *self.ports.nodes)
        named = [f"{child.name} {port}" for child, port in zip(self.children, ports, strict=True)]
        return ", ".join([*named, f"control {self.ports.control}"])

    def ready_line(self) -> str:
        config = self.config
        url = f"http://{reachable(config.up.host)}:{self.ports.http}"
        parts = [f"model {config.model.served_model_name or config.model.model}"]
        if config.aggregated:
            parts.append(f"{config.up.decode} aggregated")
        else:
            parts += [f"{config.num_prefill} prefill", f"{config.up.decode} decode"]
            parts.append(f"transfer {self._transport()}")
        return f"Baton is ready: {url} ({', '.join(parts)})"

    def _transport(self) -> str:
        """The best transport that every prefill node has, where the choice was left to them."""
        if self.config.transfer.transport != "auto":
            return self.config.transfer.transport
        status, cluster = get_json(reachable(self.config.up.host), self.ports.http, "/v1/cluster")
        offered = [node.get("transports") for node in cluster.get("nodes", ()) if node["role"] == "prefill"]
        if status != 200 or not offered or not all(offered):
            return "auto"
        return next((name for name in offered[0] if all(name in names for names in offered)), "none")

    def _report_deaths(self) -> None:
        for child in self.children:
            if child.exit_code() is not None and child.name not in self._reported:
                self._reported.add(child.name)
                _say(child.how_it_ended())

    def _can_answer(self) -> bool:
        alive = [child.name for child in self.children if child.exit_code() is None]
        return "router" in alive and any(name.startswith("decode") for name in alive)


def get_json(host: str, port: int, path: str) -> tuple[int, Any]:
    """Status and body of one GET; (0, {}) when nothing, or no JSON, comes back in time."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")
    except (OSError, http.client.HTTPException, ValueError):
        return 0, {}
    finally:
        connection.close()


def not_ready_reasons(host: str, port: int) -> list[str]:
    """What a process says at /ready; nothing when it is ready."""
    status, body = get_json(host, port, "/ready")
    if status == 200:
        return []
    return list(body.get("reasons") or [f"HTTP {status}" if status else "does not answer yet"])


def _prepare_model(config: UpConfig, environ: dict[str, str], stop: threading.Event) -> bool:
    """In a process of its own, so that the supervisor stays small. False when told to stop meanwhile."""
    command = [sys.executable, "-m", "cli.main", "model", "prepare", config.model.model]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environ) as process:
        while process.poll() is None:
            if stop.wait(POLL_S):
                process.terminate()
                return False
    if process.returncode:
        raise ModelLoadError(f"model {config.model.model!r} cannot be served (see above)")
    return True


def _say(message: str) -> None:
    print(f"baton up: {message}", file=sys.stderr, flush=True)
