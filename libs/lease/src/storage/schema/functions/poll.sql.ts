/**
 * What a worker asks once a second, so that nothing due depends on a wake-up or a leader: promotes at most `p_limit` jobs that are
 * due (locks those `waiting` rows, skipping locked ones), and lists the lanes (queue, kind) that hold something for `p_kinds` in
 * `p_queues` (null: all) and are not paused. Lanes are found by hopping along the index from one (queue, kind) to the next: the
 * cost is one probe a lane, however deep it is, and the dead rows at its head that somebody's old snapshot keeps: without `p_look` none
 * are listed.
 *
 * Returns `promoted` (rows), `lanes` [[queue, kind], …], `suspects` (the same, for jobs that must run alone), `next_due_ms` (until
 * the next waiting job is due, null if none), `look_us` (what listing the lanes took).
 */
export const pollSql = (s: string): string => `
CREATE FUNCTION ${s}.poll_v1(p_kinds text[], p_queues text[], p_limit int, p_look boolean DEFAULT true,
  OUT promoted int, OUT lanes json, OUT suspects json, OUT next_due_ms bigint, OUT look_us bigint)
LANGUAGE plpgsql AS $fn$
DECLARE v_from timestamptz;
BEGIN
  WITH c AS MATERIALIZED (
    SELECT ctid AS row_id FROM ${s}.waiting WHERE reason = 'scheduled' AND run_at <= (SELECT clock_timestamp())
    ORDER BY run_at LIMIT p_limit FOR UPDATE SKIP LOCKED
  ), d AS (
    DELETE FROM ${s}.waiting w WHERE w.ctid = ANY (ARRAY (SELECT row_id FROM c)) RETURNING w.*
  ), r AS (
    INSERT INTO ${s}.ready (job_id, attempt, crashes, releases, snoozes, payload_bytes, priority, suspect, keyed, saved, queue,
      kind, concurrency_key, batch_id)
    SELECT job_id, attempt, crashes, releases, snoozes, payload_bytes, priority, suspect, keyed, saved, queue, kind, concurrency_key,
      batch_id FROM d ORDER BY run_at, job_id
  )
  SELECT count(*) INTO promoted FROM d;
  -- What waits for a place of its concurrency key is promoted when one is given back; this is for whatever was missed then.
  IF EXISTS (SELECT FROM ${s}.waiting WHERE blocked_on = 'limit') THEN PERFORM ${s}.promote_waiting_v1('', 100); END IF;
  IF p_look THEN
    v_from := clock_timestamp();
    lanes := (${lanesSql(s, 'NOT suspect')});
    suspects := (${lanesSql(s, 'suspect')});
    look_us := round(date_part('epoch', clock_timestamp() - v_from) * 1000000);
  END IF;
  next_due_ms := (SELECT greatest(0, ceil(extract(epoch FROM run_at - clock_timestamp()) * 1000))::bigint
                  FROM ${s}.waiting WHERE reason = 'scheduled' AND run_at < 'infinity' ORDER BY run_at LIMIT 1);
END $fn$`;

const lanesSql = (s: string, which: string): string => `
    WITH RECURSIVE lane AS (
      (SELECT queue, kind FROM ${s}.ready WHERE ${which} ORDER BY queue, kind LIMIT 1)
      UNION ALL
      SELECT n.queue, n.kind FROM lane l CROSS JOIN LATERAL (
        SELECT r.queue, r.kind FROM ${s}.ready r WHERE ${which} AND (r.queue, r.kind) > (l.queue, l.kind)
        ORDER BY r.queue, r.kind LIMIT 1) n
    )
    SELECT json_agg(json_build_array(l.queue, l.kind)) FROM lane l
    WHERE l.kind = ANY (p_kinds) AND (p_queues IS NULL OR l.queue = ANY (p_queues))
      AND NOT EXISTS (SELECT FROM ${s}.queues q WHERE q.name = l.queue AND q.paused)`;
