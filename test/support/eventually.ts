import { setTimeout as sleep } from 'node:timers/promises';
import { inspect } from 'node:util';
import { errorText } from './error-text';
import { onServer } from './on-server';

/** How long to wait, and what to print when it was in vain. */
export interface EventuallyOptions {
  /** Default 15 000. */
  timeoutMs?: number;
  /** Pause between two tries, in ms. Default 25. */
  everyMs?: number;
  /** What the reader of the failure wants to see: the rows, the output of a process. */
  state?: () => unknown;
  /** Said first on failure. */
  what?: string;
}

type Truthy<T> = Exclude<T, false | undefined | null | 0 | '' | void>;

// A frozen database must not freeze the message that tells of it.
const STATE_DEADLINE_MS = 5_000;

/**
 * Tries until `fn` returns something truthy, and returns that; throwing counts as not yet, and so do assertions. A
 * function whose assertions are all it has to say ends with `return true`.
 *
 * @throws Error after `timeoutMs`, with the last error, the state, and the clocks of this machine and the database
 */
export async function eventually<T>(fn: () => T | Promise<T>, options: EventuallyOptions = {}): Promise<Truthy<T>> {
  const { timeoutMs = 15_000, everyMs = 25 } = options;
  const began = Date.now();
  let tries = 0;
  let last = 'no try came to an end';
  for (let left = timeoutMs; left > 0; left = began + timeoutMs - Date.now()) {
    tries++;
    try {
      const value = await within(left, Promise.resolve().then(fn));
      if (value === TOO_LATE) break;
      if (value) return value as Truthy<T>;
      last = `returned ${inspect(value)}`;
    } catch (error) {
      last = errorText(error);
    }
    await sleep(everyMs);
  }
  const title = `${options.what ?? 'What was awaited'} did not happen in ${timeoutMs} ms (${tries} tries).`;
  const state = options.state ? `\nState: ${await describe(options.state)}` : '';
  throw new Error(`${title}\nLast: ${last}${state}\n${await clocks()}`);
}

const TOO_LATE = Symbol('too late');

/** What the promise gives, or {@link TOO_LATE}; a rejection after that is nobody's. */
async function within<T>(ms: number, promise: Promise<T>): Promise<T | typeof TOO_LATE> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<typeof TOO_LATE>((resolve) => {
    timer = setTimeout(() => resolve(TOO_LATE), ms);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

async function describe(state: () => unknown): Promise<string> {
  try {
    const seen = await within(STATE_DEADLINE_MS, Promise.resolve().then(state));
    if (seen === TOO_LATE) return `not told within ${STATE_DEADLINE_MS} ms`;
    return typeof seen === 'string' ? seen : inspect(seen, { depth: 6, maxArrayLength: 50, breakLength: 120 });
  } catch (error) {
    return `cannot be told: ${errorText(error)}`;
  }
}

async function clocks(): Promise<string> {
  const database = await describe(databaseClock);
  return `Clock here ${new Date().toISOString()}, of the database ${database}`;
}

async function databaseClock(): Promise<string> {
  const url = process.env.LEASE_TEST_URL;
  if (url === undefined) return 'unknown (LEASE_TEST_URL is not set)';
  const sql = 'SELECT clock_timestamp() AS now';
  const { rows } = await onServer(url, (client) => client.query<{ now: Date }>(sql));
  return rows[0]?.now.toISOString() ?? 'unknown';
}
