import { setTimeout as sleep } from 'node:timers/promises';
import { DemoError } from '../errors';

/** Asks again and again until the answer is something, which is returned. @throws after `timeoutMs`, or the signal's reason */
export async function until<T>(
  what: string,
  ask: () => T | undefined | false | Promise<T | undefined | false>,
  { signal, timeoutMs = 30_000, everyMs = 25 }: { signal: AbortSignal; timeoutMs?: number; everyMs?: number },
): Promise<T> {
  for (const began = performance.now(); performance.now() - began < timeoutMs;) {
    signal.throwIfAborted();
    const answer = await ask();
    if (answer !== undefined && answer !== false) return answer;
    await sleep(everyMs);
  }
  throw new DemoError(`${what}: did not happen within ${timeoutMs / 1000} s`);
}
