import { MAX_DELAY_MS } from '../../../errors';
import { inLiteral } from '../quote';

/**
 * One round trip of a worker: settles what completed, then claims what it will start.
 *
 * Settle: `p_jobs`, `p_tokens` (same length) and `p_results` (a JSON array of that length, or null when no job has a result).
 * Locks the `leases` rows named, in the order given (callers sort by job); `worker_id || ''` keeps the planner on the primary
 * key (left alone it takes the index on worker_id: 23 µs a job instead of 16). `applied` is null when all were applied, else
 * the ids that were: the rest are lost.
 *
 * Claim: at most `p_want` jobs, whatever the plan (FOR UPDATE SKIP LOCKED in a materialised CTE, deleted by ctid), only from the
 * lanes named by `p_queues`/`p_kinds`, of each kind at most its `p_limits`, never from a paused queue, highest priority first,
 * then oldest, across lanes; payloads together at most `p_bytes` (the first always fits). Locks the `ready` rows it takes and
 * no others' wait for it. `p_suspects`: 0 = take none; 1 = one, alone, if this worker holds no lease and nothing else is to be had; 2 =
 * only that. A worker that runs a suspect gets nothing. The worker's row must be live and unexpired (`refused` otherwise); it is read
 * without a lock: leases claimed in the instant after it was declared dead are given back uncharged.
 *
 * Returns jobs as one JSON text: [[id, token, kind, queue, attempt, priority, payload, maxAttempts, deadlineMs, deadlineAt,
 * createdAt, tags, crashes, suspect], …].
 */
export const stepSql = (s: string): string => `
CREATE FUNCTION ${s}.step_v1(p_worker text, p_jobs bigint[], p_tokens bigint[], p_results json,
  p_claim_no bigint, p_want int, p_queues text[], p_kinds text[], p_limits int[], p_suspects int, p_bytes bigint,
  OUT applied text[], OUT jobs text, OUT refused boolean)
LANGUAGE plpgsql AS $fn$
DECLARE
  v_now timestamptz;
  v_ids bigint[];
  v_counts int[] := p_limits;
BEGIN
  IF cardinality(p_jobs) > 0 THEN
    v_now := clock_timestamp();
    WITH d AS (
      DELETE FROM ${s}.leases l
      USING (SELECT * FROM ROWS FROM (unnest(p_jobs), unnest(p_tokens), json_array_elements(p_results)) AS u(job, token, result)) x
      WHERE l.job_id = x.job AND l.token = x.token AND l.worker_id || '' = p_worker
      RETURNING l.*, x.result
    ), f AS (
      INSERT INTO ${s}.finished (job_id, token, started_at, finished_at, attempt, crashes, releases, snoozes, priority, state, outcome,
        worker_id, queue, kind, result)
      SELECT d.job_id, d.token, d.claimed_at, v_now, d.attempt, d.crashes, d.releases, d.snoozes, d.priority, 'completed', 'completed',
        d.worker_id, d.queue, d.kind, d.result FROM d
    )
    SELECT array_agg(d.job_id) INTO v_ids FROM d;
    IF coalesce(cardinality(v_ids), 0) < cardinality(p_jobs) THEN applied := coalesce(v_ids::text[], '{}'); END IF;
  END IF;

  IF p_want > 0 AND cardinality(p_kinds) > 0 THEN
    refused := NOT EXISTS (SELECT FROM ${s}.workers WHERE id = p_worker AND state = 'live' AND expires_at > clock_timestamp());
    IF refused OR EXISTS (SELECT FROM ${s}.leases WHERE worker_id = p_worker AND suspect) THEN RETURN; END IF;

    IF p_suspects < 2 THEN
      -- With several lanes: how many of each, so that priority and age hold across them. Looked up without locks; the lanes
      -- then give their first free rows, so rivals neither wait for each other nor come back empty.
      IF cardinality(p_kinds) > 1 THEN
        SELECT array_agg(coalesce(n.n, 0) ORDER BY g.i) INTO v_counts
        FROM generate_subscripts(p_kinds, 1) AS g(i)
        LEFT JOIN (
          SELECT t.i, count(*)::int AS n FROM (
            SELECT c.i, c.priority, c.position FROM (
              SELECT l.i, r.priority, r.position, l.n, row_number() OVER (PARTITION BY l.k ORDER BY r.priority, r.position) AS nth
              FROM unnest(p_queues, p_kinds, p_limits) WITH ORDINALITY AS l(q, k, n, i)
              CROSS JOIN LATERAL (
                SELECT r.priority, r.position FROM ${s}.ready r WHERE r.queue = l.q AND r.kind = l.k AND NOT r.suspect
                ORDER BY r.priority, r.position LIMIT least(l.n, p_want)) r
              WHERE NOT EXISTS (SELECT FROM ${s}.queues p WHERE p.name = l.q AND p.paused)
            ) c WHERE c.nth <= c.n
            ORDER BY c.priority, c.position LIMIT p_want
          ) t GROUP BY t.i
        ) n ON n.i = g.i;
      END IF;

      WITH c AS MATERIALIZED (
        SELECT r.row_id
        FROM unnest(p_queues, p_kinds, v_counts) AS l(q, k, n)
        CROSS JOIN LATERAL (
          SELECT r.ctid AS row_id FROM ${s}.ready r
          WHERE r.queue = l.q AND r.kind = l.k AND NOT r.suspect
          ORDER BY r.priority, r.position LIMIT least(l.n, p_want) FOR UPDATE SKIP LOCKED) r
        WHERE l.n > 0 AND NOT EXISTS (SELECT FROM ${s}.queues p WHERE p.name = l.q AND p.paused)
        LIMIT p_want
      )${takeSql(s)}
      IF jobs IS NOT NULL THEN RETURN; END IF;
    END IF;

    IF p_suspects > 0 AND NOT EXISTS (SELECT FROM ${s}.leases WHERE worker_id = p_worker) THEN
      WITH c AS MATERIALIZED (
        SELECT r.row_id
        FROM unnest(p_queues, p_kinds) AS l(q, k)
        CROSS JOIN LATERAL (
          SELECT r.ctid AS row_id FROM ${s}.ready r
          WHERE r.queue = l.q AND r.kind = l.k AND r.suspect
          ORDER BY r.priority, r.position LIMIT 1 FOR UPDATE SKIP LOCKED) r
        WHERE NOT EXISTS (SELECT FROM ${s}.queues p WHERE p.name = l.q AND p.paused)
        LIMIT 1
      )${takeSql(s)}
    END IF;
  END IF;
END $fn$`;

