import { LeaseholdError } from '../errors';

export type InterruptionReason = 'lease-lost' | 'cancelled' | 'paused' | 'deadline' | 'drain';

const TEXT: Record<InterruptionReason, string> = {
  'lease-lost': 'the lease is lost: another worker may already run this job',
  cancelled: 'the job was cancelled',
  paused: 'the job was paused',
  deadline: 'hard deadline exceeded',
  drain: 'this process is shutting down',
};

/** `lease.signal.reason`: why the handler should stop at its next boundary. Let it out of the handler, or throw what you like. */
export class JobInterruptedError extends LeaseholdError {
  readonly code = 'JOB_INTERRUPTED';

  constructor(
    readonly jobId: string,
    readonly reason: InterruptionReason,
    detail?: string,
  ) {
    super(`Job ${jobId}: ${TEXT[reason]}${detail ? ` (${detail})` : ''}`);
  }
}
