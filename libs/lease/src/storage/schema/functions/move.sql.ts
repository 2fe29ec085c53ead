import { few, inLiteral } from '../quote';
import { TOO_LATE } from './step.sql';

/**
 * The one function that takes a job out of a lease (law 7: every path back to the queue does the same accounting). Settles,
 * drains, give-backs and all three ways of rescue call it.
 *
 * Each element of `p_moves`: { job, token, worker, event, error?, reason?, delayMs?, result?, alone?, overdue? }. Events:
 *
 *   complete   the handler returned                     -> finished/completed; wins over a stop request
 *   fail       the handler reported an error            -> waiting with backoff, or finished/failed out of attempts
 *   fatal      … an error that no retry can mend         -> finished/failed
 *   snooze     the handler asked for later              -> waiting; the attempt is given back, or finished/failed out of snoozes
 *   stopped    the handler ended on a stop request      -> finished/cancelled or waiting/paused, as the lease says
 *   release    a drain gave it back                     -> ready; the attempt is given back, a release counted
 *   return     the same, charged to nobody              -> ready
 *   giveback   it was never started                     -> ready; no run is recorded
 *   crash      its worker is gone                       -> ready; a crash charged, the attempt given back unless onLost charges it
 *   lostdrain  its worker went while draining           -> ready; a release counted, since deploys spend no crash budget
 *   deadline   its deadline passed                      -> waiting with backoff; the attempt is charged
 *   revoke     an operator took it away                 -> finished/cancelled, at once
 *
 * Keys and places of concurrency keys are let go as well; see `release_keys_v1` and `promote_places_v1`.
 *
 * A cancel request outranks everything but a success; a spent budget outranks a pause; a pause outranks the requeue.
 *
 * Locks: the named `leases` rows, in the order of job_id, and only those whose token and worker are the ones named; a row that is
 * gone or was leased anew is not touched. With `p_skip` rows locked by somebody else are left for another time: whether one that is missing from
 * the answer is lost or only locked, the caller looks up. Without, it waits for them. `overdue`: the deadline must have passed, also now that the row is
 * locked. With `p_open` the transaction is a user's and may stay open for long: places of concurrency keys are then promoted after its
 * commit, since their lock would keep others from starting. Returns the moves made.
 */
