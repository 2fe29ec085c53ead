import { FAILED_FAST } from '../../../batches/stop-reasons';
import { few, inLiteral } from '../quote';

/** Members of one layer that are freed or failed at once, at most. */
const CHUNK = 5000;

/** A day's slack for a clock that a failover set back. Without the bounds every partition is probed, also those of the days ahead. */
export const since = (finished: string, batch: string): string =>
  `${finished}.finished_at BETWEEN ${batch}.created_at - interval '1 day' AND v_until`;
export const UNTIL = `v_until timestamptz := clock_timestamp() + interval '1 day';`;

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
    v_locked := ${s}.lock_waiting_v1(v_deps);
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
  v_locked := ${s}.lock_waiting_v1(v_deps);
  WITH c AS MATERIALIZED (
    SELECT DISTINCT ON (d.job_id) d.job_id, CASE WHEN f.token IS NULL AND starts_with(f.reason, 'needs ') THEN f.reason ELSE
      left(concat('needs ', coalesce('"' || j.member || '"', 'job ' || j.id), CASE f.state WHEN 'failed' THEN ', which failed' ELSE ', which was cancelled' END,
        ': ' || coalesce(f.reason, f.error->>'message')), 500) END AS why,
      CASE WHEN f.state = 'failed' OR f.reason = '${FAILED_FAST}' OR (f.token IS NULL AND f.outcome = 'failed') THEN 'failed' ELSE 'cancelled' END AS because
    FROM ${s}.job_dependencies d JOIN ${s}.finished f ON f.job_id = d.needs AND f.batch_id = p_batch AND ${since('f', 'b')}
    JOIN ${s}.jobs j ON j.id = d.needs
    WHERE d.job_id = ANY (v_locked) AND ${few('d.job_id')} AND NOT d.met AND NOT d.on_finished AND f.state <> 'completed'
    ORDER BY d.job_id, f.finished_at, d.needs
  ), x AS (
    DELETE FROM ${s}.waiting w USING c WHERE w.job_id = c.job_id RETURNING w.*, c.why, c.because
  ), i AS (
    INSERT INTO ${s}.finished (job_id, finished_at, attempt, crashes, releases, snoozes, priority, state, outcome, queue, kind, reason, batch_id)
    SELECT x.job_id, v_now, x.attempt, x.crashes, x.releases, x.snoozes, x.priority, e.state, CASE e.state WHEN 'failed' THEN 'failed' ELSE x.because END, x.queue,
      x.kind, x.why, x.batch_id
    FROM x CROSS JOIN (SELECT CASE WHEN b.stopping THEN 'cancelled' ELSE 'failed' END AS state) e
  ) SELECT json_agg(json_build_array(x.job_id::text, x.kind, x.queue, x.attempt, x.why, CASE WHEN b.stopping THEN 'cancelled' ELSE 'failed' END)) INTO doomed
  FROM x;
END $fn$`;

/**
 * Locks the waiting rows of some jobs, in the order of their ids. One that is resumed while this waits is another row by then, which the statement that waited does not
 * see: so it looks again until it has all that are there. Returns the jobs.
 */
export const lockWaitingSql = (s: string): string => `
CREATE FUNCTION ${s}.lock_waiting_v1(p_jobs bigint[]) RETURNS bigint[] LANGUAGE plpgsql AS $fn$
DECLARE
  v_locked bigint[];
BEGIN
  LOOP
    v_locked := ARRAY(SELECT w.job_id FROM ${s}.waiting w WHERE w.job_id = ANY (p_jobs) AND ${few('w.job_id')} ORDER BY w.job_id FOR UPDATE);
    IF v_locked = ARRAY(SELECT w.job_id FROM ${s}.waiting w WHERE w.job_id = ANY (p_jobs) AND ${few('w.job_id')} ORDER BY w.job_id) THEN
      RETURN v_locked;
    END IF;
  END LOOP;
END $fn$`;

/**
 * The same from layer to layer, until nothing more follows or \`p_until\` is past. Returns the lanes of the members that were freed, what was doomed, and the members
 * with which another call goes on. Locks as \`follow_edges_v1\` says.
 */
export const followAllSql = (s: string): string => `
CREATE FUNCTION ${s}.follow_all_v1(p_batch bigint, p_jobs bigint[], p_until timestamptz, OUT lanes json, OUT doomed json[], OUT rest bigint[])
LANGUAGE plpgsql AS $fn$
DECLARE
  v record;
  v_new json[];
  v_lanes jsonb := '[]';
BEGIN
  doomed := '{}';
  rest := p_jobs;
  LOOP
    SELECT * INTO v FROM ${s}.follow_edges_v1(p_batch, rest);
    IF v.freed IS NOT NULL THEN v_lanes := (SELECT jsonb_agg(DISTINCT e.lane) FROM jsonb_array_elements(v_lanes || v.freed::jsonb) AS e(lane)); END IF;
    IF NOT v.again THEN rest := '{}'; END IF;
    IF v.doomed IS NOT NULL THEN
      v_new := ARRAY(SELECT json_array_elements(v.doomed));
      doomed := doomed || v_new;
      rest := rest || ARRAY(SELECT (e->>0)::bigint FROM unnest(v_new) AS e);
    END IF;
    EXIT WHEN cardinality(rest) = 0 OR clock_timestamp() > p_until;
  END LOOP;
  lanes := CASE WHEN v_lanes <> '[]' THEN v_lanes::json END;
END $fn$`;

/**
 * Edges of members that were added just now, in the same transaction, which has the batch locked: `p_jobs[i]` needs `p_needs[i]`. What is met already is
 * marked, and who needs nothing more is freed; who needs a member that failed has failed. Returns { lanes: [[queue, kind], …] or null, doomed: see
 * `after_members_v1` }; null: nothing was there before.
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
  SELECT e.lanes, e.doomed INTO v FROM ${s}.follow_all_v1(p_batch, p_needs, 'infinity') e;
  RETURN json_build_object('lanes', v.lanes, 'doomed', v.doomed);
END $fn$`;
