import { Injectable } from '@nestjs/common';
import type { ClientBase } from 'pg';
import { EnqueueUncertainError, InvalidJobError, LeaseholdError, SchemaError } from '../errors';
import { ResolvedOptions } from '../options/lease-options';
import { Database } from '../storage/database';
import { errorText, isConnectionError, isSchemaMissing } from '../storage/sql-errors';
import { type Lane, WakeUp } from '../claim/wake-up';
import type { EnqueueTransaction, PreparedJob } from './enqueue-request';
import { enqueueSql } from './jobs.sql';

interface Waiting {
  job: PreparedJob;
  resolve: (id: string) => void;
  reject: (error: unknown) => void;
}

/** Well under the server's and V8's limits for one text. */
const CHUNK_CHARS = 32 * 1024 * 1024;
const SHARED_MAX = 1000;

/** Writes prepared jobs: alone or sharing a statement, in the caller's transaction or in one of its own. */
@Injectable()
export class Enqueuer {
  private queue: Waiting[] = [];
  private sending = false;

  constructor(
    private readonly database: Database,
    private readonly wakeUp: WakeUp,
    private readonly options: ResolvedOptions,
  ) {}

  /** One job of its own. Calls of the same tick, or made while an insert is on the wire, share the next insert. */
  one(job: PreparedJob): Promise<string> {
    return new Promise((resolve, reject) => {
      this.queue.push({ job, resolve, reject });
      if (this.sending) return;
      this.sending = true;
      setImmediate(() => void this.send());
    });
  }

  /** Any number of jobs, all or nothing. */
  async many(jobs: PreparedJob[]): Promise<string[]> {
    if (jobs.length === 0) return [];
    const chunks = chunksOf(jobs);
    // Five jobs a millisecond at the very least, on top of the usual limit.
    const timeoutMs = this.options.connection.queryTimeoutMs + Math.ceil(jobs.length / 5);
    const lanes = lanesOf(jobs);
    const short = chunks.length === 1 && jobs.length <= SHARED_MAX;
    const follower = short ? this.wakeUp.follower(lanes) : undefined;
    const ids = await this.certain(() =>
      short
        ? this.database
            .query<IdsRow>(enqueueSql(this.s), [chunks[0]], {
              name: 'leasehold_enqueue',
              ...(follower ? { follower } : {}),
            })
            .then(idsOf)
        : this.database.transaction(async (run) => {
            const all: string[][] = [];
            for (const chunk of chunks) all.push(idsOf(await run<IdsRow>(enqueueSql(this.s), [chunk])));
            return all.flat();
          }, timeoutMs),
    );
    if (!follower) this.wakeUp.notify(lanes);
    return ids;
  }

  /** In the caller's transaction; announced by it, at its commit. */
  async within(transaction: EnqueueTransaction, jobs: PreparedJob[]): Promise<string[]> {
    const run = runnerOf(transaction);
    if (jobs.length === 0) return [];
    await this.database.open();
    const ids: string[][] = [];
    try {
      for (const chunk of chunksOf(jobs)) {
        ids.push(idsOf((await run(enqueueSql(this.s), [chunk])) as IdsRow[]));
      }
      const announce = this.wakeUp.statement(lanesOf(jobs));
      if (announce) await run(announce.text, announce.values);
    } catch (error) {
      if (!isSchemaMissing(error)) throw error;
      throw new SchemaError(
        `The transaction's database has no Leasehold schema ${this.database.schema.name}: ${errorText(error)}`,
        { cause: error },
      );
    }
    return ids.flat();
  }

  private async send(): Promise<void> {
    while (this.queue.length > 0) await this.sendTogether(this.queue.splice(0, SHARED_MAX));
    this.sending = false;
  }

