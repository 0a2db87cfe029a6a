"""`baton doctor`: what this machine can run, found by trying: Python, PyTorch, UCX, models, ports.

Exit code 0 when a model can be served here, 1 when something that serving needs is missing.
"""

import argparse
import os
import platform
import sys
from typing import Any

PORTS = (8000, 8001)  # the router's defaults: HTTP and control
UCX_START_TIMEOUT_S = 20.0
TELLING_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import json

    report: dict[str, Any] = {
        "python": _python(),
        "machine": _machine(),
        "torch": _torch(),
        "ucx": _ucx(),
        "models": _models(),
        "ports": _ports(),
    }
    usable = report["torch"]["ok"] and any(model["ready"] for model in report["models"])
    if args.json:
        print(json.dumps({"usable": usable, **report}, indent=2))
    else:
        print(_as_text(report, usable))
    return 0 if usable else 1


def _python() -> dict[str, Any]:
    from common.version import __version__

    return {"version": platform.python_version(), "executable": sys.executable, "baton": __version__}


def _machine() -> dict[str, Any]:
    flags: set[str] = set()
    memory_gib = None
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
            named = (line for line in cpuinfo if line.startswith(("flags", "Features")))
            flags = set(next(named, "").split())
        memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except OSError:
        pass  # not Linux: nothing to tell
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores,
        "memory_gib": memory_gib,
        "cpu_flags": [flag for flag in TELLING_CPU_FLAGS if flag in flags],
    }


def _torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"ok": False, "reason": str(error)}
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"ok": True, "version": torch.__version__, "devices": devices, "threads": torch.get_num_threads()}


def _ucx() -> dict[str, Any]:
    """Starts and stops the transport: an import alone proves little."""
    import asyncio

    async def start_and_stop() -> None:
        from kv_transfer.transport import make_transport

        transport = make_transport("ucx")
        async with asyncio.timeout(UCX_START_TIMEOUT_S):
            await transport.start("127.0.0.1")
            await transport.close()

    from common.errors import BatonError

    try:
        asyncio.run(start_and_stop())
    except (BatonError, ImportError, OSError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        return {"ok": False, "reason": reason, "instead": "KV blocks cross over TCP"}
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("ucxx-cu12", "ucxx-cu13", "libucx-cu12", "libucx-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"ok": True, "versions": found, "transports": _ucx_transports(), "tls": os.environ.get("UCX_TLS")}


def _ucx_transports() -> list[str]:
    """What UCX itself lists on this machine, by the tool that comes with its library."""
    import importlib.util
    import subprocess
    from pathlib import Path

    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        tool = Path(folder, "bin", "ucx_info")
        environ = {**os.environ, "LD_LIBRARY_PATH": str(Path(folder, "lib")), "UCX_TLS": "all"}
        try:
            done = subprocess.run(
                [tool, "-d"], env=environ, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        names = {line.split(":")[1].strip() for line in done.stdout.splitlines() if "Transport:" in line}
        return sorted(names)
    return []


def _models() -> list[dict[str, Any]]:
    from common.model.registry import list_models

    return [
        {
            "name": model.name,
            "ready": model.ready,
            "folder": str(model.folder),
            "modules": str(model.modules_folder) if model.modules_folder else None,
        }
        for model in list_models()
    ]


def _ports() -> dict[str, bool]:
    from cli.ports import port_is_free

    return {str(port): port_is_free(port) for port in PORTS}


def _as_text(report: dict[str, Any], usable: bool) -> str:
    machine, torch, ucx = report["machine"], report["torch"], report["ucx"]
    flags = " ".join(machine["cpu_flags"]) or "no telling flags"
    lines = [
        f"baton    {report['python']['baton']} on Python {report['python']['version']}",
        f"machine  {machine['system']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {flags}",
    ]
    if torch["ok"]:
        lines.append(
            f"torch    {torch['version']}, {', '.join(torch['devices'])}, {torch['threads']} threads"
        )
    else:
        lines.append(f"torch    MISSING: {torch['reason']}")
    if ucx["ok"]:
        versions = ", ".join(f"{name} {version}" for name, version in ucx["versions"].items())
        lines.append(f"ucx      works ({versions}); transports {' '.join(ucx['transports']) or 'unknown'}")
    else:
        lines.append(f"ucx      not here ({ucx['reason']}): {ucx['instead']}")
    for model in report["models"]:
        state = "ready" if model["ready"] else f"not prepared: `baton model prepare {model['name']}`"
        drafting = "with MTP modules" if model["modules"] else "without MTP modules"
        lines.append(f"model    {model['name']}: {state}, {drafting}")
    for port, free in report["ports"].items():
        lines.append(f"port     {port} {'free' if free else 'in use'}")
    lines.append("a model can be served here" if usable else "no model can be served here yet")
    return "\n".join(lines)
