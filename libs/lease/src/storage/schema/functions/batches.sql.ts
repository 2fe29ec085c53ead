import { FAILED_FAST } from '../../../batches/stop-reasons';
import { few } from '../quote';
import { UNTIL, since } from './batch-edges.sql';

/** One look follows edges from layer to layer for no longer than this. */
const FOLLOWED_MS = 200;
/** Unmet needs of one member that one look of the sweep follows. */
const LOOKED_AT = 100;

/** Whether anything of a batch is unfinished, in one look at all state tables: a member that is moving between two of them is seen in one. */
const unfinished = (
  s: string,
  batch: string,
): string => `(EXISTS (SELECT FROM ${s}.leases l WHERE l.batch_id = ${batch} AND l.batch_id > 0)
      OR EXISTS (SELECT FROM ${s}.ready r WHERE r.batch_id = ${batch} AND r.batch_id > 0)
      OR EXISTS (SELECT FROM ${s}.waiting w WHERE w.batch_id = ${batch} AND w.batch_id > 0))`;

/**
 * Ends those batches of which nothing is unfinished: status, counts and the jobs of their hooks, once a generation. Returns [[batch, status, name, generation], …];
 * one that is not at its end, or was ended by somebody else, is not in it. The caller has their rows locked, by a statement before: so whoever finished a member
 * and looked before has committed, and is seen. Probe and counts are ONE statement over all state tables, since a member that moves between two is invisible to
 * two statements; and it does not write, since a statement that reads and writes would read what was there before it waited for the row.
 */
export const endBatchesSql = (s: string): string => `
CREATE FUNCTION ${s}.end_batches_v1(p_batches bigint[]) RETURNS json LANGUAGE plpgsql AS $fn$
DECLARE
  ${UNTIL}
  v_ids bigint[];
  v_status text[];
  v_failed int[];
  v_cancelled int[];
  v_hooked boolean;
  v_hooks json;
  v_lanes json;
  r_ended json;
BEGIN
  SELECT array_agg(c.id), array_agg(CASE WHEN c.failed > 0 THEN 'failed' WHEN c.members = c.cancelled AND (c.cancelled > 0 OR c.stopping) THEN 'cancelled'
      ELSE 'completed' END), array_agg(c.failed), array_agg(c.cancelled), bool_or(c.hooked)
  INTO v_ids, v_status, v_failed, v_cancelled, v_hooked FROM (
    SELECT b.id, b.members, b.stopping, b.hooks IS NOT NULL AS hooked, n.failed, n.cancelled
    FROM unnest(p_batches) AS u(id) JOIN ${s}.batches b ON b.id = u.id AND ${few('u.id')} CROSS JOIN LATERAL (
      SELECT count(*) FILTER (WHERE f.state = 'failed') AS failed, count(*) FILTER (WHERE f.state = 'cancelled') AS cancelled
      FROM ${s}.finished f WHERE f.batch_id = b.id AND f.batch_id > 0 AND f.state <> 'completed' AND ${since('f', 'b')}) n
    WHERE b.sealed AND b.status = 'running' AND NOT ${unfinished(s, 'b.id')} ORDER BY b.id) c;
  IF v_ids IS NULL THEN RETURN NULL; END IF;
  WITH x AS (
    UPDATE ${s}.batches b SET status = u.status, finished_at = clock_timestamp(), completed = b.members - u.failed - u.cancelled, failed = u.failed,
      cancelled = u.cancelled
    FROM unnest(v_ids, v_status, v_failed, v_cancelled) AS u(id, status, failed, cancelled) WHERE b.id = u.id AND ${few('u.id')}
    RETURNING b.id, b.status, b.name, b.generation
  ) SELECT json_agg(json_build_array(x.id::text, x.status, x.name, x.generation)) INTO r_ended FROM x;
  IF v_hooked THEN
    SELECT json_agg((left(h.head::text, -1) || ',"payloads":[' || left(h.payload::text, -1) || CASE h.payload::text WHEN '{}' THEN '' ELSE ',' END
        || '"batch":' || json_build_object('id', b.id::text, 'name', b.name, 'status', b.status, 'generation', b.generation,
          'completed', b.completed, 'failed', b.failed, 'cancelled', b.cancelled) || '}]}')::json ORDER BY u.i),
      json_agg(DISTINCT jsonb_build_array(h.head->'queue', h.head->'kind'))
    INTO v_hooks, v_lanes
    FROM unnest(v_ids) WITH ORDINALITY AS u(id, i) JOIN ${s}.batches b ON b.id = u.id AND ${few('u.id')}
    CROSS JOIN LATERAL json_to_recordset(b.hooks) AS h("on" text, head json, payload json) WHERE h."on" IN ('finished', b.status);
    IF v_hooks IS NOT NULL THEN
      PERFORM ${s}.enqueue_v1(v_hooks);
      PERFORM ${s}.announce_v1(v_lanes::text);
    END IF;
  END IF;
  RETURN r_ended;
END $fn$`;