  private async sendTogether(batch: Waiting[]): Promise<void> {
    try {
      const ids = await this.many(batch.map(({ job }) => job));
      batch.forEach(({ resolve }, i) => resolve(ids[i] ?? ''));
    } catch (error) {
      if (batch.length === 1 || error instanceof LeaseholdError || isConnectionError(error)) {
        for (const { reject } of batch) reject(error);
        return;
      }
      // Each call stands for itself: what the database refused in one job's content must not fail the others.
      const half = Math.ceil(batch.length / 2);
      for (const part of [batch.slice(0, half), batch.slice(half)]) await this.sendTogether(part);
    }
  }

  /** A reply that was lost leaves it open whether the jobs are there, and the caller must know that. */
  private async certain<T>(send: () => Promise<T>): Promise<T> {
    await this.database.open();
    try {
      return await send();
    } catch (error) {
      if (!isConnectionError(error) || isRefusal(error) || this.database.wasNeverSent(error)) throw error;
      throw new EnqueueUncertainError(
        `The connection was lost before the answer, so the jobs may or may not be enqueued: ${errorText(error)}`,
        {
          cause: error,
        },
      );
    }
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

/** The server's own word that it did not do it: read-only, or cancelled at its statement's limit. */
const isRefusal = (error: unknown): boolean => ['25006', '57014'].includes((error as { code?: string }).code ?? '');

interface IdsRow extends Record<string, unknown> {
  ids: string;
}

const idsOf = ([row]: IdsRow[]): string[] => (row?.ids ? row.ids.split(',') : []);

function lanesOf(jobs: PreparedJob[]): Lane[] {
  const heads = new Set(jobs.map(({ head }) => head));
  return [...new Map([...heads].map(({ queue, kind }) => [`${queue}\0${kind}`, [queue, kind] as const])).values()];
}

/** Texts for `enqueue_v1`, each of a bounded size. Neighbours that differ in their payloads only share a group. */
function chunksOf(jobs: PreparedJob[]): string[] {
  const chunks: string[] = [];
  let groups: string[] = [];
  let payloads: string[] = [];
  let chars = 0;
  jobs.forEach(({ head, payload }, i) => {
    payloads.push(payload);
    chars += payload.length;
    const full = chars >= CHUNK_CHARS;
    const next = jobs[i + 1]?.head;
    if (full || next?.json !== head.json) {
      groups.push(`${head.json},"payloads":[${payloads.join(',')}]}`);
      chars += head.json.length;
      payloads = [];
    }
    if (full || !next) {
      chunks.push(`[${groups.join(',')}]`);
      groups = [];
      chars = 0;
    }
  });
  return chunks;
}

function runnerOf({
  manager,
  queryRunner,
  client,
}: EnqueueTransaction): (text: string, values: unknown[]) => Promise<unknown[]> {
  if ([manager, queryRunner, client].filter(Boolean).length > 1) {
    throw new InvalidJobError("Give one of 'manager', 'queryRunner' and 'client', not several", 'manager');
  }
  if (client) {
    assertOpen(client);
    return async (text, values) => (await client.query(text, values)).rows as unknown[];
  }
  const runner = queryRunner ?? manager?.queryRunner;
  if (!runner?.isTransactionActive) {
    const field = queryRunner ? 'queryRunner' : 'manager';
    throw new InvalidJobError(
      `${field} has no open transaction: pass the manager that dataSource.transaction() hands to its callback, or leave '${field}' out`,
      field,
    );
  }
  return async (text, values) => (await runner.query(text, values)) as unknown[];
}

/** A pool runs each statement on another connection; a client of a recent pg knows whether a transaction is open. */
function assertOpen(client: ClientBase): void {
  if ('totalCount' in client) {
    throw new InvalidJobError('client is a pool: pass the client of pool.connect() that has the transaction', 'client');
  }
  if (client.getTransactionStatus?.() === 'I') {
    throw new InvalidJobError(
      "client has no open transaction: send BEGIN and wait for it, or leave 'client' out",
      'client',
    );
  }
}
