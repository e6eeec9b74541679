"""Text from a trace on its way to a terminal."""


def printable(text: str) -> str:
    """Return `text` with whatever could steer a terminal, or could not be encoded, as escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in text
    )
