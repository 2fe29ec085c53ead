import type { JobState } from './job.types';

/** Enqueues jobs from one JSON parameter; see `enqueue_v1`. Locks nothing that exists. */
export const enqueueSql = (s: string): string => `SELECT ${s}.enqueue_v1($1::json) AS ids`;

/** Enqueues jobs with unique keys; see `enqueue_keyed_v1`. Locks their keys, and jobs that have not started. */
export const enqueueKeyedSql = (s: string): string => `SELECT ${s}.enqueue_keyed_v1($1::json)::text AS answers`;

export const statusColumns = `
  j.id::text, j.kind, j.queue, j.priority, j.payload, coalesce(j.tags, '{}') AS tags, j.created_at AS "createdAt", j.state, j.attempt,
  j.max_attempts AS "maxAttempts", j.crashes, j.max_crashes AS "maxCrashes", j.releases, j.max_releases AS "maxReleases", j.snoozes,
  j.max_snoozes AS "maxSnoozes", j.key, j.concurrency_key AS "concurrencyKey", j.batch_id::text AS "batchId", j.member, j.suspect, j.run_at AS "runAt", j.blocked_on AS "blockedOn",
  j.token::text, j.worker_id AS "workerId", j.claimed_at AS "claimedAt", j.deadline_at AS "deadlineAt",
  j.lease_expires_at AS "leaseExpiresAt", j.cancel_requested AS "cancelRequested", j.pause_requested AS "pauseRequested",
  j.started_at AS "startedAt", j.finished_at AS "finishedAt", j.outcome, j.reason, j.error, j.result`;

/** One job. Locks nothing. */
export const getSql = (s: string): string => `SELECT ${statusColumns} FROM ${s}.job_status j WHERE j.id = $1::bigint`;

export const runsSql = (s: string): string => `
  SELECT attempt, token::text, worker_id AS "workerId", started_at AS "startedAt", ended_at AS "endedAt", outcome, error
  FROM ${s}.runs WHERE job_id = $1::bigint ORDER BY id LIMIT 1000`;

/** What a job saved. Locks nothing. */
export const savedSql = (s: string): string => `
  SELECT saved_at AS "savedAt", version, checkpoint, progress, coalesce(log, '[]') AS log FROM ${s}.checkpoints WHERE job_id = $1::bigint`;

/** The state table whose rows are the jobs in a state, so that a rare state is not looked for among all jobs. */
export const STATE_SOURCE: Readonly<Record<JobState, string>> = {
  ready: 'ready',
  scheduled: "waiting WHERE reason = 'scheduled'",
  blocked: "waiting WHERE reason = 'blocked'",
  paused: "waiting WHERE reason = 'paused'",
  running: 'leases',
  completed: "finished WHERE state = 'completed'",
  failed: "finished WHERE state = 'failed'",
  cancelled: "finished WHERE state = 'cancelled'",
};

/** A page of jobs, newest first, by keyset. Locks nothing. */
export const findSql = (s: string, state: JobState | undefined): string => `
  SELECT ${statusColumns} FROM ${s}.job_status j
  WHERE ($1::bigint IS NULL OR j.id < $1) AND ($2::text IS NULL OR j.kind = $2) AND ($3::text IS NULL OR j.queue = $3)
    AND ($4::text IS NULL OR $4 = ANY (j.tags))
    AND ($6::bigint IS NULL OR (j.batch_id = $6 AND j.batch_id IS NOT NULL))
    ${state === undefined ? '' : `AND j.state = '${state}' AND j.id IN (SELECT job_id FROM ${s}.${STATE_SOURCE[state]})`}
  ORDER BY j.id DESC LIMIT $5`;

/** How many jobs are in each state. Reads every state table in one statement. */
export const countsSql = (s: string): string => `
  SELECT 'ready' AS state, count(*)::int AS count FROM ${s}.ready
  UNION ALL SELECT reason, count(*)::int FROM ${s}.waiting GROUP BY reason
  UNION ALL SELECT 'running', count(*)::int FROM ${s}.leases
  UNION ALL SELECT state, count(*)::int FROM ${s}.finished GROUP BY state`;

/** Kinds with something ready that no active worker handles (R27). */
export const unhandledSql = (s: string): string => `
  WITH RECURSIVE kind AS (
    (SELECT min(kind) AS kind FROM ${s}.ready)
    UNION ALL
    SELECT (SELECT min(r.kind) FROM ${s}.ready r WHERE r.kind > k.kind) FROM kind k WHERE k.kind IS NOT NULL)
  SELECT k.kind FROM kind k WHERE k.kind IS NOT NULL AND NOT EXISTS (
    SELECT FROM ${s}.workers w WHERE w.state = 'live' AND w.expires_at > clock_timestamp() AND k.kind = ANY (w.kinds))
  ORDER BY k.kind`;
