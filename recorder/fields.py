"""Dataclasses that hold their fields to their annotations: what a value may be stands where the field does."""

import functools
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Chance = Annotated[float, msgspec.Meta(ge=0, le=1)]


def check_fields(given: Any) -> None:
    """Raise `ValueError` for a field with another value than its annotation, of a range or of choices, allows."""
    owner: Any = type(given)
    for name, kind in _limited(owner):
        value = getattr(given, name)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            said = str(error).partition(" - at")[0]
            expected = said.removeprefix("Expected ") if said.startswith("Expected ") else f"another value: {said}"
            if get_origin(kind) is Literal:
                expected = f"one of {', '.join(word or repr(word) for word in get_args(kind))}"
            raise ValueError(f"{name} is {value!r}, expected {expected}") from None


def expect(fits: bool, otherwise: str) -> None:
    """Raise `ValueError` unless it fits."""
    if not fits:
        raise ValueError(otherwise)


@functools.cache
def _limited(kind: type) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, hint) for name, hint in hints.items() if get_origin(hint) in (Annotated, Literal, tuple)]
