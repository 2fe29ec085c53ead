import { RESCUE_TEXT } from '@leasehold/nestjs';
import type { Ledger } from './ledger';
import type { Breach } from './rules';

/** The line that `--json` prints. Recovery in ms, from a fault until a job that it had cost a lease was started again. */
export interface Summary {
  seed: number;
  submitted: number;
  completed: number;
  failed: number;
  cancelled: number;
  rescued: { session: number; lease: number; deadline: number };
  refused: number;
  stranded: number;
  lost: number;
  doubled: number;
  recovery: Record<string, { p50: number; p99: number; max: number }>;
}

export async function summarize(ledger: Ledger, seed: number, found: readonly Breach[]): Promise<Summary> {
  const [n] = await ledger.read<{
    [K in 'submitted' | 'completed' | 'failed' | 'cancelled' | 'session' | 'lease' | 'deadline' | 'refused']: number;
  }>(
    `WITH dead AS (SELECT error->>'message' AS text FROM leasehold.runs WHERE outcome = 'dead'
       UNION ALL SELECT reason FROM leasehold.finished WHERE outcome = 'dead')
     SELECT (SELECT count(DISTINCT job)::int FROM ledger.acks) AS submitted,
       (SELECT count(*)::int FROM leasehold.finished WHERE state = 'completed') AS completed,
       (SELECT count(*)::int FROM leasehold.finished WHERE state = 'failed') AS failed,
       (SELECT count(*)::int FROM leasehold.finished WHERE state = 'cancelled') AS cancelled,
       (SELECT count(*)::int FROM dead WHERE starts_with(text, $1)) AS session,
       (SELECT count(*)::int FROM dead WHERE starts_with(text, $2)) AS lease,
       (SELECT count(*)::int FROM dead WHERE starts_with(text, $3)) AS deadline,
       (SELECT count(DISTINCT (job, token))::int FROM ledger.refused) AS refused`,
    [RESCUE_TEXT.session, RESCUE_TEXT.lease, RESCUE_TEXT.deadline],
  );
  if (!n) throw new Error('the counts returned no row');
  // The last fault of the worker that had the lease; or, of those that were the database's, the last before.
  const recovery = await ledger.read<{ fault: string; p50: number; p99: number; max: number }>(
    `SELECT r.fault, round(percentile_cont(0.5) WITHIN GROUP (ORDER BY r.ms))::int AS p50,
       round(percentile_cont(0.99) WITHIN GROUP (ORDER BY r.ms))::int AS p99, round(max(r.ms))::int AS max
     FROM (
       SELECT f.fault, date_part('epoch', s.at - f.at) * 1000 AS ms FROM leasehold.runs d
       CROSS JOIN LATERAL (
         SELECT x.fault, x.at FROM ledger.faults x
         WHERE x.at BETWEEN d.started_at - interval '1 min' AND d.ended_at AND (x.victim IS NULL OR x.victim = split_part(d.worker_id, '-', 1))
         ORDER BY x.victim IS NULL, x.at DESC LIMIT 1) f
       CROSS JOIN LATERAL (SELECT min(x.at) AS at FROM ledger.starts x WHERE x.job = d.job_id AND x.token > d.token) s
       WHERE d.outcome = 'dead' AND s.at IS NOT NULL) r
     GROUP BY r.fault ORDER BY r.fault`,
  );
  const count = (...whats: string[]): number =>
    found.filter(({ what }) => whats.includes(what)).reduce((sum, breach) => sum + breach.count, 0);
  const { session, lease, deadline, ...counts } = n;
  return {
    seed,
    submitted: counts.submitted,
    completed: counts.completed,
    failed: counts.failed,
    cancelled: counts.cancelled,
    rescued: { session, lease, deadline },
    refused: counts.refused,
    stranded: count('a job has not ended', 'a batch has not ended'),
    lost: count(
      'an acknowledged job is gone',
      'a job has no row in a state table, or several',
      'an acknowledged batch is gone, or lacks members',
    ),
    doubled: count('an effect is there twice', 'a run has two ends', 'a batch has not one hook for each of its ends'),
    recovery: Object.fromEntries(recovery.map(({ fault, ...ms }) => [fault, ms])),
  };
}
