"""How much is looked at of what an engine copies out of its cache and back, of every engine alike."""

from typing import Final

MAX_HASHED_BYTES: Final = 64 << 20  # at one end of what is copied in one go
MAX_LOOKED_AT: Final = 8 << 20  # the same of a device's
MAX_SEEN_BYTES: Final = 32 << 10  # of a block of a device's of which nobody knows where it was copied to
LATE_STEPS: Final = 16  # in which blocks are read again whose load was over, and had not landed
MAX_LATE: Final = 64  # such blocks at a time
SEARCHES: Final = 16  # for where a load landed instead, in a recording
MAX_SEARCHED_SLOTS: Final = 1 << 20  # of a pool that is searched
