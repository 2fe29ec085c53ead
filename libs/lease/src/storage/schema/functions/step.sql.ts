import { MAX_DELAY_MS } from '../../../errors';
import { few, inLiteral } from '../quote';

/** In a claim whose payloads are longer than this together, those longer than that each are left out of its text. */
const MANY_BYTES = 65_536;
const FEW_BYTES = 512;
/** From so many workers on, each has one claim on the wire: rivals walk over the rows that the others have just locked. */
export const CROWD = 3;
/** In the reason of a job that completed although it was to be cancelled. */
export const TOO_LATE = 'it completed before it saw the cancel request';

/**
 * One round trip of a worker: settles what completed, then claims what it will start.
 *
 * Settle: `p_jobs`, `p_tokens` (same length) and `p_results` (a JSON array of that length, or null when no job has a result).
 * Locks the `leases` rows named, in the order given (callers sort by job); `worker_id || ''` keeps the planner on the primary
 * key (left alone it takes the index on worker_id: 23 µs a job instead of 16). `applied` is null when all were applied, else
 * the tokens that were, separated by commas: the rest are lost.
 *
 * Claim: at most `p_want` jobs, whatever the plan, only from the lanes named by `p_queues`/`p_kinds`, of each kind at most its
 * `p_limits`, never from a paused queue, highest priority first, then oldest, across lanes; payloads together at most `p_bytes`
 * (the first always fits). In each lane it looks only at its ranges r, which end with
 * `p_range_ends` of the lane, in that order: priorities between `p_from_priorities[r]` and `p_to_priorities[r]`, or, if the two are the same, rows of that
 * priority at positions between `p_from_positions[r]` and `p_to_positions[r]`, all without the bounds. For the caller knows that what lies before holds nothing, and a
 * snapshot that somebody keeps open makes walking over it dear. Without ranges it looks everywhere. The statement that chooses locks the `ready` rows it returns
 * (SKIP LOCKED: no rival waits), the one that takes deletes those by ctid, which cannot change under the lock.
 *
 * Limits of the fleet: `p_fleet` has each lane's kind's, null for those without; those of a queue stand in `queues`, and of the worker's own for a queue in `p_queue_limits` (of each lane, over all lanes of the queue); see `caps_v1`, and
 * `admit_v1` for concurrency keys. Queues with weights share what is wanted by them instead of by priority alone.
 *
 * `p_suspects`: 0 = take none; 1 = one, alone, if this worker holds no lease and nothing else is to be had; 2 = only that. A worker
 * that runs a suspect gets nothing. The worker's row must be live and unexpired (`refused` otherwise); it is read
 * without a lock: leases claimed in the instant after it was declared dead are given back uncharged.
 *
 * `jobs` is one JSON text: [claimed at, ["id:token", kind, queue, attempt, priority, payload, maxAttempts, deadlineMs, created at, tags,
 * crashes, suspect, place, unread, batch?], …], in no order, moments in ms since 1970; deadlineMs -1 = none; the lower the place, the earlier;
 * unread: 1 = the payload is not there and is to be read as a row, since in a long text it would be copied half a dozen times; plus 2 = it has
 * a row in checkpoints. `scan` = 'xmin,xid,µs,cut,fleet,paused,capped,n…': the lowest transaction that ran when the rows were chosen, this one (0 = it has written nothing), what
 * choosing took, whether `p_bytes` or a concurrency key cut it short, how many workers are live (counted to three), whether any of the queues
 * is paused, whether a limit of the fleet applied, and how many rows each lane was asked for.
 */
