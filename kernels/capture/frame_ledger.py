"""What counts on from one forward's launches to the next one's, where Python and machine code both find it."""

import ctypes


class Ledger(ctypes.Structure):
    """What counts on from forward to forward, for Python and machine code alike; both have Python's lock.

    While `off`, `reset` or `catching_up` is not 0, every forward goes the long way. `number` is the next forward's,
    `taken` and `given_back` count flights, `taken_to` and `room_to` are places in an arena of `size` words. `thread` is
    the engine's. `back` is the launch that ends the forward begun last, 0 for none.
    """

    _fields_ = (
        ("off", ctypes.c_int64),
        ("reset", ctypes.c_int64),
        ("catching_up", ctypes.c_int64),
        ("thread", ctypes.c_uint64),
        ("number", ctypes.c_int64),
        ("taken", ctypes.c_int64),
        ("given_back", ctypes.c_int64),
        ("taken_to", ctypes.c_int64),
        ("room_to", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("back", ctypes.c_uint64),
    )
