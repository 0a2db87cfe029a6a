"""A streaming chat client of a running Baton, with nothing but the standard library.

    python examples/client.py "Why is the sky blue?" [http://127.0.0.1:8000]

The `openai` package works as well: `OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-")`.
"""

import http.client
import json
import sys
from urllib.parse import urlsplit

TIMEOUT_S = 300.0


def request(url: str, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
    """One HTTP exchange; a refusal ends the program with the server's own words."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    payload = None if body is None else json.dumps(body)
    connection.request(method, path, payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"HTTP {response.status}: {response.read().decode()}")
    return response


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Why is the sky blue?"
    url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
    model = json.load(request(url, "GET", "/v1/models"))["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 200,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for line in request(url, "POST", "/v1/chat/completions", body):
        data = line.decode().removeprefix("data:").strip()
        if not line.startswith(b"data:") or data == "[DONE]":
            continue
        chunk = json.loads(data)
        for choice in chunk["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        if chunk.get("usage"):  # the last chunk: how much it was, and what speculation did
            print("\n", json.dumps(chunk["usage"], indent=1))


if __name__ == "__main__":
    main()
