"""What a watch does about damage: freeze the flight recorder, make a report, call a command, tell Prometheus."""

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...recorder.files import replace_file
from ...recorder.trace.files import split_segment_name


@dataclass(slots=True, kw_only=True)
class Reactions:
    """Reports and commands, one at a time, in processes of their own that are never waited for.

    `freeze_file` is what the engine's KVCANARY_FREEZE_FILE names, `command` goes to the shell once the report is there, with
    `KVCANARY_TRACE`, `KVCANARY_REPORT`, `KVCANARY_VERDICT` and `KVCANARY_INCIDENT` in its environment. `say` is told what
    could not be done, `on_incident` what the report says.
    """

    freeze_file: Path | None
    command: str | None
    reports: bool
    say: Callable[[str], None]
    on_incident: Callable[[dict[str, Any]], None]
    _wanted: deque[tuple[str, Sequence[Path], Path, bool]] = field(default_factory=deque)
    _running: tuple[subprocess.Popen[bytes], tuple[str, Sequence[Path], Path, bool]] | None = None
    _commands: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def freeze(self, note: str) -> None:
        """Ask the flight recorder to keep what it has."""
        if self.freeze_file is not None:
            try:
                replace_file(self.freeze_file, f"{note}\n".encode())
            except OSError as error:
                self.say(
                    f"{self.freeze_file} cannot be written ({error.strerror}): the flight recorder was not asked to freeze"
                )

    def report(self, name: str, paths: Sequence[Path], *, calls: bool) -> None:
        """Have a report made of what is there once its turn has come; with `calls` the command is called with it.

        A report of damage stays if segments that it is made of are gone by then: a flight recorder deletes them.
        """
        if not paths:
            self.say(f"{name}: all of it has been deleted; what was frozen is in a folder beside it")
        elif not any(name == waiting for waiting, *_ in self._wanted):
            self._wanted.append((name, paths, paths[0].parent / f"{name.removesuffix('.arrow')}.report", calls))

    @property
    def busy(self) -> bool:
        """Whether a report or a command is under way."""
        self.look()
        return bool(self._running or self._wanted or self._commands)

    def look(self) -> None:
        """See what has ended, and begin what is next."""
        self._commands = [command for command in self._commands if command.poll() is None]
        if self._running is not None and self._running[0].poll() is not None:
            (_, (name, paths, target, calls)), self._running = self._running, None
            self._reported(name, paths, target, calls=calls)
        while self._running is None and self._wanted:
            wanted = self._wanted.popleft()
            name, paths, target, calls = wanted
            if not calls and _of_what_is_gone(target, paths[0]):
                continue
            if not self.reports:
                self._call(name, paths[0], None, "", calls=calls)
                continue
            replay = ["-P", "-m", "kvcanary", "replay", "--quiet", "--page", "--jobs", "1", "--report", str(target)]
            self._running = (
                subprocess.Popen(
                    [sys.executable, *replay, "--", *map(str, paths)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                ),
                wanted,
            )  # fmt: skip

    def stop(self) -> None:
        """End a report that is under way; a command goes on."""
        self._wanted.clear()
        if self._running is not None:
            self._running[0].terminate()
            self._running[0].wait()
            self._running = None

    def _reported(self, name: str, paths: Sequence[Path], target: Path, *, calls: bool) -> None:
        summary = _summary(target)
        if not summary:
            self.say(f"{name}: no report could be made; try kvcanary-replay {paths[0]}")
        incidents = summary.get("incidents") or []
        first = incidents[0] if incidents else {}
        headline = f"{first['title']} ({first['kind']}, {first['confidence']}): {first['sentence']}" if first else ""
        self.on_incident({
            "recording": name,
            "report": str(target) if summary else None,
            "verdict": summary.get("verdict"),
            "incidents": summary.get("num_incidents"),
            "first_incident": headline,
        })  # fmt: skip
        self._call(name, paths[0], target if summary else None, headline, calls=calls)

    def _call(self, name: str, trace: Path, report: Path | None, headline: str, *, calls: bool) -> None:
        if self.command is None or not calls:
            return
        told = {
            "KVCANARY_TRACE": str(trace),
            "KVCANARY_REPORT": str(report or ""),
            "KVCANARY_VERDICT": "corrupt",
            "KVCANARY_INCIDENT": headline,
        }
        try:
            command = subprocess.Popen(
                ["/bin/sh", "-c", self.command], stdin=subprocess.DEVNULL, env=os.environ | told, start_new_session=True
            )
        except OSError as error:
            self.say(f"{name}: the command cannot be run ({error.strerror})")
            return
        self._commands.append(command)


def _summary(report: Path) -> dict[str, Any]:
    try:
        found = json.loads((report / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_what_is_gone(report: Path, first: Path) -> bool:
    """Whether a report of damage begins before the first segment that is left."""
    summary, split = _summary(report), split_segment_name(first)
    begun = (summary.get("segments") or [0])[0]
    return summary.get("verdict") == "corrupt" and split is not None and begun < split[1]


class Metrics:
    """What Prometheus is told: the facts of each recording as they stood at the last `update`.

    Raises `ModuleNotFoundError` without prometheus_client, and `OSError` if the port is taken.
    """

    def __init__(self, address: str, port: int) -> None:
        import prometheus_client

        self._facts: Sequence[Mapping[str, Any]] = []
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        self._server, self._thread = prometheus_client.start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def update(self, facts: Iterable[Mapping[str, Any]]) -> None:
        """Take what is known now."""
        self._facts = list(facts)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def collect(self) -> Iterable[Any]:
        """Yield the metrics; called by prometheus_client in a thread of its own."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        facts = self._facts
        single = [
            (CounterMetricFamily, "forwards_judged", "Forwards that were replayed and judged.", "forwards"),
            (CounterMetricFamily, "events_lost", "Events that the recorder lost.", "events_lost"),
            (GaugeMetricFamily, "requests_hit", "Requests that a violation or finding names.", "requests_hit"),
            (
                GaugeMetricFamily,
                "seconds_behind",
                "Age of the last event replayed; 0 if nothing is left.",
                "seconds_behind",
            ),
        ]
        for family, name, said, key in single:
            metric = family(f"kvcanary_{name}", said, labels=["recording"])
            for one in facts:
                metric.add_metric([one["recording"]], one[key])
            yield metric
        for name, said, label, key in (
            ("violations", "Violations by reason.", "reason", "violations_by_reason"),
            ("findings", "Findings of the history checks by kind.", "kind", "findings_by_kind"),
        ):
            counter = CounterMetricFamily(f"kvcanary_{name}", said, labels=["recording", label])
            for one in facts:
                for value, count in one[key].items():
                    counter.add_metric([one["recording"], value], count)
            yield counter
        verdict = GaugeMetricFamily("kvcanary_verdict", "1 for the verdict so far.", labels=["recording", "verdict"])
        for one in facts:
            verdict.add_metric([one["recording"], one["verdict"]], 1)
        yield verdict
