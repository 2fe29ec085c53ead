import { Injectable } from '@nestjs/common';
import { Exchange } from '../claim/exchange';
import type { LeasedJob } from '../claim/leased-job';
import { LeaseLostError, MAX_DELAY_MS, NonRetryableError } from '../errors';
import { ResolvedOptions } from '../options/lease-options';
import { describeError } from './describe-error';
import { encodeResult } from './encode-result';
import type { Outcome } from './outcome';

/**
 * Writes outcomes of jobs that were claimed by hand. Each is written by the holder of the token only, and answered: a write that moves
 * nothing is a LeaseLostError, and the run must be abandoned (R17). A reply lost on the way is no error: the write is repeated, and
 * applied once.
 */
@Injectable()
export class SettleService {
  constructor(
    private readonly exchange: Exchange,
    private readonly options: ResolvedOptions,
  ) {}

  /** The job is done. A result that cannot be stored (a BigInt, a cycle, too large) fails the job for good instead. */
  async complete(job: LeasedJob, result?: unknown): Promise<void> {
    const encoded = encodeResult(result, this.options.resultMaxBytes);
    await this.write(
      job,
      'json' in encoded
        ? { event: 'complete', result: encoded.json }
        : { event: 'fatal', error: { name: 'ResultNotStorable', message: encoded.problem } },
    );
  }

  /** The attempt failed: again after the kind's backoff (or `delayMs`), or for good when out of attempts or on a NonRetryableError. */
  async fail(job: LeasedJob, error: unknown, delayMs?: number): Promise<void> {
    const described = describeError(error);
    await this.write(
      job,
      error instanceof NonRetryableError
        ? { event: 'fatal', error: described }
        : { event: 'fail', error: described, ...(delayMs === undefined ? {} : { delayMs: boundedDelay(delayMs) }) },
    );
  }

  /** Later, without spending an attempt. */
  async snooze(job: LeasedJob, delayMs: number): Promise<void> {
    await this.write(job, { event: 'snooze', delayMs: boundedDelay(delayMs) });
  }

  /** Back to the head of its lane, without spending an attempt; counted, and bounded by `maxReleases`. */
  async release(job: LeasedJob): Promise<void> {
    await this.write(job, { event: 'release' });
  }

  /** It ended on a stop request: cancelled or paused, as the lease says; given back if no request is there any more. */
  async stopped(job: LeasedJob): Promise<void> {
    await this.write(job, { event: 'stopped' });
  }

  private async write(job: LeasedJob, outcome: Outcome): Promise<void> {
    const { applied } = await this.exchange.settle(job, outcome);
    if (!applied) throw new LeaseLostError(job.id, job.token);
  }
}

const boundedDelay = (delayMs: number): number => {
  if (Number.isFinite(delayMs) && delayMs >= 0 && delayMs <= MAX_DELAY_MS) return Math.round(delayMs);
  throw new RangeError(`delayMs must be from 0 to ${MAX_DELAY_MS}, not ${delayMs}`);
};
