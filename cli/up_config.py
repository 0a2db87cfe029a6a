"""Configuration of `baton up`, and the command line that it gives to each process."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from cli.local_config import DefaultModelOptions
from cli.options import to_flags
from common.config import EngineOptions, LogOptions, option
from common.errors import ConfigError
from kv_transfer.config import TransferConfig
from router.config import PolicyOptions

NODE_HOST = "127.0.0.1"  # nodes talk to each other and to the router only
NODE_DRAIN_TIMEOUT_S = 1.5  # `up` promises to be gone within 5 s


@dataclass(frozen=True)
class UpOptions:
    """What runs, and where it listens."""

    host: str = option("127.0.0.1", "address that the router listens on")
    port: int = option(8000, "HTTP port of the router; 0: a free one", minimum=0)
    prefill: int = option(1, "prefill nodes", minimum=0)
    decode: int = option(1, "decode nodes", minimum=1)
    aggregated: bool = option(False, "no prefill nodes: every decode node computes its prompts itself")
    start_timeout_s: float = option(300.0, "longest wait until everything is ready, seconds", minimum=1)
    run_dir: str = option("", "folder for the logs of the processes; empty: a temporary one")
    verbose: bool = option(False, "show the logs of all processes on stderr")


@dataclass(frozen=True)
class UpConfig:
    """`up` passes model, engine, transfer and log on to the nodes, model, policy and log to the router."""

    up: UpOptions = field(default_factory=UpOptions)
    model: DefaultModelOptions = field(default_factory=DefaultModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        if self.up.aggregated and self.up.prefill > 1:
            raise ConfigError("--aggregated runs no prefill nodes; leave --prefill away")

    @property
    def num_prefill(self) -> int:
        return 0 if self.up.aggregated else self.up.prefill

    @property
    def aggregated(self) -> bool:
        """Nobody but the decode nodes computes prompts."""
        return self.num_prefill == 0


@dataclass(frozen=True)
class Ports:
    """Where each process listens. Nodes are in the order of `node_names`."""

    http: int
    control: int
    nodes: tuple[int, ...]


def node_names(config: UpConfig) -> list[str]:
    """Prefill nodes first."""
    return [f"prefill-{i}" for i in range(config.num_prefill)] + [
        f"decode-{i}" for i in range(config.up.decode)
    ]


def threads_per_node(config: UpConfig, num_cores: int) -> int:
    """An equal share of the cores, one at least: nodes that all take every core slow each other down."""
    return config.engine.threads or max(1, num_cores // len(node_names(config)))


def command_lines(config: UpConfig, ports: Ports, num_cores: int) -> dict[str, list[str]]:
    """Name -> words after `baton`, router first."""
    engine = dataclasses.replace(config.engine, threads=threads_per_node(config, num_cores))
    model = [f"--model={config.model.model}", *to_flags(config.model, skip=("model",))]
    drain = f"--drain-timeout-s={NODE_DRAIN_TIMEOUT_S}"
    router = ["router", f"--host={config.up.host}", f"--port={ports.http}", f"--control-port={ports.control}"]
    lines = {"router": [*router, drain, *model, *to_flags(config.policy, config.log)]}
    for name, port in zip(node_names(config), ports.nodes, strict=True):
        role = name.split("-")[0]
        node = [role, f"--node-id={name}", f"--host={NODE_HOST}", f"--port={port}"]
        control = f"--router=tcp://{reachable(config.up.host)}:{ports.control}"
        options = to_flags(engine, config.transfer, config.log)
        options += ["--aggregated"] if config.aggregated else []
        lines[name] = [*node, control, drain, *model, *options]
    return lines


def reachable(host: str) -> str:
    """An address on this machine that reaches what listens on ``host``."""
    return NODE_HOST if host in ("", "0.0.0.0", "::") else host


def child_environment(environ: Mapping[str, str], option_variables: set[str]) -> dict[str, str]:
    """The environment without the variables that are options: `up` has read those and says them as flags."""
    return {key: value for key, value in environ.items() if key not in option_variables}