/** Wakes workers of some lanes, given as a JSON text, at the commit. */
export const announceSql = (s: string, channel: string): string => `
CREATE FUNCTION ${s}.announce_v1(p_lanes text) RETURNS void LANGUAGE plpgsql AS $fn$
BEGIN
  PERFORM pg_notify('${channel}', CASE WHEN octet_length(p_lanes) < 7900 THEN p_lanes ELSE '[]' END);
END $fn$`;

/**
 * After the commit that finished members (`p_jobs`) of some batches: follows their edges, ends the batches that are at their end, begins to cancel one
 * that fails fast. A new call, never a part of that commit: who looks before others have committed does not see them, and of two that finish at
 * once the later look sees both.
 *
 * Sealed batches without edges that do not fail fast cost three probes of an index each, whatever their size; the rows of those at their end are locked, unless
 * somebody else has them, and ended all at once. Of each other batch the row is locked (FOR NO KEY UPDATE) first of all, waiting for lock_timeout at
 * most, then what `follow_all_v1` says. What could not be locked comes back as `busy`, for another call.
 *
 * Returns { busy: [batch…], again: [[batch, [job…]], …] (of which more follows: for another call), doomed: [[job, kind, queue, attempt, reason, state], …] (failed or cancelled by this), stop: [batch…] (to be cancelled), plain: [batch…] (nothing follows from
 * an end of one member but, perhaps, the batch's), ended: [[batch, status, name, generation], …] }.
 */
