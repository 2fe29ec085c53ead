import { Injectable } from '@nestjs/common';
import { LeaseEvents } from '../events/lease-events';
import { ResolvedOptions } from '../options/lease-options';
import { Database } from '../storage/database';
import { monotonicMs, sleep } from '../storage/delays';
import { MainSession } from '../storage/main-session';
import { errorText } from '../storage/sql-errors';
import { WorkersService } from '../workers/workers.service';
import { acquireSql, probeSql, readSql, reignSql, staleSql, stampSql } from './leader.sql';

export interface LeaderInfo {
  workerId: string | null;
  /** Grows with every reign. */
  epoch: string;
  since: Date | null;
  /** When the last maintenance pass was completed. */
  beatAt: Date | null;
}

/**
 * Elects one process to do the maintenance, by a session advisory lock. Leadership is an optimisation (law 5): every maintenance
 * statement is correct with two leaders at once. Any doubt means not leader: a probe that fails or is late drops the connection, and
 * the lock with it.
 */
@Injectable()
export class LeaderService {
  private reign: { epoch: string; workerId: string } | undefined;
  private probedAt = 0;
  private running: Promise<void> | undefined;
  private stopping = new AbortController();

  constructor(
    private readonly session: MainSession,
    private readonly database: Database,
    private readonly options: ResolvedOptions,
    private readonly workers: WorkersService,
    private readonly events: LeaseEvents,
  ) {
    session.use({ onDown: () => this.step('connection lost') });
  }

  /** Whether this process is the leader now, as far as a probe no older than the server's own limit can tell. */
  get isLeader(): boolean {
    return this.reign !== undefined && monotonicMs() - this.probedAt < this.options.leader.probeMs * 3;
  }

  start(): void {
    this.stopping = new AbortController();
    this.running ??= this.run(this.stopping.signal);
  }

  /** Steps down; the lock goes with the main session, which the caller ends. */
  async stop(): Promise<void> {
    this.stopping.abort();
    await this.running;
    this.running = undefined;
    if (this.reign) {
      await this.session.connection
        .query('SELECT pg_advisory_unlock($1::bigint)', [this.key])
        .catch(() => this.session.connection.drop());
      this.step('stopped');
    }
  }

  /** Who leads, from the table: from any process. */
  async current(): Promise<LeaderInfo> {
    const [row] = await this.database.query<LeaderInfo & Record<string, unknown>>(readSql(this.s));
    return row ?? { workerId: null, epoch: '0', since: null, beatAt: null };
  }

  /** Records a completed maintenance pass of this reign. */
  async stamp(): Promise<void> {
    const { reign } = this;
    if (!reign) return;
    const rows = await this.database.query(stampSql(this.s), [reign.workerId, reign.epoch]);
    if (rows.length === 0) this.step('another reign has begun');
  }

  /** Whether no leader has completed a pass for a TTL. */
  async isStale(): Promise<boolean> {
    const [row] = await this.database.query<{ stale: boolean }>(staleSql(this.s), [this.options.lease.ttlMs]);
    return row?.stale ?? true;
  }

  private async run(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      if (this.session.connection.up) {
        try {
          await (this.reign ? this.probe() : this.acquire());
        } catch (error) {
          this.step(errorText(error));
          this.session.connection.drop();
        }
      }
      await sleep(this.reign ? this.options.leader.probeMs : this.options.leader.retryMs, signal);
    }
  }

  private async acquire(): Promise<void> {
    const worker = this.workers.current;
    if (!worker) return;
    const askedAt = monotonicMs();
    const [row] = await this.session.connection.query<{ got: boolean }>(acquireSql, [this.key]);
    if (!row?.got) return;
    const [reign] = await this.session.connection.query<{ epoch: string }>(reignSql(this.s), [worker.id]);
    if (!reign) throw new Error('the leader row is missing');
    this.probedAt = askedAt;
    this.reign = { epoch: reign.epoch, workerId: worker.id };
    this.events.emit({ type: 'leader.acquired', workerId: worker.id, epoch: reign.epoch });
  }

  private async probe(): Promise<void> {
    const askedAt = monotonicMs();
    const [row] = await this.session.connection.query<{ held: boolean }>(probeSql, [this.key]);
    if (!row?.held) throw new Error('the leader lock is gone');
    if (this.reign?.workerId !== this.workers.current?.id) throw new Error('this process has a new worker id');
    this.probedAt = askedAt;
  }

  private step(message: string): void {
    const { reign } = this;
    this.reign = undefined;
    if (reign) this.events.emit({ type: 'leader.lost', workerId: reign.workerId, message });
  }

  private get key(): string {
    return this.database.schema.lockKey('leader');
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}
