"""A small HTTP server that speaks the streaming completions API with scripted chunks."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHUNK_PAUSE_S = 0.01


@dataclass
class Script:
    """What the server answers. ``refusal``: (status, error object) instead of a stream."""

    pieces: Sequence[str] = ("One", " two", " three")
    usage: dict[str, Any] = field(default_factory=dict)
    refusal: tuple[int, dict[str, Any]] | None = None
    ends_with_done: bool = True
    error_in_stream: str | None = None
    has_tokenizer: bool = True
    has_chat_template: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of the completions, as they came
    in_flight: int = 0
    most_in_flight: int = 0


@contextmanager
def openai_server(script: Script) -> Iterator[str]:
    """Serves ``script`` on a free port; yields the base URL."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "scripted"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                words = body["prompt"].split()
                known = script.has_tokenizer
                self.answer(200 if known else 404, {"tokens": list(range(len(words)))} if known else {})
            elif script.refusal is not None:
                self.answer(script.refusal[0], {"error": script.refusal[1]})
            elif self.path == "/v1/chat/completions" and not script.has_chat_template:
                self.answer(400, {"error": {"message": "no chat template", "param": "messages"}})
            else:
                with lock:
                    script.bodies.append(body)
                    script.in_flight += 1
                    script.most_in_flight = max(script.most_in_flight, script.in_flight)
                self.stream()

        def stream(self) -> None:
            chat = self.path == "/v1/chat/completions"
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            for piece in script.pieces:
                self.send({"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]})
                time.sleep(CHUNK_PAUSE_S)
            if script.error_in_stream is not None:
                self.send({"error": {"message": script.error_in_stream}})
            with lock:  # before the end is sent: the client may send its next request at once
                script.in_flight -= 1
            self.send({"choices": [], "usage": script.usage})
            if script.ends_with_done:
                self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def send(self, chunk: object) -> None:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="scripted-server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
