"""What went wrong with the tokens, positions and lengths that a model was given, and with attention's copies of them."""

from ..cluster import Cluster, Diagnosis, events_query, request_query, rule, samples_query
from ..seen.likely import POSSIBLE
from ..seen.observed import (
    begins_behind_its_prompt,
    begins_from_another,
    behind_its_rows_end,
    handed_round,
    in_windows_alone,
    kept_nowhere,
    last_of_its_prompt,
    left_out_of_a_prompt,
    over_its_window,
    skipped,
)
from ..sign import CONTENT, POSITION, TOKEN, WRITE_POSITION, WRITE_TOKEN, Sign

_FAR = 64  # positions from where a token belongs


@rule("a request's length went back", branch="input", aftermath=True)
def seq_len_backwards(cluster: Cluster) -> Diagnosis | None:
    """A decode is built from a stale sequence length. (lab)"""
    sign = cluster.finding("seq_len_backwards")
    if sign is None:
        return None
    said = f"the length of {sign.reader} went back in {sign.when}: it {sign.detail}"
    queries = (request_query(sign.request_id), events_query(sign.evidence))
    # One that begins anew may have lost its slots, which an adapter that compares tables need not have been shown.
    return cluster.diagnosis(0.96 if sign.position else 0.6, said, sign, queries=queries, cause=sign.event)


@rule("positions are not the tokens' own", branch="input")
def position_off(cluster: Cluster) -> Diagnosis | None:
    """A request's tokens are given positions that are not theirs: a shift applied twice, a count that falls behind,
    a position of another row. (llama.cpp#3825)
    """
    for sign in cluster.head:
        mine = [other for other in cluster.head if other.request_id == sign.request_id]
        told = _told(mine)
        fed = sign.bits & WRITE_POSITION and (_far_off(sign) and not told if sign.runner else _in_plan(cluster, sign))
        at_first = sign.kind == "position_not_place"
        if not (fed or at_first) and (sign.runner or not told):
            continue
        off = sorted({s.stored_position - s.position for s in mine if s.bits & WRITE_POSITION})
        by = f", off by {', '.join(f'{n:+d}' for n in off[:3])}" if off and not told else ""
        by = f", it {sign.detail}" if at_first else by
        said = f"{sign.reader} was fed a position that is not its token's in {sign.when}: {sign.place}{by}"
        if told:
            said += "; attention's length and the slot that was written are those of another position"
        asked = f"select forward, request_id, table_position, position, token from tokens where event = {sign.event} limit 50"
        return cluster.diagnosis(0.97 if told else 0.93, said, sign, queries=(asked,), cause=sign.event)
    for sign in cluster.head:
        own = cluster.wrote(sign)
        # Its own token, in the slot that it wrote for this very position: neither the row nor the slot is wrong.
        if (
            sign.runner == 0
            and sign.bits & POSITION
            and not sign.bits & TOKEN
            and own == (sign.writer_event, sign.slot)
        ):
            said = f"{sign.reader} computed its token for position {sign.position} at position {sign.stored_position} in forward "
            said += f"{sign.writer_forward}: {sign.place}, read in {sign.when}"
            return cluster.diagnosis(0.93, said, sign, own[0], sign.event, cause=own[0])
    wrong = [sign for sign in cluster.head if sign.kind == "input_not_truth" and sign.runner == 0]
    early = _own_tokens_off(wrong) if wrong else 0
    if early:
        sign = wrong[0]
        said = f"{sign.reader} was fed its own tokens {abs(early)} positions {'early' if early > 0 else 'late'} in {sign.when}: {sign.place}, it {sign.detail}"
        return cluster.diagnosis(0.68, said, sign, cause=sign.event)
    for sign in cluster.head:
        own = cluster.wrote(sign)
        if own is not None and begins_behind_its_prompt(cluster, sign):
            said = f"{sign.reader} began at position {sign.position}, behind its whole prompt, with token {sign.stored_token}, before any was "
            said += f"sampled for it: {sign.place}, read in {sign.when}; a prompt's last token is to be computed at its own place"
            return cluster.diagnosis(0.85, said, sign, own[0], sign.event, cause=own[0])
    for sign in cluster.head:
        if skipped(cluster, sign) and not left_out_of_a_prompt(cluster, sign):
            ended, begins = (of[sign.event, sign.request_id] for of in (cluster.facts.ahead, cluster.facts.prefixes))
            said = f"{sign.reader} went on from position {begins} in {sign.when}, and its forward before had ended at {ended}: what "
            said += f"lies between was never computed: {sign.place}"
            return cluster.diagnosis(0.93, said, sign, cause=sign.event)
    return None