export const afterMembersSql = (s: string): string => `
CREATE FUNCTION ${s}.after_members_v1(p_batches bigint[], p_jobs bigint[]) RETURNS json LANGUAGE plpgsql AS $fn$
DECLARE
  ${UNTIL}
  b ${s}.batches;
  v_id bigint;
  v_lanes json;
  v_doomed json[];
  v_rest bigint[];
  v_failing boolean;
  v_ends bigint[];
  v_locked bigint[];
  v_ended json;
  r_busy text[] := '{}';
  r_plain bigint[];
  r_again json[] := '{}';
  r_stop text[] := '{}';
  r_doomed json[] := '{}';
  r_ended json[] := '{}';
BEGIN
  SELECT array_agg(x.id), array_agg(x.id) FILTER (WHERE NOT ${unfinished(s, 'x.id')}) INTO r_plain, v_ends
  FROM unnest(p_batches) AS u(id) JOIN ${s}.batches x ON x.id = u.id AND ${few('u.id')}
  WHERE x.status = 'running' AND x.sealed AND NOT x.edged AND NOT x.fail_fast;

  FOR v_id IN SELECT DISTINCT u.id FROM unnest(p_batches) AS u(id) WHERE u.id <> ALL (coalesce(r_plain, '{}')) ORDER BY u.id LOOP
    SELECT * INTO b FROM ${s}.batches WHERE id = v_id;
    CONTINUE WHEN NOT FOUND OR b.status <> 'running';
    v_failing := b.fail_fast AND NOT b.stopping AND ${failed(s)};
    -- One that is open may just be given edges.
    CONTINUE WHEN b.sealed AND NOT b.edged AND NOT v_failing AND ${unfinished(s, 'v_id')};
    -- The lock also gives the transaction its number, before any position is taken (see enqueue_v1); most looks end before, and write nothing.
    v_doomed := NULL;
    v_rest := NULL;
    BEGIN
      SELECT * INTO b FROM ${s}.batches WHERE id = v_id FOR NO KEY UPDATE;
      v_failing := b.status = 'running' AND b.fail_fast AND NOT b.stopping AND ${failed(s)};
      -- Before the edges: those behind the one that failed are cancelled with the rest, in whatever layer.
      IF v_failing THEN ${stop(s)} END IF;
      IF b.edged AND b.status = 'running' THEN
        SELECT e.lanes, e.doomed, e.rest INTO v_lanes, v_doomed, v_rest
        FROM ${s}.follow_all_v1(v_id, p_jobs, clock_timestamp() + interval '${FOLLOWED_MS} ms') e;
        IF v_lanes IS NOT NULL THEN PERFORM ${s}.announce_v1(v_lanes::text); END IF;
        IF b.fail_fast AND NOT b.stopping AND NOT v_failing AND cardinality(v_doomed) > 0 THEN
          v_failing := true;
          ${stop(s)}
        END IF;
      END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
      r_busy := r_busy || v_id::text;
      CONTINUE;
    END;
    CONTINUE WHEN b.id IS NULL OR b.status <> 'running';
    v_ended := ${s}.end_batches_v1(ARRAY[v_id]);
    IF cardinality(v_rest) > 0 THEN r_again := r_again || json_build_array(v_id::text, v_rest::text[]); END IF;
    r_doomed := r_doomed || v_doomed;
    IF v_ended IS NOT NULL THEN r_ended := r_ended || ARRAY(SELECT json_array_elements(v_ended));
    ELSIF v_failing THEN r_stop := r_stop || v_id::text; END IF;
  END LOOP;

  -- Last, and without waiting: whoever waits in the loop above holds nothing that another look waits for in vain.
  IF v_ends IS NOT NULL THEN
    v_locked := ARRAY(SELECT x.id FROM ${s}.batches x WHERE x.id = ANY (v_ends) AND ${few('x.id')} ORDER BY x.id FOR NO KEY UPDATE SKIP LOCKED);
    r_busy := r_busy || ARRAY(SELECT u.id::text FROM unnest(v_ends) AS u(id) WHERE u.id <> ALL (v_locked));
    v_ended := ${s}.end_batches_v1(v_locked);
    IF v_ended IS NOT NULL THEN r_ended := r_ended || ARRAY(SELECT json_array_elements(v_ended)); END IF;
  END IF;
  RETURN json_build_object('busy', r_busy, 'again', r_again, 'doomed', r_doomed, 'stop', r_stop, 'plain', coalesce(r_plain::text[], '{}'), 'ended', r_ended);
END $fn$`;

/** Whether a member of the batch `b` has failed, in this generation. */
const failed = (
  s: string,
  more = '',
): string => `EXISTS (SELECT FROM ${s}.finished f WHERE f.batch_id = b.id AND f.batch_id > 0 AND f.state <> 'completed'
      AND f.state = 'failed' AND f.finished_at >= b.since AND ${since('f', 'b')} ${more})`;

/** Marks the batch `b`, which is locked, as one that its first failure cancels. */
const stop = (s: string): string => `
        UPDATE ${s}.batches SET stopping = true, stop_reason = '${FAILED_FAST}', sealed = true,
          members = (SELECT count(*) FROM ${s}.jobs j WHERE j.batch_id = v_id AND j.batch_id IS NOT NULL) WHERE id = v_id;`;

