import type { JobError } from '../jobs/job.types';

/** What became of a run, as the holder of the lease reports it. See `move_v1` for what each event does. */
export type Outcome =
  | { event: 'complete'; /** JSON text, or null for no result. */ result: string | null }
  | { event: 'fail'; error: JobError; /** Instead of the backoff. */ delayMs?: number }
  | { event: 'fatal'; error: JobError }
  | { event: 'snooze'; delayMs: number }
  | { event: 'stopped' }
  | { event: 'release' }
  | { event: 'return' }
  | { event: 'giveback' }
  | { event: 'deadline'; reason: string };

/** `place`: where the job went (a job state); undefined with `applied: false`: the lease was lost and nothing was changed (R17). */
export interface Answer {
  applied: boolean;
  place?: string;
  /** Of a job that has failed for good. */
  reason?: string;
}

/** One element of `move_v1`'s parameter. */
export interface Move {
  job: string;
  token: string;
  worker: string;
  event: string;
  error?: JobError;
  reason?: string;
  delayMs?: number;
  alone?: boolean;
  overdue?: boolean;
}

export interface MoveRow {
  job_id: string;
  token: string;
  place: string;
  outcome: string;
  attempt: number;
  crashes: number;
  kind: string;
  queue: string;
  worker_id: string;
  reason: string | null;
  /** '0': of none. */
  batch_id: string;
}
