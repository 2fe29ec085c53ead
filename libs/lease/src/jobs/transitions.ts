import type { JobState } from './job.types';

/**
 * The state machine of a job, as data (R22). Everything that can happen to a job is in one of these two tables: what somebody outside
 * asks for (`COMMANDS`), and what the machinery and the holder of the lease report (`EVENTS`). The database's functions are made from
 * the first, a test tries every cell of both on a real database, and the guide prints them.
 */

/** What a command does to a job in a state; absent = illegal, nothing is changed. */
export type CommandEffect =
  /** It goes to this state. */
  | JobState
  /** It stays what it is, and that is what was asked for. */
  | 'unchanged'
  /** Written on the lease; the handler is told, and the job goes there when it ends. */
  | 'requested'
  /** The pause request on the lease is withdrawn, if there is one. */
  | 'withdrawn'
  /** The lease is taken away at once: whatever its holder still writes is refused. */
  | 'revoked'
  /** It stays where it is with another priority. */
  | 'reprioritised'
  /** To ready, scheduled or blocked, whatever holds of it now. */
  | 'resumed'
  /** To the head of ready. */
  | 'hurried'
  /** To ready with fresh budgets, its checkpoint and its key; the run it ended with goes into its history. A member of a batch that still needs others: to blocked. */
  | 'retried'
  /** It is gone, with everything about it. */
  | 'deleted';

export type JobCommand = 'cancel' | 'forceCancel' | 'pause' | 'resume' | 'retry' | 'runNow' | 'reprioritise' | 'delete';

export const COMMANDS: Readonly<Record<JobCommand, Readonly<Partial<Record<JobState, CommandEffect>>>>> = {
  cancel: {
    ready: 'cancelled',
    scheduled: 'cancelled',
    blocked: 'cancelled',
    paused: 'cancelled',
    running: 'requested',
    cancelled: 'unchanged',
  },
  forceCancel: {
    ready: 'cancelled',
    scheduled: 'cancelled',
    blocked: 'cancelled',
    paused: 'cancelled',
    running: 'revoked',
    cancelled: 'unchanged',
  },
  pause: { ready: 'paused', scheduled: 'paused', blocked: 'paused', paused: 'unchanged', running: 'requested' },
  resume: {
    ready: 'unchanged',
    scheduled: 'unchanged',
    blocked: 'unchanged',
    paused: 'resumed',
    running: 'withdrawn',
  },
  retry: { completed: 'retried', failed: 'retried', cancelled: 'retried' },
  runNow: { ready: 'unchanged', scheduled: 'hurried' },
  reprioritise: {
    ready: 'reprioritised',
    scheduled: 'reprioritised',
    blocked: 'reprioritised',
    paused: 'reprioritised',
    running: 'reprioritised',
  },
  delete: {
    ready: 'deleted',
    scheduled: 'deleted',
    blocked: 'deleted',
    paused: 'deleted',
    completed: 'deleted',
    failed: 'deleted',
    cancelled: 'deleted',
  },
};

/** An event of the machinery: from which state, and where to. */
export interface JobEventRule {
  from: JobState;
  /** If nothing below holds. */
  to: JobState;
  /** Which budget it draws on: spent, the job goes to failed. */
  budget?: 'maxAttempts' | 'maxCrashes' | 'maxReleases' | 'maxSnoozes';
  /** Whether a cancel request on the lease outranks `to`, and after a spent budget a pause request. */
  stops: boolean;
  /** What the number of the attempt becomes: spent = it stays, back = it is given back. */
  attempt: 'spent' | 'back' | 'none';
}

export type JobEvent =
  | 'promote'
  | 'unblock'
  | 'claim'
  | 'complete'
  | 'fail'
  | 'fatal'
  | 'snooze'
  | 'stopped'
  | 'release'
  | 'return'
  | 'giveback'
  | 'crash'
  | 'lostdrain'
  | 'deadline'
  | 'revoke';

export const EVENTS: Readonly<Record<JobEvent, Readonly<JobEventRule>>> = {
  promote: { from: 'scheduled', to: 'ready', stops: false, attempt: 'none' },
  unblock: { from: 'blocked', to: 'ready', stops: false, attempt: 'none' },
  claim: { from: 'ready', to: 'running', stops: false, attempt: 'none' },
  complete: { from: 'running', to: 'completed', stops: false, attempt: 'spent' },
  fail: { from: 'running', to: 'scheduled', budget: 'maxAttempts', stops: true, attempt: 'spent' },
  fatal: { from: 'running', to: 'failed', stops: true, attempt: 'spent' },
  snooze: { from: 'running', to: 'scheduled', budget: 'maxSnoozes', stops: true, attempt: 'back' },
  stopped: { from: 'running', to: 'ready', stops: true, attempt: 'back' },
  release: { from: 'running', to: 'ready', budget: 'maxReleases', stops: true, attempt: 'back' },
  return: { from: 'running', to: 'ready', stops: true, attempt: 'back' },
  giveback: { from: 'running', to: 'ready', stops: true, attempt: 'back' },
  crash: { from: 'running', to: 'ready', budget: 'maxCrashes', stops: true, attempt: 'back' },
  lostdrain: { from: 'running', to: 'ready', budget: 'maxReleases', stops: true, attempt: 'back' },
  deadline: { from: 'running', to: 'scheduled', budget: 'maxAttempts', stops: true, attempt: 'spent' },
  revoke: { from: 'running', to: 'cancelled', stops: false, attempt: 'back' },
};

/** Where an event takes a job. `fatal` fails it for good also when it is to be paused: there is nothing left to resume. */
export function placeAfter(
  event: JobEvent,
  { cancel = false, pause = false, spent = false }: { cancel?: boolean; pause?: boolean; spent?: boolean } = {},
): JobState {
  const { to, budget, stops } = EVENTS[event];
  if (!stops) return to;
  if (cancel) return 'cancelled';
  if (to === 'failed' || (spent && budget)) return 'failed';
  return pause ? 'paused' : to;
}
