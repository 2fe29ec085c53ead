import { RESCUE_TEXT } from '@leasehold/nestjs';
import type { Ledger } from './ledger';

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

/** Something that must not be; `job` of the first one, to be looked up. */
export interface Breach {
  what: string;
  count: number;
  job: string | null;
}

const PLACES = `
  SELECT job_id, 'ready' AS place FROM leasehold.ready UNION ALL SELECT job_id, 'waiting' FROM leasehold.waiting
  UNION ALL SELECT job_id, 'leases' FROM leasehold.leases UNION ALL SELECT job_id, 'finished' FROM leasehold.finished`;

/** Each returns the jobs of which it is true. */
const RULES: Record<string, string> = {
  'an acknowledged job is gone': `SELECT DISTINCT a.job FROM ledger.acks a WHERE NOT EXISTS (SELECT FROM leasehold.jobs j WHERE j.id = a.job)`,
  'a job of a transaction that was rolled back is there': `SELECT a.job FROM ledger.acks a WHERE a.what = 'never'`,
  'a job has not ended': `SELECT p.job_id AS job FROM (${PLACES}) p WHERE p.place <> 'finished'`,
  'a job has no row in a state table, or several': `
    SELECT j.id AS job FROM leasehold.jobs j LEFT JOIN (${PLACES}) p ON p.job_id = j.id GROUP BY j.id HAVING count(p.place) <> 1`,
  'a row of a state table has no job': `SELECT p.job_id AS job FROM (${PLACES}) p WHERE NOT EXISTS (SELECT FROM leasehold.jobs j WHERE j.id = p.job_id)`,
  // A job that the operator retried after its end may have its effect again, once for each end.
  'an effect is there twice': `
    SELECT e.job FROM ledger.effects e GROUP BY e.job
    HAVING count(*) > 1 + (SELECT count(*) FROM ledger.commands c WHERE c.job = e.job AND c.command = 'retry' AND c.answer IN ('ready', 'blocked', 'ERROR'))`,
  'an effect without the completion that it was committed with': `
    SELECT e.job FROM ledger.effects e WHERE NOT EXISTS (
      SELECT FROM leasehold.job_runs r WHERE r.job_id = e.job AND r.token = e.token AND r.outcome = 'completed')`,
  'a completion without the effect that it was committed with': `
    SELECT r.job_id AS job FROM leasehold.job_runs r JOIN leasehold.jobs j ON j.id = r.job_id
    WHERE r.outcome = 'completed' AND j.payload->>'effect' = 'true'
      AND NOT EXISTS (SELECT FROM ledger.effects e WHERE e.job = r.job_id AND e.token = r.token)`,
  'a run has two ends': `SELECT r.job_id AS job FROM leasehold.job_runs r GROUP BY r.job_id, r.token HAVING count(*) > 1`,
  'a run that was started has no end': `
    SELECT s.job FROM ledger.starts s WHERE NOT EXISTS (SELECT FROM leasehold.job_runs r WHERE r.job_id = s.job AND r.token = s.token)`,
  'a poison job completed': `
    SELECT f.job_id AS job FROM leasehold.finished f JOIN leasehold.jobs j ON j.id = f.job_id WHERE j.payload->>'poison' = 'true' AND f.state = 'completed'`,
  'a job was convicted that is no poison': `
    SELECT f.job_id AS job FROM leasehold.finished f JOIN leasehold.jobs j ON j.id = f.job_id
    WHERE f.state = 'failed' AND f.reason LIKE '%crashed its worker%' AND j.payload->>'poison' IS NULL AND j.batch_id IS NULL`,
  'a batch has not ended': `SELECT b.id AS job FROM leasehold.batches b WHERE b.status = 'running'`,
  'an acknowledged batch is gone, or lacks members': `
    SELECT l.batch AS job FROM ledger.batches l WHERE l.members <> (SELECT count(*) FROM leasehold.jobs j WHERE j.batch_id = l.batch)`,
  'a batch’s counts are not its rows': `
    SELECT b.id AS job FROM leasehold.batches b CROSS JOIN LATERAL (
      SELECT count(*) FILTER (WHERE state = 'completed') AS c, count(*) FILTER (WHERE state = 'failed') AS f, count(*) FILTER (WHERE state = 'cancelled') AS x
      FROM leasehold.finished f WHERE f.batch_id = b.id) n
    WHERE (b.completed, b.failed, b.cancelled) IS DISTINCT FROM (n.c::int, n.f::int, n.x::int)
      OR b.status <> CASE WHEN n.f > 0 THEN 'failed' WHEN n.c = 0 THEN 'cancelled' ELSE 'completed' END`,
  'a batch has not one hook for each of its ends': `
    SELECT b.id AS job FROM leasehold.batches b
    WHERE b.generation <> (SELECT count(*) FROM leasehold.jobs j WHERE j.kind = 'chaos.closing' AND j.payload->'batch'->>'id' = b.id::text)`,
  'a key outlives its job': `
    SELECT k.job_id AS job FROM leasehold.job_keys k WHERE k.until IS NULL AND EXISTS (SELECT FROM leasehold.finished f WHERE f.job_id = k.job_id)`,
  'a session is left': `
    SELECT pid::bigint AS job FROM pg_stat_activity WHERE application_name LIKE 'lh:%' OR application_name IN ('leasehold main', 'chaos effect')`,
  'a lock is left': `
    SELECT pid::bigint AS job FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`,
};

