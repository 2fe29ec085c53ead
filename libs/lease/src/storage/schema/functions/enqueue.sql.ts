import { inLiteral } from '../quote';

/**
 * Enqueues any number of jobs from one JSON parameter and returns their ids in the order given, separated by commas. Locks no existing
 * row. Each element is a group of jobs that differ in their payloads only: { queue, kind, payloads: […], priority?, maxAttempts,
 * maxCrashes, maxReleases, maxSnoozes?, chargeLost?, deadlineMs?, deadlineFrom, backoff?, tags?, runAt? | delayMs?, concurrencyKey?,
 * concurrencyMax? }, from `enqueue_keyed_v1` { keySpace, key, blockedOn? }, and of members of a batch { batchId, names: […, one for each payload] }. A queue's own deadline outranks one
 * that comes from the module (`deadlineFrom` = 'module'). Whether a job is due is decided by this server's clock.
 *
 * The transaction has its number before any position is taken: then every position below one that a snapshot sees was taken by a
 * transaction that the snapshot knows, which is what lets a claim skip the head of a lane (see lane-marks.ts).
 */
export const enqueueSql = (s: string): string => `
CREATE FUNCTION ${s}.enqueue_v1(p_jobs json) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  v_ids text;
  v_now timestamptz := clock_timestamp();  -- read once: with two readings a job due in between would get no row at all
BEGIN
  PERFORM pg_current_xact_id();
  WITH g AS MATERIALIZED (
    SELECT x.queue, x.kind, x.payloads, coalesce(x.priority, 0) AS priority, x."maxAttempts", x."maxCrashes", x."maxReleases",
           coalesce(x."maxSnoozes", 1000) AS "maxSnoozes", coalesce(x."chargeLost", false) AS "chargeLost", x.backoff, x.tags,
           coalesce(x."concurrencyKey", '') AS "concurrencyKey", coalesce(x."concurrencyMax", 1) AS "concurrencyMax",
           x."keySpace", x.key, x.key IS NOT NULL AS keyed, x."blockedOn", x."batchId", x.names,
           coalesce(x."runAt", v_now + x."delayMs" * interval '1 ms') AS run_at,
           CASE WHEN x."deadlineFrom" = 'module' AND EXISTS (SELECT FROM ${s}.queues q WHERE q.name = x.queue AND q.deadline_ms IS NOT NULL)
             THEN (SELECT nullif(q.deadline_ms, 0) FROM ${s}.queues q WHERE q.name = x.queue)
             ELSE x."deadlineMs" END AS deadline_ms
    FROM json_to_recordset(p_jobs) AS x(queue text, kind text, payloads json, priority smallint, "maxAttempts" int,
      "maxCrashes" int, "maxReleases" int, "maxSnoozes" int, "chargeLost" boolean, "deadlineMs" bigint, "deadlineFrom" text, backoff json,
      tags text[], "runAt" timestamptz, "delayMs" bigint, "concurrencyKey" text, "concurrencyMax" int, "keySpace" text, key text,
      "blockedOn" text, "batchId" bigint, names json)
  ), i AS MATERIALIZED (
    SELECT nextval('${inLiteral(s)}.jobs_id_seq') AS id, e.payload, octet_length(e.payload::text) AS payload_bytes, g.queue, g.kind,
           g.priority, g."maxAttempts", g."maxCrashes", g."maxReleases", g."maxSnoozes", g."chargeLost", g.backoff, g.tags, g."concurrencyKey",
           g."concurrencyMax", g."keySpace", g.key, g.keyed, g."blockedOn", g.run_at, g.deadline_ms,
           g."batchId", e.member
    FROM g CROSS JOIN LATERAL ROWS FROM (json_array_elements(g.payloads), json_array_elements_text(g.names)) AS e(payload, member)
  ), j AS (
    INSERT INTO ${s}.jobs (id, queue, kind, payload, payload_bytes, priority, max_attempts, max_crashes, max_releases, max_snoozes,
      charge_lost, deadline_ms, backoff, tags, concurrency_max, key_space, key, concurrency_key, batch_id, member)
    SELECT i.id, i.queue, i.kind, i.payload, i.payload_bytes, i.priority, i."maxAttempts", i."maxCrashes", i."maxReleases",
           i."maxSnoozes", i."chargeLost", i.deadline_ms, i.backoff, i.tags, i."concurrencyMax", i."keySpace", i.key,
           nullif(i."concurrencyKey", ''), i."batchId", i.member
    FROM i
  ), r AS (
    INSERT INTO ${s}.ready (job_id, queue, kind, payload_bytes, priority, suspect, keyed, concurrency_key, batch_id)
    SELECT i.id, i.queue, i.kind, i.payload_bytes, i.priority, i."maxCrashes" <= 1, i.keyed, i."concurrencyKey", coalesce(i."batchId", 0) FROM i
    WHERE i."blockedOn" IS NULL AND (i.run_at IS NULL OR i.run_at <= v_now)
  ), w AS (
    INSERT INTO ${s}.waiting (job_id, queue, kind, payload_bytes, priority, suspect, keyed, concurrency_key, batch_id, reason, blocked_on, run_at)
    SELECT i.id, i.queue, i.kind, i.payload_bytes, i.priority, i."maxCrashes" <= 1, i.keyed, i."concurrencyKey",
           coalesce(i."batchId", 0), CASE WHEN i."blockedOn" IS NULL THEN 'scheduled' ELSE 'blocked' END, i."blockedOn", i.run_at FROM i
    WHERE i."blockedOn" IS NOT NULL OR i.run_at > v_now
  )
  SELECT string_agg(i.id::text, ',') INTO v_ids FROM i;
  RETURN coalesce(v_ids, '');
END $$`;