/** A member of a batch that has ended comes back: the batch's next generation begins. Locks the batch to the end of the transaction, so that nobody ends it meanwhile. */
export const reopenBatchSql = (s: string): string => `
CREATE FUNCTION ${s}.reopen_batch_v1(p_batch bigint) RETURNS void LANGUAGE plpgsql AS $fn$
BEGIN
  PERFORM FROM ${s}.batches WHERE id = p_batch FOR NO KEY UPDATE;
  UPDATE ${s}.batches SET status = 'running', generation = generation + 1, since = clock_timestamp(), finished_at = NULL, completed = NULL,
    failed = NULL, cancelled = NULL, stopping = false, stop_reason = NULL WHERE id = p_batch AND status <> 'running';
END $fn$`;

/**
 * What a crash between a commit and the look after it has left: batches at their end (`ended`; for how long, the caller knows who saw it before), members that
 * ended longer than `p_grace_ms` ago and whose edges nobody followed (`of_jobs`, of the batches `jobs`), and batches that are being cancelled and not yet done (`stop`). From one batch and one waiting member on; at most
 * `p_limit` of each. Locks nothing.
 */
export const sweepBatchesSql = (s: string): string => `
CREATE FUNCTION ${s}.sweep_batches_v1(p_batch bigint, p_job bigint, p_limit int, p_grace_ms int, OUT ended bigint[], OUT of_jobs bigint[],
  OUT jobs bigint[], OUT stop bigint[], OUT last_batch bigint, OUT last_job bigint)
LANGUAGE plpgsql AS $fn$
DECLARE
  ${UNTIL}
  b ${s}.batches;
  v record;
  v_before timestamptz := clock_timestamp() - p_grace_ms * interval '1 ms';
  v_goes_on boolean;
  v_count int := 0;
BEGIN
  ended := '{}'; of_jobs := '{}'; jobs := '{}'; stop := '{}';
  FOR b IN SELECT * FROM ${s}.batches x WHERE x.status = 'running' AND x.id > p_batch ORDER BY x.id LIMIT p_limit LOOP
    v_count := v_count + 1;
    IF v_count = p_limit THEN last_batch := b.id; END IF;
    CONTINUE WHEN NOT b.sealed AND NOT b.stopping AND NOT b.fail_fast;
    v_goes_on := ${unfinished(s, 'b.id')};
    IF v_goes_on THEN
      IF b.stopping THEN stop := stop || b.id;
      ELSIF b.fail_fast AND ${failed(s, 'AND f.finished_at < v_before')} THEN ended := ended || b.id; END IF;
    ELSIF b.sealed THEN ended := ended || b.id; END IF;
  END LOOP;
  v_count := 0;
  FOR v IN SELECT w.job_id, w.batch_id FROM ${s}.waiting w WHERE w.blocked_on = 'jobs' AND w.job_id > p_job ORDER BY w.job_id LIMIT p_limit LOOP
    v_count := v_count + 1;
    IF v_count = p_limit THEN last_job := v.job_id; END IF;
    SELECT * INTO b FROM ${s}.batches x WHERE x.id = v.batch_id;
    of_jobs := of_jobs || ARRAY(SELECT d.needs FROM (
        SELECT x.needs FROM ${s}.job_dependencies x WHERE x.job_id = v.job_id AND NOT x.met LIMIT ${LOOKED_AT}) d
      JOIN ${s}.finished f ON f.job_id = d.needs AND f.batch_id = v.batch_id AND ${since('f', 'b')}
      WHERE f.finished_at < v_before);
    IF cardinality(of_jobs) > cardinality(jobs) THEN
      jobs := jobs || array_fill(v.batch_id, ARRAY[cardinality(of_jobs) - cardinality(jobs)]);
    END IF;
  END LOOP;
END $fn$`;

/**
 * Deletes a batch that has ended, or has no members, with all of them: the whole or nothing. Answers 'deleted', 'unknown', 'running', 'contended' (somebody has a row
 * of it locked), or 'referenced' (a foreign key of the user's holds a member). Locks the batch, then its members' rows of jobs, in the order of their ids,
 * waiting for none of them (who is about to point at one has it locked), then their finished rows.
 */
