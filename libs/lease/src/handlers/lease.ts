import { createHash } from 'node:crypto';
import type { HeldLease } from '../claim/held-leases';
import { LeaseLostError } from '../errors';

/** The right to run one job now, as its handler sees it. */
export class Lease {
  constructor(
    private readonly held: HeldLease,
    private readonly heartbeat: { readonly trusted: boolean },
  ) {}

  /** The fencing number: a bigint as decimal text, larger for every later claim of the job. Hand it to systems that can compare it. */
  get token(): string {
    return this.held.job.token;
  }

  /** Counts runs whose failure was the handler's own; the same number again after a rescue (R12). */
  get attempt(): number {
    return this.held.job.attempt;
  }

  /** When the run must have ended, by the database's clock; null = no deadline. */
  get deadlineAt(): Date | null {
    return this.held.job.deadlineAt;
  }

  /** Milliseconds left until the deadline, on this process's monotonic clock; Infinity without one. */
  get remainingMs(): number {
    return this.held.remainingMs;
  }

  /** Aborts when the handler should stop; `signal.reason` is a JobInterruptedError whose `reason` says why. Hand it to fetch and the like. */
  get signal(): AbortSignal {
    return this.held.signal;
  }

  /**
   * Throws if the handler should stop: the signal's reason, or LeaseLostError when this process can no longer be sure that the lease is
   * its own. Call it before an effect that must not happen twice.
   */
  assertHeld(): void {
    this.held.throwIfInterrupted();
    if (this.held.lost || !this.heartbeat.trusted) {
      throw new LeaseLostError(
        this.held.job.id,
        this.token,
        'no beat has reached the database for too long to be sure of the lease',
      );
    }
  }

  /**
   * An idempotency key for one effect of this job: the same for every run of it, different for every item and job (R20). 36 characters, in
   * the form of a UUID.
   */
  key(item: string | number = ''): string {
    const hash = createHash('sha256')
      .update(`leasehold:${this.held.job.id}:${typeof item}:${item}`)
      .digest();
    hash[6] = ((hash[6] ?? 0) & 0x0f) | 0x80;
    hash[8] = ((hash[8] ?? 0) & 0x3f) | 0x80;
    const hex = hash.toString('hex');
    return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-${hex.slice(12, 16)}-${hex.slice(16, 20)}-${hex.slice(20, 32)}`;
  }
}
