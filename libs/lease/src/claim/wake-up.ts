import { Injectable, Logger } from '@nestjs/common';
import { ThrottledLog } from '../events/throttled-log';
import { ResolvedOptions } from '../options/lease-options';
import { Database, type Statement } from '../storage/database';
import { MainSession } from '../storage/main-session';
import { errorText } from '../storage/sql-errors';

/** (queue, kind). */
export type Lane = readonly [queue: string, kind: string];

/** Well under NOTIFY's 8000 bytes; more lanes than fit are left to the poll that every wake-up brings. */
const MAX_PAYLOAD_BYTES = 4000;
const QUIET_MS = 2;
/** A notification makes its transaction a writing one, which would wait for the disk: only a hint need not. */
const NOTIFY = `SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)`;

/**
 * Tells workers of new jobs at once. Only a hint (law 6): one that is lost costs at most a poll interval. Sent after the commit, since
 * NOTIFY inside a transaction makes commits queue behind each other; the first at once, further ones together.
 */
@Injectable()
export class WakeUp {
  private readonly trouble = new ThrottledLog(new Logger('Leasehold'));
  private listener: ((lanes: Lane[]) => void) | undefined;
  private lanes = new Map<string, Lane>();
  private due = false;
  private quiet = false;

  constructor(
    private readonly database: Database,
    private readonly options: ResolvedOptions,
    session: MainSession,
  ) {
    if (options.wakeUp === 'off') return;
    session.use({
      onUp: async (connection) => {
        await connection.query(`LISTEN ${database.schema.channel}`);
        // Whatever was announced while nobody listened.
        this.listener?.([]);
      },
      onNotification: (channel, payload) => {
        if (channel === database.schema.channel) this.listener?.(parseLanes(payload));
      },
    });
  }

  /** Calls back with the lanes that were announced; an empty list says only "look". */
  onWakeUp(listener: (lanes: Lane[]) => void): void {
    this.listener = listener;
  }

  /** Announces lanes that have something to do: at once, or with others after the quiet time. Call it after the commit. */
  notify(lanes: Lane[]): void {
    if (this.options.wakeUp === 'off') return;
    for (const lane of lanes) this.lanes.set(JSON.stringify(lane), lane);
    this.due = true;
    if (!this.quiet) this.send();
  }

  /**
   * The statement that announces these lanes, for sending right behind the one that enqueues, in a transaction of its own: a round trip
   * less. Undefined in the quiet time: then call `notify` after the commit.
   */
  follower(lanes: Lane[]): Statement | undefined {
    if (this.options.wakeUp === 'off' || this.quiet || this.database.targets.pooled) return undefined;
    this.rest();
    return this.announcement(lanes);
  }

  /** For an enqueue inside somebody else's transaction: the statement that announces at its commit. */
  statement(lanes: Lane[]): Statement | undefined {
    if (this.options.wakeUp === 'off') return undefined;
    return { text: 'SELECT pg_notify($1, $2)', values: [this.database.schema.channel, encodeLanes(lanes)] };
  }

  private announcement(lanes: Lane[]): Statement {
    return { name: 'leasehold_notify', text: NOTIFY, values: [this.database.schema.channel, encodeLanes(lanes)] };
  }

  private rest(): void {
    this.quiet = true;
    setTimeout(() => {
      this.quiet = false;
      if (this.due) this.send();
    }, QUIET_MS);
  }

  private send(): void {
    this.rest();
    this.due = false;
    const lanes = [...this.lanes.values()];
    this.lanes.clear();
    const { text, values, ...options } = this.announcement(lanes);
    this.database.query(text, values, options).catch((error: unknown) => {
      this.trouble.warn('notify', `Could not announce jobs, the poll finds them: ${errorText(error)}`);
    });
  }
}

const encodeLanes = (lanes: Lane[]): string => {
  const text = JSON.stringify(lanes);
  return Buffer.byteLength(text) <= MAX_PAYLOAD_BYTES ? text : '[]';
};

function parseLanes(payload: string): Lane[] {
  try {
    const value: unknown = JSON.parse(payload);
    return Array.isArray(value) ? value.filter((lane): lane is Lane => Array.isArray(lane) && lane.length === 2) : [];
  } catch {
    return [];
  }
}
