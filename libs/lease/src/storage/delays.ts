import { setTimeout as sleepFor } from 'node:timers/promises';

/** Pauses between tries: doubling from `minMs`, at most `maxMs`, with full jitter so that a fleet does not come back in step. */
export const backoffMs = (tries: number, minMs = 50, maxMs = 5000): number => {
  const ceiling = Math.min(maxMs, minMs * 2 ** Math.min(tries, 20));
  return Math.round(ceiling / 2 + Math.random() * (ceiling / 2));
};

/** Sleeps; ends early, without an error, when `signal` aborts. */
export const sleep = async (ms: number, signal?: AbortSignal): Promise<void> => {
  try {
    await sleepFor(ms, undefined, { signal });
  } catch {
    // Aborted: the caller looks at its signal.
  }
};

/** Monotonic milliseconds, the same in every thread of the process. May only ever make a worker give up (law 3). */
export const monotonicMs = (): number => Number(process.hrtime.bigint() / 1000n) / 1000;

/** @returns whether `work` ended within `ms`; leaves no timer behind */
export async function within(ms: number, work: Promise<unknown>): Promise<boolean> {
  const timer = new AbortController();
  try {
    return await Promise.race([work.then(() => true), sleep(ms, timer.signal).then(() => false)]);
  } finally {
    timer.abort();
  }
}
