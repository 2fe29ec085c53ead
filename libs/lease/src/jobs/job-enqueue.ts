import { Injectable } from '@nestjs/common';
import { InvalidJobError } from '../errors';
import { type HandlerDefinition, HandlerRegistry } from '../handlers/handler-registry';
import type { HandlerClass } from '../handlers/handler.types';
import { ResolvedOptions } from '../options/lease-options';
import { TRANSACTION_KEYS, isTransactional } from '../storage/caller-transaction';
import {
  type EnqueueOptions,
  type EnqueueTransaction,
  type PreparedHead,
  type PreparedJob,
  prepareHead,
  prepareJob,
} from './enqueue-request';
import { type EnqueueAnswer, Enqueuer } from './enqueuer';

/** One of a mixed lot for `enqueueMany`. */
export interface EnqueueItem extends Omit<EnqueueOptions, keyof EnqueueTransaction> {
  handler: HandlerClass | string;
  payload: unknown;
}

export type JobTarget = HandlerClass | string;

const MAX_JOBS = 200_000;
const MAX_KEYED = 10_000;

/** Checks what is to be enqueued, and hands it on. */
@Injectable()
export class JobEnqueue {
  private readonly heads = new Map<JobTarget, PreparedHead>();

  constructor(
    private readonly registry: HandlerRegistry,
    private readonly enqueuer: Enqueuer,
    private readonly options: ResolvedOptions,
  ) {}

  async one(target: JobTarget, payload: unknown, options: EnqueueOptions): Promise<EnqueueAnswer> {
    const head = this.headOf(target, options);
    const job = await prepareJob(payload, head, this.options);
    if (!isTransactional(options) && !head.keyed) {
      return { id: await this.enqueuer.one(job), outcome: 'created', state: 'ready' };
    }
    const [answer] = isTransactional(options)
      ? await this.enqueuer.within(options, [job])
      : await this.enqueuer.keyed([job]);
    if (!answer) throw new Error('the enqueue returned nothing');
    return answer;
  }

  async many(
    first: JobTarget | readonly EnqueueItem[],
    second: readonly unknown[] | EnqueueTransaction,
    third: EnqueueOptions,
  ): Promise<string[]> {
    const mixed = Array.isArray(first);
    const lot = mixed ? (first as readonly EnqueueItem[]) : payloadsOf(second);
    const transaction = mixed ? transactionOf(second as EnqueueTransaction) : third;
    if (lot.length > MAX_JOBS) {
      throw new InvalidJobError(
        `enqueueMany takes at most ${MAX_JOBS} jobs in one call, not ${lot.length}: make several calls`,
        'items',
      );
    }
    const shared = mixed || lot.length === 0 ? undefined : this.headOf(first as JobTarget, third);
    const jobs: PreparedJob[] = [];
    let keyed = 0;
    for (const [i, item] of lot.entries()) {
      try {
        const head = shared ?? this.headOfItem(item as EnqueueItem);
        const job = prepareJob(shared ? item : (item as EnqueueItem).payload, head, this.options);
        // Waiting for what is there already would cost more than making it.
        jobs.push(job instanceof Promise ? await job : job);
        if (head.keyed && ++keyed > MAX_KEYED) {
          throw new InvalidJobError(`at most ${MAX_KEYED} jobs with a key in one call: make several calls`, 'key');
        }
      } catch (error) {
        if (!(error instanceof InvalidJobError)) throw error;
        throw new InvalidJobError(`[${i}] ${error.message}`, `[${i}].${error.field}`, { cause: error });
      }
    }
    if (!isTransactional(transaction)) return this.enqueuer.many(jobs);
    return (await this.enqueuer.within(transaction, jobs)).map(({ id }) => id);
  }

  /** One job, checked, for somebody else to write. */
  prepare(target: JobTarget, payload: unknown, options: EnqueueOptions): PreparedJob | Promise<PreparedJob> {
    return prepareJob(payload, this.headOf(target, options), this.options);
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
  private headOf(target: JobTarget, options: EnqueueOptions): PreparedHead {
    const plain = Object.keys(options).length === 0;
    const known = plain ? this.heads.get(target) : undefined;
    if (known) return known;
    const { kind, definition } = this.resolve(target);
    const head = prepareHead(kind, definition, options, this.options);
    if (plain && definition) this.heads.set(target, head);
    return head;
  }

  private resolve(target: JobTarget): { kind: string; definition: HandlerDefinition | undefined } {
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
}

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
