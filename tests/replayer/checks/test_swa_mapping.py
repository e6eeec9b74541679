"""Full-to-SWA entries that are stale: shared by two full slots in use, or 0 inside the window."""

from .scene import decode


def test_two_full_slots_that_lead_to_one_swa_slot_are_found(make_scene) -> None:
    for stale in (True, False):
        scene = make_scene(window=8)
        scene.lut[[3, 4, 5, 6]] = [13, 14, 15, 16]
        scene.start(7, 1, [3, 4])
        if stale:
            scene.lut[5] = 14  # a recycled full slot keeps its old entry
        scene.start(8, 2, [5])
        scene.forward(decode(7, 1, 2, 6), decode(8, 2, 1, 9), mode="decode")
        rows = scene.judge("swa_mapping_stale")
        assert [(row["forward"], row["group"], row["slot"]) for row in rows] == ([(2, 1, 14)] if stale else [])
        if stale:
            assert "4 and 5" in rows[0]["detail"] or "5 and 4" in rows[0]["detail"]


def test_a_write_through_a_stale_entry_is_found_when_its_other_half_is_read(make_scene) -> None:
    scene = make_scene(window=8)
    scene.lut[[3, 4, 5]] = [13, 14, 15]
    scene.start(7, 1, [3, 4])
    scene.lut[9] = 14
    scene.forward(decode(7, 1, 2, 9))
    rows = scene.judge("swa_mapping_stale")
    assert [(row["forward"], row["request_id"], row["position"], row["slot"]) for row in rows] == [(1, 7, 2, 14)]


def test_a_position_inside_the_window_that_leads_nowhere_is_found(make_scene) -> None:
    scene = make_scene(window=2)
    scene.lut[[3, 4, 5, 6, 7]] = [13, 14, 15, 16, 17]
    scene.start(7, 1, [3, 4, 5])
    scene.lut[3] = 0  # has left the window: as it should be
    scene.forward(decode(7, 1, 3, 6))
    scene.lut[5] = 0
    scene.forward(decode(7, 1, 4, 7))
    rows = scene.judge("swa_mapping_stale")
    assert [(row["forward"], row["slot"], row["position"], row["count"]) for row in rows] == [(2, 5, 2, 1)]
    gap = make_scene(window=2)
    gap.start(7, 1, [3, 4, 5])
    gap.lose()
    gap.forward(decode(7, 1, 3, 6))
    assert gap.judge("swa_mapping_stale") == []


def test_a_shared_prefix_leads_to_the_same_swa_slots(make_scene) -> None:
    scene = make_scene(window=8)
    scene.lut[[3, 4, 5, 6]] = [13, 14, 15, 16]
    scene.start(7, 1, [3, 4])
    scene.tokens[8] = scene.token(7).copy()
    scene.table[2, :2] = [3, 4]
    scene.forward(decode(7, 1, 2, 5), decode(8, 2, 2, 6), mode="decode", padding=(0, 0))
    assert scene.judge("swa_mapping_stale", "hit_differs") == []
