import { randomUUID } from 'node:crypto';
import { Injectable } from '@nestjs/common';
import { type Lane, WakeUp } from '../claim/wake-up';
import {
  EmptyBatchError,
  IllegalBatchStateError,
  InvalidBatchError,
  InvalidJobError,
  LeaseLostError,
  UnknownBatchError,
} from '../errors';
import type { HandlerClass } from '../handlers/handler.types';
import { Enqueuer } from '../jobs/enqueuer';
import { JobEnqueue } from '../jobs/job-enqueue';
import type { PreparedJob } from '../jobs/enqueue-request';
import { ResolvedOptions } from '../options/lease-options';
import { isName } from '../options/validators';
import { didYouMean } from '../options/suggest';
import { heldSql } from '../settle/saves.sql';
import {
  TRANSACTION_KEYS,
  isTransactional,
  runnerOf,
  type CallerTransaction,
  type RunInTransaction,
} from '../storage/caller-transaction';
import { Database } from '../storage/database';
import { backoffMs, sleep } from '../storage/delays';
import { isConflict, isConnectionError } from '../storage/sql-errors';
import type {
  AddOptions,
  AddedMembers,
  BatchEnd,
  BatchHook,
  BatchId,
  BatchMember,
  BatchOptions,
  BatchStatus,
  CreatedBatch,
} from './batch.types';
import { BatchFollowUps, type EndedBatch } from './batch-follow-ups';
import { type PlannedMember, planMembers, unknownNames } from './batch-plan';
import { addEdgesSql, batchOfRequestSql, endSql, insertBatchSql, lockBatchSql, namedSql, sealSql } from './batches.sql';
import { assertBatchId } from './batch-id';

const REPEATS = 8;
const OPTIONS = ['open', 'failFast', 'ifEmpty', 'onCompleted', 'onFailed', 'onFinished', ...TRANSACTION_KEYS];
const HOOKS = ['onCompleted', 'onFailed', 'onFinished'] as const;

interface StoredHook {
  on: 'completed' | 'failed' | 'finished';
  head: unknown;
  payload: unknown;
}

interface Sealed {
  status: BatchEnd['status'] | 'running';
  ended?: EndedBatch;
}

interface Made extends CreatedBatch {
  ended?: EndedBatch;
}

/** Makes batches, adds to them and seals them: each in one transaction, the caller's if given (R28). */
@Injectable()
export class BatchWriter {
  constructor(
    private readonly enqueue: JobEnqueue,
    private readonly enqueuer: Enqueuer,
    private readonly database: Database,
    private readonly followUps: BatchFollowUps,
    private readonly wakeUp: WakeUp,
    private readonly options: ResolvedOptions,
  ) {}

  async create(name: string, members: readonly BatchMember[], options: BatchOptions): Promise<CreatedBatch> {
    assertOptions(options, OPTIONS);
    if (!isName(name)) {
      throw new InvalidBatchError('name must be text of 1 to 200 bytes without NUL or lone surrogates', 'name');
    }
    const { open = false, failFast = false, ifEmpty = 'refuse' } = options;
    const plan = await planMembers(members, this.enqueue, false);
    if (plan.length === 0 && !open && ifEmpty !== 'complete') {
      throw new InvalidBatchError(
        "members is empty: give at least one, { open: true } to add them later, or { ifEmpty: 'complete' } if none is a good outcome",
        'members',
      );
    }
    const hooks = await this.hooksOf(options);
    const values = [name, open ? null : plan.length, failFast, hooks.length > 0 ? JSON.stringify(hooks) : null];
    const request = randomUUID();
    const made = await this.inTransaction<Made>(
      options,
      plan.length,
      async (run) => {
        const [row] = await run<{ id: string }>(insertBatchSql(this.s), [...values, request]);
        const id = row?.id ?? '';
        const { jobIds, lanes } = await this.insert(run, id, plan, new Map());
        const result: Made = { id, jobIds };
        // Nothing is unfinished: nobody else would look.
        if (!open && plan.length === 0) result.ended = await this.end(run, id);
        return { result, lanes };
      },
      async () => {
        const [row] = await this.database.query<{ id: string; jobs: string[] | null }>(batchOfRequestSql(this.s), [
          request,
        ]);
        return row && { id: row.id, jobIds: asGiven(plan, row.jobs ?? []) };
      },
    );
    if (made.ended) this.followUps.announceEnd(made.ended);
    return { id: made.id, jobIds: made.jobIds };
  }

