import type { ClientBase } from 'pg';
import { Exchange } from '../claim/exchange';
import type { HeldLease, HeldLeases } from '../claim/held-leases';
import type { LeasedJob } from '../claim/leased-job';
import { LeaseLostError, LeaseSetupError } from '../errors';
import { LeaseTools, type TransactionOptions } from '../handlers/lease-tools';
import { Runner } from '../handlers/runner';
import type { Answer, Outcome } from '../settle/outcome';
import { heldSql, promoteOfSql } from '../settle/saves.sql';
import type { TransactionTarget } from '../storage/caller-transaction';
import { isContentError } from '../storage/sql-errors';
import type { LeaseParts } from './lease-parts';
import type { Reported } from './run-report';
import type { TestTransaction } from './test-transaction';
import type { TestingDatabase } from './testing-database';

/**
 * The traffic of one run, which remembers what was reported and what came of it. One for each run: what an exchange learns of the lanes holds
 * only as long as nothing is rolled back.
 */
export class RunExchange extends Exchange {
  reported: Reported | undefined;
  /** What a statement failed with, for another reason than its content. A worker would send it again for ever; a test is told. */
  failure: unknown;

  static for(parts: LeaseParts, database: TestingDatabase, held: HeldLeases): RunExchange {
    const query = async (...args: Parameters<TestingDatabase['query']>): Promise<unknown[]> => {
      try {
        return await database.query(...args);
      } catch (error) {
        if (!isContentError(error)) exchange.giveUp(error);
        throw error;
      }
    };
    const watched = Object.create(database, { query: { value: query } }) as TestingDatabase;
    const exchange = new RunExchange(watched, held, parts.options, parts.wakeUp, parts.events, parts.followUps);
    return exchange;
  }

  override post(
    job: LeasedJob,
    outcome: Outcome,
    answered: (job: LeasedJob, outcome: Outcome, answer: Answer) => void,
    lease?: HeldLease,
  ): void {
    super.post(
      job,
      outcome,
      (ofJob, sent, answer) => {
        this.reported ??= { outcome: sent, answer };
        answered(ofJob, sent, answer);
      },
      lease,
    );
  }

  override settledElsewhere(lease: HeldLease): void {
    this.reported ??= { outcome: { event: 'complete', result: null }, answer: { applied: true, place: 'completed' } };
    super.settledElsewhere(lease);
  }

  giveUp(error: unknown): void {
    this.failure ??= error;
    this.stop();
  }
}

/** A handler's tools without beats to trust in, which keep to the test's transaction while there is one. */
export class RunTools extends LeaseTools {
  constructor(
    parts: LeaseParts,
    private readonly testing: TestingDatabase,
  ) {
    super(parts.saves, parts.heartbeat, testing, parts.options, parts.moduleRef);
  }

  /** No time passes for a lease but by the test's word. */
  override get trusted(): boolean {
    return true;
  }

  override async transaction<T>(
    held: HeldLease,
    work: (target: TransactionTarget) => Promise<T>,
    options: TransactionOptions,
  ): Promise<T> {
    const { test } = this.testing;
    if (!test) return super.transaction(held, work, options);
    const target = targetOf(test, options);
    try {
      const result = await test.nested(async () => {
        await this.assertIsHeld(held, false);
        const done = await work(target);
        if (!held.completing) await this.assertIsHeld(held, true);
        return done;
      });
      if (held.completing) {
        held.settled = true;
        await this.testing.query(promoteOfSql(this.testing.schema.quoted), [held.job.id]);
      }
      return result;
    } catch (error) {
      if (held.completing && !held.settled) held.reopen();
      throw error;
    }
  }

  private async assertIsHeld(held: HeldLease, lock: boolean): Promise<void> {
    const { id, token, workerId } = held.job;
    const sql = heldSql(this.testing.schema.quoted);
    const [row] = await this.testing.query<{ held: boolean }>(sql, [id, token, workerId, lock]);
    if (row?.held) return;
    held.interrupt('lease-lost');
    throw new LeaseLostError(id, token);
  }
}

function targetOf({ client, manager }: TestTransaction, { client: wanted }: TransactionOptions): TransactionTarget {
  if (wanted) return client satisfies ClientBase;
  if (manager) return manager;
  throw new LeaseSetupError(
    'useTransaction was given a pg client, and the handler wants a TypeORM manager of lease.transaction(): give useTransaction an EntityManager or a QueryRunner',
  );
}

/** What runs one job: the same runner as a worker's. */
export const runnerFor = (parts: LeaseParts, exchange: Exchange, tools: LeaseTools): Runner =>
  new Runner(parts.registry, exchange, tools, parts.events, parts.options);
