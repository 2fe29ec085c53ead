import { few, inLiteral } from '../quote';

/** Members that one call frees or fails, at most: then the caller comes again. */
const CHUNK = 5000;
/** Unmet needs of one member that one look of the sweep follows. */
const LOOKED_AT = 100;

/** Whether anything of a batch is unfinished, in one look at all state tables: a member that is moving between two of them is seen in one. */
const unfinished = (
  s: string,
  batch: string,
): string => `(EXISTS (SELECT FROM ${s}.leases l WHERE l.batch_id = ${batch} AND l.batch_id > 0)
      OR EXISTS (SELECT FROM ${s}.ready r WHERE r.batch_id = ${batch} AND r.batch_id > 0)
      OR EXISTS (SELECT FROM ${s}.waiting w WHERE w.batch_id = ${batch} AND w.batch_id > 0))`;

/** A day's slack for a clock that a failover set back. Without the bounds every partition is probed, also those of the days ahead. */
const since = (finished: string, batch: string): string =>
  `${finished}.finished_at BETWEEN ${batch}.created_at - interval '1 day' AND v_until`;
const UNTIL = `v_until timestamptz := clock_timestamp() + interval '1 day';`;

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

/**
 * What members need one another for, once some of them have ended (`p_jobs`): marks the edges that are met, frees members of which all are, and
 * fails those that need a member which failed or was cancelled; with a reason that names the first. In a batch that is being cancelled these are
 * cancelled too. At most 5000 of each; `again`: there are more. The caller has the batch locked. Locks the waiting rows of those members in
 * the order of their ids before it marks anything: a resume, which reads the marks under the same lock, sees them or is seen.
 */
