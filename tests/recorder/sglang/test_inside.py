"""What a model is run with is taken down where it begins and ends, in a graph too; kernels run in Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.kernels.capture.model_forward import ModelForward
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.sglang import inside as sglang_inside
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from .fake_engine import (
    DECODE,
    DIM,
    HEADS,
    SLOTS,
    ForwardBatch,
    ModelRunner,
    Request,
    Scheduler,
    TokenToKVPoolAllocator,
    hooked,
)

STATIC = ("req_pool_indices", "input_ids", "positions", "out_cache_loc")  # what a graph reads of a batch


@pytest.fixture(autouse=True)
def _small_kernels_on_a_gpu(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    small_kernels(monkeypatch)


def small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the launches inside models go to the CPU, or into the graph that is captured."""
    monkeypatch.setattr(sglang_attachment, "register_drafts", lambda attachment: [])
    monkeypatch.setattr(sglang_inside, "gpu_of", lambda runner: torch.device("cpu"))
    monkeypatch.setattr(sglang_inside, "is_capturing", lambda device: Graphs.capturing is not None)
    monkeypatch.setattr(model_forward, "TILE", 32)
    monkeypatch.setattr(model_forward, "PROGRAMS", 3)
    for part in ("begin", "end"):
        monkeypatch.setattr(ModelForward, part, in_graph(getattr(ModelForward, part)))


def in_graph(launch: Any) -> Any:
    """Return a launch that goes into the graph that is captured, if there is one."""

    def launched(self: ModelForward) -> None:
        if Graphs.capturing is not None:
            Graphs.capturing.append(lambda: launch(self))
        launch(self)

    return launched


class Graphs:
    """A graph is what was launched while it was captured; that is launched again on the same tensors."""

    capturing: Any = None

    def __init__(self) -> None:
        self.graphs: dict[int, Any] = {}

    def capture_one(self, shape_key: int, forward: Any) -> None:
        forward()  # the engine warms up
        Graphs.capturing = self.graphs[shape_key] = []
        forward()
        Graphs.capturing = None

    def replay(self, shape_key: int, _batch: Any) -> None:
        for launch in self.graphs[shape_key]:
            launch()


class TritonAttnBackend:
    """Tells what attention reads as SGLang's backend of this name does; `damage` changes it afterwards."""

    def __init__(self) -> None:
        self.damage: Any = lambda told: None
        self.static = SimpleNamespace(
            kv_indptr=torch.zeros(9, dtype=torch.int32),
            kv_indices=torch.zeros(512, dtype=torch.int64),
            qo_indptr=None,
            window_kv_indptr=None,
            window_kv_indices=None,
        )
        self.forward_metadata: Any = None

    def prepare(self, table: Any, batch: Any, lens: Any, *, graph: bool) -> None:
        told = self.static if graph else SimpleNamespace(**vars(self.static))
        indices = [table[row, :length] for row, length in zip(batch.req_pool_indices, lens, strict=True)]
        ends = torch.cumsum(lens, 0).to(torch.int32)
        flat = torch.cat(indices).long()
        if graph:
            told.kv_indptr[1 : len(lens) + 1] = ends
            told.kv_indices[: flat.numel()] = flat
        else:
            told.kv_indptr, told.kv_indices = torch.cat((ends[:0], torch.zeros(1, dtype=torch.int32), ends)), flat
            extend = batch.forward_mode is not DECODE
            told.qo_indptr = (
                torch.cat((torch.zeros(1), torch.cumsum(batch.extend_seq_lens, 0))).int() if extend else None
            )
        self.damage(told)
        self.forward_metadata = told


class Model:
    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.after: Any = lambda batch: None

    def forward(self, input_ids: Any, positions: Any, batch: Any) -> None:
        def compute() -> None:
            shape = (-1, HEADS, DIM)
            self.pool.k_buffer[0][batch.out_cache_loc] = torch.sin(input_ids.float())[:, None, None].expand(shape)
            self.pool.v_buffer[0][batch.out_cache_loc] = torch.cos(positions.float())[:, None, None].expand(shape)

        if Graphs.capturing is not None:
            Graphs.capturing.append(compute)
        compute()