export const stepSql = (s: string): string => `
CREATE FUNCTION ${s}.step_v1(p_worker text, p_jobs bigint[], p_tokens bigint[], p_results json,
  p_claim_no bigint, p_want int, p_queues text[], p_kinds text[], p_limits int[],
  p_suspects int, p_bytes bigint, p_range_ends int[] DEFAULT NULL, p_from_priorities int[] DEFAULT NULL,
  p_to_priorities int[] DEFAULT NULL, p_from_positions bigint[] DEFAULT NULL, p_to_positions bigint[] DEFAULT NULL,
  p_fleet int[] DEFAULT NULL, p_queue_limits int[] DEFAULT NULL,
  OUT applied text, OUT jobs text, OUT refused boolean, OUT scan text)
LANGUAGE plpgsql AS $fn$
DECLARE
  v_now timestamptz := clock_timestamp();
  v_tokens bigint[];
  v_rows tid[];
  v_counts int[] := p_limits;
  v_bytes bigint;
  v_fleet int;
  v_paused boolean;
  v_limited boolean;
  v_weighted boolean;
  v_capped boolean := p_fleet IS NOT NULL;
  v_caps int[] := p_queue_limits;
  v_keyed bigint[];
  v_places text[];
  v_crowded boolean;
  v_again boolean := false;
  v_inline int := 2147483647;
  v_xmin xid8;
BEGIN
  IF cardinality(p_jobs) > 0 THEN
    WITH d AS (
      DELETE FROM ${s}.leases l
      USING (SELECT * FROM ROWS FROM (unnest(p_jobs), unnest(p_tokens), json_array_elements(p_results)) AS u(job, token, result)) x
      WHERE l.job_id = x.job AND l.token = x.token AND l.worker_id || '' = p_worker AND ${few('x.job')}
      RETURNING l.*, x.result
    ), f AS (
      INSERT INTO ${s}.finished (job_id, token, started_at, finished_at, attempt, crashes, releases, snoozes, priority, state, outcome,
        worker_id, queue, kind, reason, result, batch_id)
      SELECT d.job_id, d.token, d.claimed_at, v_now, d.attempt, d.crashes, d.releases, d.snoozes, d.priority, 'completed', 'completed',
        d.worker_id, d.queue, d.kind, CASE WHEN d.cancel_requested THEN '${TOO_LATE}' END, d.result, d.batch_id FROM d
    )
    SELECT array_agg(d.token), array_agg(d.job_id) FILTER (WHERE d.keyed), array_agg(d.concurrency_key) FILTER (WHERE d.concurrency_key <> '')
    INTO v_tokens, v_keyed, v_places FROM d;
    IF v_keyed IS NOT NULL THEN PERFORM ${s}.release_keys_v1(v_keyed); END IF;
    IF v_places IS NOT NULL THEN PERFORM ${s}.promote_places_v1(v_places); END IF;
    IF coalesce(cardinality(v_tokens), 0) < cardinality(p_jobs) THEN applied := coalesce(array_to_string(v_tokens, ','), ''); END IF;
  END IF;

  IF p_want > 0 AND cardinality(p_kinds) > 0 THEN
    SELECT NOT EXISTS (SELECT FROM ${s}.workers WHERE id = p_worker AND state = 'live' AND expires_at > clock_timestamp()),
           (SELECT count(*) FROM (SELECT FROM ${s}.workers WHERE state = 'live' LIMIT ${CROWD}) x), q.*
    INTO refused, v_fleet, v_paused, v_limited, v_weighted
    FROM (SELECT coalesce(bool_or(paused), false), coalesce(bool_or(max_running IS NOT NULL OR rate_limit IS NOT NULL), false),
            coalesce(bool_or(weight IS NOT NULL), false) FROM ${s}.queues WHERE name = ANY (p_queues)) q;
    IF refused OR EXISTS (SELECT FROM ${s}.leases WHERE worker_id = p_worker AND suspect) THEN RETURN; END IF;

    IF v_limited OR v_capped THEN
      v_capped := true;
      SELECT c.limits, c.queue_caps INTO p_limits, v_caps FROM ${s}.caps_v1(p_queues, p_kinds, p_limits, p_fleet) c;
      IF p_queue_limits IS NOT NULL THEN
        SELECT array_agg(least(c.cap, c.here) ORDER BY c.i) INTO v_caps FROM unnest(v_caps, p_queue_limits) WITH ORDINALITY AS c(cap, here, i);
      END IF;
      v_counts := p_limits;
    END IF;
    IF v_caps IS NOT NULL AND cardinality(p_kinds) = 1 THEN v_counts[1] := least(p_limits[1], v_caps[1]); END IF;

    IF p_suspects < 2 THEN
      IF p_range_ends IS NULL THEN
        SELECT array_agg(i), array_agg(-32769), array_agg(32768), array_agg(0::bigint), array_agg(0::bigint)
        INTO p_range_ends, p_from_priorities, p_to_priorities, p_from_positions, p_to_positions FROM generate_subscripts(p_kinds, 1) AS g(i);
      END IF;
      v_now := clock_timestamp();
      -- With several lanes: how many of each, so that priority and age hold across them. Looked up without locks; the lanes
      -- then give their first free rows, so rivals neither wait for each other nor come back empty.
      IF cardinality(p_kinds) > 1 AND (v_caps IS NOT NULL OR v_capped OR v_weighted) THEN
        WITH w AS MATERIALIZED (
          SELECT u.q, coalesce((SELECT x.weight FROM ${s}.queues x WHERE x.name = u.q), 1) AS weight, random() AS luck
          FROM (SELECT DISTINCT x.q FROM unnest(p_queues) AS x(q)) u)
        SELECT array_agg(coalesce(n.n, 0) ORDER BY g.i) INTO v_counts
        FROM generate_subscripts(p_kinds, 1) AS g(i)
        LEFT JOIN (
          SELECT t.i, count(*)::int AS n FROM (
            SELECT c.i FROM (
              SELECT b.*, row_number() OVER (PARTITION BY b.k ORDER BY b.turn, b.priority, b.position) AS of_kind FROM (
                -- Weighted queues: as if each gave its jobs at equal intervals, weight of them in the same time, from a random moment on.
                SELECT a.*, CASE WHEN v_weighted THEN (a.of_queue - w.luck) / w.weight END AS turn FROM (
                  SELECT l.i, l.q, l.k, l.n, l.cap, r.priority, r.position,
                    row_number() OVER (PARTITION BY l.q ORDER BY r.priority, r.position) AS of_queue
                  FROM unnest(p_queues, p_kinds, p_limits, v_caps) WITH ORDINALITY AS l(q, k, n, cap, i)
                  CROSS JOIN LATERAL (${laneSql(s, 'r.priority, r.position', '')}) r
                  WHERE coalesce(l.cap, 1) > 0 AND NOT EXISTS (SELECT FROM ${s}.queues p WHERE p.name = l.q AND p.paused)
                ) a JOIN w ON w.q = a.q WHERE a.of_queue <= coalesce(a.cap, p_want)
              ) b
            ) c WHERE c.of_kind <= c.n
            ORDER BY c.turn, c.priority, c.position LIMIT p_want
          ) t GROUP BY t.i
        ) n ON n.i = g.i;
      ELSIF cardinality(p_kinds) > 1 THEN
        SELECT array_agg(coalesce(n.n, 0) ORDER BY g.i) INTO v_counts
        FROM generate_subscripts(p_kinds, 1) AS g(i)
        LEFT JOIN (
          SELECT t.i, count(*)::int AS n FROM (
            SELECT c.i, c.priority, c.position FROM (
              SELECT l.i, r.priority, r.position, l.n, row_number() OVER (PARTITION BY l.k ORDER BY r.priority, r.position) AS nth
              FROM unnest(p_queues, p_kinds, p_limits) WITH ORDINALITY AS l(q, k, n, i)
              CROSS JOIN LATERAL (${laneSql(s, 'r.priority, r.position', '')}) r
              WHERE NOT EXISTS (SELECT FROM ${s}.queues p WHERE p.name = l.q AND p.paused)
            ) c WHERE c.nth <= c.n
            ORDER BY c.priority, c.position LIMIT p_want
          ) t GROUP BY t.i
        ) n ON n.i = g.i;
      END IF;

      SELECT array_agg(c.row_id), sum(c.payload_bytes), bool_or(c.concurrency_key <> ''), pg_snapshot_xmin(pg_current_snapshot())
      INTO v_rows, v_bytes, v_crowded, v_xmin FROM (
        SELECT r.* FROM unnest(p_queues, p_kinds, v_counts) WITH ORDINALITY AS l(q, k, n, i)
        CROSS JOIN LATERAL (${laneSql(s, 'r.ctid AS row_id, r.payload_bytes, r.concurrency_key', ' FOR UPDATE SKIP LOCKED')}) r
        WHERE l.n > 0 AND NOT EXISTS (SELECT FROM ${s}.queues p WHERE p.name = l.q AND p.paused)
        LIMIT p_want) c;
      IF v_bytes > ${MANY_BYTES} THEN v_inline := ${FEW_BYTES}; END IF;
      IF v_bytes > p_bytes THEN
        SELECT array_agg(f.row_id) INTO v_rows FROM (
          SELECT r.ctid AS row_id, sum(r.payload_bytes) OVER w <= p_bytes OR row_number() OVER w = 1 AS fits
          FROM ${s}.ready r WHERE r.ctid = ANY (v_rows)
          WINDOW w AS (ORDER BY r.priority, r.position ROWS UNBOUNDED PRECEDING)) f
        WHERE f.fits;
      END IF;
      IF v_crowded THEN
        SELECT a.row_ids, a.again INTO v_rows, v_again FROM ${s}.admit_v1(v_rows) a;
        IF cardinality(v_rows) = 0 THEN v_rows := NULL; END IF;
      END IF;
      scan := concat(v_xmin, ',', coalesce(pg_current_xact_id_if_assigned(), '0'), ',',
                     round(date_part('epoch', clock_timestamp() - v_now) * 1000000), ',', (v_again OR coalesce(v_bytes > p_bytes, false))::int, ',', v_fleet,
                     ',', v_paused::int, ',', v_capped::int, ',', array_to_string(v_counts, ','));
    END IF;

    IF v_rows IS NULL AND p_suspects > 0 AND NOT EXISTS (SELECT FROM ${s}.leases WHERE worker_id = p_worker) THEN
      SELECT array_agg(c.row_id), bool_or(c.concurrency_key <> '') INTO v_rows, v_crowded FROM (
        SELECT r.row_id, r.concurrency_key
        FROM unnest(p_queues, p_kinds, p_limits, v_caps) AS l(q, k, n, cap)
        CROSS JOIN LATERAL (
          SELECT r.ctid AS row_id, r.concurrency_key FROM ${s}.ready r
          WHERE r.queue = l.q AND r.kind = l.k AND r.suspect
          ORDER BY r.priority, r.position LIMIT 1 FOR UPDATE SKIP LOCKED) r
        WHERE l.n > 0 AND coalesce(l.cap, 1) > 0 AND NOT EXISTS (SELECT FROM ${s}.queues p WHERE p.name = l.q AND p.paused)
        LIMIT 1) c;
      IF v_crowded THEN
        v_rows := (SELECT a.row_ids FROM ${s}.admit_v1(v_rows) a);
        IF cardinality(v_rows) = 0 THEN v_rows := NULL; END IF;
      END IF;
    END IF;

    IF v_rows IS NULL THEN RETURN; END IF;
    IF v_limited THEN
      PERFORM ${s}.spend_v1(array_agg(x.queue), array_agg(x.n)) FROM (
        SELECT r.queue, count(*)::int AS n FROM ${s}.ready r WHERE r.ctid = ANY (v_rows) GROUP BY r.queue) x;
    END IF;
    v_now := clock_timestamp();
    -- Only what the DELETE really took is leased. \`jobs\` is joined once, after it: twice costs another µs a job, and a join between
    -- two CTEs would be a nested loop over both (with hash joins switched off: 49 µs a job instead of 17).
    WITH d AS (
      DELETE FROM ${s}.ready r WHERE r.ctid = ANY (v_rows)
      RETURNING r.job_id, r.position, r.attempt, r.crashes, r.releases, r.snoozes, r.payload_bytes, r.priority, r.suspect, r.keyed, r.saved, r.queue, r.kind,
        r.concurrency_key, r.batch_id
    ), m AS MATERIALIZED (
      -- The numbers are bounded, whatever was written into the rows by hand: one that overflows would stop its whole lane.
      SELECT d.*, CASE WHEN d.payload_bytes <= v_inline THEN j.payload END AS payload, j.max_attempts, j.created_at, j.tags, nextval('${inLiteral(s)}.tokens') AS token,
        least(d.attempt, 2147483646) + 1 AS new_attempt,
        -- Given back ones lie further below zero than a JavaScript number is exact.
        CASE WHEN d.position < 0 THEN d.position + 4611686018427387904 - 4503599627370496 ELSE d.position END AS place,
        -- Not least(): that makes a deadline of none.
        CASE WHEN j.deadline_ms > ${MAX_DELAY_MS} THEN ${MAX_DELAY_MS} ELSE j.deadline_ms END AS deadline_ms
      FROM d JOIN ${s}.jobs j ON j.id = d.job_id WHERE ${few('d.job_id')}
    ), u AS (
      INSERT INTO ${s}.leases (job_id, token, claim_no, claimed_at, deadline_at, attempt, crashes, releases, snoozes, priority,
        suspect, keyed, saved, limited, worker_id, queue, kind, concurrency_key, batch_id)
      SELECT m.job_id, m.token, p_claim_no, v_now, v_now + m.deadline_ms * interval '1 ms', m.new_attempt, m.crashes,
        m.releases, m.snoozes, m.priority, m.suspect, m.keyed, m.saved, v_capped, p_worker, m.queue, m.kind, m.concurrency_key, m.batch_id FROM m
    )
    -- concat() with to_json() where a text may need it: half of what json_build_array() takes, which looks every type up for every row.
    -- The caller sorts: here payloads would be copied for it, and beyond work_mem through a file.
    SELECT concat('[', (date_part('epoch', v_now) * 1000)::bigint, ',', a.rows, ']') INTO jobs FROM (
      SELECT string_agg(
        concat_ws(',', concat('["', m.job_id, ':', m.token, '"'), to_json(m.kind), to_json(m.queue), m.new_attempt, m.priority,
          coalesce(m.payload::text, 'null'), m.max_attempts, coalesce(m.deadline_ms, -1),
          CASE WHEN isfinite(m.created_at) THEN (date_part('epoch', m.created_at) * 1000)::bigint ELSE 0 END,
          coalesce(to_json(m.tags)::text, 'null'), m.crashes, m.suspect::int, m.place, concat((m.payload IS NULL)::int + 2 * m.saved::int,
            CASE WHEN m.batch_id > 0 THEN concat(',"', m.batch_id, '"') END, ']')),
        ',') AS rows FROM m) a
    WHERE a.rows IS NOT NULL;
  END IF;
END $fn$`;