def _told(mine: list[Sign]) -> bool:
    """Whether attention's length and the records both contradict the positions by which a decode's lengths are told.

    What is read wrong before the lengths part is wrong for another reason.
    """
    lens = {sign.event: sign.position for sign in mine if sign.kind == "attention_lens" and sign.mode == "decode"}
    off = [sign for sign in mine if sign.kind == "table_entry_differs" or sign.bits & (POSITION | WRITE_POSITION)]
    before = any(sign.bits & POSITION and sign.position < lens.get(sign.event, 0) - 1 for sign in off)
    return bool(lens and off) and not before


def _far_off(sign: Sign) -> bool:
    """Whether what a draft was fed is more than one position off."""
    return abs(sign.stored_position - sign.position) > 1


def _in_plan(cluster: Cluster, sign: Sign) -> bool:
    """Whether a forward has a token for the position that a sign says was expected, and so was fed another."""
    here = cluster.facts.wrote_before(sign.request_id, sign.position, sign.event + 1)
    return here is not None and here[0] == sign.event


@rule("positions off by one", branch="input")
def draft_position_plus_one(cluster: Cluster) -> Diagnosis | None:
    """The draft's positions are built one too high. (S#25015)"""
    first = cluster.first
    if behind_its_rows_end(cluster):
        return None  # which an engine gives another position on purpose
    if first.runner > 0 and _told([other for other in cluster.head if other.request_id == first.request_id]):
        said = f"the draft model was fed a position that is not its token's, of {first.reader} in {first.when}: {first.place}; "
        said += "attention's length is that of another position"
        return cluster.diagnosis(0.95, said, first, cause=first.event)
    sign = cluster.violation(WRITE_POSITION)
    if sign is None:
        return None
    off = {s.stored_position - s.position for s in cluster.head if s.bits & WRITE_POSITION}
    distance = sign.stored_position - sign.position
    content = any(s.kind or s.bits & ~WRITE_POSITION for s in cluster.head)
    if len(off) != 1 or content or (sign.runner == 0 and cluster.has_trace):
        return None
    if sign.runner > 0 and _far_off(sign):
        return None
    model = "draft" if sign.runner > 0 else "model"
    said = f"the {model} was fed position {sign.stored_position} for position {sign.position} of {sign.reader} in "
    said += f"{sign.when}: {sign.place}, off by {distance:+d}"
    asked = (
        "select forward, request_id, table_position, position, token from tokens where position <> table_position "
        "order by event limit 50"
    )
    return cluster.diagnosis(0.95 if sign.runner > 0 else 0.75, said, sign, queries=(asked,), cause=sign.event)


@rule("a chunk's tail got the predicted token", branch="input")
def chunk_tail_predicted_token(cluster: Cluster) -> Diagnosis | None:
    """With speculative decoding the last draft input of a prompt's chunk is the target's prediction. (S#26800)"""
    sign = cluster.finding("input_not_truth")
    if sign is None or sign.runner == 0:
        return None
    score = 0.95 if sign.mode in ("extend", "draft_extend", "mixed") else 0.7
    said = f"the draft model of {sign.reader} was fed a wrong token at the end of a chunk in {sign.when}: "
    said += f"{sign.place}, it {sign.detail}"
    chunks = f"select * from chunks where request_id = {sign.request_id} order by event"
    return cluster.diagnosis(score, said, sign, queries=(request_query(sign.request_id), chunks), cause=sign.event)


@rule("a resumed request got a stale token", branch="input")
def async_resume_wrong_input(cluster: Cluster) -> Diagnosis | None:
    """With asynchronous preemption a resumed request is fed ids from before; or one of whose prompt nothing but the last token is
    left to compute is taken for one that decodes, and fed what its row has sampled last. (V#26385, V#47466)
    """
    sign = cluster.finding("input_not_truth", "input_not_sampled")
    if sign is None:
        return _seen_later(cluster)
    if sign.runner != 0:
        return None
    prefix = cluster.facts.prefixes.get((sign.event, sign.request_id), sign.position)
    resumed = cluster.facts.came_back(sign.request_id, sign.event)
    resumed |= prefix < sign.position and sign.kind == "input_not_sampled"  # what was sampled is computed anew
    wrong = {s.request_id for s in cluster.head if s.kind in ("input_not_truth", "input_not_sampled")}
    if last_of_its_prompt(cluster, sign):
        said = f"{sign.reader} began in {sign.when} with the last token of its prompt, as all before that was there, and was fed another "
        said += f"in its place, as if it went on with what had been sampled before: {sign.place}, it {sign.detail}"
        return cluster.diagnosis(POSSIBLE, said, sign, queries=(samples_query(sign, 3),), cause=sign.event)
    alone = len(wrong) == 1 or all(cluster.facts.came_back(request, sign.event) for request in wrong)
    which = ", which had been put back and resumed," if resumed else ""
    said = f"{sign.reader}{which} was fed a stale token in {sign.when}: {sign.place}, it {sign.detail}"
    score = (0.95 if alone else 0.75) if resumed else 0.55 if alone else 0.4
    queries = (request_query(sign.request_id), events_query([sign.event, *sign.evidence]))
    return cluster.diagnosis(score, said, sign, queries=queries, cause=sign.event)