/**
 * Moves the rows that `c` chose and locked from `ready` into `leases`. Only what the DELETE really took is leased. `jobs` is joined
 * once, after it: twice costs another µs a job, and a join between two CTEs would be a nested loop over both (with hash joins switched
 * off: 49 µs a job instead of 17). What does not fit into `p_bytes` goes back to where it was, in the same statement.
 */
const takeSql = (s: string): string => `, d AS (
        DELETE FROM ${s}.ready r WHERE r.ctid = ANY (ARRAY (SELECT c.row_id FROM c)) RETURNING r.*
      ), m AS MATERIALIZED (
        -- The numbers are bounded, whatever was written into the rows by hand: one that overflows would stop its whole lane.
        SELECT d.*, j.payload, j.max_attempts, j.created_at, j.tags, clock_timestamp() AS claimed_at,
          least(d.attempt, 2147483646) + 1 AS new_attempt,
          -- Not least(): that makes a deadline of none.
          CASE WHEN j.deadline_ms > ${MAX_DELAY_MS} THEN ${MAX_DELAY_MS} ELSE j.deadline_ms END AS deadline_ms,
          sum(octet_length(j.payload::text)) OVER w <= p_bytes OR row_number() OVER w = 1 AS fits
        FROM d JOIN ${s}.jobs j ON j.id = d.job_id
        WINDOW w AS (ORDER BY d.priority, d.position ROWS UNBOUNDED PRECEDING)
      ), t AS MATERIALIZED (
        SELECT m.*, nextval('${inLiteral(s)}.tokens') AS token FROM m WHERE m.fits
      ), back AS (
        INSERT INTO ${s}.ready (job_id, position, attempt, crashes, releases, snoozes, priority, suspect, queue, kind)
        SELECT m.job_id, m.position, m.attempt, m.crashes, m.releases, m.snoozes, m.priority, m.suspect, m.queue, m.kind
        FROM m WHERE NOT m.fits
      ), u AS (
        INSERT INTO ${s}.leases (job_id, token, claim_no, claimed_at, deadline_at, attempt, crashes, releases, snoozes, priority,
          suspect, worker_id, queue, kind)
        SELECT t.job_id, t.token, p_claim_no, t.claimed_at, t.claimed_at + t.deadline_ms * interval '1 ms', t.new_attempt, t.crashes,
          t.releases, t.snoozes, t.priority, t.suspect, p_worker, t.queue, t.kind FROM t
      )
      SELECT json_agg(json_build_array(t.job_id::text, t.token::text, t.kind, t.queue, t.new_attempt, t.priority, t.payload,
        t.max_attempts, t.deadline_ms, t.claimed_at + t.deadline_ms * interval '1 ms', t.created_at, t.tags, t.crashes, t.suspect)
        ORDER BY t.priority, t.position)::text INTO jobs FROM t;`;
