/** Writes what running jobs save, under their leases; see `save_v1`. Locks the leases named, then their rows of checkpoints. */
export const saveSql = (s: string): string =>
  `SELECT job::text, token::text, cancel, pause FROM ${s}.save_v1($1::json)`;

/** Moves a lease's deadline; see `extend_v1`. Locks the lease. */
export const extendSql = (s: string): string =>
  `SELECT left_ms::text, deadline FROM ${s}.extend_v1($1, $2, $3, $4, $5)`;

/** Whether a lease is held; see `held_v1`. Locks it if told to. */
export const heldSql = (s: string): string => `SELECT ${s}.held_v1($1, $2, $3, $4) AS held`;

/** Completes a job in the caller's transaction; see `move_v1`. Locks the lease until that ends. */
export const completeSql = (s: string): string => `SELECT job_id::text AS job FROM ${s}.move_v1($1::json, false, true)`;

/** After that: a place of its concurrency key is free. Locks the waiting rows that it moves. */
export const promoteOfSql = (s: string): string =>
  `SELECT ${s}.promote_places_v1(ARRAY[concurrency_key]) FROM ${s}.jobs WHERE id = $1 AND concurrency_key IS NOT NULL`;
