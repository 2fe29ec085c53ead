/** One batch of retention; see `prune_v1`, which says what it locks: it waits for nothing of ours. */
export const pruneSql = (s: string): string => `
  SELECT deleted, held, why, next_from::text AS "from", next_after AS "after" FROM ${s}.prune_v1($1, $2, $3, $4, $5, $6)`;

/** Retention of batches, from one on; see `prune_batches_v1`. */
export const pruneBatchesSql = (s: string): string => `
  SELECT deleted, held, next_at::text AS "from", next_id::text AS "after" FROM ${s}.prune_batches_v1($1, $2, $3, $4, $5)`;

/** Drops one day that is over and empty; see `drop_empty_day_v1`. Settles wait for it for 200 ms at most. */
export const dropEmptyDaySql = (s: string): string => `SELECT ${s}.drop_empty_day_v1() AS name`;
