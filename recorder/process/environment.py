"""What an engine's operator sets: `KVCANARY_*` variables, and the TOML file that one of them names.

Only entry points read these; everything below them takes a `RecordingSettings`.
"""

import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

from .injection import INJECT, Injection
from .settings import FOLDER, PREFIX, SETTINGS, RecordingSettings

TRACE: Final = FOLDER.variable
CONFIG: Final = PREFIX + "CONFIG"
RUN_ID: Final = PREFIX + "RUN_ID"  # one for all processes of a server, so that the ranks of two servers stay apart
BISECT: Final = PREFIX + "BISECT_"  # what `kvcanary bisect run` sets for the command that it runs
WORKLOAD: Final = PREFIX + "WORKLOAD"  # what `kvcanary hunt` sets for a script: the requests that it is to run
VARIABLES: Final = (TRACE, CONFIG, *(setting.variable for setting in SETTINGS if setting is not FOLDER))

made_by = -1  # the process that made the run id, if that is this one or its parent


def is_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether a recording may be asked for, which `read_environment` finds out; imports nothing."""
    return bool(environ.get(TRACE, "").strip() or environ.get(CONFIG, "").strip())


def read_environment(environ: Mapping[str, str] = os.environ) -> RecordingSettings | None:
    """Return the settings, or None if no recording is asked for; variables go before the file. Raises `ValueError`,
    which says what was expected, for a value out of range, a `KVCANARY_` variable or a key of the file that does not
    exist, and a file that cannot be read.
    """
    if not is_wanted(environ):
        return None
    ours = sorted(name for name in environ if name.startswith(PREFIX) and not name.startswith(BISECT))
    _check_known(ours, (*VARIABLES, RUN_ID, INJECT, WORKLOAD), VARIABLES)
    config = environ.get(CONFIG, "").strip()
    values = _read_config(Path(config)) if config else {}
    for setting in SETTINGS:
        text = environ.get(setting.variable, "").strip()
        if text:
            values[setting.attribute] = setting.parse(text, setting.variable)
    if environ.get(INJECT):
        values["inject"] = Injection.from_json(environ[INJECT])
    if "folder" not in values:
        return None
    # The engine may go to another folder before the next segment is begun.
    values = {name: value.absolute() if isinstance(value, Path) else value for name, value in values.items()}
    settings = RecordingSettings(**values)
    _check_together(settings)
    return settings


def _read_config(path: Path) -> dict[str, Any]:
    """Return the fields that a TOML file sets: its table `[kvcanary]`, or if it has none its top level. Relative paths
    in it are taken from the file's own folder.
    """
    import tomllib

    from ..files import read_small_file

    try:
        found = tomllib.loads(read_small_file(path).decode("utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: the settings cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of thousands of digits
        raise ValueError(f"{path}: not TOML: {error}") from None
    table = found.get("kvcanary", found)
    if not isinstance(table, dict):
        raise ValueError(f"{path}: kvcanary is {table!r}, expected a table, [kvcanary]")  # noqa: TRY004  # what is wrong is the file
    known = {setting.name: setting for setting in SETTINGS}
    _check_known(table, known, tuple(known), f"{path}: ")
    values: dict[str, Any] = {"config": path}
    for name, given in table.items():
        value = known[name].parse(given, f"{path}: {name}")
        values[known[name].attribute] = path.parent / value if isinstance(value, Path) else value
    return values


def _check_known(names: Iterable[str], known: Collection[str], listed: Sequence[str], where: str = "") -> None:
    """Raise `ValueError` that names what does not exist, what may have been meant, and what there is."""
    import difflib

    named = []
    for name in [name for name in names if name not in known]:
        meant = difflib.get_close_matches(name, listed, n=1)
        named.append(f"{name} (did you mean {meant[0]}?)" if meant else name)
    if named:
        raise ValueError(f"{where}{', '.join(named)}: no such setting; there are {', '.join(listed)}")


def _check_together(settings: RecordingSettings) -> None:
    """Raise `ValueError` for a setting that does nothing without another, or a file that is none."""
    kept = settings.keep_segments or settings.keep_bytes
    if (settings.freeze_file or settings.freeze_signal) and not (kept or settings.in_windows):
        raise ValueError("freeze_file and freeze_signal need a flight recorder: set keep_segments or keep_bytes too")
    if settings.freeze_file is not None and settings.freeze_file.is_dir():
        raise ValueError(f"freeze_file is {settings.freeze_file}, a folder, expected the name of a file to look for")
    if settings.token_salt_file is not None:
        from ..capture.privacy import read_salt

        read_salt(settings.token_salt_file)


def share_run_id() -> None:
    """Have the processes that this one will start know one another by an id, unless it got one itself."""
    global made_by
    if not os.environ.get(RUN_ID):
        give_run_id(os.environ)
        made_by = os.getpid()


def give_run_id(environ: MutableMapping[str, str]) -> None:
    """Put a fresh id into the environment of processes that belong together."""
    environ[RUN_ID] = os.urandom(16).hex()


def run_id() -> str:
    """Return the id that this process got from the one that started it, empty for none."""
    return "" if made_by == os.getpid() else os.environ.get(RUN_ID, "")
