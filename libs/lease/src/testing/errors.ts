import { LeaseholdError } from '../errors';
import type { RunReport } from './run-report';

/** A job was, or was not, enqueued against what a test expected. The message lists what was. */
export class ExpectationError extends LeaseholdError {
  readonly code = 'EXPECTATION';
}

/** Jobs failed while a drain ran them. `runs` has them; `cause` is what the first handler threw, with its stack. */
export class JobsFailedError extends LeaseholdError {
  readonly code = 'JOBS_FAILED';

  constructor(
    message: string,
    readonly runs: RunReport[],
    options?: ErrorOptions,
  ) {
    super(message, options);
  }
}

/** A drain has run `maxRuns` jobs and more are due. `runs` has what it ran. */
export class DrainLimitError extends LeaseholdError {
  readonly code = 'DRAIN_LIMIT';

  constructor(
    message: string,
    readonly runs: RunReport[],
  ) {
    super(message);
  }
}

/** What can be done to a running job only, and this one is not run by the kit just now. */
export class JobNotRunningError extends LeaseholdError {
  readonly code = 'JOB_NOT_RUNNING';

  constructor(
    readonly jobId: string,
    why: string,
  ) {
    super(`Job ${jobId} ${why}`);
  }
}

/** The transaction that `useTransaction` was given is over, cannot be used any more, or cannot be used for this. */
export class TestTransactionError extends LeaseholdError {
  readonly code = 'TEST_TRANSACTION';
}

/** A worker that is no test is up on the schema, and would take the test's jobs. */
export class ForeignWorkerError extends LeaseholdError {
  readonly code = 'FOREIGN_WORKER';
}
