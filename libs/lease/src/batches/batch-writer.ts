import { randomUUID } from 'node:crypto';
import { Injectable } from '@nestjs/common';
import type { QueryResultRow } from 'pg';
import { type Lane, WakeUp } from '../claim/wake-up';
import {
  EmptyBatchError,
  IllegalBatchStateError,
  EnqueueUncertainError,
  InvalidBatchError,
  LeaseLostError,
  UnknownBatchError,
} from '../errors';
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
import { errorText, isConflict, isConnectionError } from '../storage/sql-errors';
import type {
  AddOptions,
  AddedMembers,
  BatchEnd,
  BatchId,
  BatchMember,
  BatchOptions,
  BatchStatus,
  CreatedBatch,
  SealOptions,
} from './batch.types';
import { BatchFollowUps, type DoomedMember, type EndedBatch } from './batch-follow-ups';
import { hooksOf } from './batch-hooks';
import { type PlannedMember, planMembers, unknownNames } from './batch-plan';
import { addEdgesSql, batchOfRequestSql, endSql, insertBatchSql, lockBatchSql, namedSql, sealSql } from './batches.sql';
import { assertBatchId } from './batch-id';

const REPEATS = 8;
const OPTIONS = ['open', 'failFast', 'ifEmpty', 'onCompleted', 'onFailed', 'onFinished', ...TRANSACTION_KEYS];

interface Sealed {
  status: BatchEnd['status'] | 'running';
  ended?: EndedBatch;
}

interface Made extends CreatedBatch {
  ended?: EndedBatch;
}

interface Added extends AddedMembers {
  doomed: DoomedMember[];
}

interface Locked {
  status: BatchEnd['status'] | 'running';
  sealed: boolean;
  stopping: boolean;
  isolation: string;
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
    const hooks = await hooksOf(name, options, this.enqueue);
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
        const [row] = await this.database
          .query<{ id: string; jobs: string[] | null }>(batchOfRequestSql(this.s), [request])
          // Away still: the repeat finds that the request is taken.
          .catch(() => []);
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
    const unnamed = plan.some(({ name }) => name === undefined);
    const { doomed, ...added } = await this.inTransaction<Added>(
      options,
      plan.length,
      async (run) => {
        const batch = await this.lock(run, id, 'add');
        const known = await this.known(run, id, plan);
        const fresh = plan.filter(({ name }) => name === undefined || !known.has(name));
        // Nothing to add: a fan-out that is done again after its batch was sealed.
        if (fresh.length > 0) assertOpen(id, batch);
        const { jobIds, lanes, doomed } = await this.insert(run, id, fresh, known);
        if (options.under) await this.holdLease(run, options.under.fence);
        const given: string[] = [];
        for (const { name, index } of plan) given[index] = known.get(name ?? '') ?? jobIds[index] ?? '';
        const existing = plan.flatMap(({ name }) => (name !== undefined && known.has(name) ? [name] : []));
        return { result: { jobIds: given, added: fresh.length, existing, doomed }, lanes };
      },
      (error) => {
        if (!unnamed || !this.database.mayBeWritten(error)) return Promise.resolve(undefined);
        throw new EnqueueUncertainError(
          `The connection was lost before the answer, so the members may or may not have been added; with names they could be given again: ${errorText(error)}`,
          { cause: error },
        );
      },
    );
    if (doomed.length > 0 && !isTransactional(options)) {
      this.followUps.announceDoomed(doomed);
      this.followUps.ended(id);
    }
    return added;
  }

  async seal(id: BatchId, options: SealOptions): Promise<BatchStatus> {
    assertOptions(options, ['ifEmpty', 'under', ...TRANSACTION_KEYS]);
    assertBatchId(id);
    const { status, ended } = await this.inTransaction<Sealed>(options, 0, async (run) => {
      const { sealed, status } = await this.lock(run, id, 'seal');
      if (options.under) await this.holdLease(run, options.under.fence);
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
  ): Promise<{ jobIds: string[]; lanes: Lane[]; doomed: DoomedMember[] }> {
    if (plan.length === 0) return { jobIds: [], lanes: [], doomed: [] };
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
    let doomed: DoomedMember[] = [];
    if (edges.jobs.length > 0) {
      const [row] = await run<{ answer: { lanes: Lane[] | null; doomed: DoomedMember[] } | null }>(
        addEdgesSql(this.s),
        [id, edges.jobs, edges.needs, edges.any, known.size > 0],
      );
      for (const lane of row?.answer?.lanes ?? []) lanes.set(lane.join('\0'), lane);
      doomed = row?.answer?.doomed ?? [];
    }
    return { jobIds: asGiven(plan, ids), lanes: [...lanes.values()], doomed };
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

  private async lock(run: RunInTransaction, id: BatchId, call: 'add' | 'seal'): Promise<Locked> {
    const [row] = await run<Locked & QueryResultRow>(lockBatchSql(this.s), [id]);
    if (!row) throw new UnknownBatchError(id);
    // What it sees may be older than the lock: members that have ended by now, or names that are there.
    if (row.isolation !== 'read committed') {
      throw new InvalidBatchError(
        `${call} sees members as they are now, so it needs a transaction of isolation READ COMMITTED, not ${row.isolation.toUpperCase()}: call it in one, or outside of the transaction`,
        'isolation',
      );
    }
    return row;
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
   * In the caller's transaction; or in one of ours, which is repeated after a conflict or a lost connection.
   * @param lost after a lost connection: finds what the try has written, if its commit arrived; or throws, when it must not be repeated
   */
  private async inTransaction<T>(
    transaction: CallerTransaction,
    size: number,
    work: (run: RunInTransaction) => Promise<{ result: T; lanes: Lane[] }>,
    lost: (error: unknown) => Promise<T | undefined> = () => Promise.resolve(undefined),
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
        const open = isConnectionError(error) || isTaken(error);
        if (tries >= REPEATS || (!open && !isConflict(error))) throw error;
        await sleep(backoffMs(tries, 20, 1000));
        const found = open ? await lost(error) : undefined;
        if (found !== undefined) return found;
      }
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

function assertOpen(id: BatchId, { status, sealed, stopping }: Locked): void {
  if (!stopping && !sealed) return;
  const why = stopping ? 'it is being cancelled' : status === 'running' ? 'it is sealed' : 'it has ended';
  throw new IllegalBatchStateError(id, status, `nobody can add members to it, ${why}`);
}

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
