import { lateJobs } from './lateness';
import type { Ledger } from './ledger';

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
  'an outcome was acknowledged and is not on record': `
    SELECT c.job FROM ledger.completed c WHERE NOT EXISTS (
      SELECT FROM leasehold.job_runs r WHERE r.job_id = c.job AND r.token = c.token AND r.outcome = 'completed')`,
  'a write was refused and is on record': `
    SELECT x.job FROM ledger.refused x JOIN leasehold.job_runs r ON r.job_id = x.job AND r.token = x.token WHERE r.outcome = 'completed'`,
  // Who ended in order has been told of each of its runs what became of it: stored, or refused.
  'a run was taken from its worker, which was never told': `
    SELECT e.job FROM ledger.ends e JOIN ledger.drained d ON d.worker = e.worker
    JOIN leasehold.job_runs r ON r.job_id = e.job AND r.token = e.token AND r.outcome = 'dead'
    WHERE NOT EXISTS (SELECT FROM ledger.refused x WHERE x.job = e.job AND x.token = e.token)`,
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
    SELECT pid::bigint AS job FROM pg_stat_activity WHERE application_name ~ '^(lh:|leasehold|chaos (effect|producer|worker))'`,
  'a worker is still registered': `SELECT 0 AS job FROM leasehold.workers WHERE state IN ('live', 'draining') AND expires_at > clock_timestamp()`,
  'a lock is left': `
    SELECT pid::bigint AS job FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`,
};

export async function breaches(ledger: Ledger): Promise<Breach[]> {
  const found: Breach[] = [];
  for (const [what, sql] of Object.entries(RULES)) {
    const rows = await ledger.read<{ job: string }>(`SELECT x.job::text FROM (${sql}) x ORDER BY 1 LIMIT 1000`);
    if (rows.length > 0) found.push({ what, count: rows.length, job: rows[0]?.job ?? null });
  }
  return [...found, ...(await lateJobs(ledger))];
}

/** All that the tables say of one job, in the order in which it happened. */
export function historyOf(ledger: Ledger, job: string): Promise<Record<string, unknown>[]> {
  return ledger.read(
    `SELECT * FROM (
       SELECT at, 'ack' AS what, a.what AS detail FROM ledger.acks a WHERE job = $1::bigint
       UNION ALL SELECT at, 'start', 'token ' || token || ' on ' || worker FROM ledger.starts WHERE job = $1::bigint
       UNION ALL SELECT at, 'effect', 'token ' || token FROM ledger.effects WHERE job = $1::bigint
       UNION ALL SELECT at, 'handler ended', 'token ' || token || ' on ' || worker FROM ledger.ends WHERE job = $1::bigint
       UNION ALL SELECT at, 'refused', 'token ' || token FROM ledger.refused WHERE job = $1::bigint
       UNION ALL SELECT at, 'command', command || ': ' || answer FROM ledger.commands WHERE job = $1::bigint
       UNION ALL SELECT ended_at, 'run', 'token ' || token || ' on ' || worker_id || ': ' || outcome || coalesce(', ' || (error->>'message'), '') FROM leasehold.job_runs WHERE job_id = $1::bigint
       UNION ALL SELECT finished_at, 'finished', state || coalesce(', ' || reason, '') FROM leasehold.finished WHERE job_id = $1::bigint
     ) x ORDER BY at DESC LIMIT 200`,
    [job],
  );
}
