"""What the engine says about itself in the trace header, and which of the header's groups is what."""

from dataclasses import dataclass

from ...trace.header import (
    EngineInfo,
    KvStream,
    ModelInfo,
    NotWatched,
    Oracle,
    PoolGroup,
    Runner,
    StateTable,
    TraceHeader,
)
from .config import EngineConfig

CAPTURE_BYTES = 16
TARGET, DRAFT = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The header, and the index of each kind of group in it; -1 for a group that there is not."""

    header: TraceHeader
    full_group: int
    swa_group: int
    draft_group: int

    @property
    def full_groups(self) -> tuple[int, ...]:
        """The groups whose slots are the full pool's, target and draft."""
        return tuple(group for group in (self.full_group, self.draft_group) if group >= 0)


def make_layout(config: EngineConfig) -> Layout:
    """Return header and group indices of an engine."""
    halves: tuple[str, ...] = ("K",) if config.shape in ("mla", "dsv4") else ("K", "V")
    num_slots = (config.num_pages + 1) * config.page_size
    host_slots = (config.host_pages + 1) * config.page_size if config.host_pages else 0
    groups: list[PoolGroup] = []
    found = {"full": -1, "swa": -1, "draft": -1}

    def add(group: PoolGroup) -> None:
        found[group.name] = len(groups)
        groups.append(group)

    def streams(layer: int) -> tuple[KvStream, ...]:
        size = config.kv_bytes_per_token
        return tuple(KvStream(half=h, layer=layer, bytes_per_token=size, capture_bytes=CAPTURE_BYTES) for h in halves)

    if config.shape != "dsv4":
        add(
            PoolGroup(
                name="full",
                num_slots=num_slots,
                page_size=config.page_size,
                num_layers=1,
                halves=halves,
                streams=streams(0),
                host_num_slots=host_slots,
            )
        )
    if config.sliding:
        add(
            PoolGroup(
                name="swa",
                kind="swa",
                window=config.window,
                lut=0,
                num_slots=(config.swa_pages + 1) * config.page_size,
                page_size=config.page_size,
                num_layers=1,
                halves=halves,
                streams=streams(1) if config.shape == "swa" else (),
            )
        )
    if config.eagle:
        add(
            PoolGroup(
                name="draft",
                runner=DRAFT,
                num_slots=num_slots,
                page_size=config.page_size,
                num_layers=1,
                halves=halves,
                streams=streams(0) if config.shape != "dsv4" else (),
                host_num_slots=host_slots,
            )
        )
    runners = (Runner(), Runner(name="draft", token_offset=1)) if config.eagle else (Runner(),)
    captured = {group.runner for group in groups if group.streams}
    off = [NotWatched(what="submitted", name=runners[number].name, reason="not configured") for number in captured]
    header = TraceHeader(
        engine=EngineInfo(name="simulated", version="1"),
        model=ModelInfo(name=f"simulated-{config.shape}", dtype="bytes"),
        groups=tuple(groups),
        tables=(StateTable(rows=config.rows, width=config.width),),
        lut_lens=(num_slots,) if config.sliding else (),
        truth_table=StateTable(name="truth", rows=config.rows, width=config.width),
        runners=runners,
        role=config.role,
        slot_history="complete",
        not_watched=() if config.submitted else tuple(off),
        sweep_interval=config.sweep_interval,
        oracle=Oracle(vocab_size=config.vocab_size) if config.sampler == "oracle" else None,
    )
    return Layout(header=header, full_group=found["full"], swa_group=found["swa"], draft_group=found["draft"])
