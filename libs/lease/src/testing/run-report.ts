import type { JobError, JobStatus, RunOutcome } from '../jobs/job.types';
import type { Answer, Outcome } from '../settle/outcome';

/** One run of a job by the testing kit. */
export interface RunReport<P = unknown, R = unknown> {
  /** The job as it was right after the run, with its result, its earlier runs and what it saved. */
  job: JobStatus<P, R>;
  /**
   * How the run ended. `failed`: the handler threw (the job is then `scheduled` for another attempt, or has `failed` for good); `dead`: its
   * deadline passed; `refused`: the lease was lost meanwhile, and what the handler reported was refused.
   */
  outcome: RunOutcome | 'refused';
  /** What the handler threw, as it stands in the database: name, message, stack, cause. Also of a run that was refused. */
  error?: JobError;
}

/** An outcome on its way to the database, and what became of it there. */
export interface Reported {
  outcome: Outcome;
  answer: Answer;
}

export const errorOf = (outcome: Outcome | undefined): JobError | undefined => {
  if (outcome?.event === 'fail' || outcome?.event === 'fatal') return outcome.error;
  return outcome?.event === 'deadline' ? { message: outcome.reason } : undefined;
};

export function runOutcome(reported: Reported | undefined): RunReport['outcome'] {
  if (!reported?.answer.applied) return 'refused';
  switch (reported.outcome.event) {
    case 'complete':
      return 'completed';
    case 'fail':
    case 'fatal':
      return 'failed';
    case 'snooze':
      return 'snoozed';
    case 'deadline':
      return 'dead';
    case 'stopped':
      return reported.answer.place === 'paused' ? 'paused' : 'cancelled';
    case 'release':
    case 'return':
    case 'giveback':
      return 'released';
  }
}

/** An Error again, so that a test runner prints the handler's own stack. */
export function thrownAs({ name = 'Error', message, stack, cause }: JobError): Error {
  const error = new Error(message, cause ? { cause: thrownAs(cause) } : undefined);
  error.name = name;
  if (stack !== undefined) error.stack = stack;
  return error;
}
