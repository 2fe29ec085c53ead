import { few } from '../quote';

/** Lines of a job's log that are kept, the last ones. */
export const LOG_LINES = 200;

/**
 * Writes what running jobs save: each element of `p_saves` is { job, token, worker, version?, checkpoint?, progress?, lines? }, `version` absent =
 * no checkpoint in this save, `lines` = [[ms ago, text], …]. Returns those whose lease is held, with the stop requests on it; what is
 * missing was lost, and nothing is written for it. Locks the named leases in the order of job_id (a rescue or a settle that is before it
 * wins; nothing else of the lease is changed, so a stop request that arrives meanwhile stays), then their rows of checkpoints. With `p_skip`
 * leases that somebody else has locked are left out and come back as `busy`: nothing was written for them yet.
 */
export const saveSql = (s: string): string => `
CREATE FUNCTION ${s}.save_v1(p_saves json, p_skip boolean) RETURNS TABLE (job bigint, token bigint, cancel boolean, pause boolean, busy boolean)
LANGUAGE plpgsql AS $fn$
#variable_conflict use_column
DECLARE
  v_now timestamptz := clock_timestamp();
  v_jobs bigint[];
  v_first bigint[];
BEGIN
  IF p_skip THEN
    SELECT array_agg(h.job_id), array_agg(h.job_id) FILTER (WHERE NOT h.saved) INTO v_jobs, v_first FROM (
      ${namedSql(s, 'l.job_id, l.saved')} ORDER BY l.job_id FOR NO KEY UPDATE OF l SKIP LOCKED) h;
    IF coalesce(cardinality(v_jobs), 0) < json_array_length(p_saves) THEN
      RETURN QUERY ${namedSql(s, 'l.job_id, l.token, l.cancel_requested, l.pause_requested, true')} AND l.job_id <> ALL (coalesce(v_jobs, '{}'));
    END IF;
  ELSE
    SELECT array_agg(h.job_id), array_agg(h.job_id) FILTER (WHERE NOT h.saved) INTO v_jobs, v_first FROM (
      ${namedSql(s, 'l.job_id, l.saved')} ORDER BY l.job_id FOR NO KEY UPDATE OF l) h;
  END IF;
  IF v_jobs IS NULL THEN RETURN; END IF;
  INSERT INTO ${s}.checkpoints AS c (job_id, token, saved_at, version, checkpoint, progress, log)
  SELECT m.job, m.token, v_now, coalesce(m.version, 0), m.checkpoint, m.progress,
    (SELECT jsonb_agg(jsonb_build_array(v_now - (e.line->>0)::float8 * interval '1 ms', l.attempt, e.line->>1) ORDER BY e.n)
     FROM jsonb_array_elements(m.lines) WITH ORDINALITY AS e(line, n))
  FROM json_to_recordset(p_saves) AS m(job bigint, token bigint, version int, checkpoint json, progress json, lines jsonb)
  JOIN ${s}.leases l ON l.job_id = m.job AND l.token = m.token
  WHERE m.job = ANY (v_jobs) AND ${few('m.job')}
  ON CONFLICT (job_id) DO UPDATE SET token = excluded.token, saved_at = excluded.saved_at,
    version = CASE WHEN excluded.version > 0 THEN excluded.version ELSE c.version END,
    checkpoint = CASE WHEN excluded.version > 0 THEN excluded.checkpoint ELSE c.checkpoint END,
    progress = coalesce(excluded.progress, c.progress),
    log = CASE WHEN excluded.log IS NULL THEN c.log ELSE (
      SELECT jsonb_agg(x.line ORDER BY x.n) FROM (
        SELECT e.line, e.n FROM jsonb_array_elements(coalesce(c.log, '[]') || excluded.log) WITH ORDINALITY AS e(line, n)
        ORDER BY e.n DESC LIMIT ${LOG_LINES}) x) END;
  IF v_first IS NOT NULL THEN UPDATE ${s}.leases SET saved = true WHERE job_id = ANY (v_first); END IF;
  RETURN QUERY SELECT l.job_id, l.token, l.cancel_requested, l.pause_requested, false FROM ${s}.leases l WHERE l.job_id = ANY (v_jobs);
END $fn$`;

const namedSql = (
  s: string,
  columns: string,
): string => `SELECT ${columns} FROM json_to_recordset(p_saves) AS m(job bigint, token bigint, worker text)
      JOIN ${s}.leases l ON l.job_id = m.job AND l.token = m.token AND l.worker_id = m.worker WHERE ${few('m.job')}`;

/**
 * Moves the deadline of a lease to `p_ms` from now, if that is later, and at most `p_max_ms` after it was claimed. `left_ms`: until then; null: the
 * lease is not held any more, or its deadline has passed; -1: it has none, and stays without. Locks the lease; one that somebody else has locked is
 * an error (55P03) instead of a wait.
 */
export const extendSql = (s: string): string => `
CREATE FUNCTION ${s}.extend_v1(p_job bigint, p_token bigint, p_worker text, p_ms bigint, p_max_ms bigint,
  OUT left_ms bigint, OUT deadline timestamptz)
LANGUAGE plpgsql AS $fn$
DECLARE
  v_now timestamptz := clock_timestamp();
BEGIN
  PERFORM FROM ${s}.leases l WHERE l.job_id = p_job AND l.token = p_token AND l.worker_id = p_worker FOR NO KEY UPDATE NOWAIT;
  UPDATE ${s}.leases l SET deadline_at = CASE WHEN l.deadline_at IS NOT NULL THEN
      greatest(l.deadline_at, least(v_now + p_ms * interval '1 ms', l.claimed_at + p_max_ms * interval '1 ms')) END
  WHERE l.job_id = p_job AND l.token = p_token AND l.worker_id = p_worker AND coalesce(l.deadline_at > v_now, true)
  RETURNING l.deadline_at INTO deadline;
  IF FOUND THEN left_ms := coalesce(floor(date_part('epoch', deadline - v_now) * 1000)::bigint, -1); END IF;
END $fn$`;

/**
 * Whether a lease is held: waiting for nobody and locking nothing; or (`p_lock`) locked to the end of the transaction, so that no rescue can take it. With
 * `p_nowait` one that somebody else has locked is an error (55P03) instead of a wait.
 */
export const heldSql = (s: string): string => {
  const lease = `PERFORM FROM ${s}.leases l WHERE l.job_id = p_job AND l.token = p_token AND l.worker_id = p_worker`;
  return `
CREATE FUNCTION ${s}.held_v1(p_job bigint, p_token bigint, p_worker text, p_lock boolean, p_nowait boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql AS $fn$
BEGIN
  IF NOT p_lock THEN
    ${lease};
  ELSIF p_nowait THEN
    ${lease} FOR NO KEY UPDATE NOWAIT;
  ELSE
    ${lease} FOR NO KEY UPDATE;
  END IF;
  RETURN FOUND;
END $fn$`;
};
