"""SGLang's models, captured where their first layer begins and their last one ends, as its own canary does.

What a model is run with is read from its arguments, what its attention gets from the backend's own metadata. Inside a
CUDA graph the same launches are captured with the model's; they do nothing until a forward is expected, right before the
graph is launched. A draft's steps in one graph are so many runs of its model.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ....kernels.capture.frames import AttentionTensors, ModelInput
from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.device.capture import DeviceCapture
from ...capture.device.forward import FrameInFlight
from ..common.hooking import Around, OnFault, beside, harmless
from .attention.probed import ProbedAttention
from .attention.rotary import fed_positions
from .forward import MODES, has_embeddings, lens_of
from .layers import backend_around, batch_among
from .recurrent import state_indices, state_pool
from .requests import KnownBatch

if TYPE_CHECKING:
    from ....kernels.capture.model_forward import ModelForward

logger = logging.getLogger("kvcanary")

MAX_TICKETS: Final = 4096  # of runs of models in graphs; beyond it a graph's forwards are captured outside
KNOWN_ATTENTION: Final = ("TritonAttnBackend",)  # whose metadata are read


@dataclass(slots=True)
class Expected:
    """A forward that has not begun yet: its runner and requests, and what captures it."""

    capture: DeviceCapture
    runner: int  # the model runner's id
    index: int  # into the header's runners
    bs: int
    known: KnownBatch
    truth_lens: bytes
    captured: bool = False
    in_flight: list[FrameInFlight | None] = field(default_factory=list)  # of a graph that has been launched

    def deliver(self) -> None:
        """Deliver what was captured in a graph."""
        capture = self.capture
        if not capture.off:
            for flight in self.in_flight:
                if flight is not None:
                    capture.hand_over(flight)


class InsideModels:
    """What stands around the forward of each of a process's models, and around its graphs.

    `on_fault` is called with the part that failed, and how. It is switched off then, and forwards are captured outside.
    """

    def __init__(self, on_fault: OnFault, probed: ProbedAttention | None = None) -> None:
        self._on_fault = on_fault
        self.probed = probed
        self.off = False
        self._wrapped: dict[int, Any] = {}  # model runners by their ids
        self._with_states: dict[int, bool] = {}
        self._tickets: dict[Any, Any] = {}  # by device
        self._used: dict[Any, int] = {}
        self._depth = 0
        self._capturing: list[tuple[int, str, ModelForward]] | None = None
        self._graphs: dict[tuple[int, Any], tuple[Any, list[tuple[int, str, ModelForward]]]] = {}
        self.expected: Expected | None = None

    def watches(self, runner: Any) -> bool:
        """Say whether a model runner's forwards are captured here."""
        return not self.off and id(runner) in self._wrapped

    def in_graphs(self, backend: Any) -> bool:
        """Say whether the graphs of one of SGLang's graph backends hold the launches that capture their forwards."""
        return any(mine is backend and runs for mine, runs in self._graphs.values())

    def drafts_in_graphs(self, runner: Any) -> bool:
        """Say whether the launches that capture a runner's decode steps are in a graph."""
        runs = [run for _, mine in self._graphs.values() for run in mine]
        return any(owner == id(runner) and mode == "decode" for owner, mode, _ in runs)

    @beside
    def on_capture(self, backend: Any, shape_key: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Take note of the runs of models that a graph holds."""
        runs: list[tuple[int, str, ModelForward]] = []
        self._capturing = runs
        try:
            yield
        finally:
            self._capturing = None
        self._graphs[id(backend), shape_key] = (backend, runs)

    def on_replay(self, backend: Any, shape_key: Any, *_args: Any, **_kwargs: Any) -> None:
        """Have the forwards in a graph captured that is launched for a forward that is expected."""
        expected = self.expected
        if expected is None or expected.captured:
            return
        _, runs = self._graphs.get((id(backend), shape_key), (None, ()))
        if runs and runs[0][0] == expected.runner:  # delivered with the forward's end: each call here has a price
            expected.captured = True
            expect, of = expected.capture.expect, (expected.index, expected.bs, expected.known, expected.truth_lens)
            expected.in_flight = [expect(forward, mode, *of) for _, mode, forward in runs]

    def wrap(self, runner: Any) -> None:
        """Stand around a model's forward as soon as there is a model; graphs are captured later."""
        model: Any = getattr(runner, "model", None)
        original = getattr(model, "forward", None)
        device = gpu_of(runner)
        if device is None or not callable(original) or id(runner) in self._wrapped:
            return
        import torch

        fed_positions(runner)  # has memory of its own, which no graph may own

        if device not in self._tickets:
            from ....kernels.capture.frame_kernels import TICKET_WORDS

            self._tickets[device] = torch.zeros((MAX_TICKETS, TICKET_WORDS), dtype=torch.int64, device=device)
            self._used[device] = 1  # the first is nobody's: what is run before a graph is captured gets it
        compiling = torch.compiler.is_compiling

        @beside
        def on_inside(*args: Any, **kwargs: Any) -> Around:
            end = self.begin(runner, device, args, kwargs)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            if end is not None:
                end()

        watched = harmless(on_inside, self._fail)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if compiling() or self._depth or self.off or (self._capturing is None and self.expected is None):
                return original(*args, **kwargs)
            return watched(original, *args, **kwargs)

        model.forward = forward
        self._wrapped[id(runner)] = runner

    def _fail(self, hook: str, error: Exception) -> None:
        self.off = True
        self._on_fault(hook, error)

    def begin(
        self, runner: Any, device: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Launch what belongs before a model's first layer, and return what launches the rest; None for nothing."""
        expected, runs = self.expected, self._capturing
        if runs is None and (expected is None or expected.captured or expected.runner != id(runner)):
            return None
        batch = batch_among(args, kwargs)
        mode = None if batch is None else MODES.get(batch.forward_mode.name)
        if batch is None or mode is None:
            return None
        if self.probed is not None:
            self.probed.before_model(runner, capturing=is_capturing(device))
        fed = fed_positions(runner)
        positions_of = None if fed is None else functools.partial(fed.of, batch, in_graph=runs is not None)
        given = model_input(batch, mode, args, kwargs, positions_of)
        if given is None or given.rows.device != device:
            return None
        if runs is None:
            assert expected is not None  # for the type checker: see above
            last = MAX_TICKETS - 1 - list(self._wrapped).index(id(runner))  # the last are of what runs outside graphs
            forward = self._made(runner, batch, given, self._tickets[device][last])
            expected.captured = True
            capture = expected.capture
            flight = capture.expect(forward, mode, expected.index, expected.bs, expected.known, expected.truth_lens)
            if flight is None:
                return None
            capture.begin(forward, flight)
            return functools.partial(capture.after, "")
        captured = is_capturing(device)
        number = self._used[device] if captured else 0
        # Padding can be distinguished from requests only if each has as many tokens.
        uneven = mode in ("extend", "mixed") or given.num_tokens % given.rows.numel()
        if uneven or number >= MAX_TICKETS - len(self._wrapped):
            return None
        forward = self._made(runner, batch, given, self._tickets[device][number])
        forward.begin()
        if captured:
            self._used[device] = number + 1
            runs.append((id(runner), mode, forward))
        return forward.end

    def _made(self, runner: Any, batch: Any, given: ModelInput, ticket: Any) -> "ModelForward":
        from ....kernels.capture.model_forward import ModelForward

        lut = getattr(getattr(runner, "token_to_kv_pool", None), "full_to_swa_index_mapping", None)
        attention = attention_tensors(runner, batch, int(given.rows.numel()))
        recorded = self._with_states.get(id(runner))
        if recorded is None:
            recorded = self._with_states[id(runner)] = isinstance(state_pool(runner, 0), tuple)
        states = state_indices(runner, batch, int(given.rows.numel())) if recorded else ()
        int64 = str(getattr(lut, "dtype", "")) == "torch.int64"
        return ModelForward(ticket, given, attention, lut_int64=int64, states=states)


def gpu_of(runner: Any) -> Any:
    """Return the GPU that a model runner runs on, None if it is none."""
    import torch

    device = torch.device(runner.device)
    if device.type != "cuda":
        return None
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def is_capturing(device: Any) -> bool:
    """Say whether what is launched now goes into a CUDA graph."""
    import torch

    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def model_input(
    batch: Any, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any], fed_of: Callable[[Any], Any] | None = None
) -> ModelInput | None:
    """Return what a model is run with: token ids and positions as its arguments have them, the rest as its batch.

    Of a batch that is fed embeddings the token ids are unknown. `fed_of` makes of its positions those that the model is fed.
    None for a batch that is empty, or has nothing to run.
    """
    names = ("input_ids", "positions")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    flat = {name: value for name, value in arguments.items() if getattr(value, "ndim", 0) == 1}
    ids, positions = (flat.get(name, getattr(batch, name)) for name in names)
    if positions is not None and (has_embeddings(batch) or kwargs.get("input_embeds") is not None):
        ids = positions.new_full(positions.shape, UNKNOWN_TOKEN)
    rows, loc = batch.req_pool_indices, batch.out_cache_loc
    if ids is None or positions is None or loc is None or not rows.numel() or ids.ndim != 1 or positions.ndim != 1:
        return None
    rows, ids, positions, loc = (part.contiguous() for part in (rows, ids, positions, loc))
    tokens = min(int(ids.numel()), int(positions.numel()))
    lens = lens_of(batch, mode, positions)
    if fed_of is not None:
        positions = fed_of(positions).contiguous()
    tensors = {"input_ids": ids, "positions": positions, "out_cache_loc": loc, "num_tokens": tokens}
    given = ModelInput(rows=rows, **lens._asdict(), **tensors)
    given.check()
    return given


def attention_tensors(runner: Any, batch: Any, bs: int) -> AttentionTensors | None:
    """Return what the attention kernels of a forward are about to be given, None of a backend that is not known."""
    backend = backend_around(runner, batch)
    metadata = getattr(backend, "forward_metadata", None)
    # Other backends give other tensors other meanings; parts of a context on several devices, or a pool that slots are
    # translated for, have slots of their own.
    plain = getattr(backend, "dcp_size", 1) == 1 and getattr(backend, "_translate_kv_loc", None) is None
    if metadata is None or type(backend).__name__ not in KNOWN_ATTENTION or not plain:
        return None
    own, queries = (metadata.kv_indptr, metadata.kv_indices), metadata.qo_indptr
    window = metadata.window_kv_indptr, metadata.window_kv_indices
    if not (_fits(own[0], bs + 1) and _fits(own[1], 0) and (queries is None or _fits(queries, bs + 1))):
        return None
    if not (_fits(window[0], bs + 1) and _fits(window[1], 0)):
        window = None, None
    return AttentionTensors(
        kv_indptr=own[0], kv_indices=own[1], window_indptr=window[0], window_indices=window[1], qo_indptr=queries
    )


def _fits(tensor: Any, least: int) -> bool:
    """Whether a tensor is there, one after another in memory, and long enough."""
    return tensor is not None and tensor.ndim == 1 and tensor.is_contiguous() and int(tensor.numel()) >= least
