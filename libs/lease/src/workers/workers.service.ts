import { randomBytes } from 'node:crypto';
import { hostname } from 'node:os';
import { Injectable } from '@nestjs/common';
import { LeaseSetupError, NotRunningError } from '../errors';
import { LeaseEvents } from '../events/lease-events';
import { ResolvedOptions } from '../options/lease-options';
import { Database } from '../storage/database';
import { VERSION } from '../version';
import { drainingSql, forgetSql, registerSql, retireSql, stoppedSql, workerColumns } from './workers.sql';

/** This process's present registration. */
export interface WorkerIdentity {
  readonly id: string;
  readonly lockNo: number;
}

/** A row of the registry. Times by the database's clock. */
export interface WorkerInfo {
  id: string;
  name: string;
  host: string;
  pid: number;
  version: string;
  state: 'live' | 'draining' | 'stopped' | 'dead';
  /** null: every queue. */
  queues: string[] | null;
  kinds: string[];
  concurrency: number;
  startedAt: Date;
  /** The registry's beat. It renews the worker lease, and with it every job lease of this worker. */
  beatAt: Date;
  expiresAt: Date | null;
  drainingAt: Date | null;
  endedAt: Date | null;
  diedOf: string | null;
  inFlight: number;
  /** Handlers that still run although their lease was aborted: each occupies a slot until it ends. */
  stuck: number;
  loopBlockedMs: number;
  clockSkewMs: number;
  /** Live or draining, and its lease has not expired. */
  active: boolean;
}

/**
 * The registry of workers. A worker id belongs to one registration: a process that was declared dead registers anew and never
 * revives its old row (R6).
 */
@Injectable()
export class WorkersService {
  private identity: WorkerIdentity | undefined;

  constructor(
    private readonly database: Database,
    private readonly options: ResolvedOptions,
    private readonly events: LeaseEvents,
  ) {}

  /** This process's registration, while it has one. */
  get current(): WorkerIdentity | undefined {
    return this.identity;
  }

  /** @throws NotRunningError before `register` */
  get currentId(): string {
    if (!this.identity)
      throw new NotRunningError('This process is not registered as a worker: call WorkersService.register() first');
    return this.identity.id;
  }

  /**
   * Registers this process under a new id, for the kinds that it will claim. A process whose role is 'worker' or 'both' does so by
   * itself; by hand, go on with `HeartbeatService.start`, which keeps the registration alive.
   * @throws LeaseSetupError if this process is registered already
   */
  async register(kinds: string[]): Promise<WorkerIdentity> {
    if (this.identity) throw new LeaseSetupError(`This process is registered already, as ${this.identity.id}`);
    const { workerName, queues, concurrency, lease } = this.options;
    const id = `${workerName}-${process.pid}-${randomBytes(5).toString('hex')}`;
    const [row] = await this.database.query<{ lock_no: number }>(registerSql(this.s), [
      id,
      workerName,
      hostname(),
      process.pid,
      VERSION,
      queues,
      kinds,
      concurrency,
      lease.ttlMs,
    ]);
    if (!row) throw new Error('the registration returned no row');
    this.identity = { id, lockNo: row.lock_no };
    this.events.emit({ type: 'worker.registered', workerId: id });
    return this.identity;
  }

  async drain(id: string): Promise<void> {
    const rows = await this.database.query(drainingSql(this.s), [id]);
    if (rows.length > 0) this.events.emit({ type: 'worker.draining', workerId: id });
  }

  /** @returns false if the worker still holds leases or was declared dead; it then stays to be rescued. */
  async stopped(id: string): Promise<boolean> {
    const rows = await this.database.query(stoppedSql(this.s), [id]);
    if (rows.length > 0) this.events.emit({ type: 'worker.stopped', workerId: id });
    return rows.length > 0;
  }

  async retire(id: string): Promise<void> {
    await this.database.query(retireSql(this.s), [id]);
  }

  /** Forgets the identity in this process; the row stays. */
  leave(): void {
    this.identity = undefined;
  }

  async list(filter: { activeOnly?: boolean } = {}): Promise<WorkerInfo[]> {
    const where = filter.activeOnly
      ? `WHERE w.state IN ('live', 'draining') AND coalesce(w.expires_at, '-infinity') >= clock_timestamp()`
      : '';
    return this.database.query<WorkerInfo & Record<string, unknown>>(
      `${workerColumns(this.s)} ${where} ORDER BY w.started_at DESC, w.id LIMIT 1000`,
    );
  }

  async get(id: string): Promise<WorkerInfo | undefined> {
    const [row] = await this.database.query<WorkerInfo & Record<string, unknown>>(
      `${workerColumns(this.s)} WHERE w.id = $1`,
      [id],
    );
    return row;
  }

  /** Maintenance: drops rows of workers that ended over a day ago. */
  async forgetEnded(): Promise<void> {
    await this.database.query(forgetSql(this.s));
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}