  async add(id: BatchId, members: readonly BatchMember[], options: AddOptions): Promise<AddedMembers> {
    assertOptions(options, ['under', ...TRANSACTION_KEYS]);
    assertBatchId(id);
    const plan = await planMembers(members, this.enqueue, true);
    return this.inTransaction(options, plan.length, async (run) => {
      await this.lockOpen(run, id, 'add members to');
      const known = await this.known(run, id, plan);
      const fresh = plan.filter(({ name }) => name === undefined || !known.has(name));
      const { jobIds, lanes } = await this.insert(run, id, fresh, known);
      if (options.under) await this.holdLease(run, options.under.fence);
      const all = plan.map(({ name }) => (name === undefined ? undefined : known.get(name)));
      const given: string[] = [];
      for (const [i, member] of plan.entries()) given[member.index] = all[i] ?? jobIds[member.index] ?? '';
      return {
        result: {
          jobIds: given,
          added: fresh.length,
          existing: plan.flatMap(({ name }) => (name !== undefined && known.has(name) ? [name] : [])),
        },
        lanes,
      };
    });
  }

  async seal(id: BatchId, options: CallerTransaction & Pick<BatchOptions, 'ifEmpty'>): Promise<BatchStatus> {
    assertOptions(options, ['ifEmpty', ...TRANSACTION_KEYS]);
    assertBatchId(id);
    const { status, ended } = await this.inTransaction<Sealed>(options, 0, async (run) => {
      const { sealed, status } = await this.lock(run, id);
      if (sealed) return { result: { status }, lanes: [] };
      if (options.ifEmpty !== 'complete') await this.refuseEmpty(run, id);
      await run(sealSql(this.s), [id]);
      const ended = await this.end(run, id);
      return { result: ended ? { status: ended[1], ended } : { status: 'running' }, lanes: [] };
    });
    if (ended) this.followUps.announceEnd(ended);
    return status;
  }

  private async refuseEmpty(run: RunInTransaction, id: BatchId): Promise<void> {
    const rows = await run(`SELECT FROM ${this.s}.jobs WHERE batch_id = $1::bigint AND batch_id IS NOT NULL LIMIT 1`, [
      id,
    ]);
    if (rows.length === 0) throw new EmptyBatchError(id);
  }

  /** Members in the order of the plan, with their edges. `known`: members that are there already, by name. */
  private async insert(
    run: RunInTransaction,
    id: BatchId,
    plan: PlannedMember[],
    known: Map<string, string>,
  ): Promise<{ jobIds: string[]; lanes: Lane[] }> {
    if (plan.length === 0) return { jobIds: [], lanes: [] };
    const suffixed = new Map<string, string>();
    const jobs = plan.map(({ job, name, needs }): PreparedJob => {
      const suffix = `,"batchId":${id}${needs.size > 0 ? ',"blockedOn":"jobs"' : ''}`;
      const whole = job.json + suffix;
      const json = suffixed.get(whole) ?? whole;
      suffixed.set(whole, json);
      return { ...job, json, member: name ?? null };
    });
    const ids = await this.enqueuer.insert(run, jobs);
    const ofName = new Map(known);
    plan.forEach(({ name }, i) => name !== undefined && ofName.set(name, ids[i] ?? ''));
    const edges = { jobs: [] as string[], needs: [] as string[], any: [] as boolean[] };
    plan.forEach(({ needs }, i) => {
      for (const [name, any] of needs) {
        edges.jobs.push(ids[i] ?? '');
        edges.needs.push(ofName.get(name) ?? '');
        edges.any.push(any);
      }
    });
    const lanes = new Map<string, Lane>();
    for (const { job, needs } of plan) {
      if (needs.size === 0) lanes.set(`${job.head.queue}\0${job.head.kind}`, [job.head.queue, job.head.kind]);
    }
    if (edges.jobs.length > 0) {
      const [row] = await run<{ lanes: Lane[] | null }>(addEdgesSql(this.s), [
        id,
        edges.jobs,
        edges.needs,
        edges.any,
        known.size > 0,
      ]);
      for (const lane of row?.lanes ?? []) lanes.set(lane.join('\0'), lane);
    }
    return { jobIds: asGiven(plan, ids), lanes: [...lanes.values()] };
  }

