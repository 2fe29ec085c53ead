const COLUMNS = `q.name, q.paused, q.deadline_ms::text AS "deadlineMs", q.max_running AS "maxRunning", q.rate_limit AS "rateLimit",
  q.rate_ms::text AS "rateMs", q.weight, q.ageing_ms::text AS "ageingMs", q.keep_completed_ms::text AS "keepCompletedMs",
  q.keep_failed_ms::text AS "keepFailedMs", q.keep_cancelled_ms::text AS "keepCancelledMs"`;

/** Every queue that has settings of its own. Locks nothing. */
export const queuesSql = (s: string): string => `SELECT ${COLUMNS} FROM ${s}.queues q ORDER BY q.name`;

export const queueSql = (s: string): string => `SELECT ${COLUMNS} FROM ${s}.queues q WHERE q.name = $1`;

/** Pauses a queue or lets it go on. Locks its row; a claim reads that without a lock, and what it has taken before goes on. */
export const pauseQueueSql = (s: string): string => `
  INSERT INTO ${s}.queues AS q (name, paused) VALUES ($1, $2)
  ON CONFLICT (name) DO UPDATE SET paused = excluded.paused WHERE q.paused <> excluded.paused RETURNING q.name`;

/** Writes the columns named, which come from our own list, and leaves the others as they are. Locks the queue's row. */
export const configureQueueSql = (s: string, columns: readonly string[]): string => `
  INSERT INTO ${s}.queues (${['name', ...columns].join(', ')}) VALUES (${['name', ...columns].map((_, i) => `$${i + 1}`).join(', ')})
  ON CONFLICT (name) DO UPDATE SET ${(columns.length > 0 ? columns : ['name']).map((c) => `${c} = excluded.${c}`).join(', ')}`;

/** Leases that were claimed before the queue had a limit count against it too. Locks those leases, for a moment. */
export const countRunningSql = (s: string): string => `
  UPDATE ${s}.leases SET limited = true WHERE queue = $1 AND NOT limited`;