export const followEdgesSql = (s: string): string => `
CREATE FUNCTION ${s}.follow_edges_v1(p_batch bigint, p_jobs bigint[], OUT freed json, OUT doomed json, OUT again boolean) LANGUAGE plpgsql AS $fn$
DECLARE
  ${UNTIL}
  b ${s}.batches;
  v_now timestamptz := clock_timestamp();
  v_deps bigint[];
  v_locked bigint[];
  v_free bigint[];
BEGIN
  SELECT * INTO b FROM ${s}.batches WHERE id = p_batch;
  again := false;
  v_deps := ARRAY(SELECT DISTINCT d.job_id FROM ${s}.job_dependencies d
    JOIN ${s}.finished f ON f.job_id = d.needs AND f.batch_id = p_batch AND ${since('f', 'b')}
    WHERE d.needs = ANY (p_jobs) AND ${few('d.needs')} AND NOT d.met AND (f.state = 'completed' OR d.on_finished) ORDER BY d.job_id LIMIT ${CHUNK});
  IF cardinality(v_deps) > 0 THEN
    again := cardinality(v_deps) = ${CHUNK};
    v_locked := ${lockSql(s)};
    -- One that was resumed meanwhile is another row by now.
    WHILE v_locked <> ARRAY(SELECT w.job_id FROM ${s}.waiting w WHERE w.job_id = ANY (v_deps) AND ${few('w.job_id')} ORDER BY w.job_id) LOOP
      v_locked := ${lockSql(s)};
    END LOOP;
    UPDATE ${s}.job_dependencies d SET met = true FROM ${s}.finished f
    WHERE d.job_id = ANY (v_deps) AND ${few('d.job_id')} AND d.needs = ANY (p_jobs) AND NOT d.met AND f.job_id = d.needs AND f.batch_id = p_batch
      AND ${since('f', 'b')} AND (f.state = 'completed' OR d.on_finished);
    v_free := ARRAY(SELECT u.id FROM unnest(v_locked) AS u(id)
      WHERE NOT EXISTS (SELECT FROM ${s}.job_dependencies d WHERE d.job_id = u.id AND NOT d.met));
    UPDATE ${s}.waiting w SET reason = 'scheduled', blocked_on = NULL
    WHERE w.job_id = ANY (v_free) AND ${few('w.job_id')} AND w.blocked_on = 'jobs' AND w.run_at > v_now;
    WITH d AS (
      DELETE FROM ${s}.waiting w WHERE w.job_id = ANY (v_free) AND ${few('w.job_id')} AND w.blocked_on = 'jobs' RETURNING w.*
    ), r AS (
      INSERT INTO ${s}.ready (job_id, position, attempt, crashes, releases, snoozes, payload_bytes, priority, suspect, keyed, saved, queue, kind,
        concurrency_key, batch_id)
      SELECT d.job_id, nextval('${inLiteral(s)}.positions') - 4611686018427387904, d.attempt, d.crashes, d.releases, d.snoozes, d.payload_bytes,
        d.priority, d.suspect, d.keyed, d.saved, d.queue, d.kind, d.concurrency_key, d.batch_id FROM d ORDER BY d.job_id
    ) SELECT json_agg(DISTINCT jsonb_build_array(d.queue, d.kind)) INTO freed FROM d;
  END IF;

  v_deps := ARRAY(SELECT DISTINCT d.job_id FROM ${s}.job_dependencies d
    JOIN ${s}.finished f ON f.job_id = d.needs AND f.batch_id = p_batch AND ${since('f', 'b')}
    JOIN ${s}.waiting w ON w.job_id = d.job_id
    WHERE d.needs = ANY (p_jobs) AND ${few('d.needs')} AND NOT d.met AND NOT d.on_finished AND f.state <> 'completed' ORDER BY d.job_id LIMIT ${CHUNK});
  IF cardinality(v_deps) = 0 THEN RETURN; END IF;
  again := again OR cardinality(v_deps) = ${CHUNK};
  v_locked := ${lockSql(s)};
  WITH c AS MATERIALIZED (
    SELECT DISTINCT ON (d.job_id) d.job_id, CASE WHEN f.token IS NULL AND starts_with(f.reason, 'needs ') THEN f.reason ELSE
      left(concat('needs ', coalesce('"' || j.member || '"', 'job ' || j.id), CASE f.state WHEN 'failed' THEN ', which failed' ELSE ', which was cancelled' END,
        ': ' || coalesce(f.reason, f.error->>'message')), 500) END AS why
    FROM ${s}.job_dependencies d JOIN ${s}.finished f ON f.job_id = d.needs AND f.batch_id = p_batch AND ${since('f', 'b')}
    JOIN ${s}.jobs j ON j.id = d.needs
    WHERE d.job_id = ANY (v_locked) AND ${few('d.job_id')} AND NOT d.met AND NOT d.on_finished AND f.state <> 'completed'
    ORDER BY d.job_id, f.finished_at, d.needs
  ), x AS (
    DELETE FROM ${s}.waiting w USING c WHERE w.job_id = c.job_id RETURNING w.*, c.why
  ), i AS (
    INSERT INTO ${s}.finished (job_id, finished_at, attempt, crashes, releases, snoozes, priority, state, outcome, queue, kind, reason, batch_id)
    SELECT x.job_id, v_now, x.attempt, x.crashes, x.releases, x.snoozes, x.priority, e.state, e.state, x.queue, x.kind, x.why, x.batch_id
    FROM x CROSS JOIN (SELECT CASE WHEN b.stopping THEN 'cancelled' ELSE 'failed' END AS state) e
  ) SELECT json_agg(json_build_array(x.job_id::text, x.kind, x.queue, x.attempt, x.why)) INTO doomed FROM x;
END $fn$`;

