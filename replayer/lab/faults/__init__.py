"""The lab's faults, one module a family; `FAULTS` has them all by name."""

from typing import Final

from ..fault import Fault
from . import allocation, attention, batches, kv_bytes, prefix_cache, sliding, table, tokens, transfer

_FAMILIES: Final = (kv_bytes, table, allocation, prefix_cache, sliding, attention, tokens, batches, transfer)

FAULTS: Final = {
    fault.name: fault for family in _FAMILIES for fault in vars(family).values() if isinstance(fault, Fault)
}
