/** Raises what has been ready for too long; see `age_v1`. Locks the ready rows that it moves, skipping locked ones. */
export const ageSql = (s: string): string => `SELECT ${s}.age_v1($1) AS moved`;

/** Repairs keys, from one on; see `sweep_keys_v1`. Locks the rows that it changes, skipping locked ones. */
export const sweepKeysSql = (s: string): string =>
  `SELECT repaired, last_space AS space, last_key AS key FROM ${s}.sweep_keys_v1($1, $2, $3)`;

/** Gives free places to jobs that wait for one, from a key on; see `promote_waiting_v1`. Locks as that says. */
export const promoteWaitingSql = (s: string): string =>
  `SELECT promoted, last_key AS key FROM ${s}.promote_waiting_v1($1, $2)`;

/** Makes the days of `finished` up to some ahead; see `ensure_partitions_v1`. */
export const ensurePartitionsSql = (s: string): string => `SELECT ${s}.ensure_partitions_v1($1)`;