export async function breaches(ledger: Ledger): Promise<Breach[]> {
  const found: Breach[] = [];
  for (const [what, sql] of Object.entries(RULES)) {
    const rows = await ledger.read<{ job: string }>(`SELECT x.job::text FROM (${sql}) x ORDER BY 1 LIMIT 1000`);
    if (rows.length > 0) found.push({ what, count: rows.length, job: rows[0]?.job ?? null });
  }
  return found;
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
  const recovery = await ledger.read<{ fault: string; p50: number; p99: number; max: number }>(
    `SELECT r.fault, round(percentile_cont(0.5) WITHIN GROUP (ORDER BY r.ms))::int AS p50,
       round(percentile_cont(0.99) WITHIN GROUP (ORDER BY r.ms))::int AS p99, round(max(r.ms))::int AS max
     FROM (
       SELECT f.fault, date_part('epoch', s.at - f.at) * 1000 AS ms FROM leasehold.runs d
       CROSS JOIN LATERAL (SELECT x.fault, x.at FROM ledger.faults x WHERE x.at <= d.ended_at ORDER BY x.at DESC LIMIT 1) f
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

/** All that the tables say of one job, in the order in which it happened. */
export function historyOf(ledger: Ledger, job: string): Promise<Record<string, unknown>[]> {
  return ledger.read(
    `SELECT * FROM (
       SELECT at, 'ack' AS what, a.what AS detail FROM ledger.acks a WHERE job = $1::bigint
       UNION ALL SELECT at, 'start', 'token ' || token || ' on ' || worker FROM ledger.starts WHERE job = $1::bigint
       UNION ALL SELECT at, 'effect', 'token ' || token FROM ledger.effects WHERE job = $1::bigint
       UNION ALL SELECT at, 'refused', 'token ' || token FROM ledger.refused WHERE job = $1::bigint
       UNION ALL SELECT at, 'command', command || ': ' || answer FROM ledger.commands WHERE job = $1::bigint
       UNION ALL SELECT ended_at, 'run', 'token ' || token || ': ' || outcome || coalesce(', ' || (error->>'message'), '') FROM leasehold.job_runs WHERE job_id = $1::bigint
       UNION ALL SELECT finished_at, 'finished', state || coalesce(', ' || reason, '') FROM leasehold.finished WHERE job_id = $1::bigint
     ) x ORDER BY at DESC LIMIT 200`,
    [job],
  );
}
