/**
 * Way 1's look: every other live worker of the server's present incarnation, and whether its session is gone: no session lock granted in
 * this database and no backend under its name. Looks, never tries the lock. Locks nothing.
 */
export const sessionsSql = (s: string): string => `
  SELECT w.id, w.lock_no, w.beat_at::text AS beat_at,
    NOT EXISTS (SELECT FROM pg_locks k WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
      AND k.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND k.classid = $2::int::oid AND k.objid = w.lock_no::oid)
    AND NOT EXISTS (SELECT FROM pg_stat_activity a WHERE a.application_name = $3 || w.lock_no) AS gone
  FROM ${s}.workers w
  WHERE w.state IN ('live', 'draining') AND w.lock_no IS NOT NULL AND w.id <> $1 AND w.incarnation = (SELECT ${s}.incarnation_v1())`;

/**
 * Way 1's mark. Guarded on the beat and the lock that were read in both looks, so a renewal and a rescue cannot both win. Locks
 * the worker's row and is committed alone.
 */
export const markVanishedSql = (s: string): string => `
  UPDATE ${s}.workers w SET ${markSql(s, "'session'")}
  WHERE w.id = $1 AND w.state IN ('live', 'draining') AND w.beat_at = $2::timestamptz AND w.lock_no = $3
  RETURNING ${markedSql}`;

/**
 * Way 2's mark: workers whose lease has expired (none counts as expired). Re-checked under the row lock; a row that a beat
 * holds just now is skipped. At most 100 rows of `workers`.
 */
export const markExpiredSql = (s: string): string => `
  WITH c AS (
    SELECT id FROM ${s}.workers WHERE state IN ('live', 'draining') AND id <> $1
      AND coalesce(expires_at, '-infinity') < (SELECT clock_timestamp())
    ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED)
  UPDATE ${s}.workers w SET ${markSql(s, "'lease'")} FROM c WHERE w.id = c.id
  RETURNING ${markedSql}`;

/** An exclusive store at its start: nobody else can be up, so every other worker is dead. Locks those rows of `workers`. */
export const markAllSql = (s: string): string => `
  UPDATE ${s}.workers w SET ${markSql(s, "'exclusive'")} WHERE w.state IN ('live', 'draining') AND w.id <> $1 RETURNING ${markedSql}`;

/** What it held when it died: one lease means that a suspect was alone. */
const markSql = (s: string, cause: string): string => `state = 'dead', ended_at = clock_timestamp(), died_of = ${cause},
    leases_at_death = (SELECT count(*) FROM (SELECT FROM ${s}.leases l WHERE l.worker_id = w.id LIMIT 2) x)`;

const markedSql = `w.id, (extract(epoch FROM clock_timestamp() - w.beat_at) * 1000)::bigint::text AS silent_ms`;

/**
 * Workers that hold leases without being live: declared dead, stopped, or not registered at all. Found by hopping from one worker_id to the
 * next along the index. Locks nothing.
 */
export const orphansSql = (s: string): string => `
  WITH RECURSIVE h AS (
    (SELECT worker_id FROM ${s}.leases ORDER BY worker_id LIMIT 1)
    UNION ALL
    SELECT n.worker_id FROM h CROSS JOIN LATERAL (
      SELECT l.worker_id FROM ${s}.leases l WHERE l.worker_id > h.worker_id ORDER BY l.worker_id LIMIT 1) n)
  SELECT h.worker_id AS id, w.died_of, w.leases_at_death, w.draining_at IS NOT NULL AS drained, w.ended_at::text AS ended_at
  FROM h LEFT JOIN ${s}.workers w ON w.id = h.worker_id
  WHERE (w.id IS NULL OR w.state IN ('dead', 'stopped')) AND h.worker_id <> $1`;

/** The leases of one such worker; `late`: claimed after the mark. By the index on (worker_id, token, job_id). Locks nothing. */
export const leasesOfSql = (s: string): string => `
  SELECT job_id, token, coalesce(claimed_at > $2::timestamptz, false) AS late FROM ${s}.leases WHERE worker_id = $1
  ORDER BY token LIMIT $3`;

/** Way 3: leases whose deadline has passed, whatever their worker says. By the index on deadline_at. Locks nothing. */
export const overdueSql = (s: string): string => `
  SELECT job_id, token, worker_id FROM ${s}.leases WHERE deadline_at <= (SELECT clock_timestamp()) AND worker_id <> $1
  ORDER BY deadline_at LIMIT $2`;

/** Moves what was read, each row guarded on its token and worker, skipping rows that somebody else has locked; see `move_v1`. */
export const rescueSql = (s: string): string => `SELECT * FROM ${s}.move_v1($1::json, true)`;