def _seen_later(cluster: Cluster) -> Diagnosis | None:
    """A token that a resumed request computed itself, in its own slot, and that the scheduler did not contradict until later."""
    first = cluster.first
    own = cluster.wrote(first)
    if first.bits != TOKEN or own is None or own[1] != first.slot:
        return None
    if not cluster.facts.retracted_before(first.request_id, own[0]):
        return None
    said = f"{first.reader}, which had been put back and resumed, was fed token {first.stored_token} in forward "
    said += (
        f"{first.writer_forward}, where the scheduler has {first.expected_token}: {first.place}, read in {first.when}"
    )
    queries = (request_query(first.request_id), events_query([own[0], first.event]))
    return cluster.diagnosis(0.9, said, first, queries=queries, cause=own[0])


@rule("inputs were overwritten before they were read", branch="input")
def future_map_overrun(cluster: Cluster) -> Diagnosis | None:
    """What a step is fed lies in a buffer that the next step fills: a ring of sampled tokens that is overrun, a prompt's
    tokens whose copy to the device has not begun. A request is fed what belongs elsewhere. (S#13713, vllm-ascend#16428)
    """
    prompt = _prompt_overwritten(cluster)
    if prompt is not None:
        return prompt
    sign = cluster.finding("input_not_sampled")
    if sign is None or sign.runner != 0:
        return None
    wrong = cluster.violation(WRITE_TOKEN)
    resumed = cluster.facts.came_back(sign.request_id, sign.event)
    again = cluster.kinds["input_not_sampled"] > 1
    # Who is fed what was sampled for another that has left since looks the same.
    score = 0.68 if cluster.facts.late_samples > 0 or not cluster.has_trace else 0.45
    score += 0.15 if again else -0.25 if resumed else 0
    score -= 0.1 if cluster.finding("input_not_truth") is not None else 0
    # A row that is another's has another's tokens too.
    astray = any(
        s.bits & CONTENT and s.request_id == sign.request_id and s.writer_request_id not in (-1, s.request_id)
        for s in cluster.head
    )
    score = min(score, 0.65) if resumed or astray else score
    fed = f" (token {wrong.stored_token}, expected {wrong.expected_token})" if wrong is not None else ""
    said = f"{sign.reader} was fed another token than was sampled for it in {sign.when}{fed}: {sign.place}, it {sign.detail}"
    return cluster.diagnosis(score, said, sign, queries=(samples_query(sign, 3),))


def _prompt_overwritten(cluster: Cluster) -> Diagnosis | None:
    """Neighbouring tokens of a chunk, none of them sampled and none of a resumed request, that are not the scheduler's."""
    wrong = [sign for sign in cluster.head if sign.kind == "input_not_truth" and sign.runner == 0]
    at = sorted(sign.position for sign in wrong if sign.request_id == wrong[0].request_id)
    if len(at) < 2 or at[-1] - at[0] >= 2 * len(at) or cluster.finding("input_not_sampled", "seq_len_backwards"):
        return None
    sign = wrong[0]
    if (
        cluster.facts.retracted_before(sign.request_id, sign.event)
        or begins_from_another(cluster)
        or _own_tokens_off(wrong)
    ):
        return None
    said = f"{len(at)} tokens of a chunk of {sign.reader} were not fed as the scheduler has them in {sign.when}, from {sign.place} on: it "
    queries = (request_query(sign.request_id), events_query([sign.event]))
    return cluster.diagnosis(0.85, said + sign.detail, sign, queries=queries, cause=sign.event)


