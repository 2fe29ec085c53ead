import { Injectable, Logger } from '@nestjs/common';
import { type Client, Pool, type PoolClient, type QueryResultRow } from 'pg';
import { NotRunningError, SchemaError } from '../errors';
import { ThrottledLog } from '../events/throttled-log';
import { ResolvedOptions } from '../options/lease-options';
import {
  type ConnectionTargets,
  SESSION_SETTINGS,
  connectionTargets,
  limitedQuery,
  ownTypes,
  startupOptions,
} from './connection';
import { assertServerFits } from './server-check';
import { errorText, isConflict, isConnectionError, isPartitionMissing, isRefusal } from './sql-errors';
import { backoffMs, sleep, within } from './delays';
import { prepareSchema } from './migrator';
import { Schema } from './schema';

export interface QueryOptions {
  /** Client-side limit in ms. Default: `connection.queryTimeout`. */
  timeoutMs?: number;
  /** Prepare under this name (not behind a pooler). For statements that run often. */
  name?: string;
  /** Sent right behind it on the same connection, in a transaction of its own, whatever becomes of it; not behind a pooler. */
  follower?: Statement;
}

export interface Statement {
  text: string;
  values: unknown[];
  name?: string;
}

const CONFLICT_TRIES = 8;

/**
 * Leasehold's own pool. Opened on first use: checks the server, brings the schema up to date if told to, and from then on
 * every query has a client-side limit and every broken connection is destroyed instead of returned.
 */
@Injectable()
export class Database {
  readonly schema: Schema;
  readonly targets: ConnectionTargets;
  private readonly logger = new Logger('Leasehold');
  private readonly trouble = new ThrottledLog(this.logger);
  private readonly pool: Pool;
  private readonly prepared = new WeakSet<PoolClient>();
  private readonly unsent = new WeakSet<object>();
  private opening: Promise<void> | undefined;
  private closed = false;

  constructor(private readonly options: ResolvedOptions) {
    this.schema = new Schema(options.schema);
    this.targets = connectionTargets(options.connection);
    const { pool, pooled } = this.targets;
    this.pool = new Pool({
      keepAlive: true,
      allowExitOnIdle: true,
      connectionTimeoutMillis: options.connection.queryTimeoutMs,
      idleTimeoutMillis: 30_000,
      application_name: 'leasehold',
      ...pool,
      max: options.connection.poolMax,
      // A follower goes out without waiting for the answer before it. Versions of pg that do not know this send it after that.
      ...{ pipeline: true },
      types: ownTypes,
      // A pooler refuses start-up settings; there every statement runs in an explicit READ COMMITTED transaction instead.
      ...(pooled ? {} : { options: startupOptions({ ...SESSION_SETTINGS, ...this.timeouts }, pool.options) }),
    });
    // Before it is handed out: a server that shuts down says so right behind its welcome, when nobody else listens yet.
    this.pool.on('connect', (client) =>
      client.on('error', (error) => this.trouble.warn('pool', `Connection lost: ${errorText(error)}`)),
    );
    this.pool.on('error', (error) => this.trouble.warn('pool', `Idle connection lost: ${errorText(error)}`));
  }

  /** Server-side limits stay below the client's own, so that a slow statement ends there first and its outcome is known. */
  private get timeouts(): Record<string, number> {
    const ms = Math.max(50, Math.floor(this.options.connection.queryTimeoutMs * 0.8));
    return { statement_timeout: ms, lock_timeout: ms, idle_in_transaction_session_timeout: this.options.lease.ttlMs };
  }

  /** Checks the server and the schema once. Repeated calls share the first; a failed one may be tried again. */
  open(): Promise<void> {
    if (this.closed) return Promise.reject(this.refusal());
    this.opening ??= this.openOnce().catch((error: unknown) => {
      this.opening = undefined;
      throw error;
    });
    return this.opening;
  }

  protected async openOnce(): Promise<void> {
    await assertServerFits(this.targets, this.options);
    // Both on connections of their own, so that a boot which fails later leaves no session in the pool.
    await prepareSchema(this.targets.direct, this.schema, this.options).catch(explainPooler);
  }

  /** Runs one statement. Conflicts (40001, 40P01) are repeated with growing pauses, other errors are not (R19). */
  async query<R extends QueryResultRow>(
    text: string,
    values: unknown[] = [],
    options: QueryOptions = {},
  ): Promise<R[]> {
    await this.open();
    for (let tries = 0; ; tries++) {
      try {
        return await this.unchecked<R>(text, values, options);
      } catch (error) {
        if (isPartitionMissing(error) && tries < CONFLICT_TRIES) {
          await this.unchecked(`SELECT ${this.schema.quoted}.ensure_partitions_v1(14)`);
        } else if (isConflict(error) && tries < CONFLICT_TRIES) {
          await sleep(backoffMs(tries, 5, 1000));
        } else {
          throw error;
        }
      }
    }
  }

