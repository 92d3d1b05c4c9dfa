"""A small server of the OpenAI API that repeats what it hears, with the habits of a real engine.

Its weights are a text file: one line of greeting, which every answer begins with. While it "loads" it answers 503; it
counts words for tokens, refuses a prompt that is longer than its context, streams, and tells how busy it is.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

VERSION = "1.0"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog="parrot-server", description="Says what it hears.", allow_abbrev=False)
    options.add_argument("--version", action="version", version=f"parrot {VERSION}")
    options.add_argument("--weights", "-w", required=True, metavar="FILE", help="The greeting to begin with.")
    options.add_argument("--name", required=True, help="What the model is called.")
    options.add_argument("--listen", default="127.0.0.1", metavar="HOST", help="The address to listen on.")
    options.add_argument("--port", type=int, default=8500, help="The port to listen on.")
    options.add_argument("--context", type=int, default=512, metavar="WORDS", help="The longest prompt.")
    options.add_argument("--gpus", default="", help="The cards to use, by number; it needs none.")
    options.add_argument("--parse-calls", choices=("off", "xml"), default="off", help="How to read its tool calls.")
    options.add_argument("--no-usage", action="store_true", help="Never count words in streams.")
    options.add_argument("--loading-seconds", type=float, default=0.0, help="How long it takes to load.")
    return options


class Parrot:
    """What is loaded, and how busy it is."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.greeting: str | None = None
        self.running = 0
        self.heard = 0
        self.said = 0
        self.lock = threading.Lock()
        self.numbers = count(1)

    def load(self) -> None:
        """Read the weights, which may fail; then it is ready."""
        print("loading the greeting", flush=True)
        time.sleep(self.options.loading_seconds)
        try:
            with open(self.options.weights, encoding="utf-8") as file:
                self.greeting = file.readline().strip()
        except (OSError, ValueError) as error:
            print(f"FATAL: weights {self.options.weights}: {getattr(error, 'strerror', None) or error}", flush=True)
            print("FATAL: could not start", flush=True)
            signal.raise_signal(signal.SIGTERM)

    def answer(self, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]] | None]:
        """What it says, and the tool calls in it as far as it parses them."""
        words = " ".join(str(message.get("content") or "") for message in body.get("messages") or [])
        if not body.get("tools"):
            return " ".join(filter(None, (self.greeting, words))), None
        name = body["tools"][0]["function"]["name"]
        if self.options.parse_calls == "off":
            return f"<tool_call>{json.dumps({'name': name, 'arguments': {}})}</tool_call>", None
        call = {"index": 0, "id": f"call-{next(self.numbers)}", "type": "function"}
        return "", [call | {"function": {"name": name, "arguments": "{}"}}]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    parrot: Parrot

    def do_GET(self) -> None:
        """Health, models and figures."""
        parrot = self.parrot
        if self.path == "/health":
            return self.reply(503 if parrot.greeting is None else 200, {})
        if self.path == "/v1/models":
            model = {"id": parrot.options.name, "owned_by": "parrot", "max_model_len": parrot.options.context}
            return self.reply(200, {"object": "list", "data": [model]})
        if self.path == "/metrics":
            figures = {"running": parrot.running, "heard_words": parrot.heard, "said_words": parrot.said}
            return self.send("text/plain", "".join(f"parrot_{name} {value}\n" for name, value in figures.items()))
        return self.reply(404, error(404, f"there is no {self.path}"))

    def do_POST(self) -> None:
        """A chat."""
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/v1/chat/completions":
            return self.reply(404, error(404, f"there is no {self.path}"))
        try:
            body = json.loads(text)
            said, calls = self.parrot.answer(body)
        except (ValueError, AttributeError, KeyError, TypeError) as fault:
            return self.reply(400, error(400, f"this can't be read: {fault}"))
        if self.parrot.greeting is None:
            return self.reply(503, error(503, "still loading"))
        heard, limit = len(json.dumps(body.get("messages")).split()), self.parrot.options.context
        if heard > limit:
            return self.reply(400, error(400, f"the prompt has {heard} words, and the context {limit}"))
        with self.parrot.lock:
            self.parrot.running += 1
            self.parrot.heard += heard
        try:
            self.speak(body, said, calls, heard + len(json.dumps(body.get("tools") or "").split()))
        finally:
            with self.parrot.lock:
                self.parrot.running -= 1

    def speak(self, body: dict[str, Any], said: str, calls: list[dict[str, Any]] | None, heard: int) -> None:
        """Send the answer, whole or word by word."""
        words = said.split(" ")[: body.get("max_tokens") or None]
        usage = {"prompt_tokens": heard, "completion_tokens": len(words), "total_tokens": heard + len(words)}
        name = self.parrot.options.name
        head = {"id": f"parrot-{next(self.parrot.numbers)}", "created": int(time.time()), "model": name}
        finish = "tool_calls" if calls else "stop"
        with self.parrot.lock:
            self.parrot.said += len(words)
        if not body.get("stream"):
            message = {"role": "assistant", "content": " ".join(words)} | ({"tool_calls": calls} if calls else {})
            choice = {"index": 0, "message": message, "finish_reason": finish}
            return self.reply(200, head | {"object": "chat.completion", "choices": [choice], "usage": usage})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        first: dict[str, Any] = {"role": "assistant", "content": ""} | ({"tool_calls": calls} if calls else {})
        deltas = [first, *({"content": word if not at else f" {word}"} for at, word in enumerate(words) if not calls)]
        for delta in deltas:
            self.event(head | {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]})
        last = {"index": 0, "delta": {}, "finish_reason": finish}
        self.event(head | {"object": "chat.completion.chunk", "choices": [last]})
        if (body.get("stream_options") or {}).get("include_usage") and not self.parrot.options.no_usage:
            self.event(head | {"object": "chat.completion.chunk", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, facts: dict[str, Any]) -> None:
        """One event of a stream."""
        self.wfile.write(f"data: {json.dumps(facts)}\n\n".encode())

    def reply(self, status: int, facts: dict[str, Any]) -> None:
        """A JSON answer."""
        self.send("application/json", json.dumps(facts), status)

    def send(self, kind: str, text: str, status: int = 200) -> None:
        """An answer."""
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


def error(status: int, message: str) -> dict[str, Any]:
    """An error in the API's form."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": status}}


def main() -> int:
    """Serve until a signal; 1 when it can't begin."""
    options = parser().parse_args()
    parrot = Parrot(options)
    try:
        server = ThreadingHTTPServer((options.listen, options.port), type("Bound", (Handler,), {"parrot": parrot}))
    except OSError as fault:
        print(f"FATAL: port {options.port}: {fault.strerror}", flush=True)
        print("FATAL: could not start", flush=True)
        return 1
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    threading.Thread(target=parrot.load, daemon=True).start()
    server.serve_forever()
    return 0 if parrot.greeting is not None else 1


if __name__ == "__main__":
    sys.exit(main())
