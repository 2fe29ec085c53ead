/** Writes what running jobs save, under their leases; see `save_v1`. Locks the leases named that are free, then their rows of checkpoints. */
export const saveSql = (s: string): string =>
  `SELECT job::text, token::text, cancel, pause, busy FROM ${s}.save_v1($1::json, true)`;

/** The same in the caller's transaction, waiting for the lease; it stays locked until that ends. */
export const saveInSql = (s: string): string => `SELECT FROM ${s}.save_v1($1::json, false)`;

/** Moves a lease's deadline; see `extend_v1`. Locks the lease. */
export const extendSql = (s: string): string =>
  `SELECT left_ms::text, deadline FROM ${s}.extend_v1($1, $2, $3, $4, $5)`;

/** Whether a lease is held; see `held_v1`. Locks it if told to. */
export const heldSql = (s: string): string => `SELECT ${s}.held_v1($1, $2, $3, $4) AS held`;

/** The same, with an error (55P03) if somebody else has it locked. */
export const heldNowSql = (s: string): string => `SELECT ${s}.held_v1($1, $2, $3, true, true) AS held`;

/** Completes a job in the caller's transaction; see `move_v1`. Locks the lease until that ends. */
export const completeSql = (s: string): string => `SELECT job_id::text AS job FROM ${s}.move_v1($1::json, false, true)`;

/** Whether the completion of this lease is on record: a rescue of it is recorded too, and is none. Locks nothing. */
export const completedSql = (s: string): string => `
  SELECT FROM ${s}.finished WHERE job_id = $1 AND token = $2 AND worker_id = $3 AND outcome = 'completed'
  UNION ALL SELECT FROM ${s}.runs WHERE job_id = $1 AND token = $2 AND worker_id = $3 AND outcome = 'completed'`;

/** After that: a place of its concurrency key is free. Locks the waiting rows that it moves. */
export const promoteOfSql = (s: string): string =>
  `SELECT ${s}.promote_places_v1(ARRAY[concurrency_key]) FROM ${s}.jobs WHERE id = $1 AND concurrency_key IS NOT NULL`;