def _own_tokens_off(wrong: list[Sign]) -> int:
    """Return by how many positions a request's own tokens stand where others belong, all alike, 0 if they do not."""
    mine = {
        sign.position: sign for sign in wrong if sign.request_id == wrong[0].request_id and sign.event == wrong[0].event
    }
    whole = max(mine) - min(mine)  # so far off that of all these one alone shows it
    for by in (step * sign for step in range(1, _FAR) for sign in (1, -1)):
        pairs = [(one, mine[at + by]) for at, one in mine.items() if at + by in mine]
        if (len(pairs) > 2 or (pairs and len(mine) > 2 and abs(by) == whole)) and all(
            one.stored_token == other.expected_token for one, other in pairs
        ):
            return by
    return 0


@rule("sampled tokens mixed up", branch="input")
def next_token_swap(cluster: Cluster) -> Diagnosis | None:
    """A sampled token is handed to another request, and the scheduler believes it. (canary)"""
    swapped = _swapped(cluster)
    if swapped is not None:
        return swapped
    wrong = [sign for sign in cluster.head if sign.bits & WRITE_TOKEN]
    if not wrong or cluster.finding("input_not_sampled", "input_not_truth", "seq_len_backwards") is not None:
        return None
    sign = wrong[0]
    fed = {(s.stored_token, s.expected_token) for s in wrong}
    crossed = any((expected, stored) in fed for stored, expected in fed if stored != expected)
    others = (s for s in wrong if s.expected_token == sign.stored_token and s.request_id != sign.request_id)
    partner = next(others, None)
    words = f", which was sampled for {partner.reader}" if partner is not None else ""
    said = f"{sign.reader} was fed token {sign.stored_token} instead of {sign.expected_token} in {sign.when}{words}: {sign.place}"
    queries = (events_query([sign.event]), samples_query(sign, 2))
    return cluster.diagnosis(0.95 if crossed else 0.85, said, sign, queries=queries, cause=sign.event)


def _swapped(cluster: Cluster) -> Diagnosis | None:
    """Requests that were fed one another's sampled tokens, which the scheduler knows better."""
    ring = handed_round(cluster)
    if not ring:
        return None
    first, *others = ring
    tokens = ", ".join(str(sign.expected_token) for sign in ring[:4])
    said = f"{first.reader} and {others[0].reader}"
    said += f" and {len(others) - 1} more" if len(others) > 1 else ""
    said += f" were fed one another's sampled tokens, {tokens}{', ...' if len(ring) > 4 else ''}, in {first.when}"
    queries = (events_query([first.event]), samples_query(first, 2))
    return cluster.diagnosis(0.85, said, first, queries=queries, cause=first.event)


@rule("sliding window read wrongly", branch="read")
def window_read_wrong(cluster: Cluster) -> Diagnosis | None:
    """A forward reads fewer or more positions of its prefix than the sliding window has, or its layers with a window alone get
    other slots than are its own: of a ring, or of a table that layers without one read as well. (lab)
    """
    sign = cluster.finding("wrong_window")
    if sign is None:
        return (
            _got_of_ring(cluster)
            or _got_beside_the_table(cluster)
            or _nobodys_in_ring(cluster)
            or _shifted(cluster)
            or _by_output(cluster, sliding=True)
        )
    said = f"in {sign.when} {sign.reader} {sign.detail}"
    return cluster.diagnosis(0.95, said, sign, queries=(events_query(sign.evidence),), cause=sign.event)


def _got_of_ring(cluster: Cluster) -> Diagnosis | None:
    """Rows of a ring that attention got and that are not those which its index names: no table stands between."""
    sign = cluster.finding("attention_slots")
    if sign is None or not cluster.in_ring(sign):
        return None
    score = 0.9 if all(other.kind.startswith("attention_") for other in cluster.head) else 0.5
    said = f"in {sign.when} attention got another row of the window than is its own, at position {sign.position} of {sign.reader}: "
    return cluster.diagnosis(score, said + sign.detail, sign, queries=(events_query(sign.evidence),), cause=sign.event)


def _nobodys_in_ring(cluster: Cluster) -> Diagnosis | None:
    """A position of a ring's window that is read from nobody's place, though its request keeps it in one of its own."""
    sign = cluster.finding("padding_slot_read")
    own = cluster.wrote(sign) if sign is not None and cluster.in_ring(sign) else None
    if sign is None or own is None or own[1] <= 0:
        return None
    said = f"in {sign.when} position {sign.position} of the window of {sign.reader}, which it keeps in slot {own[1]}, is read from {sign.place}: "
    return cluster.diagnosis(0.85, said + sign.detail, sign, own[0], cause=sign.event)