const lockSql = (
  s: string,
): string => `ARRAY(SELECT w.job_id FROM ${s}.waiting w WHERE w.job_id = ANY (v_deps) AND ${few('w.job_id')}
      ORDER BY w.job_id FOR UPDATE)`;

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
 * most, then what `follow_edges_v1` says. What could not be locked comes back as `busy`, for another call.
 *
 * Returns { busy: [batch…], again: [batch…], doomed: [[job, kind, queue, attempt, reason], …] (failed or cancelled by this: they are `p_jobs` of the next
 * call, with the batches `again`), stop: [batch…] (to be cancelled), plain: [batch…] (nothing follows from
 * an end of one member but, perhaps, the batch's), ended: [[batch, status, name, generation], …] }.
 */
export const afterMembersSql = (s: string): string => `
CREATE FUNCTION ${s}.after_members_v1(p_batches bigint[], p_jobs bigint[]) RETURNS json LANGUAGE plpgsql AS $fn$
DECLARE
  ${UNTIL}
  b ${s}.batches;
  v_id bigint;
  v_freed json;
  v_doomed json;
  v_again boolean;
  v_failing boolean;
  v_ends bigint[];
  v_locked bigint[];
  v_ended json;
  r_busy text[] := '{}';
  r_plain bigint[];
  r_again text[] := '{}';
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
    v_again := false;
    BEGIN
      SELECT * INTO b FROM ${s}.batches WHERE id = v_id FOR NO KEY UPDATE;
      IF b.edged AND b.status = 'running' THEN
        SELECT e.freed, e.doomed, e.again INTO v_freed, v_doomed, v_again FROM ${s}.follow_edges_v1(v_id, p_jobs) e;
        IF v_freed IS NOT NULL THEN PERFORM ${s}.announce_v1(v_freed::text); END IF;
      END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
      r_busy := r_busy || v_id::text;
      CONTINUE;
    END;
    CONTINUE WHEN b.id IS NULL OR b.status <> 'running';
    v_failing := b.fail_fast AND NOT b.stopping AND ${failed(s)};
    IF v_failing THEN
      UPDATE ${s}.batches SET stopping = true, stop_reason = 'another member of its batch failed', sealed = true,
        members = (SELECT count(*) FROM ${s}.jobs j WHERE j.batch_id = v_id AND j.batch_id IS NOT NULL) WHERE id = v_id;
    END IF;
    v_ended := ${s}.end_batches_v1(ARRAY[v_id]);
    IF v_again OR v_doomed IS NOT NULL THEN r_again := r_again || v_id::text; END IF;
    IF v_doomed IS NOT NULL THEN r_doomed := r_doomed || ARRAY(SELECT json_array_elements(v_doomed)); END IF;
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

/** Whether a member of the batch `b` has failed. */
const failed = (
  s: string,
): string => `EXISTS (SELECT FROM ${s}.finished f WHERE f.batch_id = b.id AND f.batch_id > 0 AND f.state <> 'completed'
      AND f.state = 'failed' AND ${since('f', 'b')})`;

/**
 * Edges of members that were added just now, in the same transaction, which has the batch locked: `p_jobs[i]` needs `p_needs[i]`. What is met already is
 * marked, and who needs nothing more is freed; who needs a member that failed has failed.
 */
export const addEdgesSql = (s: string): string => `
CREATE FUNCTION ${s}.add_edges_v1(p_batch bigint, p_jobs bigint[], p_needs bigint[], p_on_finished boolean[], p_look boolean) RETURNS json
LANGUAGE plpgsql AS $fn$
DECLARE
  v record;
BEGIN
  INSERT INTO ${s}.job_dependencies (job_id, needs, batch_id, on_finished)
  SELECT u.job, u.needs, p_batch, u.on_finished FROM unnest(p_jobs, p_needs, p_on_finished) AS u(job, needs, on_finished);
  UPDATE ${s}.batches SET edged = true WHERE id = p_batch AND NOT edged;
  IF NOT p_look THEN RETURN NULL; END IF;
  LOOP
    SELECT * INTO v FROM ${s}.follow_edges_v1(p_batch, p_needs);
    IF v.doomed IS NOT NULL THEN p_needs := p_needs || ARRAY(SELECT (e->>0)::bigint FROM json_array_elements(v.doomed) AS e); END IF;
    EXIT WHEN NOT v.again AND v.doomed IS NULL;
  END LOOP;
  RETURN v.freed;
END $fn$`;

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
      ELSIF b.fail_fast AND EXISTS (SELECT FROM ${s}.finished f WHERE f.batch_id = b.id AND f.batch_id > 0 AND f.state <> 'completed' AND f.state = 'failed' AND ${since('f', 'b')}
        AND f.finished_at < v_before) THEN ended := ended || b.id; END IF;
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
