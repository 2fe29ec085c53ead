import type { Ledger } from './ledger';
import type { Breach } from './rules';
import { SCAN_MS, TTL_MS } from './settings';

/** What a busy machine of two cores takes for itself. */
const SLACK_MS = 2500;
const ALLOWED_MS = TTL_MS + SCAN_MS + SLACK_MS;
/** After the database was away everybody waits for a TTL of steady beats before declaring anybody dead; and it takes a moment to be back. */
const AFTERMATH_MS = TTL_MS + 1000;

interface Span {
  from: number;
  to: number;
}

/** How much of a span is in none of the others, which are in the order of their beginnings. */
export function outside({ from, to }: Span, others: readonly Span[]): number {
  let sum = 0;
  let at = from;
  for (const other of others) {
    if (other.to <= at) continue;
    if (other.from >= to) break;
    sum += Math.max(0, other.from - at);
    at = Math.max(at, other.to);
  }
  return sum + Math.max(0, to - at);
}

interface Orphan extends Record<string, unknown> {
  job: string;
  from: number;
  to: number;
}

const ms = (column: string): string => `date_part('epoch', ${column}) * 1000`;

/** Leases of workers that were killed, frozen or cut off: from then until they were taken. */
const ORPHANS = `
  SELECT r.job_id::text AS job, ${ms('f.at')} AS "from", ${ms('r.ended_at')} AS "to"
  FROM leasehold.job_runs r CROSS JOIN LATERAL (
    SELECT x.at, x.ended_at FROM ledger.faults x
    WHERE x.victim = split_part(r.worker_id, '-', 1) AND x.fault IN ('kill', 'killLeader', 'freeze', 'freezeLeader', 'partition', 'redeploy') AND x.at <= r.ended_at
    ORDER BY x.at DESC LIMIT 1) f
  WHERE r.outcome = 'dead' AND r.started_at < f.at`;

/** Jobs that nothing kept from being started, and no worker's trouble: from the answer to the enqueue, or when they were due, until they were. */
const WAITING = `
  SELECT a.job::text AS job, ${ms('a.at')} + a.due_ms AS "from", ${ms('min(s.at)')} AS "to"
  FROM ledger.acks a JOIN ledger.starts s ON s.job = a.job
  WHERE a.what IN ('one', 'many', 'transactional') AND NOT EXISTS (SELECT FROM ledger.commands c WHERE c.job = a.job)
    AND NOT EXISTS (SELECT FROM leasehold.job_runs r WHERE r.job_id = a.job AND r.outcome = 'dead')
  GROUP BY a.job, a.at, a.due_ms`;

/** Jobs that were started or taken later than a TTL and a scan allow, while the database was well and nothing was the matter with it just before. */
export async function lateJobs(ledger: Ledger): Promise<Breach[]> {
  const trouble = await ledger.read<Span & Record<string, unknown>>(
    `SELECT ${ms('at')} AS "from", ${ms('ended_at')} + ${AFTERMATH_MS} AS "to" FROM ledger.faults
     WHERE victim IS NULL AND ended_at IS NOT NULL ORDER BY at`,
  );
  const found: Breach[] = [];
  for (const [what, sql] of [
    ['a lease was taken late', ORPHANS],
    ['a job was started late', WAITING],
  ] as const) {
    const late = (await ledger.read<Orphan>(sql))
      .map((orphan) => ({ ...orphan, late: outside(orphan, trouble) }))
      .filter((orphan) => orphan.late > ALLOWED_MS)
      .sort((a, b) => b.late - a.late);
    const [worst] = late;
    if (worst) {
      found.push({
        what: `${what} (over ${ALLOWED_MS} ms; the latest ${Math.round(worst.late)} ms)`,
        count: late.length,
        job: worst.job,
      });
    }
  }
  return found;
}
