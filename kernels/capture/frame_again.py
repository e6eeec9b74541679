"""A decode forward of the kind of an earlier one, taken down by one call of machine code.

Of such a forward nothing is new but the addresses of four tensors and a few numbers that count on. Asking torch for
addresses, types and lengths one by one, counting and launching takes Python some forty calls. What is made here asks
through DLPack's exchange of C functions, which reads a tensor without making anything, and touches one block of memory.

Whatever is not as it was then is left alone, without a trace of the attempt: the caller goes the long way.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .builtin_calls import Method, api, builtin, method
from .frame_driver import STREAM_OFFSET, Launch
from .frame_ledger import Ledger
from .tensor_exchange import CPU, CUDA, TensorExchange, TensorView

TENSORS: Final = 4  # rows, input_ids, positions, out_cache_loc

# Where the addresses of the four go, and the numbers behind them, in the parameters of `take_down`: seven addresses,
# then at, flight, forward, the lengths of out_cache_loc and of prefix, extend_each; `take_back` has at, flight, next_flight, forward.
_ADDRESSED: Final = ((0, 2, 3), (4,), (1, 5), (6,))
_DOWN_NUMBERS: Final = 7 * 8


class _Again(ctypes.Structure):
    """What one kind of forward has: its launches, the words of its frame, and how its four tensors must look."""

    _fields_ = (
        ("ledger", ctypes.c_uint64),
        ("down_parameters", ctypes.c_uint64),
        ("down_call", ctypes.c_uint64),
        ("back_parameters", ctypes.c_uint64 * 2),  # without and with a look at the prefix
        ("back_call", ctypes.c_uint64 * 2),
        ("words", ctypes.c_int64),
        ("watch_every", ctypes.c_int64),
        ("device", ctypes.c_uint64),
        ("kinds", ctypes.c_uint64 * TENSORS),
        ("sizes", ctypes.c_int64 * TENSORS),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How a flight's numbers follow from the ledger: when counters and stamps begin anew, and how many may fly."""

    counters: int
    stamps: int
    flights: int


class Repeater:
    """Makes what takes a kind of forward down again; all machine code is made here, before the engine runs.

    Args:
        ledger: what the forwards count in.
        rounds: how a flight's numbers follow from it.
        launch: the address of `cuLaunchKernelEx`.

    Raises:
        ImportError: there is no llvmlite.
        RuntimeError: LLVM does not make the code.
        AttributeError: this torch has no such exchange.
        ValueError: it has another version of it.
    """

    def __init__(self, ledger: Ledger, rounds: Rounds, launch: int) -> None:
        self._exchange = TensorExchange()
        self._ledger = ledger
        self._launch = launch
        self._again = _again(launch, self._exchange.view, self._exchange.stream, rounds)

    def ending(self, device: Any) -> Callable[[], int | None]:
        """Return what ends the forward that was begun this way on the current stream, and returns the driver's error.

        That is 0 for none; it returns None, and has done nothing, where there is no such forward, or all is off.

        Args:
            device: where the forwards run.
        """
        made = _ending(self._launch, self._exchange.stream, CUDA if device.type == "cuda" else CPU, device.index or 0)
        return builtin(made, ctypes.addressof(self._ledger))

    def again(
        self,
        tensors: Sequence[Any],
        *,
        down: Launch,
        back: Launch | None,
        watching: Launch | None,
        words: int,
        watch_every: int,
    ) -> tuple[Callable[..., Any], object] | None:
        """Return what takes another forward like this one down, and what it uses; None where that cannot be had.

        It is called with the four tensors, and returns the forward's number, the frame's place, where it begins, its row
        of counters and whether its prefix is watched; the driver's error, where there is one; or None, and has done
        nothing then.

        Args:
            tensors: this one's rows, input_ids, positions and out_cache_loc, as `down` had them.
            down: what has launched its `take_down`, filled in.
            back: its `take_back` without a look at the prefix's bytes, None for none.
            watching: the same with one.
            words: of its frame.
            watch_every: forwards between two looks, 0 never.
        """
        if not down.call:
            return None
        block = _Again(ledger=ctypes.addressof(self._ledger), words=words, watch_every=watch_every)
        block.down_parameters, block.down_call = down.parameters, down.call
        for number, one in enumerate((back, watching)):
            if one is not None:
                block.back_parameters[number], block.back_call[number] = one.parameters, one.call
        for number, tensor in enumerate(tensors):
            try:
                seen = self._exchange.look(tensor)
            except Exception:  # noqa: BLE001  # torch's own: what the exchange cannot tell of goes the long way
                return None
            if seen.dimensions != 1:
                return None
            block.device = seen.device
            block.kinds[number], block.sizes[number] = seen.kind, seen.shape[0]
        return builtin(self._again, ctypes.addressof(block)), (block, down, back, watching)


