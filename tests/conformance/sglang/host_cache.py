"""HiCache of a real SGLang on the CPU: `python host_cache.py FOLDER [CASE...]`; a case is a way to run, or a fault.

What only CUDA has is stood in for: streams and events, and the kernels that copy between the two pools, by torch. The tree, the
controller, the host's pool and the scheduler are SGLang's. Exit status 1 if a case's verdict or cause is not as expected.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent


def copy_layers(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Stand in for `transfer_kv_direct`: rows of each layer to rows of its counterpart."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def load_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int) -> None:
    """Stand in for `transfer_kv_per_layer_direct_pf_lf`: of pages that hold all layers one layer's rows."""
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[src_indices // page_size, layer_id, src_indices % page_size]


def store_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Stand in for `transfer_kv_all_layer_direct_lf_pf`: rows of all layers, K's before V's, to pages that hold them all."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, src in enumerate(src_ptrs):
        dst_ptrs[number // layers][dst_indices // page_size, number % layers, dst_indices % page_size] = src[
            src_indices
        ]


def stand_in() -> None:
    """Put in place what SGLang's host cache needs and a CPU build does not have."""
    import torch
    from sglang.srt.mem_cache.pool_host import base, common, mha

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def record(self, *_: Any) -> None:
            pass

        def wait(self, *_: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            return True

        def elapsed_time(self, _: Any) -> float:
            return 0.0

    common._cuda_host_register = lambda *_: None
    base._cuda_host_unregister = lambda *_: None
    torch.cpu.Event = Event
    torch.cpu.Stream.wait_event = lambda *_: None
    mha.transfer_kv_direct = copy_layers
    mha.transfer_kv_per_layer_direct_pf_lf = load_pages
    mha.transfer_kv_all_layer_direct_lf_pf = store_pages


def generate(folder: Path, case: "Case") -> None:
    """Ask for prompts that come again when others have taken their slots; write the answers and what was cached down."""
    from engine import CPU_ENGINE
    from sglang.srt.entrypoints.engine import Engine

    stand_in()
    if case.fault:
        faulty(case.fault)
    os.chdir(HERE)  # the trace keeps the model's name as it is given here
    storage = {}
    if case.storage:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(
            folder.parent / "stored" if case.before else folder / "stored"
        )
        storage = {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"}
        storage["hicache_storage_backend_extra_config"] = json.dumps({"prefetch_threshold": case.page})
    engine = Engine(
        model_path="models/llama",
        **{**CPU_ENGINE, "log_level": "info", "max_running_requests": 3},
        disable_overlap_schedule=not case.overlap,
        page_size=case.page,
        max_total_tokens=160,
        random_seed=1,
        enable_hierarchical_cache=True,
        hicache_ratio=1.1 if case.storage else 4.0,
        **storage,
        hicache_io_backend="direct",
        hicache_mem_layout=case.layout,
        hicache_write_policy=case.policy,
    )
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    prompts = [tokens(rng.randrange(36, 60)) for _ in range(5)]
    answers, cached = [], []
    for batch in (
        prompts[:2],
        prompts[2:4],
        prompts[:1],
        prompts[4:],
        [prompts[1] + tokens(3), prompts[3]],
        prompts[:1],
        *([prompt] for prompt in prompts[1:] * case.storage),
    ):
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        for output in engine.generate(input_ids=batch, sampling_params=sampling):
            answers.append(output["output_ids"])
            cached.append(output["meta_info"].get("cached_tokens"))
    (folder / "tokens.json").write_text(json.dumps([answers, cached]))
    engine.shutdown()


def faulty(fault: str) -> None:
    """Put a fault into SGLang's host cache, which shows from the first load on."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.model_executor.model_runner import ModelRunner

    load, forward, put_off = HybridCacheController.load, ModelRunner.forward, []
    store, load_layer = MHATokenToKVPoolHost.backup_from_device_all_layer, MHATokenToKVPoolHost.load_to_device_per_layer

    alloc = MHATokenToKVPoolHost.alloc

    def load_what_was_overwritten(self: Any, host_indices: Any, **kwargs: Any) -> Any:
        host = self.mem_pool_host.anchor_entry.host_pool
        host.get_data_page(int(host_indices[0]) // self.page_size * self.page_size, flat=False).mul_(1.5)
        return load(self, host_indices, **kwargs)

    def store_one_over_another(self: Any, pool: Any, host_indices: Any, device_indices: Any, backend: str) -> None:
        moved, size = host_indices.clone(), self.page_size
        if len(moved) > size:
            moved[:size] = moved[size : 2 * size]
        store(self, pool, moved, device_indices, backend)

    def give_one_place_for_two(self: Any, need_size: int) -> Any:
        given = alloc(self, need_size)
        if given is not None and need_size > self.page_size:
            given = given.clone()
            given[: self.page_size] = given[self.page_size : 2 * self.page_size]
        return given

    def load_from_elsewhere(
        self: Any, pool: Any, host: Any, device: Any, layer: int, backend: str, **kwargs: Any
    ) -> None:
        load_layer(self, pool, host.roll(self.page_size), device, layer, backend, **kwargs)

    def load_to_elsewhere(
        self: Any, pool: Any, host: Any, device: Any, layer: int, backend: str, **kwargs: Any
    ) -> None:
        # Where nobody's page is: the device's pool has 160 slots and a page of padding.
        held = {int(page) for page in device // self.page_size}
        other = next(page for page in range(160 // self.page_size, 0, -1) if page not in held)
        moved = device.clone()
        moved[: self.page_size] += other * self.page_size - int(device[0])
        load_layer(self, pool, host, moved, layer, backend, **kwargs)

    def load_behind_the_forward(self: Any, *args: Any, **kwargs: Any) -> None:
        put_off.append(lambda: load_layer(self, *args, **kwargs))

    def then_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        for copy in put_off if fault == "late" else ():
            copy()
        put_off.clear()
        return result

    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    get = HiCacheFile.get

    def get_other_bytes(self: Any, *args: Any, **kwargs: Any) -> Any:
        page = get(self, *args, **kwargs)
        return None if page is None else page.mul_(1.5)

    before: list[Any] = []

    def get_the_page_before(self: Any, *args: Any, **kwargs: Any) -> Any:
        page = get(self, *args, **kwargs)
        if page is None:
            return None
        before.append(page.clone())
        return page.copy_(before[-2]) if len(before) > 1 else page

    if fault in ("storage damages", "storage mixes up"):
        HiCacheFile.get = get_other_bytes if fault == "storage damages" else get_the_page_before
    if fault == "overwritten":
        HybridCacheController.load = load_what_was_overwritten
    elif fault == "two pages to one":
        MHATokenToKVPoolHost.backup_from_device_all_layer = store_one_over_another
    elif fault == "one place for two":
        MHATokenToKVPoolHost.alloc = give_one_place_for_two
    elif fault in ("other pages", "other slots"):
        wrong = load_from_elsewhere if fault == "other pages" else load_to_elsewhere
        MHATokenToKVPoolHost.load_to_device_per_layer = wrong
    elif fault in ("late", "never"):
        MHATokenToKVPoolHost.load_to_device_per_layer = load_behind_the_forward
        ModelRunner.forward = then_load


class Case(NamedTuple):
    """A way to run, or what goes wrong; then a cause of the findings of copies, and the kinds that may be the first incident's."""

    layout: str = "layer_first"
    page: int = 1
    policy: str = "write_through"
    overlap: bool = False
    storage: bool = False
    before: bool = False  # whether another server has filled the storage before
    fault: str = ""
    cause: str = ""
    incidents: tuple[str, ...] = ()


CASES = {
    "plain": Case(),
    "pages": Case(page=4),
    "page first": Case(layout="page_first_direct", page=4),
    "write back": Case(policy="write_back"),
    "overlap": Case(layout="page_first_direct", page=4, overlap=True),
    "storage": Case(page=4, storage=True),
    "storage, page first": Case(layout="page_first_direct", page=4, storage=True, overlap=True),
    "storage of another": Case(page=4, storage=True, before=True),
    "storage damages": Case(
        page=4, storage=True, fault="storage damages", cause="changed_in_store", incidents=("stored_wrong",)
    ),
    "storage mixes up": Case(
        page=4, storage=True, fault="storage mixes up", cause="loaded_another", incidents=("load_of_other_prefix",)
    ),
    "overwritten": Case(fault="overwritten", cause="changed_in_store", incidents=("stored_wrong",)),
    "two pages to one": Case(fault="two pages to one", cause="stored_wrong", incidents=("stored_wrong",)),
    "one place for two": Case(fault="one place for two", cause="two_to_one", incidents=("host_copy_overwritten",)),
    "other pages": Case(fault="other pages", cause="landed_elsewhere", incidents=("load_landed_elsewhere",)),
    "other slots": Case(fault="other slots", cause="landed_elsewhere", incidents=("load_landed_elsewhere",)),
    "late": Case(fault="late", cause="nothing_landed", incidents=("read_before_landed",)),
    "never": Case(fault="never", cause="nothing_landed", incidents=("failed_load_counted_loaded",)),
}


def judge(folder: Path) -> dict[str, Any]:
    """Return what a replay says of the one trace in a folder; in a process of its own, since a fork must inherit no threads."""
    import numpy as np
    import pyarrow.parquet as pq
    from kvcanary.analysis.incidents.finding import find_incidents
    from kvcanary.recorder.trace.reader import read_trace
    from kvcanary.replayer.run.replay import replay
    from kvcanary.replayer.run.settings import ReplaySettings

    (trace,) = folder.glob("*.arrow")
    summary = replay(trace, settings=ReplaySettings(), report=folder)
    notes = "offload", "stored", "load-back", "landed late", "to storage", "from storage"
    copies, forward, reading, hashed, unknown = dict.fromkeys(notes, 0), -1, [], True, 0
    for event in read_trace(trace):
        if event.kind == "forward":
            forward += 1
        unknown += event.kind == "transfer" and event.scalar("status") == "end"
        if event.kind == "kv_copy":
            note = event.scalar("note")
            copies[note] += 1
            hashed &= bool(event.ints("copy_dst_hash" if note in ("stored", "from storage") else "copy_src_hash").all())
            if note == "load-back":
                reading.append(forward + 1)
    violations = pq.read_table(folder / "violations.parquet").column("forward").to_numpy()
    findings = pq.read_table(folder / "findings.parquet", columns=["kind", "cause"]).to_pylist()
    return {
        "verdict": summary.verdict.value,
        "copies": copies,
        "hashed": hashed,
        "unknown": unknown,
        "reading": reading,
        "first": int(np.min(violations)) if len(violations) else -1,
        "causes": sorted({row["cause"] for row in findings if row["kind"] == "copy_differs"}),
        "incidents": [row["kind"] for row in find_incidents(folder, [trace]).rows],
    }


def run(name: str, folder: Path) -> list[str]:
    """Run a case, a healthy one without a recorder, too; return what is not as expected."""
    from engine import forked

    case, wrong = CASES[name], []
    shutil.rmtree(folder / name, ignore_errors=True)
    kinds = ["recorded"] if case.fault else ["unrecorded", "recorded"]
    for kind in (["before"] if case.before else []) + kinds:
        place = folder / name / kind
        environment = {"KVCANARY_TRACE": str(place / "traces")} if kind == "recorded" else {}
        if code := forked(place, environment, lambda place=place: generate(place, case), 240.0):
            return [f"the engine ended with {code}, see {place / 'log'}"]
    said = subprocess.run(
        [sys.executable, __file__, "judge", str(place / "traces")], capture_output=True, text=True, check=False
    )
    if said.returncode:
        return [said.stderr[-2000:]]
    found = json.loads(said.stdout.splitlines()[-1])
    print(name, found, flush=True)
    if not found["hashed"] or not found["copies"]["load-back"] or not found["copies"]["stored"]:
        wrong.append("what was copied is not all there, or not hashed")
    if case.fault:
        if found["verdict"] != "corrupt" or case.cause not in found["causes"]:
            wrong.append(f"{found['verdict']}, {found['causes']}, expected {case.cause}")
        if found["incidents"][:1] not in [[kind] for kind in case.incidents]:
            wrong.append(f"{found['incidents']}, expected {case.incidents}")
        if found["first"] not in found["reading"]:
            wrong.append(f"forward {found['first']} shows it first, expected one of {found['reading']}")
    else:
        one, other = ((folder / name / kind / "tokens.json").read_text() for kind in ("unrecorded", "recorded"))
        if found["verdict"] != "clean" or one != other:
            wrong.append(f"{found['verdict']}, tokens are {'' if one == other else 'not '}the same")
    return wrong


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    from engine import ENVIRONMENT, import_engine

    if sys.argv[1] == "judge":
        print(json.dumps(judge(Path(sys.argv[2]))))
        sys.exit()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):  # read when the interpreter starts
        path = os.pathsep.join([str(HERE / "standin"), os.environ.get("PYTHONPATH", "")])
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT, "PYTHONPATH": path})
    import_engine()
    failed = {name: wrong for name in sys.argv[2:] or CASES if (wrong := run(name, Path(sys.argv[1])))}
    for name, wrong in failed.items():
        print(f"{name}: {'; '.join(wrong)}")
    sys.exit(bool(failed))
