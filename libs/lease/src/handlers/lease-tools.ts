import { AsyncLocalStorage } from 'node:async_hooks';
import { Injectable } from '@nestjs/common';
import { ModuleRef } from '@nestjs/core';
import type { ClientBase, QueryResultRow } from 'pg';
import { DataSource, type EntityManager } from 'typeorm';
import type { HeldLease } from '../claim/held-leases';
import { LeaseLostError, LeaseSetupError, NonRetryableError } from '../errors';
import { HeartbeatService } from '../heartbeat/heartbeat.service';
import { ResolvedOptions } from '../options/lease-options';
import { encodeResult } from '../settle/encode-result';
import { Saves } from '../settle/saves';
import {
  completeSql,
  completedSql,
  extendSql,
  heldNowSql,
  heldSql,
  promoteOfSql,
  saveInSql,
} from '../settle/saves.sql';
import { type RunInTransaction, type TransactionTarget, runnerOn } from '../storage/caller-transaction';
import { Database } from '../storage/database';
import { backoffMs, monotonicMs, sleep } from '../storage/delays';
import { isConflict, isConnectionError, isLimit, isLocked } from '../storage/sql-errors';

export interface TransactionOptions {
  /** Whose transaction it is. Default: the module's `connection.dataSource`, else the application's DataSource. */
  dataSource?: DataSource;
  /** A `pg` client without an open transaction. */
  client?: ClientBase;
}

const CONFLICT_TRIES = 8;
/** Looks at a lease that somebody else has locked, before that counts as an open transaction. */
const MOMENTARY_TRIES = 4;

/** A `lease.transaction` that is open in this flow of calls; `locked`: it has the lease locked, until it ends. */
const openTransaction = new AsyncLocalStorage<{ held: HeldLease; locked: boolean }>();

/** What a lease can do with the database; one for all leases of the process. */
@Injectable()
export class LeaseTools {
  private readonly looks = new WeakMap<HeldLease, Promise<void>>();

  constructor(
    readonly saves: Saves,
    private readonly heartbeat: HeartbeatService,
    private readonly database: Database,
    private readonly options: ResolvedOptions,
    private readonly moduleRef: ModuleRef,
  ) {}

  get trusted(): boolean {
    return this.heartbeat.trusted;
  }

  get checkpointMaxBytes(): number {
    return this.options.checkpointMaxBytes;
  }

  /** @throws LeaseSetupError in a `lease.transaction` that has the lease locked: what is written outside of it would wait for its end, and it for that. */
  assertNotInside(held: HeldLease, what: string): void {
    const open = openTransaction.getStore();
    if (!open?.locked || open.held !== held) return;
    throw new LeaseSetupError(
      `${what} inside lease.transaction(), after checkpointIn() or completeIn(), would wait for the transaction, and that for it: ` +
        'use checkpointIn(), or call it after the transaction',
    );
  }

  async extend(held: HeldLease, ms: number): Promise<void> {
    await held.whileExtending(async () => {
      const endsAtMs = monotonicMs() + this.options.connection.queryTimeoutMs;
      for (let tries = 0; ; tries++) {
        const sentAtMs = monotonicMs();
        try {
          const [row] = await this.database.query<{ left_ms: string | null; deadline: Date | null }>(
            extendSql(this.s),
            [...fence(held), ms, this.options.maxExtensionMs],
          );
          if (row?.left_ms == null) throw this.lost(held);
          if (row.deadline) held.extended(sentAtMs + Number(row.left_ms), row.deadline);
          return;
        } catch (error) {
          // Waiting in the server would keep a connection from all other jobs.
          if (!isLocked(error) || sentAtMs > endsAtMs) throw error;
          await sleep(backoffMs(tries, 10, 500));
        }
      }
    });
  }

  /** The caller's transaction may be rolled back, or be another than the lease's: nothing is concluded from it but for this save. */
  async checkpointIn(target: TransactionTarget, held: HeldLease, json: string, version: number): Promise<void> {
    const { id, token, workerId } = held.job;
    const save = `[{"job":${id},"token":${token},"worker":${JSON.stringify(workerId)},"version":${version},"checkpoint":${json}}]`;
    const rows = await runnerOn(target)(saveInSql(this.s), [save]);
    this.locks(held);
    if (rows.length === 0) throw this.lost(held);
  }