  /** Of the names in a plan, and of those that it depends on, what is in the batch already. */
  private async known(run: RunInTransaction, id: BatchId, plan: PlannedMember[]): Promise<Map<string, string>> {
    const names = new Set(plan.flatMap(({ name, needs }) => [...(name === undefined ? [] : [name]), ...needs.keys()]));
    if (names.size === 0) return new Map();
    const rows = await run<{ name: string; id: string }>(namedSql(this.s), [id, [...names]]);
    const known = new Map(rows.map((row) => [row.name, row.id]));
    const given = new Set(plan.map(({ name }) => name));
    const unknown = plan.flatMap(({ needs }) =>
      [...needs.keys()].filter((name) => !known.has(name) && !given.has(name)),
    );
    if (unknown.length > 0) throw unknownNames([...new Set(unknown)], []);
    return known;
  }

  private async lock(run: RunInTransaction, id: BatchId) {
    const [row] = await run<{ status: BatchEnd['status'] | 'running'; sealed: boolean; stopping: boolean }>(
      lockBatchSql(this.s),
      [id],
    );
    if (!row) throw new UnknownBatchError(id);
    return row;
  }

  private async lockOpen(run: RunInTransaction, id: BatchId, what: string): Promise<void> {
    const { status, sealed, stopping } = await this.lock(run, id);
    const why = stopping
      ? 'it is being cancelled'
      : sealed
        ? status === 'running'
          ? 'it is sealed'
          : 'it has ended'
        : undefined;
    if (why) throw new IllegalBatchStateError(id, status, `nobody can ${what} it, ${why}`);
  }

  private async holdLease(run: RunInTransaction, { jobId, token, workerId }: LeaseFence): Promise<void> {
    const [row] = await run<{ held: boolean }>(heldSql(this.s), [jobId, token, workerId, true]);
    if (!row?.held) throw new LeaseLostError(jobId, token);
  }

  /** A statement after the one that locked or made it. */
  private async end(run: RunInTransaction, id: BatchId): Promise<EndedBatch | undefined> {
    const [row] = await run<{ ended: [EndedBatch] | null }>(endSql(this.s), [id]);
    return row?.ended?.[0];
  }

  /**
   * In the caller's transaction; or in one of ours, which is repeated after a conflict or a lost reply.
   * @param find what an earlier try has written, if its commit arrived
   */
  private async inTransaction<T>(
    transaction: CallerTransaction,
    size: number,
    work: (run: RunInTransaction) => Promise<{ result: T; lanes: Lane[] }>,
    find: () => Promise<T | undefined> = () => Promise.resolve(undefined),
  ): Promise<T> {
    if (isTransactional(transaction)) {
      const run = runnerOf(pick(transaction));
      await this.database.open();
      const { result, lanes } = await work(run);
      const announce = lanes.length > 0 ? this.wakeUp.statement(lanes) : undefined;
      if (announce) await run(announce.text, announce.values);
      return result;
    }
    await this.database.open();
    const timeoutMs = this.options.connection.queryTimeoutMs + Math.ceil(size / 2);
    for (let tries = 0; ; tries++) {
      try {
        const { result, lanes } = await this.database.transaction((run) => work(run as RunInTransaction), timeoutMs);
        if (lanes.length > 0) this.wakeUp.notify(lanes);
        return result;
      } catch (error) {
        const lost = isConnectionError(error) || isTaken(error);
        if (tries >= REPEATS || (!lost && !isConflict(error))) throw error;
        await sleep(backoffMs(tries, 20, 1000));
        const found = lost ? await find().catch(() => undefined) : undefined;
        if (found !== undefined) return found;
      }
    }
  }