def _load(name: str, base: str, offset: int) -> str:
    """Return the instructions that load the word at an offset of an address."""
    return f"  %{name}_at = getelementptr i8, ptr %{base}, i64 {offset}\n  %{name} = load i64, ptr %{name}_at\n"


def _field(name: str, base: str, structure: Any, field: str, place: int = 0) -> str:
    return _load(name, base, getattr(structure, field).offset + 8 * place)


def _store(kind: str, value: str, base: str, offset: int, name: str) -> str:
    return f"  %{name}_to = getelementptr i8, ptr %{base}, i64 {offset}\n  store {kind} {value}, ptr %{name}_to\n"


def _fire(launch: int, call: str) -> str:
    """Return the instructions that launch, on `%stream`, by four words at an address; the error is in `%error`."""
    words = "".join(_load(f"word{number}", call, 8 * number) for number in range(4))
    pointers = "".join(f"  %given{number} = inttoptr i64 %word{number} to ptr\n" for number in range(4))
    given = ", ".join(f"ptr %given{number}" for number in range(4))
    return f"""{words}{pointers}{_store("ptr", "%stream", "given0", STREAM_OFFSET, "stream")}
  %error = call i32 inttoptr (i64 {launch} to ptr)({given})
"""


@functools.cache
def _ending(launch: int, stream: int, device: int, index: int) -> Method:
    return method(
        "end",
        f"""
  %stream_out = alloca ptr
  %ledger = call ptr {api("PyLong_AsVoidPtr")}(ptr %self)
{_field("back", "ledger", Ledger, "back")}
{_field("off", "ledger", Ledger, "off")}
  %call = inttoptr i64 %back to ptr
  %begun = icmp ne i64 %back, 0
  %on = icmp eq i64 %off, 0
  %there = and i1 %begun, %on
  br i1 %there, label %ask, label %no
ask:
{_store("i64", "0", "ledger", Ledger.back.offset, "none")}
  %asked = call i32 inttoptr (i64 {stream} to ptr)(i32 {device}, i32 {index}, ptr %stream_out)
  %answered = icmp eq i32 %asked, 0
  br i1 %answered, label %go, label %refuse
go:
  %stream = load ptr, ptr %stream_out
{_fire(launch, "call")}
  %wide = sext i32 %error to i64
  %result = call ptr {api("PyLong_FromLong")}(i64 %wide)
  ret ptr %result
no:
  call void {api("Py_IncRef")}(ptr inttoptr (i64 {id(None)} to ptr))
  ret ptr inttoptr (i64 {id(None)} to ptr)
refuse:
  ret ptr null
""",
    )


