import { Injectable, Logger } from '@nestjs/common';
import { ThrottledLog } from '../events/throttled-log';
import { ResolvedOptions } from '../options/lease-options';
import { Database, type Statement } from '../storage/database';
import { MainSession } from '../storage/main-session';
import { monotonicMs } from '../storage/delays';
import { errorText } from '../storage/sql-errors';

/** (queue, kind). */
export type Lane = readonly [queue: string, kind: string];

export type Stop = [jobId: string, token: string, request: 'cancel' | 'pause'];

export interface Wait {
  onEnd: () => void;
}

/** What processes tell each other besides lanes. */
interface Message {
  stop?: Stop[];
  await?: string[];
  ended?: string[];
}

const AWAITED_MS = 60_000;
const MAX_AWAITED = 10_000;
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
  private stopListener: (stops: Stop[]) => void = () => undefined;
  /** Jobs that this process waits for. */
  private readonly waits = new Map<string, Set<Wait>>();
  /** Jobs that somebody, anywhere, waits for, and until when that is believed. */
  private readonly awaited = new Map<string, number>();

  constructor(
    private readonly database: Database,
    private readonly options: ResolvedOptions,
    private readonly session: MainSession,
  ) {
    if (options.wakeUp === 'off') return;
    session.use({
      onUp: async (connection) => {
        await connection.query(`LISTEN ${database.schema.channel}`);
        // Whatever was announced while nobody listened.
        this.listener?.([]);
      },
      onNotification: (channel, payload) => {
        if (channel === database.schema.channel) this.receive(payload);
      },
    });
  }

  /** Calls back with the lanes that were announced; an empty list says only "look". */
  onWakeUp(listener: (lanes: Lane[]) => void): void {
    this.listener = listener;
  }

  /** Calls back with the stop requests that were announced; an empty list says only "look". */
  onStops(listener: (stops: Stop[]) => void): void {
    this.stopListener = listener;
  }

  /** Tells the workers of running jobs that these are to stop; it stands on their leases already. */
  stop(stops: Stop[]): void {
    this.tell({ stop: stops });
  }

  /** Asks whoever ends this job to say so, and calls `onEnd` when that is heard. Ask again now and then: it may be forgotten. */
  awaitEnd(jobId: string): Wait & { stop(): void } {
    const wait: Wait & { stop(): void } = { onEnd: () => undefined, stop: () => undefined };
    if (this.options.wakeUp === 'off') return wait;
    this.session.listen();
    const waits = this.waits.get(jobId) ?? new Set<Wait>();
    this.waits.set(jobId, waits.add(wait));
    this.tell({ await: [jobId] });
    const again = setInterval(() => this.tell({ await: [jobId] }), AWAITED_MS / 2).unref();
    wait.stop = () => {
      clearInterval(again);
      waits.delete(wait);
      if (waits.size === 0) this.waits.delete(jobId);
    };
    return wait;
  }

  /** A job has finished: those who wait for it are told, if there are any. */
  ended(jobId: string): void {
    if (this.awaited.size === 0 || !this.awaited.delete(jobId)) return;
    this.tell({ ended: [jobId] });
  }

  private tell(message: Message): void {
    if (this.options.wakeUp === 'off') return;
    const text = JSON.stringify(message);
    const payload = Buffer.byteLength(text) <= MAX_PAYLOAD_BYTES ? text : JSON.stringify({ stop: [] });
    this.database
      .query(NOTIFY, [this.database.schema.channel, payload], { name: 'leasehold_notify' })
      .catch((error: unknown) => {
        this.trouble.warn('notify', `Could not tell the other processes, they look by themselves: ${errorText(error)}`);
      });
  }

  private receive(payload: string): void {
    const message = parse(payload);
    if (Array.isArray(message)) return this.listener?.(message.filter(isLane));
    if (Array.isArray(message.stop)) this.stopListener(message.stop);
    // Anybody who may connect may send anything.
    for (const jobId of listOf(message.ended)) for (const { onEnd } of this.waits.get(jobId) ?? []) onEnd();
    for (const jobId of listOf(message.await)) this.remember(jobId);
  }

  private remember(jobId: string): void {
    const now = monotonicMs();
    if (this.awaited.size >= MAX_AWAITED)
      for (const [id, until] of this.awaited) if (until < now) this.awaited.delete(id);
    if (this.awaited.size < MAX_AWAITED) this.awaited.set(jobId, now + AWAITED_MS);
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

const listOf = (value: unknown): string[] => (Array.isArray(value) ? value.filter((id) => typeof id === 'string') : []);

const isLane = (lane: unknown): lane is Lane => Array.isArray(lane) && lane.length === 2;

function parse(payload: string): unknown[] | Message {
  try {
    const value: unknown = JSON.parse(payload);
    return typeof value === 'object' && value !== null ? value : [];
  } catch {
    return [];
  }
}
