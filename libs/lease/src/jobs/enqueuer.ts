import { Injectable } from '@nestjs/common';
import { EnqueueUncertainError, LeaseholdError, SchemaError } from '../errors';
import { ResolvedOptions } from '../options/lease-options';
import { type CallerTransaction, type RunInTransaction, runnerOf } from '../storage/caller-transaction';
import { Database } from '../storage/database';
import { backoffMs, sleep } from '../storage/delays';
import { errorText, isConflict, isConnectionError, isSchemaMissing } from '../storage/sql-errors';
import { type Lane, WakeUp } from '../claim/wake-up';
import type { PreparedJob } from './enqueue-request';
import type { JobState } from './job.types';
import { enqueueKeyedSql, enqueueSql } from './jobs.sql';

interface Waiting {
  job: PreparedJob;
  resolve: (id: string) => void;
  reject: (error: unknown) => void;
}

/** Well under the server's and V8's limits for one text. */
const CHUNK_CHARS = 32 * 1024 * 1024;
const SHARED_MAX = 1000;
/** Keyed jobs are looked at one by one: a statement's worth of them. */
const KEYED_CHUNK = 1000;
/** Of a keyed enqueue whose reply was lost, or that met a conflict. */
const REPEATS = 8;

/** What an enqueue with a key has done: `created`, `replaced` (payload and time), or `existing`: nothing, the key is held by that job. */
export interface EnqueueAnswer {
  /** The job that was created, replaced, or that holds the key. */
  id: string;
  outcome: 'created' | 'replaced' | 'existing';
  /** Its state, as seen by the enqueue. */
  state: JobState;
}

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
    if (jobs.some(({ head }) => head.keyed)) return (await this.keyed(jobs)).map(({ id }) => id);
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

  /**
   * Jobs some of which have a unique key, all or nothing. A reply that was lost is no uncertainty: the repeat finds what is there. (A job that was
   * enqueued and finished before the repeat is enqueued again, unless its mode is throttle.)
   */
  async keyed(jobs: PreparedJob[]): Promise<EnqueueAnswer[]> {
    for (let tries = 0; ; tries++) {
      try {
        const answers = await this.certain(() =>
          this.database.transaction(
            (run) => this.sendAll(run, jobs),
            this.options.connection.queryTimeoutMs + jobs.length,
          ),
        );
        this.wakeUp.notify(lanesOf(jobs));
        return answers;
      } catch (error) {
        const repeatable = isConflict(error) || error instanceof EnqueueUncertainError;
        if (!repeatable || tries >= REPEATS || (!isConflict(error) && jobs.some(({ head }) => !head.keyed)))
          throw error;
        await sleep(backoffMs(tries, 20, 1000));
      }
    }
  }

  /** In the caller's transaction; announced by it, at its commit. */
  async within(transaction: CallerTransaction, jobs: PreparedJob[]): Promise<EnqueueAnswer[]> {
    const run = runnerOf(transaction);
    if (jobs.length === 0) return [];
    await this.database.open();
    try {
      const answers = await this.sendAll(run, jobs);
      const announce = this.wakeUp.statement(lanesOf(jobs));
      if (announce) await run(announce.text, announce.values);
      return answers;
    } catch (error) {
      if (!isSchemaMissing(error)) throw error;
      throw new SchemaError(
        `The transaction's database has no Leasehold schema ${this.database.schema.name}: ${errorText(error)}`,
        { cause: error },
      );
    }
  }

  /** Jobs without keys, in a transaction of somebody else's, who announces them. @returns their ids in the order given */
  async insert(run: RunInTransaction, jobs: PreparedJob[]): Promise<string[]> {
    const ids: string[][] = [];
    for (const chunk of chunksOf(jobs)) ids.push(idsOf(await run<IdsRow>(enqueueSql(this.s), [chunk])));
    return ids.flat();
  }

  /** Those without a key first, together; then those with one. Answers in the order given. */
  private async sendAll(run: RunInTransaction, jobs: PreparedJob[]): Promise<EnqueueAnswer[]> {
    const plain = jobs.filter(({ head }) => !head.keyed);
    const keyed = jobs.filter(({ head }) => head.keyed);
    const ids = await this.insert(run, plain);
    const answers: EnqueueAnswer[] = [];
    for (let at = 0; at < keyed.length; at += KEYED_CHUNK) {
      const items = keyed.slice(at, at + KEYED_CHUNK).map(({ json, payload }) => `${json},"payloads":[${payload}]}`);
      const [row] = await run<{ answers: string }>(enqueueKeyedSql(this.s), [`[${items.join(',')}]`]);
      answers.push(...(JSON.parse(row?.answers ?? '[]') as EnqueueAnswer[]));
    }
    const nextId = ids[Symbol.iterator]();
    const nextAnswer = answers[Symbol.iterator]();
    return jobs.map(({ head }) =>
      head.keyed
        ? (nextAnswer.next().value as EnqueueAnswer)
        : { id: nextId.next().value as string, outcome: 'created', state: 'ready' },
    );
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
      if (!this.database.mayBeWritten(error)) throw error;
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
  let names: (string | null)[] = [];
  let chars = 0;
  jobs.forEach(({ json, payload, member }, i) => {
    payloads.push(payload);
    if (member !== undefined) names.push(member);
    chars += payload.length + (member?.length ?? 0);
    const full = chars >= CHUNK_CHARS;
    const next = jobs[i + 1];
    if (full || next?.json !== json) {
      groups.push(
        `${json},"payloads":[${payloads.join(',')}]${names.length > 0 ? `,"names":${JSON.stringify(names)}` : ''}}`,
      );
      chars += json.length;
      payloads = [];
      names = [];
    }
    if (full || !next) {
      chunks.push(`[${groups.join(',')}]`);
      groups = [];
      chars = 0;
    }
  });
  return chunks;
}
