"""Faults of vLLM's own offloading on a GPU: what its jobs copy, from where, to where and when.

Every other job is wrong, so that healthy copies stand beside the wrong ones; each fault leaves a mark in the trace. What goes wrong
in the connector's scheduler is ../connector_faults.py's.
"""

from typing import Any

import connector_faults
import numpy as np

OWN = ("store_wrong", "load_elsewhere", "load_missing", "load_layout", "load_late")


def install(fault: str, mark: Any) -> None:
    """Put one fault into this process; `mark(labels)` is called when it happens."""
    if fault not in OWN:
        connector_faults.install_scheduled(fault, mark)
        return
    import torch
    from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler as Handler

    submit, fill, finished = Handler.transfer_async, Handler._fill_direct_ops, Handler.get_finished
    jobs, wrong = {True: 0, False: 0}, [False]
    lied: set[int] = set()

    def faulty_fill(handler: Any, *args: Any, **given: Any) -> tuple[int, int]:
        """Change the addresses that are copied between, or how much is."""
        end, count = fill(handler, *args, **given)
        if wrong[0]:
            first, size = given["op_idx"], given["group_size"]
            src, dst, sizes = (given[f"all_{name}"] for name in ("src", "dst", "sizes"))
            width = int(sizes[first])
            if fault == "store_wrong":  # the block behind each
                src[first:end] += width
            elif fault == "load_elsewhere":
                layers = [int(tensor.data_ptr()) for tensor in handler.dst_tensors]
                free = handler.dst_tensors[0].shape[0] - 2
                for n, layer in enumerate(layers):
                    dst[first + n * size : first + (n + 1) * size] = layer + (free - np.arange(size)) * width
            elif fault == "load_missing":
                return first, 0
        return end, count

    def faulty_submit(handler: Any, job: int, src: Any, dst: Any) -> bool:
        mine = handler.gpu_to_cpu == (fault == "store_wrong")
        jobs[handler.gpu_to_cpu] += 1
        wrong[0] = mine and jobs[handler.gpu_to_cpu] % 2 == 1
        if wrong[0]:
            here = src if handler.gpu_to_cpu else dst
            mark({"fault": fault, "blocks": here.block_ids.tolist()})
        try:
            if wrong[0] and fault == "load_late":
                with torch.cuda.stream(torch.cuda.Stream()):  # which the job waits for
                    torch.cuda._sleep(40_000_000)
                    done = submit(handler, job, src, dst)
                lied.add(job)
                return done
            done = submit(handler, job, src, dst)
            if wrong[0] and fault == "load_layout":  # the second half first
                last = handler._transfers[-1]
                with torch.cuda.stream(last.stream):
                    for tensor in handler.dst_tensors:
                        for block in dst.block_ids.tolist():
                            row = tensor[block]
                            row.copy_(row.view(2, -1).flip(0).reshape(-1))
                    last.end_event.record(last.stream)
            return done
        finally:
            wrong[0] = False

    def faulty_finished(handler: Any) -> Any:
        """Take jobs for ended that are not."""
        for transfer in handler._transfers:
            if transfer.job_id in lied:
                transfer.end_event = torch.cuda.Event(enable_timing=True)
                transfer.start_event = torch.cuda.Event(enable_timing=True)
                transfer.start_event.record()
                transfer.end_event.record()
                transfer.end_event.synchronize()
                lied.discard(transfer.job_id)
        return finished(handler)

    Handler.transfer_async, Handler._fill_direct_ops, Handler.get_finished = faulty_submit, faulty_fill, faulty_finished