class Runner(ModelRunner):
    """Runs its model through a graph of `width` requests in a decode, and the padding that this takes; else eagerly."""

    device = "cpu"

    def __init__(self, attachment: Any, *, width: int = 0) -> None:
        super().__init__()
        self.server_args.disable_cuda_graph = not width
        self.attn_backend = TritonAttnBackend()
        self.after: Any = lambda batch: None
        self.graphs = SimpleNamespace(backend=Graphs(), model_runner=self, topk=1)
        self.width, self.replay = width, self.graphs.backend.replay
        self.load_model(attachment)
        if width:
            self.static = SimpleNamespace(
                forward_mode=DECODE,
                **{name: torch.zeros((3, width)[name[0] != "m" :], dtype=torch.int64) for name in STATIC},
            )
            self.attn_backend.forward_metadata = self.attn_backend.static
            self.hook(attachment, "capture", self.graphs.backend.capture_one)(
                self.graphs.backend,
                width,
                lambda: self.model.forward(self.static.input_ids, self.static.positions, self.static),
            )
            self.replay = self.hook(attachment, "replay", self.graphs.backend.replay)

    def load_model(self, attachment: Any) -> None:
        def load(_: Any) -> None:
            self.model = Model(self.token_to_kv_pool)

        self.hook(attachment, "load", load)(self)

    @staticmethod
    def hook(attachment: Any, name: str, original: Any) -> Any:
        """Return a function with the attachment's hook around it; the owner is the first argument."""

        def around(owner: Any, *args: Any) -> Any:
            finish = getattr(attachment, f"on_{name}")(owner, *args)
            result = original(owner, *args) if name == "load" else original(*args)
            if finish is not None:
                finish(result, None)
            return result

        return around

    def _forward_raw(self, batch: Any) -> torch.Tensor:
        bs, table = batch.req_pool_indices.numel(), self.req_to_token_pool.req_to_token
        if self.width and batch.forward_mode is DECODE:
            for name in STATIC:
                static = getattr(self.static, name)
                static.zero_()
                static[..., :bs] = getattr(batch, name)
            lens = torch.nn.functional.pad(batch.seq_lens, (0, self.width - bs), value=1)
            self.attn_backend.prepare(table, self.static, lens, graph=True)
            self.replay(self.graphs.backend, self.width, batch)
        else:
            lens = batch.seq_lens if batch.forward_mode is DECODE else batch.extend_prefix_lens
            self.attn_backend.prepare(table, batch, lens, graph=False)
            self.model.forward(batch.input_ids, batch.positions, batch)
        self.after(batch)
        return torch.tensor([int(ids) * 7 % 97 for ids in batch.input_ids[batch.ends - 1]])


