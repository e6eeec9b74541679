"""What logs and traces call an exception: asking one what it says may raise, and it may say a great deal."""

from typing import Final

MAX_ERROR_TEXT: Final = 2000  # characters: some have a whole tensor in them


def error_text(error: BaseException) -> str:
    """Return an exception's type and what it says; the type alone where it cannot say it, as of a device that failed."""
    kind = type(error).__name__
    try:
        said = str(error)
    except Exception:  # noqa: BLE001  # whatever it is, the one that is told of matters more
        return kind
    return f"{kind}: {said}"[:MAX_ERROR_TEXT]
