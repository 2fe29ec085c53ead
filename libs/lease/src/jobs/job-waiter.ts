import { Injectable } from '@nestjs/common';
import { WakeUp } from '../claim/wake-up';
import { InvalidJobError, WaitTimeoutError } from '../errors';
import { DURATION_SYNTAX, type Duration, parseDuration } from '../options/duration';
import { monotonicMs, sleep } from '../storage/delays';
import { JobReader } from './job-reader';
import type { JobStatus } from './job.types';

export interface WaitOptions {
  /** Default 30 s. */
  timeout?: Duration;
  /** Gives up when it aborts. */
  signal?: AbortSignal;
}

const FIRST_LOOK_MS = 25;
const LONGEST_LOOK_MS = 1000;

/**
 * Waits for jobs to finish. The worker that ends one says so by NOTIFY, if it has heard that somebody waits; whether or not that arrives, the
 * waiter looks, at first soon and then once a second.
 */
@Injectable()
export class JobWaiter {
  constructor(
    private readonly reader: JobReader,
    private readonly wakeUp: WakeUp,
  ) {}

  async waitFor(id: string, { timeout = 30_000, signal }: WaitOptions = {}): Promise<JobStatus> {
    const timeoutMs = parseDuration(timeout);
    if (timeoutMs === undefined) {
      throw new InvalidJobError(
        `timeout = ${JSON.stringify(timeout)} must be a duration (${DURATION_SYNTAX})`,
        'timeout',
      );
    }
    const until = monotonicMs() + timeoutMs;
    const heard = this.wakeUp.awaitEnd(id);
    try {
      for (let lookMs = FIRST_LOOK_MS; ; lookMs = Math.min(LONGEST_LOOK_MS, lookMs * 2)) {
        const nap = new AbortController();
        heard.onEnd = () => nap.abort();
        const job = await this.reader.get(id);
        if (job.finishedAt !== null) return job;
        signal?.throwIfAborted();
        const leftMs = until - monotonicMs();
        if (leftMs <= 0) throw new WaitTimeoutError(id, job.state, timeoutMs);
        const either = signal ? AbortSignal.any([nap.signal, signal]) : nap.signal;
        await sleep(Math.min(lookMs, leftMs), either);
      }
    } finally {
      heard.stop();
    }
  }
}