def serve(
    monkeypatch: pytest.MonkeyPatch, folder: Any, *, width: int, change: Any = lambda runner: None, **options: Any
) -> tuple[Any, list[Any]]:
    """Run three requests and return the trace's path and its forwards."""
    attachment = hooked(monkeypatch, RecordingSettings(folder=folder, history="off", **options))
    monkeypatch_raw(monkeypatch, attachment)
    runner = Runner(attachment, width=width)
    scheduler = Scheduler(runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
    assert attachment.recording is not None
    change(runner)
    requests = [Request(f"r{i}", [i + 3, i + 5, 40, 41 + i], new_tokens=3 + 2 * i) for i in range(3)]
    for request in requests:
        scheduler.step([request])
    while running := [request for request in requests if not request.finished()]:
        scheduler.step(running)
    attachment.close()
    (path,) = folder.glob("*.arrow")
    return path, [event for event in read_trace(path) if event.kind == "forward"]


def monkeypatch_raw(monkeypatch: pytest.MonkeyPatch, attachment: Any) -> None:
    """Hook the runner's own `_forward_raw`, which its class has overwritten."""
    from kvcanary.recorder.engines.common.hooking import harmless

    original = Runner.__dict__["_forward_raw"]
    around = harmless(attachment.on_model, attachment.fault, attachment.cost)
    monkeypatch.setattr(Runner, "_forward_raw", lambda self, batch: around(original, self, batch))


def verdict(path: Any) -> str:
    return str(replay(path, settings=ReplaySettings(), report=None).verdict.value)


@pytest.mark.parametrize("width", [0, 3, 4])
def test_each_forward_is_taken_down_with_what_its_attention_got(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    path, forwards = serve(monkeypatch, tmp_path, width=width)
    assert verdict(path) == "clean"
    assert [event.ints("req_pool_indices").size for event in forwards] == [1, 1, 1, 3, 3, 2, 2, 1, 1]
    with TraceReader(path) as reader:
        assert {entry.what for entry in reader.header.not_watched} == {"submitted"}
    for event in forwards:
        assert event.scalar("attention_watched") == 3
        ends = event.ints("prefix_lens") + event.ints("extend_lens")
        assert event.ints("attention_seq_lens").tolist() == ends.tolist()
        assert event.ints("attention_query_lens").tolist() == event.ints("extend_lens").tolist()
        assert not event.ints("attention_slots").size
        assert event.scalar("kv_watched") == 1
        assert not event.scalar("note")


@pytest.mark.parametrize("width", [0, 4])
def test_what_attention_got_is_told_where_it_is_not_what_the_table_says(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    def overwritten(told: Any) -> None:
        if told.qo_indptr is None and told.kv_indptr[3:4].tolist() == [18]:  # the second decode of three
            told.kv_indices[told.kv_indptr[1] + 2] = 70
            told.kv_indices[told.kv_indptr[1] + 3] = 71
            told.kv_indptr[3] -= 1  # the last request's newest token

    _, forwards = serve(
        monkeypatch, tmp_path, width=width, change=lambda runner: setattr(runner.attn_backend, "damage", overwritten)
    )
    told = [event for event in forwards if event.ints("attention_slots").size]
    assert [event.scalar("forward") for event in told] == [4]
    (event,) = told
    names = ("attention_group", "attention_request", "attention_start", "attention_count", "attention_slots")
    assert [event.ints(name).tolist() for name in names] == [[0], [1], [2], [2], [70, 71]]
    assert event.ints("attention_seq_lens").tolist() == [6, 6, 5]
    assert len(forwards) == 9


@pytest.mark.parametrize("width", [0, 4])
def test_what_changes_after_the_model_and_before_the_forward_ends_is_no_write(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    def flips(runner: Any) -> None:
        def after(batch: Any) -> None:
            if batch.req_pool_indices.numel() == 3:
                runner.token_to_kv_pool.k_buffer[0].view(torch.uint8)[batch.out_cache_loc[1], 0, 0] ^= 255

        runner.after = after

    path, forwards = serve(monkeypatch, tmp_path, width=width, change=flips)
    assert verdict(path) == "corrupt"
    changed = [(event.scalar("forward"), event.ints("kv_change_slot").size) for event in forwards]
    assert [number for number, slots in changed if slots] == [4, 5]


def test_a_graph_that_is_not_looked_into_is_taken_down_outside(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_inside, "MAX_TICKETS", 3)  # one is nobody's, the last are of what runs outside of graphs
    monkeypatch.setattr(sglang_inside.InsideModels, "in_graphs", lambda self, backend: False)
    first = sglang_inside.InsideModels.begin

    def no_graph(self: Any, *told: Any) -> Any:
        return None if self._capturing is not None else first(self, *told)

    monkeypatch.setattr(sglang_inside.InsideModels, "begin", no_graph)
    path, forwards = serve(monkeypatch, tmp_path, width=4)
    assert verdict(path) == "clean"
    assert [event.scalar("attention_watched") for event in forwards] == [3, 3, 3, 0, 0, 0, 0, 0, 0]


class Draft(Runner):
    is_draft_worker = True


def test_the_steps_of_a_draft_graph_are_told_as_the_model_got_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path, history="off"))
    target = Runner(attachment)
    draft = Draft(attachment)
    draft.req_to_token_pool = target.req_to_token_pool
    draft.server_args.disable_cuda_graph = False
    steps = [
        SimpleNamespace(
            forward_mode=DECODE,
            **{
                name: torch.zeros(2, dtype=torch.int64)
                for name in ("req_pool_indices", "input_ids", "positions", "out_cache_loc")
            },
        )
        for _ in range(2)
    ]
    backend = draft.graphs.backend
    draft.attn_backend.forward_metadata = draft.attn_backend.static

    def both() -> None:
        for step in steps:
            draft.model.forward(step.input_ids, step.positions, step)

    Runner.hook(attachment, "capture", backend.capture_one)(backend, 2, both)
    for runner in (target, draft):
        attachment.on_runner(runner)
    Scheduler(target, TokenToKVPoolAllocator(SLOTS - 1, 1))
    session: Any = attachment.recording
    assert read_header_of(session).runners[1].derived == ()
    for number, step in enumerate(steps):  # an engine whose positions are one off
        step.req_pool_indices[:] = torch.tensor([1, 2])
        step.positions[:] = 7 + number + 1
        step.input_ids[:] = torch.tensor([20, 30]) + number
        step.out_cache_loc[:] = torch.tensor([11, 21]) + number
    batch = ForwardBatch(
        rids=["a", "b"],
        forward_mode=DECODE,
        spec_info=None,
        req_pool_indices=torch.tensor([1, 2]),
        positions=torch.tensor([7, 7]),
        seq_lens=torch.tensor([7, 7]),
        out_cache_loc=torch.tensor([11, 12, 13, 21, 22, 23]),
        input_ids=None,
    )
    finish: Any = attachment.on_draft_graph(draft.graphs, batch)
    Runner.hook(attachment, "replay", backend.replay)(backend, 2, batch)
    finish(None, None)
    attachment.close()
    (path,) = tmp_path.glob("*.arrow")
    told = [event for event in read_trace(path) if event.kind == "forward"]
    assert [(event.scalar("runner"), event.scalar("mode")) for event in told] == [(1, "decode")] * 2
    assert [event.ints("positions").tolist() for event in told] == [[8, 8], [9, 9]]
    assert [event.ints("prefix_lens").tolist() for event in told] == [[8, 8], [9, 9]]
    assert [event.ints("input_ids").tolist() for event in told] == [[20, 30], [21, 31]]
    assert [event.ints("out_cache_loc").tolist() for event in told] == [[11, 21], [12, 22]]
    assert not [event for event in read_trace(path) if event.kind == "loss"]


def test_draft_steps_in_graphs_that_are_not_looked_into_are_marked(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path, history="off"))
    target, draft = Runner(attachment), Draft(attachment)
    draft.req_to_token_pool = target.req_to_token_pool
    draft.server_args.disable_cuda_graph = False
    for runner in (target, draft):
        attachment.on_runner(runner)
    Scheduler(target, TokenToKVPoolAllocator(SLOTS - 1, 1))
    header = read_header_of(attachment.recording)
    assert header.runners[1].derived == ("prefix_lens", "input_ids", "positions", "out_cache_loc")
    assert [(part.what, part.name) for part in header.not_watched if part.what != "submitted"] == [
        ("graph", "draft: steps in a CUDA graph")
    ]
    attachment.close()


def read_header_of(session: Any) -> Any:
    return session.recorder.header
