"""Asking a server that runs an engine, over HTTP: the steps of a workload at their times."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerError
from typing import Any, Final
from urllib.parse import urlsplit

from ..errors import AnalysisError
from .workload import Step

_AT_ONCE_S: Final = 0.02  # a client that leaves before any token: the engine has the request by then
_ASK_S: Final = 5.0


class Server:
    """A server of vLLM or SGLang at `url`; `patience_s` is how long an answer may take."""

    def __init__(self, url: str, patience_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise AnalysisError(f"{url}: is no address of a server, expected such as http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, parts.port or 80
        self._patience_s = patience_s
        self._model, self._is_sglang = "", False
        self._folders: dict[str, str] = {}  # of adapters
        self._swaps: Counter[str] = Counter()

    def is_taken(self) -> bool:
        """Whether somebody listens there."""
        with contextlib.suppress(OSError), socket.create_connection((self._host, self._port), _ASK_S):
            return True
        return False

    def is_ready(self) -> bool:
        """Whether the server answers that it is well."""
        try:
            return self._call("GET", "/health", None, _ASK_S)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def describe(self) -> tuple[int, list[str]]:
        """Return the longest prompt with its answer, 0 if it is not said, and the adapters; raise `AnalysisError`."""
        try:
            models = json.loads(self._call("GET", "/v1/models", None, self._patience_s)[1])["data"]
            self._model, self._is_sglang = models[0]["id"], models[0]["owned_by"] == "sglang"
            longest = int(models[0].get("max_model_len") or 0)
            self._folders = {model["id"]: model.get("root", "") for model in models[1:] if model.get("parent")}
            return longest, list(self._folders)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            raise AnalysisError(
                f"the server at port {self._port} does not say what it serves (GET /v1/models); expected vLLM or SGLang"
            ) from None

    def flush(self) -> bool:
        """Have the prefix cache emptied; False if the server does not do that."""
        path = "/flush_cache" if self._is_sglang else "/reset_prefix_cache"
        return self._call("POST", path, {}, self._patience_s)[0] == 200

    def swap(self, adapter: str) -> bool:
        """Have an adapter unloaded, and the next one's folder loaded under its name; False if the server does not do that."""
        names = list(self._folders)
        if adapter not in names:  # of a workload that another server was asked
            return False
        self._swaps[adapter] += 1
        folder = self._folders[names[(names.index(adapter) + self._swaps[adapter]) % len(names)]]
        prefix, loaded = "" if self._is_sglang else "/v1", {"lora_name": adapter, "lora_path": folder}
        done = [
            self._call("POST", f"{prefix}/{path}_lora_adapter", body, self._patience_s)[0]
            for path, body in (("unload", {"lora_name": adapter}), ("load", loaded))
        ]
        return done == [200, 200]

    def ask(self, step: Step, prompt: list[int]) -> list[int] | None:
        """Return the answer's tokens, None if the client left before its end; raise `OSError`, and `ValueError` for a refusal."""
        streamed = step.abort_after >= 0
        body: dict[str, Any]
        sampling = {"temperature": 0, "ignore_eos": True}
        if self._is_sglang:
            path, body = "/generate", {"input_ids": prompt, "rid": step.name}
            body["sampling_params"] = {**sampling, "max_new_tokens": step.max_tokens}
            named = {"lora_path": step.adapter, "extra_key": step.salt}
        else:
            path, body = "/v1/completions", {"prompt": prompt, "max_tokens": step.max_tokens, **sampling}
            body |= {"detokenize": False, "return_token_ids": True}
            named = {"model": step.adapter or self._model, "cache_salt": step.salt}
        body |= {"stream": streamed} | {name: value for name, value in named.items() if value}
        for name, value in step.fields.items():
            inner = body.get(name)
            body[name] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, dict) else value
        if streamed:
            self._leave(path, body, step)
            return None
        status, said = self._call("POST", path, body, self._patience_s, step.name)
        if status != 200:
            raise ValueError(f"{status}: {said[:300].decode(errors='replace')}")
        answer = json.loads(said)
        answer = answer[0] if isinstance(answer, list) else answer  # SGLang's, if several were asked for
        tokens = answer["output_ids"] if self._is_sglang else answer["choices"][0]["token_ids"]
        return [int(token) for token in tokens]

    def _leave(self, path: str, body: dict[str, Any], step: Step) -> None:
        """Ask, and close the connection after some tokens."""
        with contextlib.closing(self._sent("POST", path, body, self._patience_s, step.name)) as connection:
            if not step.abort_after:
                time.sleep(_AT_ONCE_S)
                return
            response, got = connection.getresponse(), 0
            if response.status != 200:
                raise ValueError(f"{response.status}: {response.read(300).decode(errors='replace')}")
            while got < step.abort_after and (line := response.readline()):
                got += line.startswith(b"data: {")

    def _call(self, method: str, path: str, body: Any, timeout_s: float, name: str = "") -> tuple[int, bytes]:
        with contextlib.closing(self._sent(method, path, body, timeout_s, name)) as connection:
            response = connection.getresponse()
            return response.status, response.read()

    def _sent(self, method: str, path: str, body: Any, timeout_s: float, name: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"} | ({"X-Request-Id": name} if name else {})
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
        except OSError:
            connection.close()
            raise
        return connection


class Asker:
    """Does steps in a thread, and each request in one of its own; `counts` says what came of them, `done` that all did.

    `pause(process, seconds)` stops a process of the engine. `refusal` is the first refusal, in the server's words.
    """

    def __init__(self, server: Server, steps: Sequence[Step], pause: Callable[[int, float], None]) -> None:
        self._server, self._steps, self._pause = server, steps, pause
        self._answers: dict[str, Future[list[int] | None]] = {}
        self._stopped = threading.Event()
        self.counts: Counter[str] = Counter()
        self.refusal = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="hunt")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether all steps are done."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Begin nothing more; what is asked ends with the engine."""
        self._stopped.set()

    def _run(self) -> None:
        began, asked = time.monotonic(), list[threading.Thread]()
        for step in self._steps:
            if self._stopped.wait(max(0.0, began + step.at_ms / 1e3 - time.monotonic())):
                return
            if step.do == "ask":
                self._answers[step.name] = Future()
                asked.append(threading.Thread(target=self._ask, args=(step,), daemon=True, name=step.name))
                asked[-1].start()
            elif step.do == "pause":
                self._pause(step.process, step.for_ms / 1e3)
            else:
                for thread in asked:
                    thread.join()
                with contextlib.suppress(OSError, http.client.HTTPException):
                    if step.do == "flush":
                        self.counts["flushed" if self._server.flush() else "not flushed"] += 1
                    elif step.do == "swap":
                        self.counts["swapped" if self._server.swap(step.adapter) else "not swapped"] += 1
                began, asked = time.monotonic(), []
        for thread in asked:
            thread.join()

    def _ask(self, step: Step) -> None:
        whole: list[int] | None = None
        try:
            before = self._answers[step.continues].result(600) if step.continues in self._answers else None
            prompt = [*(before or []), *step.prompt]
            answer = self._server.ask(step, prompt)
            self.counts["left" if answer is None else "answered"] += 1
            whole = None if answer is None else prompt + answer
        except (OSError, http.client.HTTPException, NoAnswerError):
            self.counts["lost"] += 1
        except (ValueError, LookupError, TypeError) as error:
            self.counts["refused"] += 1
            self.refusal = self.refusal or str(error)
        finally:
            self._answers[step.name].set_result(whole)
