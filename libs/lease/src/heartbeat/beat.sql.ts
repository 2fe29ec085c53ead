/**
 * One beat: renews the worker lease of a worker that is still live, and with it every job lease it holds. One row, whatever the
 * number of jobs. Locks the worker's row; a rescue that got there first has made it `dead`, and this then moves nothing.
 */
export const beatSql = (s: string): string => `
  UPDATE ${s}.workers SET beat_at = clock_timestamp(), expires_at = clock_timestamp() + $2::bigint * interval '1 ms',
    incarnation = ${s}.incarnation_v1(), in_flight = $3, stuck = $4, loop_blocked_ms = $5, clock_skew_ms = $6, lock_no = $7
  WHERE id = $1 AND state IN ('live', 'draining')
  RETURNING state, extract(epoch FROM clock_timestamp())::float8 * 1000 AS now_ms`;

/** A worker's session lock: shared, so that a worker that reconnects does not wait for its own half-open ghost. */
export const sessionLockSql = 'SELECT pg_advisory_lock_shared($1::int, $2::int)';

/** The store lock: shared by ordinary workers, alone by an exclusive one. Never waits. */
export const storeLockSql = {
  shared: 'SELECT pg_try_advisory_lock_shared($1::bigint) AS got',
  exclusive: 'SELECT pg_try_advisory_lock($1::bigint) AS got',
} as const;

/** One chunk of an attestation; see `attest_v1`. Locks nothing. */
export const attestSql = (s: string): string =>
  `SELECT gone, stops, unknown FROM ${s}.attest_v1($1, $2::bigint[], $3::bigint[], $4::bigint, $5::bigint, $6::bigint)`;

/** The leases of a range of tokens in four numbers; see `tally_v1`. Locks nothing. */
export const tallySql = (s: string): string =>
  `SELECT leases, tokens, pairs, stops FROM ${s}.tally_v1($1, $2::bigint, $3::bigint)`;

/** Session locks must outlive a statement; behind a transaction-mode pooler they do not. */
export const lockHeldSql = `
  SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
    AND classid = $1::int::oid AND objid = $2::int::oid AND objsubid = 2) AS held`;
