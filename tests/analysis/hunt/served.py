"""A server that answers as vLLM does, as a class for tests and as a program, which puts a trace where a recorder would.

python served.py --port PORT TRACE
"""

import json
import os
import shutil
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Engine(BaseHTTPRequestHandler):
    """Answers as vLLM does: with as many tokens as are asked for, one every few milliseconds if they are streamed."""

    asked: list[tuple[str, dict]] = []  # noqa: RUF012

    def do_GET(self):
        models = [
            {"id": "m", "owned_by": "vllm", "max_model_len": 99},
            {"id": "tuned", "owned_by": "vllm", "parent": "m", "root": "/a"},
            {"id": "other", "owned_by": "vllm", "parent": "m", "root": "/b"},
        ]
        self.answer(json.dumps({"data": models}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        if len(body.get("prompt", ())) > 50:
            self.answer(b"too long", 400)
            return
        if not body.get("stream"):
            self.answer(json.dumps({"choices": [{"token_ids": [7] * body.get("max_tokens", 0)}]}).encode())
            return
        self.send_response(200)
        self.end_headers()
        for sent in range(body["max_tokens"]):
            time.sleep(0.003)
            try:
                self.wfile.write(b"data: {}\n\n")
            except OSError:
                self.asked.append(("left after", {"sent": sent}))
                return

    def answer(self, body, code=200):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    shutil.copy(sys.argv[3], os.environ["KVCANARY_TRACE"])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Engine).serve_forever()
