import { Client, type ClientConfig, type Notification, type QueryResultRow } from 'pg';
import { destroy, endClient, limitedQuery, ownTypes } from './connection';
import { backoffMs, monotonicMs, sleep } from './delays';

/** For this long after a loss it tries again in quick succession. */
const HASTE_MS = 5000;
const HASTY_PAUSE_MS = 200;
const MOST_PAUSE_MS = 5000;

export interface SessionHooks {
  /** Runs on each new connection before it counts as up, for example to take locks. A throw drops the connection. */
  onUp(session: Session): Promise<void>;
  /** The connection is gone. Everything that depended on it (locks, LISTEN) is too. */
  onDown?(error: Error): void;
  onNotification?(message: Notification): void;
  /** A connection could not be made, or was lost. For the log. */
  onTrouble?(error: Error): void;
}

/**
 * One dedicated connection, never from a pool, kept up for as long as the session runs: after a loss the first reconnect is
 * immediate, later ones wait with capped, jittered backoff, without limit. Every query has a client-side limit after which the
 * connection is destroyed, so that what hangs on it (an advisory lock) cannot leak.
 */
export class Session {
  private client: Client | undefined;
  private readonly ending = new AbortController();
  private running: Promise<void> | undefined;
  private isUp = false;
  /** When the connection was last known to be up, or the session began. */
  private upAt = monotonicMs();
  private last: Promise<unknown> = Promise.resolve();

  constructor(
    private readonly config: () => ClientConfig,
    private readonly timeoutMs: number,
    private readonly hooks: SessionHooks,
  ) {}

  get up(): boolean {
    return this.isUp;
  }

  start(): void {
    this.running ??= this.run();
  }

  /** Ends the connection and the attempts to make one. Idempotent. */
  async stop(): Promise<void> {
    this.ending.abort();
    if (this.client) await endClient(this.client);
    await this.running;
  }

  /** Any doubt about the connection: drop it, and with it its locks. */
  drop(): void {
    if (this.client) destroy(this.client);
  }

  query<R extends QueryResultRow>(text: string, values: unknown[] = [], timeoutMs = this.timeoutMs): Promise<R[]> {
    // One at a time, so that each has its whole limit to itself.
    const before = this.last;
    const answer = before.then(() => {
      if (!this.client) throw new Error('connection is down');
      return limitedQuery<R>(this.client, { text, values }, timeoutMs);
    });
    this.last = answer.catch(() => undefined);
    return answer;
  }

  private async run(): Promise<void> {
    let failures = 0;
    while (!this.ending.signal.aborted) {
      const startedAt = monotonicMs();
      try {
        const wasUp = await this.runOne();
        failures = wasUp && monotonicMs() - startedAt > 1000 ? 0 : failures + 1;
      } catch (error) {
        failures++;
        if (!this.ending.signal.aborted) this.hooks.onTrouble?.(error as Error);
      }
      // At first in haste: rescue waits only so long for a worker that is cut off for a moment.
      const mostMs = monotonicMs() - this.upAt < HASTE_MS ? HASTY_PAUSE_MS : MOST_PAUSE_MS;
      if (failures > 0) await sleep(backoffMs(failures, 50, mostMs), this.ending.signal);
    }
  }

  /** From connect to loss. @returns whether the connection was up in between. */
  private async runOne(): Promise<boolean> {
    const client = new Client({
      connectionTimeoutMillis: this.timeoutMs,
      keepAlive: true,
      ...this.config(),
      types: ownTypes,
    });
    let lost: (error: Error) => void = () => undefined;
    const loss = new Promise<Error>((resolve) => (lost = resolve));
    client.on('error', lost);
    client.on('end', () => lost(new Error('connection ended')));
    if (this.hooks.onNotification) client.on('notification', (message) => this.hooks.onNotification?.(message));
    try {
      await client.connect();
      this.client = client;
      if (this.ending.signal.aborted) return false;
      await this.hooks.onUp(this);
      this.isUp = true;
      const error = await loss;
      if (!this.ending.signal.aborted) this.hooks.onTrouble?.(error);
      return true;
    } finally {
      const wasUp = this.isUp;
      if (wasUp) this.upAt = monotonicMs();
      this.isUp = false;
      this.client = undefined;
      destroy(client);
      if (wasUp) this.hooks.onDown?.(new Error('connection lost'));
    }
  }
}