export const deleteBatchSql = (s: string): string => `
CREATE FUNCTION ${s}.delete_batch_v1(p_batch bigint, OUT answer text, OUT deleted int) LANGUAGE plpgsql AS $fn$
DECLARE
  v_jobs bigint[];
BEGIN
  deleted := 0;
  BEGIN
    SET CONSTRAINTS ALL IMMEDIATE;
    PERFORM FROM ${s}.batches WHERE id = p_batch FOR UPDATE;
    IF NOT FOUND THEN answer := 'unknown'; RETURN; END IF;
    v_jobs := ARRAY(SELECT j.id FROM ${s}.jobs j WHERE j.batch_id = p_batch AND j.batch_id IS NOT NULL ORDER BY j.id);
    IF cardinality(v_jobs) > 0 AND EXISTS (SELECT FROM ${s}.batches WHERE id = p_batch AND status = 'running') THEN answer := 'running'; RETURN; END IF;
    IF v_jobs <> ARRAY(SELECT j.id FROM ${s}.jobs j WHERE j.id = ANY (v_jobs) AND ${few('j.id')} ORDER BY j.id FOR UPDATE SKIP LOCKED) THEN
      answer := 'contended';
      RETURN;
    END IF;
    DELETE FROM ${s}.finished f WHERE f.job_id = ANY (v_jobs) AND ${few('f.job_id')}
      AND f.finished_at >= (SELECT b.created_at - interval '1 day' FROM ${s}.batches b WHERE b.id = p_batch);
    DELETE FROM ${s}.job_dependencies d WHERE d.batch_id = p_batch;
    deleted := ${s}.forget_v1(v_jobs);
    IF deleted < cardinality(v_jobs) THEN RAISE foreign_key_violation; END IF;
    DELETE FROM ${s}.batches WHERE id = p_batch;
    answer := 'deleted';
  EXCEPTION
    WHEN foreign_key_violation OR restrict_violation THEN answer := 'referenced'; deleted := 0;
    WHEN lock_not_available OR deadlock_detected THEN answer := 'contended'; deleted := 0;
  END;
END $fn$`;

/**
 * Retention of batches: deletes those that ended longer ago than is kept of their status (ms; null: for ever), the oldest first, from one on, for a third of a second.
 * `next_at`, `next_id`: where to go on; null: that was all. Locks as `delete_batch_v1` says.
 */
export const pruneBatchesSql = (s: string): string => `
CREATE FUNCTION ${s}.prune_batches_v1(p_completed bigint, p_failed bigint, p_cancelled bigint, p_at timestamptz, p_id bigint,
  OUT deleted int, OUT held int, OUT next_at timestamptz, OUT next_id bigint)
LANGUAGE plpgsql AS $fn$
DECLARE
  v_until timestamptz := clock_timestamp() + interval '300 ms';
  v record;
  v_done record;
BEGIN
  deleted := 0;
  held := 0;
  FOR v IN
    SELECT x.id, x.finished_at FROM ${s}.batches x WHERE x.finished_at IS NOT NULL AND (x.finished_at, x.id) > (p_at, p_id)
      AND date_part('epoch', clock_timestamp() - x.finished_at) * 1000 >= CASE x.status WHEN 'completed' THEN p_completed WHEN 'failed' THEN p_failed
        ELSE p_cancelled END
    ORDER BY x.finished_at, x.id LIMIT 1000
  LOOP
    SELECT * INTO v_done FROM ${s}.delete_batch_v1(v.id);
    deleted := deleted + v_done.deleted;
    IF v_done.answer <> 'deleted' THEN held := held + 1; END IF;
    next_at := v.finished_at;
    next_id := v.id;
    IF clock_timestamp() > v_until THEN RETURN; END IF;
  END LOOP;
  next_at := NULL;
  next_id := NULL;
END $fn$`;
