import { few, inLiteral } from '../quote';

/** The advisory lock under which places of a concurrency key, a kind or a queue are counted and taken. Held to the end of the transaction. */
const lockOf = (s: string, what: string): string => `hashtextextended('leasehold:${inLiteral(s)}:' || ${what}, 0)`;

/** Whether somebody could claim it at present. A place that is given to any other would lie idle. */
const claimable = (
  s: string,
  row: string,
): string => `NOT EXISTS (SELECT FROM ${s}.queues q WHERE q.name = ${row}.queue AND q.paused)
         AND EXISTS (SELECT FROM ${s}.workers x WHERE x.state = 'live' AND ${row}.kind = ANY (x.kinds))`;

/** Rows of a full concurrency key that leave the lane with those that a claim met. */
const PARK_AHEAD = 1000;

/**
 * Of the ready rows that a claim has locked, those whose concurrency key has a place free, counted in the leases. The others leave the lane
 * and wait (blocked on 'limit'), so that they cost the next claim nothing, and with them up to a thousand others of a key that is full: else a lane
 * full of one busy key is moved out at the pace of the claims. A key whose lock somebody holds just now is left alone, and `again`
 * says that its rows stayed. Locks nothing that anybody waits for: the keys' locks are tried, and rows locked by others skipped.
 */
export const admitSql = (s: string): string => `
CREATE FUNCTION ${s}.admit_v1(p_rows tid[], OUT row_ids tid[], OUT again boolean) LANGUAGE plpgsql AS $fn$
DECLARE
  v record;
  v_park bigint[] := '{}';
  v_full text[] := '{}';
  v_fulls int[] := '{}';
  v_key text := '';
  v_free boolean := false;
  v_taken int := 0;
BEGIN
  again := false;
  row_ids := '{}';
  FOR v IN
    SELECT r.ctid AS row_id, r.job_id, r.concurrency_key, CASE WHEN r.concurrency_key <> '' THEN j.concurrency_max END AS most
    FROM ${s}.ready r JOIN ${s}.jobs j ON j.id = r.job_id WHERE r.ctid = ANY (p_rows)
    ORDER BY r.concurrency_key, r.priority, r.position
  LOOP
    IF v.concurrency_key = '' THEN
      row_ids := row_ids || v.row_id;
      CONTINUE;
    END IF;
    IF v.concurrency_key <> v_key THEN
      v_key := v.concurrency_key;
      v_free := pg_try_advisory_xact_lock(${lockOf(s, "'key:' || v_key")});
      -- In a statement after the lock: what its last holder leased is seen.
      v_taken := (SELECT count(*) FROM ${s}.leases l WHERE l.concurrency_key = v_key AND l.concurrency_key <> '');
    END IF;
    IF NOT v_free THEN
      again := true;
    ELSIF v_taken < v.most THEN
      v_taken := v_taken + 1;
      row_ids := row_ids || v.row_id;
    ELSE
      v_park := v_park || v.job_id;
      IF v_full[cardinality(v_full)] IS DISTINCT FROM v_key THEN
        v_full := v_full || v_key;
        v_fulls := v_fulls || v_taken;
      END IF;
    END IF;
  END LOOP;
  IF cardinality(v_park) > 0 THEN
    again := true;
    v_park := v_park || ARRAY(
      SELECT n.job_id FROM unnest(v_full, v_fulls) AS f(key, taken) CROSS JOIN LATERAL (
        SELECT r.job_id FROM ${s}.ready r JOIN ${s}.jobs j ON j.id = r.job_id
        WHERE r.concurrency_key = f.key AND r.concurrency_key <> '' AND r.ctid <> ALL (p_rows) AND j.concurrency_max <= f.taken AND ${claimable(s, 'r')}
        LIMIT ${PARK_AHEAD} FOR UPDATE OF r SKIP LOCKED) n LIMIT ${PARK_AHEAD});
    WITH d AS (DELETE FROM ${s}.ready r WHERE r.job_id = ANY (v_park) RETURNING r.*)
    INSERT INTO ${s}.waiting (job_id, attempt, crashes, releases, snoozes, payload_bytes, priority, suspect, keyed, saved, reason, blocked_on,
      queue, kind, concurrency_key, batch_id)
    SELECT d.job_id, d.attempt, d.crashes, d.releases, d.snoozes, d.payload_bytes, d.priority, d.suspect, d.keyed, d.saved, 'blocked',
      'limit', d.queue, d.kind, d.concurrency_key, d.batch_id FROM d;
  END IF;
END $fn$`;

