import { Injectable } from '@nestjs/common';
import { InvalidJobError, UnknownJobError } from '../errors';
import { HandlerRegistry, type HandlerDefinition } from '../handlers/handler-registry';
import type { HandlerClass, PayloadOf, ResultOf } from '../handlers/handler.types';
import { ResolvedOptions } from '../options/lease-options';
import { didYouMean } from '../options/suggest';
import { Database } from '../storage/database';
import {
  type EnqueueOptions,
  type EnqueueTransaction,
  type PreparedJob,
  TRANSACTION_KEYS,
  prepareHead,
  preparePayload,
  type PreparedHead,
} from './enqueue-request';
import { Enqueuer } from './enqueuer';
import { JOB_STATES, type JobRun, type JobState, type JobStatus } from './job.types';
import { countsSql, findSql, getSql, runsSql, unhandledSql } from './jobs.sql';

/** An enqueued job's id: a bigint as decimal text. */
export type JobId = string;

/** One of a mixed lot for `enqueueMany`. */
export interface EnqueueItem extends Omit<EnqueueOptions, keyof EnqueueTransaction> {
  handler: HandlerClass | string;
  payload: unknown;
}

export interface FindJobs {
  state?: JobState;
  kind?: string;
  queue?: string;
  /** Jobs with this tag. */
  tag?: string;
  /** 1 to 1000, default 50. */
  limit?: number;
  /** `next` of the page before. */
  after?: string;
}

export interface JobPage {
  /** Newest first. */
  jobs: JobStatus[];
  /** Pass as `after` to get the next page; null at the end. */
  next: string | null;
}

type Target = HandlerClass | string;
type Payload<T> = T extends HandlerClass ? PayloadOf<T> : unknown;

/** Enqueues jobs and says what has become of them. */
@Injectable()
export class JobsService {
  private readonly heads = new Map<Target, PreparedHead>();

  constructor(
    private readonly registry: HandlerRegistry,
    private readonly enqueuer: Enqueuer,
    private readonly database: Database,
    private readonly options: ResolvedOptions,
  ) {}

  /**
   * Enqueues one job: by its handler's class, which types the payload, or by its kind's name, also for a kind that only other processes
   * handle. In the caller's transaction if one is given.
   * @throws InvalidJobError naming the field, nothing written; EnqueueUncertainError when the reply was lost
   */
  async enqueue<T extends Target>(target: T, payload: Payload<T>, options: EnqueueOptions = {}): Promise<JobId> {
    const head = this.headOf(target, options);
    const job = { head, payload: await preparePayload(payload, head, this.options) };
    if (!isTransactional(options)) return this.enqueuer.one(job);
    const [id] = await this.enqueuer.within(options, [job]);
    return id ?? '';
  }

  /**
   * Enqueues up to 200 000 jobs, all or nothing, and returns their ids in the order given: many payloads of one handler with the same
   * options, or a mixed lot. An empty list returns an empty list.
   */
  enqueueMany<T extends Target>(target: T, payloads: readonly Payload<T>[], options?: EnqueueOptions): Promise<JobId[]>;
  enqueueMany(items: readonly EnqueueItem[], transaction?: EnqueueTransaction): Promise<JobId[]>;
  async enqueueMany(
    first: Target | readonly EnqueueItem[],
    second: readonly unknown[] | EnqueueTransaction = {},
    third: EnqueueOptions = {},
  ): Promise<JobId[]> {
    const mixed = Array.isArray(first);
    const lot = mixed ? (first as readonly EnqueueItem[]) : payloadsOf(second);
    const transaction = mixed ? transactionOf(second as EnqueueTransaction) : third;
    if (lot.length > MAX_JOBS) {
      throw new InvalidJobError(
        `enqueueMany takes at most ${MAX_JOBS} jobs in one call, not ${lot.length}: make several calls`,
        'items',
      );
    }
    const shared = mixed || lot.length === 0 ? undefined : this.headOf(first as Target, third);
    const jobs: PreparedJob[] = [];
    for (const [i, item] of lot.entries()) {
      try {
        const head = shared ?? this.headOfItem(item as EnqueueItem);
        const encoded = preparePayload(shared ? item : (item as EnqueueItem).payload, head, this.options);
        // Waiting for what is there already would cost more than making it.
        jobs.push({ head, payload: typeof encoded === 'string' ? encoded : await encoded });
      } catch (error) {
        if (!(error instanceof InvalidJobError)) throw error;
        throw new InvalidJobError(`[${i}] ${error.message}`, `[${i}].${error.field}`, { cause: error });
      }
    }
    return isTransactional(transaction) ? this.enqueuer.within(transaction, jobs) : this.enqueuer.many(jobs);
  }

