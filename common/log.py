"""One logging setup for every process: a line a record, plain text or JSON, with the request id on it.

The request id travels in a context variable, so that whatever logs while a request is served names it
without passing it along. asyncio tasks inherit it from the task that made them.
"""

import contextlib
import contextvars
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from common.config import LogOptions

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("baton_request_id", default="")

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@contextlib.contextmanager
def bind_request_id(request_id: str) -> Iterator[None]:
    """Every record logged inside carries ``request_id``."""
    token = request_id_var.set(request_id)
    try:
        yield
    finally:
        request_id_var.reset(token)


def setup_logging(options: LogOptions, *, process: str, stream: TextIO | None = None) -> None:
    """Sends all records of this process to ``stream`` (standard error by default) under the name ``process``.

    Replaces handlers that were there before; safe to call twice.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if options.log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(options.log_level.upper())
    # A line for every HTTP request tells nothing that the metrics do not.
    for chatty in ("uvicorn.access", "uvicorn.error", "httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _timestamp(created: float) -> str:
    """UTC, with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{whole}.{int(created % 1 * 1000):03d}Z"


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD_ATTRIBUTES}


class TextFormatter(logging.Formatter):
    """``time LEVEL process logger [request id] message key=value``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        request_id = request_id_var.get()
        parts = [_timestamp(record.created), record.levelname, self._process, record.name]
        if request_id:
            parts.append(f"[{request_id}]")
        parts.append(record.getMessage())
        parts += [f"{key}={value}" for key, value in _extra(record).items()]
        line = " ".join(parts)
        return line + "\n" + self.formatException(record.exc_info) if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = request_id_var.get()
        if request_id:
            entry["request_id"] = request_id
        entry |= _extra(record)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()
