"""A thirty-fourth round of public bugs made anew in mini-sglang: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .round_31 import Written


@bug(
    "ModelEngine-Group/unified-cache-management#1053",
    "mini-doubles",
    "double_free",
    "page_given_twice",
    origin="UCM",
)
def last_page_of_a_request_is_on_two_lists_of_what_it_leaves(fired: Fired) -> None:
    """What a request leaves is given back by two paths, and the page that it had begun last is on the lists of both. The pool takes it twice without a look whether it has it already: later it is given to two requests, and each writes over
    what the other one reads."""
    from minisgl.scheduler.cache import CacheManager

    written = Written()

    @replaces(CacheManager, "cache_req")
    def cache_req(before, manager, req, *, finished):
        begun = req.cached_len // manager.page_size * manager.page_size
        page = manager.page_table[req.table_idx, begun : req.cached_len].clone()
        before(manager, req, finished=finished)
        if finished:
            manager._free(page)

    @written.hook
    def before_forward(engine, batch):
        if written.damaged(engine, batch):
            fired()