  protected unchecked<R extends QueryResultRow>(
    text: string,
    values: unknown[] = [],
    options: QueryOptions = {},
  ): Promise<R[]> {
    const { pooled } = this.targets;
    const timeoutMs = options.timeoutMs ?? this.options.connection.queryTimeoutMs;
    if (pooled) return this.transaction((run) => run<R>(text, values), timeoutMs);
    const statement = { text, values, ...(options.name ? { name: options.name } : {}) };
    if (options.follower) return this.followed<R>(statement, options.follower, timeoutMs);
    return this.withClient((client) => limitedQuery<R>(client, statement, timeoutMs));
  }

  /** Answers when the first is answered; the connection goes back when both are. */
  private async followed<R extends QueryResultRow>(
    statement: Statement,
    follower: Statement,
    timeoutMs: number,
  ): Promise<R[]> {
    const client = await this.connect();
    const both = [limitedQuery<R>(client, statement, timeoutMs), limitedQuery(client, follower, timeoutMs)] as const;
    void Promise.allSettled(both).then((results) => {
      const failed = results.flatMap((result) => (result.status === 'rejected' ? [result.reason as unknown] : []));
      client.release(failed.some(isConnectionError));
    });
    return both[0];
  }

  /** Runs several statements in one READ COMMITTED transaction: all or nothing. */
  async transaction<T>(
    work: (run: <R extends QueryResultRow>(text: string, values?: unknown[]) => Promise<R[]>) => Promise<T>,
    timeoutMs = this.options.connection.queryTimeoutMs,
  ): Promise<T> {
    return this.withClient(async (client) => {
      const run = <R extends QueryResultRow>(text: string, values: unknown[] = []) =>
        limitedQuery<R>(client, { text, values }, timeoutMs);
      await run('BEGIN ISOLATION LEVEL READ COMMITTED');
      try {
        await run(`SET LOCAL statement_timeout = ${Math.floor(timeoutMs * 0.8)}`);
        const result = await work(run);
        await run('COMMIT');
        return result;
      } catch (error) {
        if (!isConnectionError(error)) await run('ROLLBACK');
        throw error;
      }
    });
  }

  private async withClient<T>(work: (client: Client) => Promise<T>): Promise<T> {
    const client = await this.connect();
    try {
      const result = await work(client);
      client.release();
      return result;
    } catch (error) {
      client.release(isConnectionError(error));
      throw error;
    }
  }

  private async connect(): Promise<PoolClient> {
    if (this.closed) throw this.refusal();
    let client: PoolClient | undefined;
    try {
      client = await this.pool.connect();
      if (!this.prepared.has(client)) {
        await this.prepare(client);
        this.prepared.add(client);
      }
      return client;
    } catch (error) {
      client?.release(true);
      if (typeof error === 'object' && error !== null) this.unsent.add(error);
      throw error;
    }
  }

  /** Whether it is open, after this error, if the statement was done: not if it was never sent, for want of a connection, or the server said that it did not. */
  mayBeWritten(error: unknown): boolean {
    if (!isConnectionError(error) || isRefusal(error)) return false;
    return !(typeof error === 'object' && error !== null && this.unsent.has(error));
  }

  private refusal(): NotRunningError {
    return new NotRunningError('The lease module is shut down; its connections are closed');
  }

  private async prepare(client: PoolClient): Promise<void> {
    const { queryTimeoutMs } = this.options.connection;
    await limitedQuery(
      client as unknown as Client,
      { text: `SELECT ${this.schema.quoted}.advance_tokens_v1()` },
      queryTimeoutMs,
    );
  }

  /** Closes the pool. Queries after this are refused with NotRunningError. Idempotent. */
  async close(): Promise<void> {
    if (this.closed) return;
    this.closed = true;
    await within(this.options.connection.queryTimeoutMs, this.pool.end());
  }
}

/** PgBouncer and its like refuse start-up settings; without them our isolation and limits would be the pooler's. */
function explainPooler(error: unknown): never {
  if (error instanceof Error && /unsupported startup parameter/.test(error.message)) {
    throw new SchemaError(
      `The connection goes through a pooler (${error.message}): set connection.directUrl to a URL that goes straight to PostgreSQL, for the ` +
        'session locks and LISTEN; the pool may then go through the pooler',
      { cause: error },
    );
  }
  throw error;
}
