/** Every error that Leasehold throws on purpose. `code` is stable; the admin API repeats it in its bodies (R35). */
export abstract class LeaseholdError extends Error {
  abstract readonly code: string;

  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** A wrong option, found before anything is started. Names the option, its value and what is allowed. */
export class InvalidOptionError extends LeaseholdError {
  readonly code = 'INVALID_OPTION';
}

/** The application is put together wrongly: two handlers of a kind, `forRoot` twice, no `ScheduleModule`. */
export class LeaseSetupError extends LeaseholdError {
  readonly code = 'LEASE_SETUP';
}

/** A job that cannot be enqueued, or a question about jobs that cannot be answered, as it is. Nothing was written. `field` names what to change. */
export class InvalidJobError extends LeaseholdError {
  readonly code = 'INVALID_JOB';

  constructor(
    message: string,
    readonly field: string,
    options?: ErrorOptions,
  ) {
    super(message, options);
  }
}

/** No job has this id. */
export class UnknownJobError extends LeaseholdError {
  readonly code = 'UNKNOWN_JOB';

  constructor(readonly jobId: string) {
    super(`There is no job ${jobId}`);
  }
}

/**
 * The lease is no longer held: the job was rescued, cancelled or leased anew, and the write was refused (R17). Whoever
 * gets this must stop working on the job; the run is abandoned, never marked failed.
 */
export class LeaseLostError extends LeaseholdError {
  readonly code = 'LEASE_LOST';

  constructor(
    readonly jobId: string,
    readonly token: string,
    why = 'the lease is held by nobody of this token any more',
  ) {
    super(`Job ${jobId} (token ${token}): ${why}`);
  }
}

/** The insert was sent and its reply lost: the jobs may or may not be there. Look before repeating. */
export class EnqueueUncertainError extends LeaseholdError {
  readonly code = 'ENQUEUE_UNCERTAIN';
}

/** `store: 'exclusive'` while another worker is up. */
export class StoreNotExclusiveError extends LeaseholdError {
  readonly code = 'STORE_NOT_EXCLUSIVE';
}

/** The database's schema is missing or older than this code. */
export class SchemaError extends LeaseholdError {
  readonly code = 'SCHEMA';
}

/** A query took longer than its client-side limit; its connection was destroyed. */
export class QueryTimeoutError extends LeaseholdError {
  readonly code = 'QUERY_TIMEOUT';
}

/** The module is shut down, or not started yet. */
export class NotRunningError extends LeaseholdError {
  readonly code = 'NOT_RUNNING';
}

/** `lease.checkpoint` was given what cannot be stored: no JSON, too large. Nothing was saved; the last checkpoint stands. */
export class CheckpointError extends LeaseholdError {
  readonly code = 'INVALID_CHECKPOINT';
}

/** A command that the job's present state does not allow (R22). Nothing was changed. */
export class IllegalTransitionError extends LeaseholdError {
  readonly code = 'ILLEGAL_TRANSITION';

  constructor(
    readonly jobId: string,
    readonly command: string,
    /** The state that it is in. */
    readonly state: string,
    why = '',
  ) {
    super(`Job ${jobId} is ${state}: ${command} is not possible${why === '' ? '' : ` (${why})`}`);
  }
}

/** The job moved each time that it was looked for. Try again. */
export class JobContendedError extends LeaseholdError {
  readonly code = 'JOB_CONTENDED';

  constructor(readonly jobId: string) {
    super(`Job ${jobId} moved five times while it was looked for: try again`);
  }
}

/** `jobs.waitFor` ran into its timeout. The job goes on. */
export class WaitTimeoutError extends LeaseholdError {
  readonly code = 'WAIT_TIMEOUT';

  constructor(
    readonly jobId: string,
    readonly state: string,
    timeoutMs: number,
  ) {
    super(`Job ${jobId} is ${state} after ${timeoutMs} ms`);
  }
}

/** Thrown by a handler: this job can never succeed. It is failed at once, whatever attempts are left. */
export class NonRetryableError extends LeaseholdError {
  readonly code = 'NON_RETRYABLE';
}

/** Thrown by a handler: run me again in `delayMs` milliseconds. No attempt is spent. */
export class SnoozeError extends LeaseholdError {
  readonly code = 'SNOOZE';

  constructor(readonly delayMs: number) {
    super(`snoozed for ${delayMs} ms`);
    if (!Number.isFinite(delayMs) || delayMs < 0 || delayMs > MAX_DELAY_MS) {
      throw new RangeError(`SnoozeError: delayMs must be from 0 to ${MAX_DELAY_MS}, not ${delayMs}`);
    }
  }
}

/** Ten years. Longer delays are refused everywhere, so that no timestamp can overflow. */
export const MAX_DELAY_MS = 315_576_000_000;

/** A batch that cannot be made, or be added to, as it is: a name given twice, unknown or its own dependency, a cycle. Nothing was written. */
export class InvalidBatchError extends LeaseholdError {
  readonly code = 'INVALID_BATCH';

  constructor(
    message: string,
    /** What to change. */
    readonly field: string,
    /** The members that it is about, by name. */
    readonly names: readonly string[] = [],
    options?: ErrorOptions,
  ) {
    super(message, options);
  }
}

/** No batch has this id. */
export class UnknownBatchError extends LeaseholdError {
  readonly code = 'UNKNOWN_BATCH';

  constructor(readonly batchId: string) {
    super(`There is no batch ${batchId}`);
  }
}

/** There is such a batch, and it has no members: there is nothing to have a status (R30). */
export class EmptyBatchError extends LeaseholdError {
  readonly code = 'EMPTY_BATCH';

  constructor(readonly batchId: string) {
    super(
      `Batch ${batchId} has no members: add some, or seal it with { ifEmpty: 'complete' } if none is a good outcome`,
    );
  }
}

/** What the batch's present state does not allow: adding to one that is sealed, deleting one that runs. Nothing was changed. */
export class IllegalBatchStateError extends LeaseholdError {
  readonly code = 'ILLEGAL_BATCH_STATE';

  constructor(
    readonly batchId: string,
    readonly status: string,
    what: string,
  ) {
    super(`Batch ${batchId} is ${status}: ${what}`);
  }
}
