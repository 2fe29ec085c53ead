import type { Job } from '../jobs/job.types';

/** A job under a lease of this process, as claimed. `key` = `id:token` is unique for ever. */
export interface LeasedJob<P = unknown> extends Job<P> {
  readonly key: string;
  /** The fence: a bigint as decimal text. Every write about the running job names it. */
  readonly token: string;
  readonly workerId: string;
  readonly deadlineMs: number | null;
  readonly deadlineAt: Date | null;
  readonly crashes: number;
  /** Runs alone, since its next crash would spend its crash budget. */
  readonly suspect: boolean;
  /** Monotonic ms at which the claim was sent: local time limits count from here, so they end before the database's. */
  readonly claimedAtMs: number;
}

type Row = [
  id: string,
  token: string,
  kind: string,
  queue: string,
  attempt: number,
  priority: number,
  payload: unknown,
  maxAttempts: number,
  deadlineMs: number | null,
  createdAt: number,
  tags: string[] | null,
  crashes: number,
  suspect: 0 | 1,
  position: number,
];

/** The jobs of one claim, and where each stood in its lane (exact below 2^53; below zero: given back). */
export interface Claimed {
  jobs: LeasedJob[];
  positions: number[];
}

/** Reads what `step_v1` returns: one JSON text for all jobs of a claim, parsed in one go (a third of the cost of rows). */
export function parseClaim(text: string | null, workerId: string, sentAtMs: number): Claimed {
  if (text === null) return { jobs: [], positions: [] };
  const [claimedAt, ...rows] = JSON.parse(text) as [number, ...Row[]];
  const jobs = rows.map((row): LeasedJob => {
    const deadlineMs = row[8];
    return {
      key: `${row[0]}:${row[1]}`,
      id: row[0],
      token: row[1],
      workerId,
      kind: row[2],
      queue: row[3],
      attempt: row[4],
      priority: row[5],
      payload: row[6],
      maxAttempts: row[7],
      deadlineMs,
      deadlineAt: deadlineMs === null ? null : new Date(claimedAt * 1000 + deadlineMs),
      createdAt: new Date(row[9] * 1000),
      tags: row[10] ?? [],
      crashes: row[11],
      suspect: row[12] === 1,
      claimedAtMs: sentAtMs,
    };
  });
  return { jobs, positions: rows.map((row) => row[13]) };
}