/**
 * Places of these concurrency keys have become free: as many of the jobs that wait for one become ready, the first first. Waits for the key's
 * lock for a moment, which a claim or a settle holds, else leaves it to the poll; so a job that a claim sends to wait in the same
 * instant is seen. Locks the waiting rows it moves, skipping locked ones.
 */
export const promotePlacesSql = (s: string): string => `
CREATE FUNCTION ${s}.promote_places_v1(p_keys text[]) RETURNS int LANGUAGE plpgsql AS $fn$
DECLARE
  v_key text;
  v_job record;
  v_taken int;
  v_most int;
  v_jobs bigint[];
  v_promoted int := 0;
BEGIN
  FOR v_key IN SELECT DISTINCT u.key FROM unnest(p_keys) AS u(key) WHERE u.key <> '' ORDER BY u.key LOOP
    BEGIN
      PERFORM pg_advisory_xact_lock(${lockOf(s, "'key:' || v_key")});
    EXCEPTION WHEN lock_not_available THEN
      CONTINUE;
    END;
    SELECT array_agg(x.job_id), max(x.most) INTO v_jobs, v_most FROM (
      SELECT w.job_id, j.concurrency_max AS most FROM ${s}.waiting w JOIN ${s}.jobs j ON j.id = w.job_id
      WHERE w.blocked_on = 'limit' AND w.concurrency_key = v_key AND ${claimable(s, 'w')}
      ORDER BY w.priority, w.job_id LIMIT 100 FOR UPDATE OF w SKIP LOCKED) x;
    CONTINUE WHEN v_jobs IS NULL;
    v_taken := (SELECT count(*) FROM (
        SELECT FROM ${s}.leases l WHERE l.concurrency_key = v_key AND l.concurrency_key <> '' LIMIT v_most) x)
      -- Ready ones will take a place; but not those that nobody can claim.
      + (SELECT count(*) FROM (
        SELECT r.queue, r.kind FROM ${s}.ready r WHERE r.concurrency_key = v_key AND r.concurrency_key <> '' LIMIT v_most + ${PARK_AHEAD}) r
         WHERE ${claimable(s, 'r')});
    FOR v_job IN
      SELECT w.job_id, j.concurrency_max AS most FROM ${s}.waiting w JOIN ${s}.jobs j ON j.id = w.job_id
      WHERE w.job_id = ANY (v_jobs) ORDER BY w.priority, w.job_id
    LOOP
      EXIT WHEN v_taken >= v_job.most;
      PERFORM ${s}.unblock_v1(v_job.job_id, 'limit');
      v_taken := v_taken + 1;
      v_promoted := v_promoted + 1;
    END LOOP;
  END LOOP;
  RETURN v_promoted;
END $fn$`;

