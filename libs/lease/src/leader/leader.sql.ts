/** The leader lock: on this session until it ends. Never waits, and is only asked for while it is not held, so it cannot stack. */
export const acquireSql = 'SELECT pg_try_advisory_lock($1::bigint) AS got';

/** Is the lock still this session's? Asked of the server, not remembered. */
export const probeSql = `
  SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
    AND objsubid = 1 AND (classid::bigint << 32 | objid::bigint) = $1::bigint) AS held`;

/** A new reign. Locks the one row of `leader`. */
export const reignSql = (s: string): string => `
  UPDATE ${s}.leader SET worker_id = $1, epoch = epoch + 1, since = clock_timestamp(), beat_at = clock_timestamp() RETURNING epoch::text`;

/** A maintenance pass is complete; only of the present reign. Locks the one row of `leader`. */
export const stampSql = (s: string): string =>
  `UPDATE ${s}.leader SET beat_at = clock_timestamp() WHERE worker_id = $1 AND epoch = $2 RETURNING epoch`;

/** No pass for a TTL: then any worker does the leader's rescues (R15). Locks nothing. */
export const staleSql = (s: string): string =>
  `SELECT coalesce(beat_at, '-infinity') < clock_timestamp() - $1::bigint * interval '1 ms' AS stale FROM ${s}.leader`;

export const readSql = (s: string): string =>
  `SELECT worker_id AS "workerId", epoch::text, since, beat_at AS "beatAt" FROM ${s}.leader`;
