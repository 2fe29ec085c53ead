import { inLiteral } from '../quote';

/**
 * Enqueues any number of jobs from one JSON parameter and returns their ids in the order given, as text. Locks no existing
 * row. Each element: { queue, kind, payload, priority?, maxAttempts, maxCrashes, maxReleases, deadlineMs?, deadlineFrom,
 * backoff?, tags?, runAt? | delayMs? }. A queue's own deadline outranks one that comes from the module (`deadlineFrom` = 'module').
 * Whether a job is due is decided by this server's clock. A payload of JSON's null arrives as SQL's, and is stored as JSON's.
 */
export const enqueueSql = (s: string): string => `
CREATE FUNCTION ${s}.enqueue_v1(p_jobs json) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
  v_ids text[];
  v_now timestamptz := clock_timestamp();  -- read once: with two readings a job due in between would get no row at all
BEGIN
  WITH i AS MATERIALIZED (
    SELECT nextval(pg_get_serial_sequence('${inLiteral(s)}.jobs', 'id')) AS id, x.*,
           coalesce(coalesce(x."runAt", v_now + x."delayMs" * interval '1 ms') <= v_now, true) AS due,
           coalesce(x."runAt", v_now + x."delayMs" * interval '1 ms') AS run_at,
           x."maxCrashes" <= 1 AS suspect
    FROM json_to_recordset(p_jobs) AS x(queue text, kind text, payload json, priority smallint, "maxAttempts" int,
      "maxCrashes" int, "maxReleases" int, "deadlineMs" bigint, "deadlineFrom" text, backoff json, tags text[],
      "runAt" timestamptz, "delayMs" bigint)
  ), j AS (
    INSERT INTO ${s}.jobs (id, queue, kind, payload, priority, max_attempts, max_crashes, max_releases, deadline_ms, backoff, tags)
    SELECT i.id, i.queue, i.kind, coalesce(i.payload, 'null'), coalesce(i.priority, 0), i."maxAttempts", i."maxCrashes", i."maxReleases",
           CASE WHEN i."deadlineFrom" = 'module' AND q.deadline_ms IS NOT NULL THEN nullif(q.deadline_ms, 0) ELSE i."deadlineMs" END,
           i.backoff, i.tags
    FROM i LEFT JOIN ${s}.queues q ON q.name = i.queue
  ), r AS (
    INSERT INTO ${s}.ready (job_id, queue, kind, priority, suspect)
    SELECT i.id, i.queue, i.kind, coalesce(i.priority, 0), i.suspect FROM i
    WHERE i.due ORDER BY i.id
  ), w AS (
    INSERT INTO ${s}.waiting (job_id, queue, kind, priority, suspect, reason, run_at)
    SELECT i.id, i.queue, i.kind, coalesce(i.priority, 0), i.suspect, 'scheduled', i.run_at FROM i
    WHERE NOT i.due
  )
  SELECT array_agg(i.id::text) INTO v_ids FROM i;
  RETURN coalesce(v_ids, '{}');
END $$`;
