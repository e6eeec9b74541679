-- One row a chunk of a prompt: the positions from first_position up to, not including, end_position, that one forward
-- computed. A decode that rides along in a mixed forward is none. first_position 0 of a request's first chunk means that nothing came from the prefix cache.
select
    batch.trace, batch.request_id, batch.request, batch.forward, batch.event, batch.runner, batch.mode,
    batch.prefix_len as first_position, batch.prefix_len + batch.extend_len as end_position,
    row_number() over (partition by batch.trace, batch.runner, batch.request_id order by batch.event) as number
from forward_requests as batch
left join requests using (trace, request_id)
where batch.extend_len > 0
    and (batch.mode = 'extend' or (batch.mode = 'mixed' and (batch.extend_len > 1 or batch.prefix_len < prompt_len)))