@functools.cache
def _again(launch: int, view: int, stream: int, rounds: Rounds) -> Method:
    looked = "".join(_looked_at(number, view) for number in range(TENSORS))
    addresses = ""
    for number, places in enumerate(_ADDRESSED):
        for place in places:
            addresses += _store("ptr", f"%data{number}", "down", 8 * place, f"down{place}")
    numbers = ""
    for place, value in enumerate(("%at32", "%row32", "%stamp32", "%slots32", "%prefix32", "1")):
        numbers += _store("i32", value, "down", _DOWN_NUMBERS + 4 * place, f"down_n{place}")
    for place, value in enumerate(("%at32", "%row32", "%next32", "%stamp32")):
        numbers += _store("i32", value, "back", 4 * place, f"back_n{place}")
    ticket = ""
    for place, value in enumerate(("number", "place", "at", "row")):
        ticket += f"""  %item{place} = call ptr {api("PyLong_FromLongLong")}(i64 %{value})
  %set{place} = call i32 {api("PyTuple_SetItem")}(ptr %ticket, i64 {place}, ptr %item{place})
"""
    return method(
        "again",
        f"""
  %tensors = alloca [{TENSORS * ctypes.sizeof(TensorView)} x i8], align 8
  %stream_out = alloca ptr
  %block = call ptr {api("PyLong_AsVoidPtr")}(ptr %self)
  %given = icmp eq i64 %count, {TENSORS}
  br i1 %given, label %begin_it, label %refuse
begin_it:
{_field("ledger_word", "block", _Again, "ledger")}
  %ledger = inttoptr i64 %ledger_word to ptr
{_field("off", "ledger", Ledger, "off")}{_field("reset", "ledger", Ledger, "reset")}
{_field("catching_up", "ledger", Ledger, "catching_up")}{_field("thread", "ledger", Ledger, "thread")}
{_field("number", "ledger", Ledger, "number")}{_field("taken", "ledger", Ledger, "taken")}
{_field("given_back", "ledger", Ledger, "given_back")}{_field("place", "ledger", Ledger, "taken_to")}
{_field("room_to", "ledger", Ledger, "room_to")}{_field("size", "ledger", Ledger, "size")}
{_field("words", "block", _Again, "words")}{_field("every", "block", _Again, "watch_every")}
  %mine = call i64 {api("PyThread_get_thread_ident")}()
  %other = xor i64 %mine, %thread
  %blocked0 = or i64 %off, %reset
  %blocked1 = or i64 %blocked0, %catching_up
  %blocked = or i64 %blocked1, %other
  %flying = sub i64 %taken, %given_back
  %taken_to = add i64 %place, %words
  %free = icmp eq i64 %blocked, 0
  %few = icmp slt i64 %flying, {rounds.flights}
  %room = icmp sle i64 %taken_to, %room_to
  %free_few = and i1 %free, %few
  %ready = and i1 %free_few, %room
  br i1 %ready, label %watch, label %no
watch:
  %ever = icmp sgt i64 %every, 0
  %often = select i1 %ever, i64 %every, i64 1
  %since = srem i64 %number, %often
  %now = icmp eq i64 %since, 0
  %watched = and i1 %ever, %now
  %which = zext i1 %watched to i64
  %which_at = mul i64 %which, 8
  %backs = getelementptr i8, ptr %block, i64 %which_at
{_field("back_word", "backs", _Again, "back_parameters")}{_field("back_call", "backs", _Again, "back_call")}
  %back = inttoptr i64 %back_word to ptr
  %backed = icmp ne i64 %back_call, 0
  br i1 %backed, label %look0, label %no
{looked}
look{TENSORS}:
{_field("down_word", "block", _Again, "down_parameters")}{_field("down_call", "block", _Again, "down_call")}
  %down = inttoptr i64 %down_word to ptr
  %call = inttoptr i64 %down_call to ptr
{_field("device", "block", _Again, "device")}
  %device_type = trunc i64 %device to i32
  %device_high = lshr i64 %device, 32
  %device_index = trunc i64 %device_high to i32
  %asked = call i32 inttoptr (i64 {stream} to ptr)(i32 %device_type, i32 %device_index, ptr %stream_out)
  %answered = icmp eq i32 %asked, 0
  br i1 %answered, label %go, label %raised
go:
  %stream = load ptr, ptr %stream_out
  %at = srem i64 %place, %size
  %row = srem i64 %taken, {rounds.counters}
  %taken_next = add i64 %taken, 1
  %next = srem i64 %taken_next, {rounds.counters}
  %stamp_before = srem i64 %number, {rounds.stamps}
  %stamp = add i64 %stamp_before, 1
  %at32 = trunc i64 %at to i32
  %row32 = trunc i64 %row to i32
  %next32 = trunc i64 %next to i32
  %stamp32 = trunc i64 %stamp to i32
  %slots32 = trunc i64 %size3 to i32
  %prefix32 = trunc i64 %size2 to i32
{addresses}{numbers}
  %number_next = add i64 %number, 1
{_store("i64", "%number_next", "ledger", Ledger.number.offset, "number_next")}
{_store("i64", "%taken_next", "ledger", Ledger.taken.offset, "taken_next")}
{_store("i64", "%taken_to", "ledger", Ledger.taken_to.offset, "taken_to")}
{_store("i64", "%back_call", "ledger", Ledger.back.offset, "back_call")}
{_fire(launch, "call")}
  %launched = icmp eq i32 %error, 0
  br i1 %launched, label %told, label %failed
told:
  %ticket = call ptr {api("PyTuple_New")}(i64 5)
  %made = icmp ne ptr %ticket, null
  br i1 %made, label %fill, label %refuse
fill:
{ticket}  %looked = zext i1 %watched to i64
  %item4 = call ptr {api("PyBool_FromLong")}(i64 %looked)
  %set4 = call i32 {api("PyTuple_SetItem")}(ptr %ticket, i64 4, ptr %item4)
  ret ptr %ticket
failed:
  %wide = sext i32 %error to i64
  %result = call ptr {api("PyLong_FromLong")}(i64 %wide)
  ret ptr %result
raised:
  call void {api("PyErr_Clear")}()
  br label %no
no:
  call void {api("Py_IncRef")}(ptr inttoptr (i64 {id(None)} to ptr))
  ret ptr inttoptr (i64 {id(None)} to ptr)
refuse:
  ret ptr null
""",
    )