  async completeIn(target: TransactionTarget, held: HeldLease, result: unknown): Promise<void> {
    const encoded = encodeResult(result, this.options.resultMaxBytes);
    if ('problem' in encoded) throw new NonRetryableError(encoded.problem);
    const run = runnerOn(target);
    const { id, token, workerId } = held.job;
    // What it said last of its progress could not be written after this.
    if (held.saving) await this.saves.flush(held);
    if (held.settling) {
      held.throwIfInterrupted();
      throw new LeaseLostError(id, token, 'the run has ended already');
    }
    held.completions++;
    // From here on "gone" may mean that this has been committed.
    held.settling = true;
    held.completing = true;
    const move = `[{"job":${id},"token":${token},"worker":${JSON.stringify(workerId)},"event":"complete"${
      encoded.json === null ? '' : `,"result":${encoded.json}`
    }}]`;
    try {
      const rows = await run(completeSql(this.s), [move]);
      this.locks(held);
      // Whoever looked before it was written has concluded that it was not.
      held.settling = held.completing = true;
      held.completions++;
      if (rows.length === 0) throw this.lost(held);
    } catch (error) {
      this.reopen(held);
      throw error;
    }
  }

  async transaction<T>(
    held: HeldLease,
    work: (target: TransactionTarget) => Promise<T>,
    options: TransactionOptions,
  ): Promise<T> {
    for (let tries = 0; ; tries++) {
      try {
        return await this.transactionOnce(held, work, options);
      } catch (error) {
        if (!isConflict(rootOf(error)) || tries >= CONFLICT_TRIES) throw error;
        await sleep(backoffMs(tries, 5, 1000));
        held.throwIfInterrupted();
      }
    }
  }

  private async transactionOnce<T>(
    held: HeldLease,
    work: (target: TransactionTarget) => Promise<T>,
    { client, dataSource }: TransactionOptions,
  ): Promise<T> {
    if (client) {
      return this.within(held, client, work, {
        run: async <R extends QueryResultRow>(text: string, values: unknown[]) =>
          (await client.query(text, values)).rows as R[],
        begin: () => client.query('BEGIN ISOLATION LEVEL READ COMMITTED'),
        commit: () => client.query('COMMIT'),
        rollback: () => client.query('ROLLBACK'),
      });
    }
    const runner = (dataSource ?? this.dataSource()).createQueryRunner();
    try {
      await runner.connect();
      return await this.within(held, runner.manager, work, {
        run: async <R extends QueryResultRow>(text: string, values: unknown[]) =>
          (await runner.query(text, values)) as R[],
        begin: () => runner.startTransaction('READ COMMITTED'),
        commit: () => runner.commitTransaction(),
        rollback: () => runner.rollbackTransaction(),
      });
    } finally {
      await runner.release();
    }
  }

  private async within<T>(
    held: HeldLease,
    target: EntityManager | ClientBase,
    work: (target: TransactionTarget) => Promise<T>,
    { run, begin, commit, rollback }: Transaction,
  ): Promise<T> {
    const open = { held, locked: false };
    await begin();
    let result: T;
    try {
      // Frozen in here it would keep its locks, and with them rescue and cancel from the job.
      await run(`SELECT set_config('idle_in_transaction_session_timeout', $1, true)`, [
        `${this.options.lease.ttlMs}ms`,
      ]);
      await this.assertHeld(run, held, false);
      result = await openTransaction.run(open, () => work(target));
      // Completed in a savepoint that was rolled back, or elsewhere: then it is not, in here.
      if (held.completing && (await run(completedSql(this.s), fence(held))).length === 0) this.reopen(held);
      if (!held.completing) await this.assertHeld(run, held, true);
    } catch (error) {
      this.reopen(held);
      // A session that the server has ended has rolled back already.
      await rollback().catch(() => undefined);
      open.locked = false;
      throw error;
    }
    try {
      await commit();
    } catch (error) {
      await rollback().catch(() => undefined);
      // The answer to the COMMIT may be what was lost.
      const mayBe = held.completing && isConnectionError(rootOf(error));
      if (!mayBe || !(await this.wasCommitted(held))) {
        this.reopen(held);
        throw error;
      }
    } finally {
      // What was begun inside may go on after it.
      open.locked = false;
    }
    if (held.completing) this.completed(held);
    return result;
  }

