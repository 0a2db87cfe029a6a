"""Every UCX setting that Baton relies on, in one place, with the reason.

UCX reads its environment once, when its library is loaded, so :func:`apply` runs before the first import of
the binding. A variable that the operator has set is left alone.
"""

import os
import tempfile

DEFAULTS: dict[str, str] = {
    # Shared memory (posix + cma) between processes of one host, TCP otherwise. Hosts with InfiniBand or
    # GPUs set this themselves, e.g. "self,posix,cma,tcp,rc,cuda_copy,cuda_ipc"; PyPI's libucx is built
    # without verbs.
    "UCX_TLS": "self,posix,cma,tcp",
    # Without it UCX silently leaves shared memory out of endpoints that have error handling, and ours all do.
    "UCX_POSIX_ERROR_HANDLING": "y",
    # How soon a killed peer on the same host is noticed: 1 s instead of 20 s.
    "UCX_KEEPALIVE_INTERVAL": "1s",
    # The binding would choose "cuda" for rendezvous fragments, also where there is no GPU.
    "UCX_RNDV_FRAG_MEM_TYPE": "host",
    # UCX's TCP segments default to 8 KiB, slower than a plain socket; large ones gain 1.2x to 5x.
    "UCX_TCP_TX_SEG_SIZE": "512K",
    "UCX_TCP_RX_SEG_SIZE": "1M",
    # Data as active messages pulled by the receiver's own progress: faster over TCP, and no write into our
    # memory is ever executed by the peer's process (a put scheme over cma would be), which the fence needs.
    "UCX_RNDV_SCHEME": "am",
    # Everything above 8 KiB by rendezvous: an eager message that is half received never becomes terminal when
    # its sender dies, and eager messages without a posted receive pile up in memory. Never "inf".
    "UCX_RNDV_THRESH": "8192",
    "UCX_MEMTYPE_CACHE": "n",
    # UCX logs to standard output by default, which would break whatever reads ours.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


def apply(environ: "os._Environ[str] | dict[str, str]" = os.environ) -> dict[str, str]:
    """Sets what is not set; returns what is now in force."""
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)
    environ.setdefault("UCX_LOG_FILE", os.path.join(tempfile.gettempdir(), "baton-ucx-%p.log"))
    return {name: environ[name] for name in (*DEFAULTS, "UCX_LOG_FILE")}