def _looked_at(number: int, view: int) -> str:
    """Return the instructions that look at one of the four, and go on where it is as it was."""
    n = number
    return f"""
look{n}:
  %object{n}_at = getelementptr ptr, ptr %args, i64 {n}
  %object{n} = load ptr, ptr %object{n}_at
  %tensor{n} = getelementptr i8, ptr %tensors, i64 {n * ctypes.sizeof(TensorView)}
  %seen{n} = call i32 inttoptr (i64 {view} to ptr)(ptr %object{n}, ptr %tensor{n})
  %good{n} = icmp eq i32 %seen{n}, 0
  br i1 %good{n}, label %same{n}, label %raised
same{n}:
{_field(f"base{n}", f"tensor{n}", TensorView, "data")}{_field(f"offset{n}", f"tensor{n}", TensorView, "byte_offset")}
{_field(f"device{n}", f"tensor{n}", TensorView, "device")}{_field(f"kind{n}", f"tensor{n}", TensorView, "kind")}
{_field(f"shape{n}", f"tensor{n}", TensorView, "shape")}{_field(f"strides{n}", f"tensor{n}", TensorView, "strides")}
{_field(f"device_was{n}", "block", _Again, "device")}{_field(f"kind_was{n}", "block", _Again, "kinds", n)}
{_field(f"size_was{n}", "block", _Again, "sizes", n)}
  %same_device{n} = icmp eq i64 %device{n}, %device_was{n}
  %same_kind{n} = icmp eq i64 %kind{n}, %kind_was{n}
  %same_both{n} = and i1 %same_device{n}, %same_kind{n}
  br i1 %same_both{n}, label %long{n}, label %no
long{n}:
  %shape_at{n} = inttoptr i64 %shape{n} to ptr
  %size{n} = load i64, ptr %shape_at{n}
  %same_size{n} = icmp eq i64 %size{n}, %size_was{n}
  %dense{n} = icmp eq i64 %strides{n}, 0
  %data_word{n} = add i64 %base{n}, %offset{n}
  %data{n} = inttoptr i64 %data_word{n} to ptr
  br i1 %same_size{n}, label %spread{n}, label %no
spread{n}:
  br i1 %dense{n}, label %look{n + 1}, label %stride{n}
stride{n}:
  %strides_at{n} = inttoptr i64 %strides{n} to ptr
  %stride{n}_is = load i64, ptr %strides_at{n}
  %next{n} = icmp eq i64 %stride{n}_is, 1
  br i1 %next{n}, label %look{n + 1}, label %no
"""