  /** Everything about one job, with its closed runs. @throws UnknownJobError */
  async get<H extends HandlerClass = HandlerClass>(id: JobId): Promise<JobStatus<PayloadOf<H>, ResultOf<H>>> {
    assertId(id, 'id');
    const [row] = await this.database.query<JobStatus<PayloadOf<H>, ResultOf<H>> & Record<string, unknown>>(
      getSql(this.s),
      [id],
    );
    if (!row) throw new UnknownJobError(id);
    const runs = await this.database.query<JobRun & Record<string, unknown>>(runsSql(this.s), [id]);
    return { ...row, runs };
  }

  /** A page of jobs, newest first. @throws InvalidJobError naming the filter that is wrong */
  async find(filter: FindJobs = {}): Promise<JobPage> {
    const { state, kind = null, queue = null, tag = null, limit = 50, after } = filter;
    if (state !== undefined && !JOB_STATES.includes(state)) {
      throw new InvalidJobError(
        `state = '${String(state)}' is none of ${JOB_STATES.join(', ')}${didYouMean(String(state), JOB_STATES)}`,
        'state',
      );
    }
    if (!Number.isInteger(limit) || limit < 1 || limit > 1000) {
      throw new InvalidJobError(`limit = ${limit} must be a whole number from 1 to 1000`, 'limit');
    }
    if (after !== undefined) assertId(after, 'after');
    const jobs = await this.database.query<JobStatus & Record<string, unknown>>(findSql(this.s, state), [
      after ?? null,
      kind,
      queue,
      tag,
      limit + 1,
    ]);
    const page = jobs.slice(0, limit);
    return { jobs: page, next: jobs.length > limit ? (page.at(-1)?.id ?? null) : null };
  }

  /** How many jobs are in each state. Counts rows: for a dashboard, not for every request. */
  async counts(): Promise<Record<JobState, number>> {
    const rows = await this.database.query<{ state: JobState; count: number }>(countsSql(this.s));
    const counts = Object.fromEntries(JOB_STATES.map((state) => [state, 0])) as Record<JobState, number>;
    for (const { state, count } of rows) counts[state] += count;
    return counts;
  }

  /** Kinds with jobs ready that no active worker handles (R27). */
  async unhandledKinds(): Promise<string[]> {
    return (await this.database.query<{ kind: string }>(unhandledSql(this.s))).map(({ kind }) => kind);
  }

  private headOfItem(item: EnqueueItem): PreparedHead {
    if (typeof item !== 'object' || item === null) {
      throw new InvalidJobError(`an item must be { handler, payload, … }, not ${String(item)}`, 'item');
    }
    const { handler, payload: _payload, ...options } = item;
    const transactional = TRANSACTION_KEYS.find((key) => key in options);
    if (transactional) {
      throw new InvalidJobError(
        `'${transactional}' belongs to all jobs of the call: give it as the second argument`,
        transactional,
      );
    }
    return this.headOf(handler, options);
  }

  /** Most jobs are enqueued with their kind's own options: those are worked out once. */
  private headOf(target: Target, options: EnqueueOptions): PreparedHead {
    const plain = Object.keys(options).length === 0;
    const known = plain ? this.heads.get(target) : undefined;
    if (known) return known;
    const { kind, definition } = this.resolve(target);
    const head = prepareHead(kind, definition, options, this.options);
    if (plain && definition) this.heads.set(target, head);
    return head;
  }

  private resolve(target: Target): { kind: string; definition: HandlerDefinition | undefined } {
    if (typeof target === 'string') return { kind: target, definition: this.registry.get(target) };
    const definition = typeof target === 'function' ? this.registry.of(target) : undefined;
    if (!definition) {
      const name = typeof target === 'function' ? (target as { name: string }).name : String(target);
      throw new InvalidJobError(
        `${name} is no class decorated with @JobHandler for the lease instance '${this.options.name}'`,
        'handler',
      );
    }
    return { kind: definition.kind, definition };
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

const MAX_JOBS = 200_000;

function payloadsOf(payloads: unknown): readonly unknown[] {
  if (Array.isArray(payloads)) return payloads;
  throw new InvalidJobError('enqueueMany(handler, payloads): payloads must be an array', 'payloads');
}

/** The second argument of a mixed lot: each item has its own options, so nothing else may stand here. */
function transactionOf(given: EnqueueTransaction): EnqueueTransaction {
  const other = Object.keys(given).find((key) => !(TRANSACTION_KEYS as readonly string[]).includes(key));
  if (other === undefined) return given;
  throw new InvalidJobError(`enqueueMany(items, transaction): there is no '${other}' here, only in each item`, other);
}

const isTransactional = ({ manager, queryRunner, client }: EnqueueTransaction): boolean =>
  manager !== undefined || queryRunner !== undefined || client !== undefined;

function assertId(id: unknown, field: string): void {
  if (typeof id !== 'string' || !/^\d{1,19}$/.test(id) || BigInt(id) > 9_223_372_036_854_775_807n) {
    throw new InvalidJobError(`${field} = ${JSON.stringify(id)} is no job id: ids are decimal text`, field);
  }
}
