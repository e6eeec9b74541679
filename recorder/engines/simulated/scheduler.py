"""The scheduler: who waits, who runs, who is put back, who is stopped. First come first served within a priority."""

from collections.abc import Callable

from ...trace.schema import RequestStatus
from .config import BrokenEngineError, Counters, EngineConfig
from .memory import KvMemory
from .requests import NO_ROW, Request

Prefill = tuple[Request, int]  # a request, and how many of its tokens the next forward computes


class Scheduler:
    """The queues, and the rows of req_to_token. `drain` waits for the forwards in flight and says whether there were
    any.
    """

    def __init__(
        self, config: EngineConfig, memory: KvMemory, counters: Counters, *, drain: Callable[[], bool]
    ) -> None:
        self._config = config
        self._memory = memory
        self._counters = counters
        self._drain = drain
        self.waiting: list[Request] = []  # in the order in which it is served
        self.prefilling: Request | None = None  # the one request whose prompt is computed in parts
        self.running: list[Request] = []  # they have one sampled token to go on from
        self.parked: list[Request] = []  # they hold a row and wait for a transfer
        self.free_rows = list(range(config.rows - 1, 0, -1))
        # After a retraction nobody is let in until somebody has finished: what was put back would come straight back.
        self._hold = False

    @property
    def active(self) -> list[Request]:
        """The requests that hold a row."""
        return self.running + self.parked + ([self.prefilling] if self.prefilling else [])

    @property
    def decoding(self) -> list[Request]:
        """The running requests that want another token."""
        return [request for request in self.running if not request.done]

    def add(self, request: Request) -> None:
        """Queue a request behind those of its priority, a retracted one before those that came after it."""
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: (-r.spec.priority, r.order))

    def next_prefill(self) -> list[Prefill]:
        """Return the requests of the next prefill forward, slots allotted, within the chunk budget."""
        budget = self._config.chunk_tokens
        picked: list[Prefill] = []
        request, self.prefilling = self.prefilling, None
        if request is not None:
            taken = self.take(request, budget)
            if self._memory.extend(request, request.cached_len + taken):
                picked.append((request, taken))
                budget -= taken
            else:
                self.running.append(request)  # so that it is found where retract looks
                self.retract(request)
        while budget >= self._config.page_size and self.waiting and self.prefilling is None:
            if self._hold and (self.running or self.parked or picked):
                break
            request = self.waiting[0]
            taken = self.admit(request, budget, len(picked))
            if not taken:
                if not self.preempt_for(request):
                    break
                continue
            self.waiting.remove(request)
            picked.append((request, taken))
            budget -= taken
        for request, taken in picked:
            if request.cached_len + taken < request.num_tokens:
                self.prefilling = request
        return picked

    def take(self, request: Request, budget: int) -> int:
        """Return how many tokens of a request fit the budget; a part of a prompt ends where a page ends."""
        rest = request.num_tokens - request.cached_len
        if rest <= budget:
            return rest
        end = (request.cached_len + budget) // self._config.page_size * self._config.page_size
        return max(0, end - request.cached_len)

    def admit(self, request: Request, budget: int, num_picked: int) -> int:
        """Give a waiting request row, cached prefix and slots; how many tokens it computes next, 0 if it must wait."""
        if not self.has_row(num_picked):
            return 0
        request.row = self.free_rows.pop()
        self._memory.cache.attach(request)
        taken = self.take(request, budget)
        if not taken or not self._give_slots(request, request.cached_len + taken, note="not admitted"):
            return 0
        self._counters.resumed += request.retracted
        request.retracted = False
        return taken

    def share_prompt(self, parent: Request, child: Request) -> bool:
        """Give a fork a row with its parent's shared pages and a copy of the page begun; False if memory does not do."""
        memory = self._memory
        if not self.free_rows or len(self.active) >= self._config.max_running:
            return False
        child.row = self.free_rows.pop()
        child.shared_pages, child.node = parent.shared_pages, parent.node
        memory.cache.tree.lock(child.node)
        child.window_nodes = list(parent.window_nodes)
        for node in child.window_nodes:
            node.window_lock += 1
        child.cached_len = child.allocated_len = child.shared_pages * memory.page_size
        child.window_start = min(child.shared_pages, parent.window_start)
        shared = slice(0, child.cached_len)
        memory.req_to_token[child.row, shared] = memory.req_to_token[parent.row, shared]
        if not self._give_slots(child, parent.cached_len, note="not forked"):
            return False
        memory.copy_tail(parent, child, note="fork")
        child.cached_len = parent.cached_len
        memory.slide(child)
        return True

    def _give_slots(self, request: Request, upto: int, *, note: str) -> bool:
        """Admit a request that has its row, with slots up to `upto`; False, and without the row, if it must wait."""
        if not self._memory.has_room(request, upto):
            self._memory.cache.unlock(request)
            self.give_up_row(request)
            return False
        self.record_admitted(request)
        if not self._memory.extend(request, upto):
            self.leave(request, note=note)
            return False
        return True

    def has_row(self, num_picked: int = 0) -> bool:
        """Whether another request may run, beside those picked already."""
        return bool(self.free_rows) and len(self.running) + len(self.parked) + num_picked < self._config.max_running

    def preempt_for(self, request: Request) -> bool:
        """Put the least important running request back if the waiting one is more important."""
        victim = min(self.running, key=lambda r: (r.spec.priority, -r.order), default=None)
        if victim is None or victim.spec.priority >= request.spec.priority:
            return False
        self._counters.preemptions += 1
        self.retract(victim, hold=False)
        return True

    def make_decode_room(self) -> None:
        """Give every running request the slots of its next decode; those that memory does not carry are put back."""
        # All that will be missing is evicted at once; where that cannot be had, each request is on its own.
        memory, ahead = self._memory, self._config.verify_tokens
        needed = (memory.pages_for(r.cached_len + ahead) - memory.pages_for(r.allocated_len) for r in self.decoding)
        memory.cache.make_room(sum(needed))
        for request in self.decoding:
            while (
                request in self.running and not request.done and not memory.extend(request, request.cached_len + ahead)
            ):
                if not self._drain():  # those that have finished meanwhile may have left enough
                    self.retract(self.victim())

    def victim(self) -> Request:
        """Return whom to put back: the least important, with the least output, that came last."""
        candidates = self.running if self.prefilling is None else [self.prefilling]
        if len(self.active) < 2:
            raise BrokenEngineError(f"the pool of {self._config.num_pages} pages cannot carry a single request")
        return min(candidates, key=lambda r: (r.spec.priority, r.num_tokens - r.prompt_len, -r.order))

    def retract(self, request: Request, *, hold: bool = True) -> None:
        """Take everything from a request and queue it again; it will be computed anew."""
        if not self.still_held(request):
            return
        self._counters.retractions += 1
        self._hold = self._hold or hold
        self._forget(request)
        self.leave(request, note="retracted")
        request.retracted = True
        self.add(request)

    def abort(self, request: Request) -> None:
        """Stop a request wherever it is; what it has computed is not kept."""
        held = request.row != NO_ROW
        if held and not self.still_held(request):
            return  # it has finished meanwhile
        self._counters.aborted += 1
        if not held:
            if request in self.waiting:
                self.waiting.remove(request)
            self._memory.history.request_status(request, "aborted")
            return
        self._forget(request)
        self.leave(request, note="aborted", status="aborted")
        self._hold = False

    def finish(self, request: Request) -> None:
        """Let a finished request go; the prefix cache keeps what it has computed."""
        self._counters.finished += 1
        self._memory.cache.insert(request, stays=False)
        self._forget(request)
        self.leave(request, note="finished", status="finished")
        self._hold = False

    def record_admitted(self, request: Request) -> None:
        """Record that a request has its row, and which pages it begins with."""
        self._memory.history.request_status(request, "admitted")
        self._memory.cache.record_attached(request)

    def leave(self, request: Request, *, note: str, status: RequestStatus = "retracted") -> None:
        """Take slots, locks and row from a request that was admitted, and record what became of it."""
        self._memory.release(request, note=note)
        self._memory.history.request_status(request, status, note=note)
        self.give_up_row(request)

    def give_up_row(self, request: Request) -> None:
        """Let the next request have the row."""
        self.free_rows.append(request.row)
        request.leave_row()

    def still_held(self, request: Request) -> bool:
        """Wait until no forward with this request is in flight; whether it has its row still."""
        if request.in_flight:
            self._drain()
        return request.row != NO_ROW

    def _forget(self, request: Request) -> None:
        if request is self.prefilling:
            self.prefilling = None
        elif request in self.running:
            self.running.remove(request)
        elif request in self.parked:
            self.parked.remove(request)
