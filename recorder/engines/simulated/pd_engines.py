"""The two halves of a prefill/decode pair: each an engine of its own, with pools, page numbers and a trace of its own."""

from .engine import SimulatedEngine
from .errors import BrokenEngineError
from .requests import Request


class _Half(SimulatedEngine):
    """An engine that is given its requests by the pair."""

    def _nothing_to_run(self) -> None:
        if self.scheduler.waiting and not self.scheduler.parked:
            super()._nothing_to_run()
        if self.config.idle_forwards:
            self._idle_forward()


class PrefillEngine(_Half):
    """Computes prompts and samples the first token; then its requests are parked until they have been sent.

    `ready` are those that wait for the other side, in the order in which they came to be.
    """

    ready: list[Request]

    def _prefilled(self, request: Request) -> None:
        self.scheduler.parked.append(request)
        self.ready.append(request)

    def _aborts(self) -> None:
        """The pair stops requests, on both sides."""


class DecodeEngine(_Half):
    """Takes requests over once their prompt's KV has landed.

    One that is retracted later on is computed anew on this side.
    """

    def preallocate(self, request: Request, num_tokens: int) -> bool:
        """Give a request a row and slots for the KV to come; False where there is no room, or others wait for it."""
        scheduler, memory = self.scheduler, self.memory
        windowless = memory.swa.first_needed_page(num_tokens) if memory.swa is not None else 0
        if scheduler.waiting or not scheduler.has_row():
            return False
        if not memory.has_room(request, num_tokens, windowless=windowless):
            return False
        request.row = scheduler.free_rows.pop()
        scheduler.tell_admitted(request)
        if not memory.extend(request, num_tokens, windowless=windowless):
            raise BrokenEngineError(f"request {request.name} was promised room for {num_tokens} tokens and gets none")
        request.window_start = windowless
        scheduler.parked.append(request)
        return True

    def landed(self, request: Request, num_tokens: int, token: int) -> None:
        """Go on from KV that has arrived, and from the token that the other side sampled."""
        request.cached_len = num_tokens
        request.append(token)
        self.scheduler.parked.remove(request)
        self.scheduler.running.append(request)
        self._settle([request])
