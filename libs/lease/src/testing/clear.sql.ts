/** Deletes every job, as rows, since a user's foreign key would refuse a TRUNCATE. Locks them all. */
export const clearSql = (s: string): string[] =>
  [
    'leases',
    'ready',
    'waiting',
    'finished',
    'runs',
    'checkpoints',
    'job_keys',
    'job_dependencies',
    'batches',
    'jobs',
  ].map((table) => `DELETE FROM ${s}.${table}`);
