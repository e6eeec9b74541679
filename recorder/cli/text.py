"""Text from a trace on its way to a terminal."""


def printable(text: str) -> str:
    """Return `text` with whatever could steer a terminal, or could not be encoded, as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )


def printable_message(text: str) -> str:
    """Return a message of several lines, such as DuckDB's, as `printable`; lines behind the first are set in, and so
    never look like lines of a command's own.
    """
    return "\n  ".join(printable(line) for line in text.split("\n"))
