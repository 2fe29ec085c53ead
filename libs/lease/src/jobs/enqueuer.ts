import { Injectable } from '@nestjs/common';
import { EnqueueUncertainError, InvalidJobError, QueryTimeoutError, SchemaError } from '../errors';
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
    const ids = await this.certain(() =>
      chunks.length === 1 && jobs.length <= SHARED_MAX
        ? this.database
            .query<{ ids: string[] }>(enqueueSql(this.s), [chunks[0]], { name: 'leasehold_enqueue' })
            .then(idsOf)
        : this.database.transaction(async (run) => {
            const all: string[] = [];
            for (const chunk of chunks) all.push(...idsOf(await run<{ ids: string[] }>(enqueueSql(this.s), [chunk])));
            return all;
          }, timeoutMs),
    );
    this.wakeUp.notify(lanesOf(jobs));
    return ids;
  }

  /** In the caller's transaction; announced by it, at its commit. */
  async within(transaction: EnqueueTransaction, jobs: PreparedJob[]): Promise<string[]> {
    const run = runnerOf(transaction);
    if (jobs.length === 0) return [];
    await this.database.open();
    const ids: string[] = [];
    try {
      for (const chunk of chunksOf(jobs))
        ids.push(...idsOf((await run(enqueueSql(this.s), [chunk])) as { ids: string[] }[]));
      const announce = this.wakeUp.statement(lanesOf(jobs));
      if (announce) await run(announce.text, announce.values);
    } catch (error) {
      if (!isSchemaMissing(error)) throw error;
      throw new SchemaError(
        `The transaction's database has no Leasehold schema ${this.database.schema.name}: ${errorText(error)}`,
        { cause: error },
      );
    }
    return ids;
  }

  private async send(): Promise<void> {
    while (this.queue.length > 0) {
      const batch = this.queue.splice(0, SHARED_MAX);
      try {
        const ids = await this.many(batch.map(({ job }) => job));
        batch.forEach(({ resolve }, i) => resolve(ids[i] ?? ''));
      } catch (error) {
        // Each call stands for itself: what the database refused in one job's content must not fail the others.
        if (batch.length === 1 || error instanceof EnqueueUncertainError) for (const { reject } of batch) reject(error);
        else
          for (const { job, resolve, reject } of batch)
            await this.many([job]).then(([id]) => resolve(id ?? ''), reject);
      }
    }
    this.sending = false;
  }

  /** A reply that was lost leaves it open whether the jobs are there, and the caller must know that. */
  private async certain<T>(send: () => Promise<T>): Promise<T> {
    await this.database.open();
    try {
      return await send();
    } catch (error) {
      if (!isConnectionError(error) || isRefusal(error)) throw error;
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

/** Connection errors that say for certain that nothing was written. */
const isRefusal = (error: unknown): boolean => {
  const code = (error as { code?: string }).code ?? '';
  return (
    !(error instanceof QueryTimeoutError) &&
    (['25006', '53300', '57014', '57P03', 'ECONNREFUSED', 'ENOTFOUND'].includes(code) ||
      /timeout exceeded when trying to connect/.test((error as Error).message))
  );
};

const idsOf = (rows: { ids: string[] }[]): string[] => rows[0]?.ids ?? [];

const lanesOf = (jobs: PreparedJob[]): Lane[] => [
  ...new Map(jobs.map(({ queue, kind }) => [`${queue}\0${kind}`, [queue, kind] as const])).values(),
];

function chunksOf(jobs: PreparedJob[]): string[] {
  const chunks: string[] = [];
  let parts: string[] = [];
  let chars = 0;
  for (const { json } of jobs) {
    if (chars + json.length > CHUNK_CHARS && parts.length > 0) {
      chunks.push(`[${parts.join(',')}]`);
      parts = [];
      chars = 0;
    }
    parts.push(json);
    chars += json.length;
  }
  chunks.push(`[${parts.join(',')}]`);
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
  if (client) return async (text, values) => (await client.query(text, values)).rows as unknown[];
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
