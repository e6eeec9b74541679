"""A folder of recordings, each replayed while it is written, one step after another in one thread."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ...recorder.errors import TraceError, printable
from ...recorder.files import read_small_file, replace_file
from ...recorder.trace.recordings import Recording, group_recordings, traces_in
from ..run.settings import ReplaySettings
from .recording import Facts, WatchedRecording, is_readable, is_settled

STATE_FILE: Final = ".kvcanary-watch.json"
_TURN_SECONDS: Final = 0.5  # how long one recording is replayed before the next has its turn


class WatchedFolder:
    """All recordings of a folder; `on_news(what, recording, facts)` is told what happens to them.

    `what` is "begun", "damage" (the first of a recording), "over", or "unreadable" with an `error` in the facts. Recordings that
    were judged to their end are kept in `STATE_FILE` in the folder, and passed over the next time; so is how far one under way
    was judged, where the next watch goes on.
    """

    def __init__(
        self,
        folder: Path,
        settings: ReplaySettings,
        on_news: Callable[[str, WatchedRecording | None, Mapping[str, Any]], None],
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._on_news = on_news
        self._refused: set[Path] = set()
        self._damage_reported: set[str] = set()
        state = self._read_state()
        self.judged: dict[str, Facts] = {name: facts for name, facts in state.items() if facts["over"]}
        self._resumed = {name: facts for name, facts in state.items() if not facts["over"]}
        self._written: dict[str, Facts] = {}
        self.state_error = ""
        self.under_way: list[WatchedRecording] = []

    def look(self) -> bool:
        """Begin with recordings that are new in the folder; raise `TraceError` if the folder cannot be read.

        Returns whether a file is there that may get its header yet.
        """
        if not self._folder.is_dir():
            raise TraceError(f"{self._folder}: no such folder; name the one that the engine records into")
        known = {path for one in self.under_way for path in one.paths}
        try:
            paths = [path for path in traces_in(self._folder) if path not in known | self._refused]
        except TraceError:  # none yet
            return False
        ready = [path for path in paths if is_readable(path) or is_settled(path)]
        watched = {one.trace_id for one in self.under_way}
        for recording in group_recordings(ready)[0]:
            header = recording.header
            if header is None or header.trace_id not in watched | self.judged.keys():
                self._begin(recording)
        return len(ready) < len(paths)

    def step(self) -> bool:
        """Give each recording a turn; False if none had anything new."""
        moved = False
        for one in list(self.under_way):
            until = time.monotonic() + _TURN_SECONDS
            while one.step():
                moved = True
                self._notice_damage(one)
                if time.monotonic() > until:
                    break
            self._notice_damage(one)
            if one.over:
                self._end(one)
                moved = True
            elif one.resume is not self._written.get(one.trace_id):
                self._write_state()
        return moved

    def facts(self) -> Iterator[Facts]:
        """Yield what is known of each recording, of those that are over first."""
        yield from self.judged.values()
        for one in self.under_way:
            yield one.facts()

    def close(self) -> None:
        """Let go of what is under way; the next watch replays it from the beginning of its last segment."""
        while self.under_way:
            self.under_way.pop().close()

    def _begin(self, recording: Recording) -> None:
        try:
            resumed = self._resumed.get(recording.header.trace_id) if recording.header is not None else None
            one = WatchedRecording(recording.paths, self._settings, resumed)
        except TraceError as error:
            self._refused.update(recording.paths)
            self._on_news("unreadable", None, {"recording": Path(recording.name).name, "error": printable(str(error))})
            return
        self.under_way.append(one)
        if resumed is not None and resumed["verdict"] == "corrupt":
            self._damage_reported.add(one.trace_id)  # by the earlier watch
        self._on_news("begun", one, one.facts())

    def _notice_damage(self, one: WatchedRecording) -> None:
        if one.damaged and one.trace_id not in self._damage_reported:
            self._damage_reported.add(one.trace_id)
            one.resume = {**one.resume, "verdict": "corrupt"}
            self._on_news("damage", one, one.facts())

    def _end(self, one: WatchedRecording) -> None:
        one.finish()
        self._notice_damage(one)  # what ends a recording may be the first that was found
        facts = self.judged[one.trace_id] = one.facts()
        self.under_way.remove(one)
        one.close()
        self._write_state()
        self._on_news("over", one, facts)

    def _read_state(self) -> dict[str, Facts]:
        """Return what an earlier watch has judged; nothing if the file is not what a watch writes."""
        try:
            return msgspec.json.decode(read_small_file(self._folder / STATE_FILE), type=dict[str, Facts])
        except (OSError, msgspec.DecodeError):
            return {}

    def _write_state(self) -> None:
        self._written = {one.trace_id: one.resume for one in self.under_way}
        try:
            replace_file(self._folder / STATE_FILE, msgspec.json.encode(self._resumed | self._written | self.judged))
        except OSError as error:
            self.state_error = f"{self._folder / STATE_FILE} cannot be written ({error.strerror}): what was judged is judged again next time"
