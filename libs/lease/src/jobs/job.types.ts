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
export interface Job<P = unknown, C = unknown> {
  readonly id: string;
  readonly kind: string;
  readonly queue: string;
  readonly priority: number;
  readonly payload: P;
  readonly attempt: number;
  readonly maxAttempts: number;
  readonly tags: readonly string[];
  readonly createdAt: Date;
  /** The batch that it is a member of; null: of none. */
  readonly batchId: string | null;
  /** What an earlier run saved last with `lease.checkpoint`; null: nothing (R23). */
  readonly checkpoint: C | null;
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

/** How far a job is, in units of its own. */
export interface JobProgress {
  current: number;
  total?: number;
  message?: string;
}

export interface JobLogLine {
  at: Date;
  attempt: number;
  line: string;
}

/** What running jobs save, each save under the lease of that time. */
export interface JobSaved {
  savedAt: Date;
  /** The last checkpoint, in the format of `version`, the kind's own; 0: none. */
  checkpoint: unknown;
  version: number;
  progress: JobProgress | null;
  /** The last lines, oldest first. */
  log: JobLogLine[];
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
  maxReleases: number;
  maxSnoozes: number;
  /** Its unique key, and the key whose jobs share places. */
  key: string | null;
  concurrencyKey: string | null;
  /** The batch that it is a member of, and its name in it. */
  batchId: string | null;
  member: string | null;
  /** Its next crash would spend its crash budget: it runs alone. */
  suspect: boolean;
  /** When a scheduled job becomes due; of a paused or blocked one, not before when it may run. */
  runAt: Date | null;
  /** What a blocked job waits for: the running job of its key, a place of its concurrency key, or members of its batch that it depends on. */
  blockedOn: 'key' | 'limit' | 'jobs' | null;
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
  /** What it saved on its way. Only from `get`; null: nothing. */
  saved?: JobSaved | null;
  /** Attempts that did not finish the job, oldest first. Only from `get`. */
  runs?: JobRun[];
}