  private async hooksOf(options: BatchOptions): Promise<StoredHook[]> {
    const hooks: StoredHook[] = [];
    for (const field of HOOKS) {
      const given = options[field];
      if (given === undefined) continue;
      hooks.push({ on: field.slice(2).toLowerCase() as StoredHook['on'], ...(await this.hookOf(field, given)) });
    }
    return hooks;
  }

  private async hookOf(field: string, given: BatchHook | HandlerClass): Promise<Pick<StoredHook, 'head' | 'payload'>> {
    const hook: BatchHook = typeof given === 'function' ? { handler: given } : given;
    if (typeof hook !== 'object' || hook === null) {
      throw new InvalidBatchError(`${field} must be a handler class, or { handler, payload?, … }`, field);
    }
    const { handler, payload = {}, ...rest } = hook;
    if (typeof payload !== 'object' || Array.isArray(payload) || payload === null || 'batch' in payload) {
      throw new InvalidBatchError(
        `${field}: payload must be an object without a field 'batch', which says how the batch has ended`,
        `${field}.payload`,
      );
    }
    const wrong = ['key', 'keyMode', 'keyScope', ...TRANSACTION_KEYS].find((key) => key in rest);
    if (wrong)
      throw new InvalidBatchError(
        `${field}: '${wrong}' is not for a hook, which runs once for each end`,
        `${field}.${wrong}`,
      );
    try {
      // Checked as it will be, with an end of a batch in it.
      const job = await this.enqueue.prepare(handler, { ...payload, batch: SAMPLE }, rest);
      return { head: JSON.parse(`${job.json}}`), payload };
    } catch (error) {
      if (!(error instanceof InvalidJobError)) throw error;
      throw new InvalidBatchError(`${field}: ${error.message}`, `${field}.${error.field}`, [], { cause: error });
    }
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

/** What names a lease, and fences it. */
export interface LeaseFence {
  jobId: string;
  token: string;
  workerId: string;
}

const SAMPLE: BatchEnd = {
  id: '0',
  name: '',
  status: 'completed',
  generation: 1,
  completed: 0,
  failed: 0,
  cancelled: 0,
};

/** The same request is on its way still, or was committed. */
const isTaken = (error: unknown): boolean => (error as { constraint?: string }).constraint === 'batches_request_key';

const pick = ({ manager, queryRunner, client }: CallerTransaction): CallerTransaction => ({
  ...(manager ? { manager } : {}),
  ...(queryRunner ? { queryRunner } : {}),
  ...(client ? { client } : {}),
});

/** Ids in the order of a plan, put into the order in which the members were given. */
function asGiven(plan: PlannedMember[], ids: string[]): string[] {
  const given: string[] = [];
  plan.forEach(({ index }, i) => (given[index] = ids[i] ?? ''));
  return given;
}

function assertOptions(options: object, known: readonly string[]): void {
  if (typeof options !== 'object' || options === null)
    throw new InvalidBatchError('options must be an object', 'options');
  for (const key of Object.keys(options)) {
    if (!known.includes(key)) {
      throw new InvalidBatchError(`there is no option '${key}'${didYouMean(key, known as string[])}`, key);
    }
  }
}
