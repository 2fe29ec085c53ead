import { RESCUE_TEXT } from '@leasehold/nestjs';
import { escapeIdentifier } from 'pg';
import type { Kill } from '../faults/kill-worker';
import { plural } from '../output/format';
import type { RunDatabase } from './database';

/** What the database says about a run; the line that `--json` prints. */
export interface Summary {
  files: number;
  completed: number;
  failed: number;
  /** Runs that a rescue closed, by the way that did it. */
  rescued: { session: number; lease: number; deadline: number };
  /** Runs of which no result was ever reported. */
  deadRuns: number;
  /** Results that came without their lease. */
  refusedWrites: number;
  /** Jobs that have not ended. */
  stranded: number;
  /** From the kill until the last job of the killed worker was claimed again; null: nobody was killed. */
  recoveryMs: number | null;
}

export interface Check {
  ok: boolean;
  text: string;
}

const PLACES = (s: string): string => `
  SELECT job_id, 'ready' AS place FROM ${s}.ready UNION ALL SELECT job_id, 'waiting' FROM ${s}.waiting
  UNION ALL SELECT job_id, 'leases' FROM ${s}.leases UNION ALL SELECT job_id, 'finished' FROM ${s}.finished`;

/** All counts in one statement, so that a job that moves is seen exactly once. */
const COUNTS = (s: string): string => `
  WITH places AS (${PLACES(s)}),
  per_job AS (
    SELECT j.id, count(p.place) AS rows, count(p.place) FILTER (WHERE p.place = 'finished') AS finished
    FROM ${s}.jobs j LEFT JOIN places p ON p.job_id = j.id GROUP BY j.id),
  dead AS (
    SELECT error->>'message' AS text, outcome FROM ${s}.runs
    UNION ALL SELECT reason, outcome FROM ${s}.finished WHERE outcome = 'dead')
  SELECT (SELECT count(*)::int FROM ${s}.jobs) AS jobs,
    (SELECT count(*)::int FROM per_job WHERE rows <> 1) AS misplaced,
    (SELECT count(*)::int FROM per_job WHERE finished = 0) AS stranded,
    (SELECT count(*)::int FROM per_job WHERE finished > 1) AS "finishedTwice",
    (SELECT count(*)::int FROM places p WHERE NOT EXISTS (SELECT FROM ${s}.jobs j WHERE j.id = p.job_id)) AS strays,
    (SELECT count(*)::int FROM ${s}.leases) AS leases,
    (SELECT count(*)::int FROM ${s}.finished WHERE state = 'completed' AND batch_id > 0) AS completed,
    (SELECT count(*)::int FROM ${s}.finished WHERE state = 'failed' AND batch_id > 0) AS failed,
    (SELECT count(*)::int FROM ${s}.finished WHERE state <> 'completed' AND (error->>'code') IS DISTINCT FROM 'NON_RETRYABLE') AS unexplained,
    (SELECT count(*)::int FROM (SELECT FROM ${s}.job_runs WHERE outcome = 'completed' GROUP BY job_id HAVING count(*) > 1) x) AS "completedTwice",
    (SELECT count(*)::int FROM dead WHERE outcome = 'dead') AS "deadRuns",
    (SELECT count(*)::int FROM dead WHERE starts_with(text, $1)) AS session,
    (SELECT count(*)::int FROM dead WHERE starts_with(text, $2)) AS lease,
    (SELECT count(*)::int FROM dead WHERE starts_with(text, $3)) AS deadline`;

const RECOVERY = (s: string): string => `
  SELECT round(extract(epoch FROM max(again.at) - $2::timestamptz) * 1000)::int AS ms
  FROM ${s}.runs lost CROSS JOIN LATERAL (
    SELECT min(r.started_at) AS at FROM ${s}.job_runs r WHERE r.job_id = lost.job_id AND r.token > lost.token) again
  WHERE lost.worker_id = $1 AND lost.outcome = 'dead'`;

interface Counts {
  jobs: number;
  misplaced: number;
  stranded: number;
  finishedTwice: number;
  strays: number;
  leases: number;
  completed: number;
  failed: number;
  unexplained: number;
  completedTwice: number;
  deadRuns: number;
  session: number;
  lease: number;
  deadline: number;
}

/** Asks the database, not the processes, what has become of every job. Call it when no worker runs any more. */
export async function verify(
  { query, schema }: RunDatabase,
  files: number,
  refusedWrites: number,
  kill: Kill | undefined,
): Promise<{ summary: Summary; checks: Check[] }> {
  const s = escapeIdentifier(schema);
  const [n] = await query<Counts & Record<string, unknown>>(COUNTS(s), [
    RESCUE_TEXT.session,
    RESCUE_TEXT.lease,
    RESCUE_TEXT.deadline,
  ]);
  if (!n) throw new Error('the counts returned no row');
  const [recovery] = kill ? await query<{ ms: number | null }>(RECOVERY(s), [kill.workerId, kill.at]) : [];
  const summary: Summary = {
    files,
    completed: n.completed,
    failed: n.failed,
    rescued: { session: n.session, lease: n.lease, deadline: n.deadline },
    deadRuns: n.deadRuns,
    refusedWrites,
    stranded: n.stranded,
    recoveryMs: recovery?.ms ?? null,
  };
  return { summary, checks: checksOf(n, files) };
}

function checksOf(n: Counts, files: number): Check[] {
  const check = (ok: boolean, good: string, bad: string): Check => ({ ok, text: ok ? good : bad });
  return [
    check(
      n.jobs === files + 1,
      `${plural(files, 'file')}, ${plural(files, 'job')}, and one that closed their batch`,
      `${files} files and a closing job, but ${n.jobs} jobs`,
    ),
    check(
      n.misplaced + n.strays === 0,
      'every job has one row in one state table',
      `${n.misplaced} jobs without exactly one row, ${n.strays} rows without a job`,
    ),
    check(
      n.stranded + n.finishedTwice + n.completedTwice === 0,
      'every job has finished exactly once',
      `${n.stranded} jobs have not finished, ${n.finishedTwice} finished twice, ${n.completedTwice} completed twice`,
    ),
    check(n.leases === 0, 'no lease is left', `${n.leases} leases are left`),
    check(
      n.unexplained === 0,
      n.failed === 0 ? 'no job failed' : `${plural(n.failed, 'job')} failed, each for a reason of its file's own`,
      `${n.unexplained} jobs failed for no fault of their file`,
    ),
  ];
}
