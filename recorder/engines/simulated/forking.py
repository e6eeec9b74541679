"""Several answers to one prompt: the prompt's whole pages are shared, the page begun is copied."""

from typing import TYPE_CHECKING

import numpy as np

from .requests import Request, RequestSpec

if TYPE_CHECKING:
    from .engine import SimulatedEngine


def fork(engine: "SimulatedEngine", parent: Request) -> Request:
    """Start another answer to a request whose prompt has just been computed.

    Where there is no row or no page for it, it waits in the queue like any other request, and finds the prompt in the
    prefix cache.
    """
    spec = RequestSpec(
        arrival_s=engine.clock_s,
        prompt=parent.tokens[: parent.prompt_len].copy(),
        max_new_tokens=parent.max_tokens - parent.prompt_len,
        priority=parent.priority,
    )
    child = engine.new_request(spec, labels={"forked_from": parent.name})
    scheduler = engine.scheduler
    # The draft's KV of the prompt's last token depends on the token sampled next, which the fork does not share.
    if engine.eagle is not None or not share(engine, parent, child):
        scheduler.add(child)
        return child
    ids = np.array([child.sampling_id], np.int64)
    last = engine.memory.req_to_token[child.row, child.cached_len - 1]
    content = engine.memory.pools[0].content[engine.memory.lut[[last]] if engine.config.shape == "dsv4" else [last]]
    child.append(int(engine.sampler.tokens(ids, np.array([child.cached_len], np.int64), content)[0]))
    engine.counters.forks += 1
    engine.counters.output_tokens += 1
    scheduler.running.append(child)
    return child


def share(engine: "SimulatedEngine", parent: Request, child: Request) -> bool:
    """Give the child a row with the parent's shared pages and a copy of the rest; False where memory does not do."""
    memory, scheduler = engine.memory, engine.scheduler
    if not scheduler.free_rows or len(scheduler.active) >= engine.config.max_running:
        return False
    child.row = scheduler.free_rows.pop()
    child.shared_pages, child.node = parent.shared_pages, parent.node
    memory.cache.tree.lock(child.node)
    child.window_nodes = list(parent.window_nodes)
    for node in child.window_nodes:
        node.window_lock += 1
    child.cached_len = child.allocated_len = child.shared_pages * memory.page_size
    child.window_start = min(child.shared_pages, parent.window_start)
    shared = slice(0, child.cached_len)
    memory.req_to_token[child.row, shared] = memory.req_to_token[parent.row, shared]
    if not memory.has_room(child, parent.cached_len):
        memory.cache.unlock(child)
        scheduler.give_up_row(child)
        return False
    scheduler.tell_admitted(child)
    if not memory.extend(child, parent.cached_len):
        scheduler.leave(child, note="not forked")
        return False
    memory.copy_tail(parent, child, note="fork")
    child.cached_len = parent.cached_len
    memory.slide(child)
    return True
