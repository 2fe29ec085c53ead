/**
 * One chunk of a beat's attestation: compares the (job, token) pairs that a worker believes it holds with the leases that the database
 * holds for it whose token lies in [p_from, p_to). Locks nothing. The chunks of a beat are contiguous token ranges that
 * together cover all tokens, so a lease is judged unknown in exactly one of them.
 *
 * `gone`: [job, token] held by nobody of that token any more. `stops`: [job, token, 'cancel' | 'pause']. `unknown`: leases the
 * worker does not know, [job, token]; only of claims numbered below `p_below`, since the reply of a later one may still be on its way.
 */
export const attestSql = (s: string): string => `
CREATE FUNCTION ${s}.attest_v1(p_worker text, p_jobs bigint[], p_tokens bigint[], p_from bigint, p_to bigint, p_below bigint,
  OUT gone json, OUT stops json, OUT unknown json)
LANGUAGE sql STABLE AS $fn$
  SELECT json_agg(json_build_array(k.job::text, k.token::text)) FILTER (WHERE l.job_id IS NULL),
         json_agg(json_build_array(k.job::text, k.token::text, CASE WHEN l.cancel_requested THEN 'cancel' ELSE 'pause' END))
           FILTER (WHERE k.job IS NOT NULL AND (l.cancel_requested OR l.pause_requested)),
         json_agg(json_build_array(l.job_id::text, l.token::text)) FILTER (WHERE k.job IS NULL AND l.claim_no < p_below)
  FROM (SELECT job_id, token, claim_no, cancel_requested, pause_requested FROM ${s}.leases
        WHERE worker_id = p_worker AND token >= p_from AND token < p_to) l
  FULL JOIN unnest(p_jobs, p_tokens) AS k(job, token) ON k.job = l.job_id AND k.token = l.token
$fn$`;

/**
 * The leases of a worker whose token lies in [p_from, p_to), told in four numbers: a quarter of the time that comparing them takes. `pairs` mixes
 * tokens and jobs: sets of leases that differ hardly ever sum up to the same, and then the next beat, or the deadline, tells. `stops`: any of them is to be cancelled or paused. Locks nothing.
 */
export const tallySql = (s: string): string => `
CREATE FUNCTION ${s}.tally_v1(p_worker text, p_from bigint, p_to bigint, OUT leases bigint, OUT tokens text, OUT pairs text, OUT stops boolean)
LANGUAGE sql STABLE AS $fn$
  SELECT count(*), coalesce(sum(token), 0)::text, coalesce(sum(token % 1000003 * (job_id % 1000033)), 0)::text,
    coalesce(bool_or(cancel_requested OR pause_requested), false)
  FROM ${s}.leases WHERE worker_id = p_worker AND token >= p_from AND token < p_to
$fn$`;