  /**
   * The run has ended, and its job was completed in a transaction that is not ours to watch (`completeIn` without `lease.transaction`): whether that
   * was committed is looked up. If not, the job is still to be settled.
   */
  async endCompletion(held: HeldLease): Promise<void> {
    if (!held.completing || held.settled) return;
    if (await this.wasCommitted(held)) this.completed(held);
    else this.reopen(held);
  }

  /** The same while the run goes on: a transaction that is still open, or was committed, leaves it as it is. Those who ask at once share the answer. */
  lookAtCompletion(held: HeldLease): Promise<void> {
    const known = this.looks.get(held);
    if (known) return known;
    const look = this.look(held).finally(() => this.looks.delete(held));
    this.looks.set(held, look);
    return look;
  }

  private async look(held: HeldLease): Promise<void> {
    for (let tries = 0; held.completing && !held.settled; tries++) {
      const { completions } = held;
      try {
        const [lease] = await this.database.query<{ held: boolean }>(heldNowSql(this.s), fence(held));
        if (lease?.held) {
          // Unless it has been completed again since this was asked.
          if (held.completions === completions) this.reopen(held);
          return;
        }
        if ((await this.database.query(completedSql(this.s), fence(held))).length > 0) return;
        if (held.completions !== completions) continue;
        this.reopen(held);
        return held.interrupt('lease-lost');
      } catch (error) {
        if (!isLocked(error)) throw error;
        // A save or a stop request locks it for a moment only.
        if (tries >= MOMENTARY_TRIES) return;
        await sleep(backoffMs(tries, 5, 100));
      }
    }
  }

  /** Waits until nobody has the lease locked, then looks for the outcome. Not in the server, where it would keep a connection from all other jobs. */
  private async wasCommitted(held: HeldLease): Promise<boolean> {
    for (let tries = 0; ; tries++) {
      try {
        const [lease] = await this.database.query<{ held: boolean }>(heldNowSql(this.s), fence(held));
        if (lease?.held) return false;
        return (await this.database.query(completedSql(this.s), fence(held))).length > 0;
      } catch (error) {
        if (!isConnectionError(error) && !isLimit(error)) throw error;
        await sleep(backoffMs(tries, 20, 1000));
      }
    }
  }

  private async assertHeld(run: RunInTransaction, held: HeldLease, lock: boolean): Promise<void> {
    const [row] = await run<{ held: boolean }>(heldSql(this.s), [...fence(held), lock]);
    if (!row?.held) throw this.lost(held);
  }

  private completed(held: HeldLease): void {
    held.settled = true;
    // Only a hint: the next poll promotes whoever waits for the place.
    this.database.query(promoteOfSql(this.s), [held.job.id]).catch(() => undefined);
  }

  private locks(held: HeldLease): void {
    const open = openTransaction.getStore();
    if (open?.held === held) open.locked = true;
  }

  /** The completion was rolled back: the job is still to be settled. */
  private reopen(held: HeldLease): void {
    if (held.completing) held.reopen();
  }

  private lost(held: HeldLease): LeaseLostError {
    if (!held.settling || held.completing) held.interrupt('lease-lost');
    return new LeaseLostError(held.job.id, held.job.token);
  }

  private dataSource(): DataSource {
    const found = this.options.connection.dataSource ?? this.applicationDataSource();
    if (!found) {
      throw new LeaseSetupError(
        'lease.transaction() found no DataSource: pass { dataSource } or { client }, give the module connection.dataSource, or import TypeOrmModule',
      );
    }
    if (!found.isInitialized) {
      throw new LeaseSetupError(
        'lease.transaction(): the DataSource is not initialized; await dataSource.initialize()',
      );
    }
    return found;
  }

  private applicationDataSource(): DataSource | undefined {
    try {
      return this.moduleRef.get(DataSource, { strict: false });
    } catch {
      return undefined;
    }
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

interface Transaction {
  run: RunInTransaction;
  begin: () => Promise<unknown>;
  commit: () => Promise<unknown>;
  rollback: () => Promise<unknown>;
}

const fence = ({ job }: HeldLease): [string, string, string] => [job.id, job.token, job.workerId];

/** TypeORM wraps what the driver says. */
const rootOf = (error: unknown): unknown => (error as { driverError?: unknown } | undefined)?.driverError ?? error;
