/** Where a job stands. Shown by the state table that holds its row; `scheduled`, `blocked` and `paused` are reasons to wait. */
export type JobState = 'ready' | 'scheduled' | 'blocked' | 'paused' | 'running' | 'completed' | 'failed' | 'cancelled';

export const JOB_STATES: readonly JobState[] = [
  'ready',
  'scheduled',
  'blocked',
  'paused',
  'running',
  'completed',
  'failed',
  'cancelled',
];

/** How one run ended. `dead`: no result was ever reported (rescue); `failed`: the handler reported an error (R12). */
export type RunOutcome = 'completed' | 'failed' | 'dead' | 'released' | 'snoozed' | 'paused' | 'cancelled';

/** A job as its handler sees it. Ids are decimal text: they are 64 bits wide. */
export interface Job<P = unknown> {
  readonly id: string;
  readonly kind: string;
  readonly queue: string;
  readonly priority: number;
  readonly payload: P;
  readonly attempt: number;
  readonly maxAttempts: number;
  readonly tags: readonly string[];
  readonly createdAt: Date;
}

/** One closed attempt that did not finish its job. */
export interface JobRun {
  attempt: number;
  token: string;
  workerId: string;
  startedAt: Date;
  endedAt: Date;
  outcome: RunOutcome;
  error: JobError | null;
}

/** A thrown value, made readable, storable and bounded. */
export interface JobError {
  name?: string;
  message: string;
  stack?: string;
  code?: string;
  cause?: JobError;
  errors?: JobError[];
}

/** A job with everything that is known about it. */
export interface JobStatus<P = unknown, R = unknown> {
  id: string;
  kind: string;
  queue: string;
  priority: number;
  payload: P;
  tags: string[];
  createdAt: Date;
  state: JobState;
  attempt: number;
  maxAttempts: number;
  crashes: number;
  maxCrashes: number;
  releases: number;
  snoozes: number;
  /** Its next crash would spend its crash budget: it runs alone. */
  suspect: boolean;
  /** When a scheduled job becomes due. */
  runAt: Date | null;
  /** The lease, while running; of the last run once finished. */
  token: string | null;
  workerId: string | null;
  claimedAt: Date | null;
  deadlineAt: Date | null;
  leaseExpiresAt: Date | null;
  cancelRequested: boolean;
  pauseRequested: boolean;
  startedAt: Date | null;
  finishedAt: Date | null;
  outcome: RunOutcome | null;
  reason: string | null;
  error: JobError | null;
  result: R | null;
  /** Attempts that did not finish the job, oldest first. Only from `get`. */
  runs?: JobRun[];
}