/** The same for every key for which somebody waits, at most p_limit of them, from one after p_after on. What no settle has promoted, for whatever reason. */
export const promoteWaitingSql = (s: string): string => `
CREATE FUNCTION ${s}.promote_waiting_v1(p_after text, p_limit int, OUT promoted int, OUT last_key text) LANGUAGE plpgsql AS $fn$
DECLARE
  v_keys text[];
BEGIN
  promoted := 0;
  WITH RECURSIVE k AS (
    (SELECT w.concurrency_key AS key, 1 AS n FROM ${s}.waiting w WHERE w.blocked_on = 'limit' AND w.concurrency_key > p_after
     ORDER BY w.concurrency_key LIMIT 1)
    UNION ALL
    SELECT x.key, k.n + 1 FROM k CROSS JOIN LATERAL (
      SELECT w.concurrency_key AS key FROM ${s}.waiting w WHERE w.blocked_on = 'limit' AND w.concurrency_key > k.key
      ORDER BY w.concurrency_key LIMIT 1) x WHERE k.n < p_limit
  ) SELECT array_agg(k.key ORDER BY k.key) INTO v_keys FROM k;
  IF v_keys IS NULL THEN RETURN; END IF;
  promoted := ${s}.promote_places_v1(v_keys);
  IF cardinality(v_keys) = p_limit THEN last_key := v_keys[p_limit]; END IF;
END $fn$`;

/**
 * How much a claim may take under the limits of the fleet: of each lane's kind (limits) and of each lane's queue (queue_caps, null: as much as
 * there is). p_fleet: the kinds' limits, null for those without. Leases are counted under a lock that the claim holds to its end; a
 * kind or queue whose lock a rival holds gives nothing this time, as does a queue whose tokens are spent.
 */
export const capsSql = (s: string): string => `
CREATE FUNCTION ${s}.caps_v1(p_queues text[], p_kinds text[], p_limits int[], p_fleet int[], OUT limits int[], OUT queue_caps int[])
LANGUAGE plpgsql AS $fn$
DECLARE
  v record;
  v_cap int;
BEGIN
  limits := p_limits;
  queue_caps := array_fill(NULL::int, ARRAY[cardinality(p_queues)]);
  FOR v IN
    SELECT l.k, min(l.f) AS most, array_agg(l.i) AS lanes FROM unnest(p_kinds, p_fleet) WITH ORDINALITY AS l(k, f, i)
    WHERE l.f IS NOT NULL GROUP BY l.k ORDER BY l.k
  LOOP
    v_cap := 0;
    IF pg_try_advisory_xact_lock(${lockOf(s, "'kind:' || v.k")}) THEN
      v_cap := v.most - (SELECT count(*) FROM ${s}.leases l WHERE l.kind = v.k AND l.limited);
    END IF;
    FOR i IN 1..cardinality(v.lanes) LOOP
      limits[v.lanes[i]] := least(limits[v.lanes[i]], greatest(v_cap, 0));
    END LOOP;
  END LOOP;
  FOR v IN
    SELECT q.name, q.max_running, q.rate_limit, ${tokensLeft} AS tokens,
      (SELECT array_agg(l.i) FROM unnest(p_queues) WITH ORDINALITY AS l(q, i) WHERE l.q = q.name) AS lanes
    FROM ${s}.queues q WHERE q.name = ANY (p_queues) AND (q.max_running IS NOT NULL OR q.rate_limit IS NOT NULL) ORDER BY q.name
  LOOP
    v_cap := 0;
    IF pg_try_advisory_xact_lock(${lockOf(s, "'queue:' || v.name")}) THEN
      v_cap := least(v.max_running - (SELECT count(*) FROM ${s}.leases l WHERE l.queue = v.name AND l.limited),
        CASE WHEN v.rate_limit IS NOT NULL THEN
          (SELECT floor(${tokensLeft}) FROM ${s}.queues q WHERE q.name = v.name) END);
    END IF;
    FOR i IN 1..cardinality(v.lanes) LOOP
      queue_caps[v.lanes[i]] := greatest(v_cap, 0);
    END LOOP;
  END LOOP;
END $fn$`;

/** What the bucket of queue q holds now: it fills by rate_limit in rate_ms, up to rate_limit. */
const tokensLeft = `least(q.rate_limit, coalesce(q.bucket, q.rate_limit) + greatest(0, coalesce(
        date_part('epoch', clock_timestamp() - q.bucket_at) * 1000 * q.rate_limit / nullif(q.rate_ms, 0), 0)))`;

