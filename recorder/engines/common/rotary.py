"""What a model is fed that has several dimensions of positions (M-RoPE), told by one position for each token.

Text has the same position in every dimension: its place in the sequence, behind media its place and a number that the
request has for good. So of all tokens but those of prompts with media, what the model is fed can be held against the place.
"""

from typing import Any, Final

NEVER: Final = 1 << 62  # from which place on a request is text, if nobody said what it has


def one_of(fed: Any, places: Any) -> Any:
    """Return `[T]` of `fed` `[dimensions, T]` one that is not the token's place, if there is one; both are tensors."""
    low, high = fed.aminmax(dim=0)
    return high.where(high > places, low)


def told_by_one(fed: Any, places: Any, text_from: Any, ahead: Any) -> Any:
    """Return `[T]` positions: the places of tokens before `text_from`, else one that is fed, less what that is `ahead`."""
    return one_of(fed - ahead, places).where(places >= text_from, places)
