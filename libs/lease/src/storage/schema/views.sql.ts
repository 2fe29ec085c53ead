/**
 * Read views. `job_status`: one row a job, with the state that its state table shows. `job_runs`: one row per attempt that
 * a handler began. Each reads all state tables in one statement, so a job that is moving is seen exactly once.
 */
export const viewsSql = (s: string): string[] => [
  `CREATE VIEW ${s}.job_status AS
   SELECT j.id, j.queue, j.kind, coalesce(l.priority, r.priority, w.priority, f.priority) AS priority, j.payload, j.tags, j.created_at,
          j.deadline_ms, j.max_attempts, j.max_crashes, j.max_releases, j.max_snoozes, j.key, j.concurrency_key, j.batch_id, j.member,
          CASE WHEN l.job_id IS NOT NULL THEN 'running'
               WHEN r.job_id IS NOT NULL THEN 'ready'
               WHEN w.job_id IS NOT NULL THEN w.reason
               ELSE f.state END AS state,
          coalesce(l.attempt, r.attempt, w.attempt, f.attempt) AS attempt,
          coalesce(l.crashes, r.crashes, w.crashes, f.crashes) AS crashes,
          coalesce(l.releases, r.releases, w.releases, f.releases) AS releases,
          coalesce(l.snoozes, r.snoozes, w.snoozes, f.snoozes) AS snoozes,
          coalesce(l.suspect, r.suspect, w.suspect, false) AS suspect,
          w.run_at, w.blocked_on,
          coalesce(l.token, f.token) AS token,
          coalesce(l.worker_id, f.worker_id) AS worker_id,
          l.claimed_at, l.deadline_at, wk.expires_at AS lease_expires_at,
          coalesce(l.cancel_requested, false) AS cancel_requested,
          coalesce(l.pause_requested, false) AS pause_requested, l.stop_reason,
          f.started_at, f.finished_at, f.outcome, f.reason, f.error, f.result
   FROM ${s}.jobs j
   LEFT JOIN ${s}.ready r ON r.job_id = j.id
   LEFT JOIN ${s}.waiting w ON w.job_id = j.id
   LEFT JOIN ${s}.leases l ON l.job_id = j.id
   LEFT JOIN ${s}.workers wk ON wk.id = l.worker_id
   -- A day's slack for a clock that a failover set back; without the bound every partition is probed for every job.
   LEFT JOIN ${s}.finished f ON f.job_id = j.id AND f.finished_at >= j.created_at - interval '1 day'`,
  `CREATE VIEW ${s}.job_runs AS
   SELECT job_id, attempt, token, worker_id, started_at, ended_at, outcome, error FROM ${s}.runs
   UNION ALL
   SELECT job_id, attempt, token, worker_id, started_at, finished_at, outcome, error FROM ${s}.finished WHERE token IS NOT NULL`,
];
