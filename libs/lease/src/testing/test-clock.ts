import { InvalidOptionError, LeaseSetupError, MAX_DELAY_MS } from '../errors';
import { DURATION_SYNTAX, type Duration, parseDuration } from '../options/duration';
import type { Schema } from '../storage/schema';
import {
  advanceClockSql,
  createClockSql,
  daysAroundSql,
  defaultsSql,
  functionsSql,
  lockClockSql,
  nowSql,
  resetClockSql,
  setClockSql,
} from './clock.sql';

/** Sends a statement. */
export type Send = <R extends Record<string, unknown>>(text: string, values?: unknown[]) => Promise<R[]>;

const SUFFIX = '_clock';
const MAX_NAME_BYTES = 63 - SUFFIX.length;
const CALL = /(?<![.\w"])clock_timestamp\(\)/g;
/** No right to make it. */
const DENIED = '42501';

/**
 * The one function that a test's time comes from: `clock_timestamp()` in a schema of its own, `<schema>_clock`, which adds a shift that stands in
 * a table beside it. Leasehold's functions are given a search path that finds it first, its column defaults are bound to it, and the statements
 * that the kit sends name it. So nothing in production knows of it, and what is to be tried is the same SQL.
 */
export class TestClock {
  private readonly name: string;
  private readonly quoted: string;
  private why: string | undefined = 'the kit has not been started yet';

  constructor(private readonly schema: Schema) {
    this.name = `${schema.name}${SUFFIX}`;
    this.quoted = `"${this.name.replaceAll('"', '""')}"`;
  }

  /** Makes the clock if it is not there, gives it to whatever does not have it yet, and sets it to the real time. */
  async install(together: (work: (send: Send) => Promise<void>) => Promise<void>): Promise<void> {
    if (Buffer.byteLength(this.schema.name) > MAX_NAME_BYTES) {
      this.why = `the name of schema ${this.schema.name} has more than ${MAX_NAME_BYTES} bytes, which leaves no room for '${SUFFIX}'`;
      return;
    }
    try {
      await together((send) => this.make(send));
      this.why = undefined;
    } catch (error) {
      if ((error as { code?: string }).code !== DENIED) throw error;
      this.why = `the database's role may not make the schema ${this.name}, or change ${this.schema.name}: ${(error as Error).message}`;
    }
  }

  private async make(send: Send): Promise<void> {
    const { quoted: s } = this.schema;
    await send(lockClockSql(s));
    for (const statement of createClockSql(s, this.quoted)) await send(statement);
    for (const find of [defaultsSql(s), functionsSql(s)]) {
      for (const { statement } of await send<{ statement: string }>(find, [this.name])) await send(statement);
    }
    await send(resetClockSql(this.quoted));
  }

  /** The statement with the test's clock in place of the database's. */
  qualify(text: string): string {
    return this.why === undefined ? text.replace(CALL, `${this.quoted}.clock_timestamp()`) : text;
  }

  async now(send: Send): Promise<Date> {
    const [row] = await send<{ now: Date }>(
      this.why === undefined ? nowSql(this.quoted) : 'SELECT clock_timestamp() AS now',
    );
    if (!row) throw new Error('the clock returned no row');
    return row.now;
  }

  /** @param outside sends what must not wait for, nor be rolled back with, the transaction that `send` may go through */
  async advance(duration: Duration, send: Send, outside: Send): Promise<Date> {
    this.assertThere();
    const ms = parseDuration(duration);
    if (ms === undefined || ms > MAX_DELAY_MS) {
      throw new InvalidOptionError(
        `advance(${JSON.stringify(duration)}): it must be a duration of at most ten years (${DURATION_SYNTAX})`,
      );
    }
    await this.makeDays(new Date((await this.now(send)).getTime() + ms), outside);
    await send(advanceClockSql(this.quoted), [ms]);
    return this.now(send);
  }

  async set(time: Date, send: Send, outside: Send): Promise<Date> {
    this.assertThere();
    const year = time instanceof Date ? time.getUTCFullYear() : NaN;
    if (!(year >= 1970 && year < 2200)) {
      throw new InvalidOptionError(`setTime(${String(time)}): it must be a Date from 1970 to 2199`);
    }
    await this.makeDays(time, outside);
    await send(setClockSql(this.quoted), [time.toISOString()]);
    return this.now(send);
  }

  async reset(send: Send, outside: Send = send): Promise<void> {
    if (this.why !== undefined) return;
    await send(resetClockSql(this.quoted));
    // Retention, in the future, may have dropped today.
    await this.makeDays(await this.now(send), outside);
  }

  /** A job that finishes then needs the partition of its day. */
  private async makeDays(time: Date, outside: Send): Promise<void> {
    await outside(daysAroundSql(this.quoted), [time.toISOString()]);
  }

  private assertThere(): void {
    if (this.why === undefined) return;
    throw new LeaseSetupError(
      `Time cannot be controlled here, since ${this.why}. Give the tests a database in which their role may create schemas`,
    );
  }
}