/** Takes tokens for jobs just claimed, or (below zero) puts back those of jobs that were given back unstarted. Locks the queues' rows, in the order of their names. */
export const spendSql = (s: string): string => `
CREATE FUNCTION ${s}.spend_v1(p_queues text[], p_counts int[]) RETURNS void LANGUAGE plpgsql AS $fn$
BEGIN
  PERFORM FROM ${s}.queues q WHERE q.name = ANY (p_queues) AND q.rate_limit IS NOT NULL ORDER BY q.name FOR NO KEY UPDATE;
  UPDATE ${s}.queues q SET bucket = least(q.rate_limit, ${tokensLeft} - u.n), bucket_at = clock_timestamp()
  FROM unnest(p_queues, p_counts) AS u(name, n) WHERE q.name = u.name AND q.rate_limit IS NOT NULL AND u.n <> 0;
END $fn$`;

/**
 * Raises by one the priority of jobs that have been ready for their queue's ageing_ms, at most to 0, at most p_limit of a lane. Each
 * goes to the end of the lane above, and ages on from there. Locks the rows that it moves, skipping locked ones.
 */
export const ageSql = (s: string): string => `
CREATE FUNCTION ${s}.age_v1(p_limit int) RETURNS int LANGUAGE plpgsql AS $fn$
DECLARE
  v record;
  v_moved int;
  v_all int := 0;
BEGIN
  PERFORM pg_current_xact_id();
  FOR v IN
    WITH RECURSIVE q AS (SELECT name, ageing_ms FROM ${s}.queues WHERE ageing_ms IS NOT NULL),
    lane AS (
      SELECT q.name AS queue, q.ageing_ms, x.kind, x.priority FROM q CROSS JOIN LATERAL (
        SELECT r.kind, r.priority FROM ${s}.ready r WHERE r.queue = q.name AND NOT r.suspect ORDER BY r.kind, r.priority LIMIT 1) x
      UNION ALL
      SELECT l.queue, l.ageing_ms, x.kind, x.priority FROM lane l CROSS JOIN LATERAL (
        SELECT r.kind, r.priority FROM ${s}.ready r WHERE r.queue = l.queue AND (r.kind, r.priority) > (l.kind, l.priority) AND NOT r.suspect
        ORDER BY r.kind, r.priority LIMIT 1) x
    ) SELECT * FROM lane WHERE priority > 0
  LOOP
    WITH h AS MATERIALIZED (
      -- The head only: who stands further back has hardly waited longer.
      SELECT r.job_id, r.since FROM ${s}.ready r
      WHERE r.queue = v.queue AND r.kind = v.kind AND r.priority = v.priority AND NOT r.suspect ORDER BY r.position LIMIT p_limit
    ), c AS MATERIALIZED (
      SELECT r.ctid AS row_id FROM h JOIN ${s}.ready r ON r.job_id = h.job_id
      WHERE h.since <= clock_timestamp() - v.ageing_ms * interval '1 ms' AND r.priority = v.priority AND ${few('h.job_id')}
      FOR UPDATE OF r SKIP LOCKED
    ), d AS (DELETE FROM ${s}.ready r WHERE r.ctid = ANY (ARRAY (SELECT row_id FROM c)) RETURNING r.*)
    INSERT INTO ${s}.ready (job_id, attempt, crashes, releases, snoozes, payload_bytes, priority, suspect, keyed, saved, queue, kind, concurrency_key,
      batch_id)
    SELECT d.job_id, d.attempt, d.crashes, d.releases, d.snoozes, d.payload_bytes, d.priority - 1, d.suspect, d.keyed, d.saved, d.queue, d.kind,
      d.concurrency_key, d.batch_id FROM d ORDER BY d.position;
    GET DIAGNOSTICS v_moved = ROW_COUNT;
    v_all := v_all + v_moved;
  END LOOP;
  RETURN v_all;
END $fn$`;