/** The part of a list that belongs to lane `l`. */
const slice = (list: string): string => `${list}[coalesce(p_range_ends[l.i - 1], 0) + 1 : p_range_ends[l.i]]`;

/**
 * The first rows of lane `l` in its ranges, at most as many as it may give. Bounds as plain conditions on one column after equalities:
 * before version 18 the server walks on to the end of the lane when a condition on a pair of columns fails in its second.
 */
const laneSql = (s: string, columns: string, lock: string): string => {
  const part = (name: string, where: string): string => `SELECT * FROM (
              SELECT ${columns} FROM ${s}.ready r WHERE r.queue = l.q AND r.kind = l.k AND NOT r.suspect AND ${where}
              ORDER BY r.priority, r.position LIMIT least(l.n, p_want)${lock}) ${name}`;
  return `
          SELECT x.* FROM unnest(${['from_priorities', 'to_priorities', 'from_positions', 'to_positions'].map((list) => slice(`p_${list}`)).join(', ')})
            AS g(from_priority, to_priority, from_position, to_position)
          CROSS JOIN LATERAL (
            ${part('a', 'r.priority > g.from_priority AND r.priority < g.to_priority')}
            UNION ALL
            ${part('b', 'r.priority = CASE WHEN g.from_priority = g.to_priority THEN g.from_priority END AND r.position > g.from_position AND r.position < g.to_position')}
          ) x LIMIT least(l.n, p_want)`;
};
