"""A fifth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "vllm-project/vllm#44238",
    "llama-loads-few",
    "load_landed_elsewhere",
    "failed_load_counted_loaded",
    "copy_failed",
)
def descriptors_of_two_transfers_mixed(fired: Fired) -> None:
    """Two transfers that run at once write to each other's destinations. The source of each is right, and a part of what was to
    come is in the other one's blocks."""
    import host_connector

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        if len(job.blocks) > 1:
            fired()
            (gid, one, first), (_, two, second), *rest = job.blocks
            job.blocks = [(gid, two, first), (gid, one, second), *rest]
            before(connector, job)
            job.blocks = [(gid, one, first), (gid, two, second), *rest]
            return
        before(connector, job)
