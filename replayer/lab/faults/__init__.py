"""The lab's faults, one module a family; `FAULTS` has them all by name."""

import dataclasses
from types import ModuleType
from typing import Final

from ..fault import Fault
from . import (
    allocation,
    attention,
    kv_bytes,
    overlap,
    padding,
    positions,
    prefix_cache,
    sliding,
    table,
    tokens,
    transfer,
)

_FAMILIES: Final[tuple[ModuleType, ...]] = (
    kv_bytes,
    table,
    allocation,
    prefix_cache,
    sliding,
    positions,
    attention,
    tokens,
    padding,
    overlap,
    transfer,
)


def _catalogue() -> dict[str, Fault]:
    found: dict[str, Fault] = {}
    for module in _FAMILIES:
        family = module.__name__.rpartition(".")[2]
        for fault in module.FAULTS:
            found[fault.name] = dataclasses.replace(fault, family=family)
    return found


FAULTS: Final = _catalogue()
