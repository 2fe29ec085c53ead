import { inLiteral } from '../storage/schema/quote';

/**
 * Registers a worker: one new row, never an old one revived. Locks nothing. The lock number is handed out here and written by the first beat,
 * when the session lock is held: until then way 1 has nothing to look for and cannot miss it.
 */
export const registerSql = (s: string): string => `
  INSERT INTO ${s}.workers (id, name, host, pid, version, state, queues, kinds, concurrency, ttl_ms, incarnation, expires_at)
  VALUES ($1, $2, $3, $4, $5, 'live', $6, $7, $8, $9, ${s}.incarnation_v1(), clock_timestamp() + $9::bigint * interval '1 ms')
  RETURNING nextval('${inLiteral(s)}.lock_numbers')::int AS lock_no`;

/** The drain has begun: no claim is granted after this commits. Locks the worker's row. */
export const drainingSql = (s: string): string =>
  `UPDATE ${s}.workers SET state = 'draining', draining_at = clock_timestamp() WHERE id = $1 AND state = 'live' RETURNING id`;

/** The worker has ended and holds nothing. Locks its row; one that still has leases stays as it is and is rescued. */
export const stoppedSql = (s: string): string => `
  UPDATE ${s}.workers w SET state = 'stopped', ended_at = clock_timestamp(), in_flight = 0
  WHERE id = $1 AND state IN ('live', 'draining') AND NOT EXISTS (SELECT FROM ${s}.leases l WHERE l.worker_id = w.id) RETURNING id`;

/** A worker that fenced itself declares itself dead, so that what it held can go back uncharged. Locks its row. */
export const retireSql = (s: string): string => `
  UPDATE ${s}.workers SET state = 'dead', ended_at = clock_timestamp(), died_of = 'self'
  WHERE id = $1 AND state IN ('live', 'draining') RETURNING id`;

export const workerColumns = (s: string): string => `
  SELECT w.id, w.name, w.host, w.pid, w.version, w.state, w.queues, w.kinds, w.concurrency, w.started_at AS "startedAt", w.beat_at AS "beatAt",
    w.expires_at AS "expiresAt", w.draining_at AS "drainingAt", w.ended_at AS "endedAt", w.died_of AS "diedOf", w.in_flight AS "inFlight",
    w.stuck, w.loop_blocked_ms AS "loopBlockedMs", w.clock_skew_ms AS "clockSkewMs",
    w.state IN ('live', 'draining') AND coalesce(w.expires_at, '-infinity') >= clock_timestamp() AS active
  FROM ${s}.workers w`;

/** Forgets workers that ended over a day ago and hold nothing. Locks at most 500 rows of `workers`, skipping locked ones. */
export const forgetSql = (s: string): string => `
  WITH c AS (
    SELECT id FROM ${s}.workers w WHERE state IN ('stopped', 'dead') AND ended_at < (SELECT clock_timestamp()) - interval '1 day'
      AND NOT EXISTS (SELECT FROM ${s}.leases l WHERE l.worker_id = w.id)
    ORDER BY id LIMIT 500 FOR UPDATE SKIP LOCKED)
  DELETE FROM ${s}.workers w USING c WHERE w.id = c.id`;