def _got_beside_the_table(cluster: Cluster) -> Diagnosis | None:
    """Slots that layers with a window alone got, and that are not those of the table that they share with the others."""
    sign = cluster.finding("attention_slots")
    if sign is None or not in_windows_alone(cluster, sign):
        return None
    score = 0.9 if all(other.kind.startswith("attention_") for other in cluster.head) else 0.5
    said = f"in {sign.when} layers with a window got another slot than those without, of one table, at position {sign.position} of {sign.reader}: "
    return cluster.diagnosis(score, said + sign.detail, sign, queries=(events_query(sign.evidence),), cause=sign.event)


def _by_output(cluster: Cluster, *, sliding: bool) -> Diagnosis | None:
    """What attention gave, and no run of positions explains: of layers with a window the window, of others the table is likelier."""
    sign = cluster.finding("attention_output")
    if sign is None or sliding != (cluster.window(sign) > 0):
        return None
    said = f"in {sign.when} attention read something else than the slots of {sign.reader}: {sign.detail}"
    return cluster.diagnosis(0.6, said, sign, queries=(events_query(sign.evidence),), cause=sign.event)


def _shifted(cluster: Cluster) -> Diagnosis | None:
    """Positions of a window, all of which hold the request's own tokens from the same distance away."""
    first = cluster.first
    if over_its_window(cluster, first) or kept_nowhere(cluster, first):
        return None
    wrong = [
        s for s in cluster.head if s.bits & POSITION and s.request_id == first.request_id and s.group == first.group
    ]
    off = {(s.stored_position - s.position, s.writer_request_id == s.request_id) for s in wrong}
    named = [s.slot for s in wrong if s.writer_request_id == s.request_id]
    if cluster.window(first) and first.writer_request_id == first.request_id and len(set(named)) < len(named):
        said = f"in {first.when} {first.reader} reads {len(set(named))} slots for {len(named)} positions of its sliding window, "
        said += f"{first.place} among them"
        return cluster.diagnosis(0.66, said, first, cause=first.event)
    own = all(mine for _, mine in off)
    if cluster.window(first) and own and len(off) > 1:
        said = f"in {first.when} {first.reader} reads its sliding window in another order than it wrote it: {first.place} holds its "
        said += f"position {first.stored_position}, and {len(wrong)} positions are not where they are looked for"
        return cluster.diagnosis(0.66, said, first, cause=first.event)
    if len(wrong) < 2 or len(off) != 1 or not own or not cluster.window(first):
        return None
    said = f"in {first.when} {first.reader} reads its sliding window {first.stored_position - first.position:+d} positions off: {first.place} holds its own "
    said += f"position {first.stored_position}, and so on for {len(wrong)} positions"
    return cluster.diagnosis(0.94, said, first, cause=first.event)


@rule("attention's own table differs", branch="read")
def attention_table_overwritten(cluster: Cluster) -> Diagnosis | None:
    """The attention backend's copy of the block table is overwritten in flight. (TensorRT-LLM#15546)"""
    sign = cluster.finding("attention_slots")
    if sign is None:
        return _by_output(cluster, sliding=False)
    if cluster.in_ring(sign) or in_windows_alone(cluster, sign):
        return None
    score = 0.96 if all(other.kind.startswith("attention_") for other in cluster.head) else 0.5
    said = f"in {sign.when} attention was given a slot that is not the block table's, at position {sign.position} of "
    said += f"{sign.reader}: {sign.detail}"
    asked = f"select * from attention_slots where event = {sign.event} order by batch_index, position limit 50"
    return cluster.diagnosis(score, said, sign, queries=(asked, events_query(sign.evidence)), cause=sign.event)


@rule("attention's length is wrong", branch="read")
def attention_seq_len_wrong(cluster: Cluster) -> Diagnosis | None:
    """The sequence length that attention gets is not the request's: its cached prefix is left out, or it is stale
    or one off. (V#46460)
    """
    sign = cluster.finding("attention_lens")
    if sign is None:
        return None
    said = f"in {sign.when} attention got a wrong length of {sign.reader}: {sign.detail}"
    asked = (
        "select forward, request_id, prefix_len, extend_len, attention_seq_len, attention_query_len "
        f"from forward_requests where event = {sign.event}"
    )
    score = 0.9 if cluster.finding("wrong_window") is None else 0.5
    return cluster.diagnosis(score, said, sign, queries=(asked, events_query(sign.evidence)), cause=sign.event)
