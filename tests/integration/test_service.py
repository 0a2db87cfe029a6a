"""A process with a service: answers, drains on a signal, exits; a second signal does not wait."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

PROCESS = """
import asyncio
from common.metrics import NODE_METRICS, Metrics
from common.service import Service, run

async def main():
    service = Service(
        name="n", host="127.0.0.1", port=0, metrics=Metrics(NODE_METRICS, model_name="m"),
        not_ready=lambda: ["warming up"], drain_timeout_s={drain_timeout_s},
    )
    await service.start()
    running = asyncio.create_task(service.run_until_stopped(lambda: asyncio.sleep({drain_s})))
    await asyncio.sleep(0)
    print(service.url, flush=True)
    await running

run(main())
"""


@contextmanager
def process(drain_s: float, drain_timeout_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    code = PROCESS.format(drain_s=drain_s, drain_timeout_s=drain_timeout_s)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


def test_routes_of_every_process() -> None:
    with process(0, 1) as (_, url):
        assert httpx.get(url + "/health").json() == {"status": "alive"}
        ready = httpx.get(url + "/ready")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["warming up"])
        assert "baton_num_requests_running 0.0" in httpx.get(url + "/metrics").text
        assert httpx.get(url + "/").status_code == 404


def test_a_signal_drains_and_ends_within_the_deadline() -> None:
    with process(60, 0.5) as (started, url):
        started.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        ready = httpx.get(url + "/ready")
        assert ready.json()["reasons"] == ["draining", "warming up"]
        assert started.wait(timeout=3) == 0


def test_a_second_signal_does_not_wait() -> None:
    with process(60, 60) as (started, _):
        started.send_signal(signal.SIGINT)
        time.sleep(0.2)
        started.send_signal(signal.SIGINT)
        assert started.wait(timeout=3) == 0
