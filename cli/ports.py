"""Ports on this machine: free ones, and a clear word about one that is taken."""

import errno
import socket
from contextlib import ExitStack

from common.errors import ConfigError


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` different free ports. Nothing reserves them: use them soon."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind((host, 0))
        return [int(s.getsockname()[1]) for s in sockets]


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as s:
        # As servers do: a port whose last owner has just stopped (TIME_WAIT) is free.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        return True


def require_free(port: int, host: str, flag: str) -> None:
    """Raises ConfigError that names the flag when ``port`` is taken."""
    if not port_is_free(port, host):
        raise ConfigError(
            f"port {port} on {host} is in use; stop what listens there or choose another with {flag}"
        )
