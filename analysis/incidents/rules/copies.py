"""What went wrong with KV that goes to a storage and comes back: which hop lied."""

from typing import Final

from ....recorder.trace.schema import SEEN
from ..cluster import Cluster, Diagnosis, rule
from ..seen.likely import POSSIBLE
from ..seen.observed import half_of_a_page
from ..sign import CONTENT, Sign

NOTHING_LANDED: Final = ("nothing_landed", "not_landed_here")
EITHER: Final = POSSIBLE - 0.05  # of a load that failed, or went where it was stored from


def copy_finding(cluster: Cluster, *causes: str) -> Sign | None:
    """Return the head's first finding of a copy with one of certain causes."""
    return next((sign for sign in cluster.head if sign.kind == "copy_differs" and sign.cause in causes), None)


def _diagnosis(cluster: Cluster, sign: Sign, words: str) -> Diagnosis:
    said = f"{sign.place} {sign.detail}, in {sign.when}: {words}"
    return cluster.diagnosis(0.96, said, sign, *sign.evidence, cause=min([*sign.evidence, sign.event]))


@rule("a stored copy is wrong", branch="transfer")
def stored_wrong(cluster: Cluster) -> Diagnosis | None:
    """A storage does not hold what lay in the slots that were stored: the store went wrong, or what it left was changed
    before the load. (lab)
    """
    sign = copy_finding(cluster, "stored_wrong", "changed_in_store")
    if sign is not None:
        return _diagnosis(cluster, sign, "the storage is wrong, not the slots")
    for sign in cluster.head:
        load = cluster.filled(sign)
        if load is not None and load.what == "loaded" and load.together <= 1 and half_of_a_page(cluster, sign):
            said = f"{sign.reader} read {sign.place} in {sign.when}, loaded in event {load.event}: the page in front of it is the request's "
            said += f"own, and here lies token {sign.stored_token} of position {sign.stored_position}: it was stored when a part of it was still to be computed"
            return cluster.diagnosis(0.85, said, sign, load.event, sign.event, cause=load.event)
    return None


@rule("a layout was misread", branch="transfer")
def layout_misread(cluster: Cluster) -> Diagnosis | None:
    """A store or load takes one order of layers, heads or tokens for another: the same bytes lie elsewhere. (lab)"""
    sign = copy_finding(cluster, "other_order")
    return None if sign is None else _diagnosis(cluster, sign, "the two ends lay it out differently")


@rule("a load landed elsewhere", branch="transfer")
def load_landed_elsewhere(cluster: Cluster) -> Diagnosis | None:
    """A load writes to other slots than its request was given: these keep what they held, those are overwritten.
    (conformance)
    """
    back = copy_finding(cluster, "not_landed_here")
    if back is not None and copy_finding(cluster, "landed_elsewhere") is None:
        later = next((s for s in cluster.signs if s.cause == "landed_elsewhere"), None)
        where = "may have gone there" if later is None else f"went there: that of {later.when} went to other slots, too"
        said = f"{back.place} {back.detail}, in {back.when}: the load {where}"
        return cluster.diagnosis(EITHER if later is None else 0.9, said, back, cause=back.event)
    sign = copy_finding(cluster, "landed_elsewhere")
    if sign is None and (other := copy_finding(cluster, "loaded_another")) is not None and _left_out(cluster, other):
        return _diagnosis(cluster, other, "of the same load other slots got nothing, so it wrote to the wrong ones")
    return None if sign is None else _diagnosis(cluster, sign, "the load wrote to the wrong slot")


def _left_out(cluster: Cluster, sign: Sign) -> bool:
    """Whether a slot of the same load, of another pool group say, holds what it held before."""
    of_load = [s for s in cluster.signs if (s.request_id, s.forward) == (sign.request_id, sign.forward)]
    return any(s.cause in NOTHING_LANDED for s in of_load)


@rule("read before its load landed", branch="transfer")
def read_before_landed(cluster: Cluster) -> Diagnosis | None:
    """A load is taken for ended, its slots are read, and its bytes come later. (conformance)"""
    sign = copy_finding(cluster, *NOTHING_LANDED, "loaded_wrong")
    late = cluster.finding("load_landed_late", anywhere=True)
    if sign is None or late is None:
        return None
    return _diagnosis(cluster, sign, f"it landed before {late.when}, after its request had read it")


@rule("a load of another prefix", branch="transfer")
def load_of_other_prefix(cluster: Cluster) -> Diagnosis | None:
    """A storage's key leads to what was stored for other tokens: two prompts share a key, or it was looked up for
    another. What is loaded came whole, and belongs to another prefix. (lab)
    """
    other = copy_finding(cluster, "loaded_another")
    if other is not None and not _left_out(cluster, other):
        return _diagnosis(cluster, other, "the load took another page of the storage")
    loads = [cluster.filled(sign) for sign in cluster.head]
    if any(load is not None and load.together > 1 for load in loads):  # something else was stored in its place
        return None
    for sign, load in zip(cluster.head, loads, strict=True):
        if sign.bits & CONTENT and load is not None and load.what == "loaded":
            said = f"{sign.reader} read {sign.place} in {sign.when}, loaded in event {load.event}: it is the KV of another prefix, "
            said += f"token {sign.stored_token} at position {sign.stored_position}, which "
            said += "was computed here before" if load.twin_kind == SEEN else "lay under the key that was loaded"
            # It may as well have been stored wrong where nobody saw it stored, or if it is of another position than the key's.
            score = 0.94 if sign.stored_position == sign.position and load.twin_kind != SEEN else 0.66
            return cluster.diagnosis(score, said, sign, load.event, sign.event, cause=load.event)
    return None
