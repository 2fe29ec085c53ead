import { type Job, type Lease, type Handler, type BatchMember, JobHandler, NonRetryableError } from '@leasehold/nestjs';

type Work = (job: Job<never>, lease: Lease) => unknown;

const usual: Work = ({ payload }) => {
  if ((payload as unknown) === 'fails') throw new NonRetryableError('as told');
  return payload;
};

/** A member's handler. What it does is the spec's to say; by default it fails if its payload is 'fails', else it returns that. */
@JobHandler('part', { backoff: 0, concurrency: 20 })
export class Part implements Handler {
  static work: Work = usual;

  static reset(): void {
    Part.work = usual;
  }

  handle(job: Job, lease: Lease): unknown {
    return Part.work(job as Job<never>, lease);
  }
}

/** A member of this name. */
export const part = (name: string, payload: unknown = name, more: Partial<BatchMember> = {}): BatchMember => ({
  handler: Part,
  payload,
  name,
  ...more,
});

/** Members without names. */
export const parts = (...payloads: unknown[]): BatchMember[] => payloads.map((payload) => ({ handler: Part, payload }));