export const moveSql = (s: string): string => `
CREATE FUNCTION ${s}.move_v1(p_moves json, p_skip boolean, p_open boolean DEFAULT false)
RETURNS TABLE (job_id bigint, token bigint, place text, outcome text, attempt int, crashes int, kind text, queue text, worker_id text,
  reason text, batch_id bigint)
LANGUAGE plpgsql AS $fn$
#variable_conflict use_column
DECLARE
  v_now timestamptz := clock_timestamp();
  v_jobs bigint[];
  v_keyed bigint[];
  v_places text[];
BEGIN
  IF p_skip THEN
    SELECT array_agg(h.job_id) INTO v_jobs FROM (
      SELECT l.job_id FROM json_to_recordset(p_moves) AS m(job bigint, token bigint, worker text, overdue boolean)
      JOIN ${s}.leases l ON l.job_id = m.job AND l.token = m.token AND l.worker_id = m.worker
      WHERE (m.overdue IS NOT TRUE OR l.deadline_at <= v_now) AND ${few('m.job')}
      ORDER BY l.job_id FOR UPDATE OF l SKIP LOCKED) h;
  ELSE
    SELECT array_agg(h.job_id) INTO v_jobs FROM (
      SELECT l.job_id FROM json_to_recordset(p_moves) AS m(job bigint, token bigint, worker text)
      JOIN ${s}.leases l ON l.job_id = m.job AND l.token = m.token AND l.worker_id = m.worker
      WHERE ${few('m.job')} ORDER BY l.job_id FOR UPDATE OF l) h;
  END IF;
  IF v_jobs IS NULL THEN RETURN; END IF;

  SELECT array_agg(l.job_id) FILTER (WHERE l.keyed), array_agg(l.concurrency_key) FILTER (WHERE l.concurrency_key <> '') INTO v_keyed, v_places
  FROM ${s}.leases l WHERE l.job_id = ANY (v_jobs) AND (l.keyed OR l.concurrency_key <> '');

  RETURN QUERY
  WITH m AS MATERIALIZED (
    SELECT DISTINCT ON (x.job, x.token, x.worker) x.* FROM json_to_recordset(p_moves) AS x(job bigint, token bigint, worker text, event text,
      error json, reason text, "delayMs" bigint, result json, alone boolean)
    WHERE x.job = ANY (v_jobs)
  ), d AS (
    DELETE FROM ${s}.leases l USING m
    WHERE l.job_id = m.job AND l.token = m.token AND l.worker_id = m.worker AND ${few('m.job')}
    RETURNING l.*, m.event, m.error, m.reason, m."delayMs" AS delay_ms, m.result,
      m.event = 'crash' AND l.suspect AND coalesce(m.alone, false) AS convicted
  ), b AS MATERIALIZED (
    SELECT d.*, j.max_attempts, j.max_crashes, j.max_releases, j.max_snoozes, j.payload_bytes, j.backoff,
      CASE WHEN d.event IN ('fail', 'fatal', 'complete', 'deadline') OR d.event IN ('crash', 'lostdrain') AND j.charge_lost THEN d.attempt
           ELSE greatest(d.attempt - 1, 0) END AS new_attempt,
      CASE WHEN d.event = 'crash' THEN
             -- Short of a conviction the last crash never counts: the job goes on as a suspect and is tried alone.
             least(least(d.crashes, 2147483646) + 1, CASE WHEN d.convicted THEN 2147483647 ELSE greatest(j.max_crashes, 1) - 1 END)
           WHEN d.event IN ('fail', 'fatal', 'complete', 'snooze', 'stopped') THEN 0
           ELSE d.crashes END AS new_crashes,
      d.releases + CASE WHEN d.event IN ('release', 'lostdrain') AND d.releases < 2147483647 THEN 1 ELSE 0 END AS new_releases,
      d.snoozes + CASE WHEN d.event = 'snooze' AND d.snoozes < 2147483647 THEN 1 ELSE 0 END AS new_snoozes,
      CASE WHEN d.event = 'complete' THEN 'completed'
           WHEN d.event IN ('fail', 'fatal') THEN 'failed'
           WHEN d.event = 'snooze' THEN 'snoozed'
           WHEN d.event = 'stopped' AND d.cancel_requested OR d.event = 'revoke' THEN 'cancelled'
           WHEN d.event = 'stopped' AND d.pause_requested THEN 'paused'
           WHEN d.event IN ('crash', 'lostdrain', 'deadline') THEN 'dead'
           ELSE 'released' END AS new_outcome,
      CASE WHEN d.event IN ('fail', 'deadline') AND d.attempt >= j.max_attempts THEN
             format(' (attempt %s of %s)', d.attempt, j.max_attempts)
           WHEN d.event IN ('crash', 'lostdrain') AND j.charge_lost AND d.attempt >= j.max_attempts THEN
             format(' (attempt %s of %s, charged since onLost is charge)', d.attempt, j.max_attempts)
           WHEN d.event = 'snooze' AND d.snoozes >= j.max_snoozes THEN
             format('snoozed %s times (maxSnoozes %s)', d.snoozes, j.max_snoozes)
           WHEN d.convicted THEN
             format(' (crashed its worker %s times, the last time running alone; maxCrashes %s)', d.crashes::bigint + 1, j.max_crashes)
           WHEN d.event IN ('release', 'lostdrain') AND d.releases >= j.max_releases THEN
             format(' (released %s times; maxReleases %s)', d.releases, j.max_releases)
           WHEN d.event = 'fatal' THEN '' END AS spent
    FROM d JOIN ${s}.jobs j ON j.id = d.job_id
  ), k AS MATERIALIZED (
    SELECT b.*,
      CASE WHEN b.event = 'complete' THEN 'completed'
           WHEN b.cancel_requested OR b.event = 'revoke' THEN 'cancelled'
           WHEN b.spent IS NOT NULL THEN 'failed'
           WHEN b.pause_requested THEN 'paused'
           WHEN b.event IN ('fail', 'deadline', 'snooze') THEN 'scheduled'
           ELSE 'ready' END AS new_place,
      CASE WHEN b.event = 'complete' THEN CASE WHEN b.cancel_requested THEN '${TOO_LATE}' END
           WHEN b.cancel_requested OR b.event = 'revoke' THEN coalesce(b.stop_reason, b.reason, 'cancelled')
           WHEN b.spent IS NOT NULL THEN CASE b.event WHEN 'snooze' THEN '' ELSE coalesce(b.reason, b.error->>'message', b.event) END || b.spent
           END AS new_reason,
      b.new_crashes::bigint + 1 >= b.max_crashes AS new_suspect,
      -- Full jitter above the base. The exponent is clamped first (2^40 times a day still fits a double), then the delay.
      v_now + interval '1 ms' * coalesce(b.delay_ms, base.ms + random() * (least(max.ms, base.ms * 2 ^ least(b.attempt, 40)) - base.ms)) AS run_at
    FROM b
    CROSS JOIN LATERAL (SELECT coalesce((b.backoff->>'baseMs')::float8, 1000) AS ms) base
    CROSS JOIN LATERAL (SELECT greatest(coalesce((b.backoff->>'maxMs')::float8, 86400000), base.ms) AS ms) max
  ), f AS (
    INSERT INTO ${s}.finished (job_id, token, started_at, finished_at, attempt, crashes, releases, snoozes, priority, state, outcome,
      worker_id, queue, kind, reason, error, result, batch_id)
    SELECT k.job_id, CASE WHEN k.event <> 'giveback' THEN k.token END, CASE WHEN k.event <> 'giveback' THEN k.claimed_at END, v_now,
      CASE WHEN k.event = 'giveback' THEN k.new_attempt ELSE k.attempt END, CASE WHEN k.event = 'complete' THEN k.crashes ELSE k.new_crashes END, k.new_releases, k.new_snoozes, k.priority,
      k.new_place, CASE WHEN k.event = 'giveback' THEN 'cancelled' ELSE k.new_outcome END,
      CASE WHEN k.event <> 'giveback' THEN k.worker_id END, k.queue, k.kind,
      k.new_reason,
      k.error, k.result, k.batch_id
    FROM k WHERE k.new_place IN ('completed', 'failed', 'cancelled')
  ), h AS (
    INSERT INTO ${s}.runs (job_id, token, started_at, ended_at, attempt, outcome, worker_id, error)
    SELECT k.job_id, k.token, k.claimed_at, v_now, k.attempt, k.new_outcome, k.worker_id,
      coalesce(k.error, CASE WHEN k.reason IS NOT NULL THEN json_build_object('message', k.reason) END)
    FROM k WHERE k.new_place NOT IN ('completed', 'failed', 'cancelled') AND k.event <> 'giveback'
  ), w AS (
    INSERT INTO ${s}.waiting (job_id, run_at, attempt, crashes, releases, snoozes, payload_bytes, priority, suspect, keyed, saved, reason, queue,
      kind, concurrency_key, batch_id)
    SELECT k.job_id, CASE WHEN k.new_place = 'scheduled' OR k.event IN ('fail', 'deadline', 'snooze') THEN k.run_at END, k.new_attempt, k.new_crashes,
      k.new_releases, k.new_snoozes, k.payload_bytes, k.priority, k.new_suspect, k.keyed, k.saved, k.new_place, k.queue, k.kind,
      k.concurrency_key, k.batch_id
    FROM k WHERE k.new_place IN ('scheduled', 'paused')
  ), r AS (
    -- Given back: to the head of its lane, first in, first out.
    INSERT INTO ${s}.ready (job_id, position, attempt, crashes, releases, snoozes, payload_bytes, priority, suspect, keyed, saved, queue, kind,
      concurrency_key, batch_id)
    SELECT k.job_id, nextval('${inLiteral(s)}.positions') - 4611686018427387904, k.new_attempt, k.new_crashes, k.new_releases,
      k.new_snoozes, k.payload_bytes, k.priority, k.new_suspect, k.keyed, k.saved, k.queue, k.kind, k.concurrency_key, k.batch_id
    FROM k WHERE k.new_place = 'ready' ORDER BY k.token
  )
  SELECT k.job_id, k.token, k.new_place, k.new_outcome, k.attempt, k.new_crashes, k.kind, k.queue, k.worker_id, k.new_reason, k.batch_id FROM k;

  IF v_keyed IS NOT NULL THEN
    v_keyed := (SELECT array_agg(x) FROM unnest(v_keyed) AS x WHERE ${s}.state_v1(x) IN ('completed', 'failed', 'cancelled'));
    IF v_keyed IS NOT NULL THEN PERFORM ${s}.release_keys_v1(v_keyed); END IF;
  END IF;
  IF v_places IS NOT NULL AND NOT p_open THEN PERFORM ${s}.promote_places_v1(v_places); END IF;
  -- What was never started takes nothing from the rate of its queue.
  IF EXISTS (SELECT FROM ${s}.queues WHERE rate_limit IS NOT NULL) THEN
    PERFORM ${s}.spend_v1(array_agg(x.queue), array_agg(x.n)) FROM (
      SELECT j.queue, -count(*)::int AS n FROM json_to_recordset(p_moves) AS m(job bigint, event text)
      JOIN ${s}.jobs j ON j.id = m.job WHERE m.event = 'giveback' AND m.job = ANY (v_jobs) AND ${few('m.job')} GROUP BY j.queue) x;
  END IF;
END $fn$`;
