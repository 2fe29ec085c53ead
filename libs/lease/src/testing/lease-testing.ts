import type { INestApplicationContext, OnModuleInit } from '@nestjs/common';
import { ModulesContainer } from '@nestjs/core';
import { InvalidOptionError, LeaseSetupError } from '../errors';
import type { HandlerClass, PayloadOf, ResultOf } from '../handlers/handler.types';
import type { AttestResult } from '../heartbeat/beat-messages';
import type { JobTarget } from '../jobs/job-enqueue';
import type { JobStatus } from '../jobs/job.types';
import type { Duration } from '../options/duration';
import { didYouMean } from '../options/suggest';
import type { TransactionTarget } from '../storage/caller-transaction';
import { clearSql } from './clear.sql';
import { type DrainOptions, drain } from './drain';
import type { EnqueuedJob, EnqueuedOptions } from './enqueued';
import { TestTransactionError } from './errors';
import { type Kit, kitOf } from './kit';
import { leaseParts } from './lease-parts';
import type { PayloadMatcher } from './payload-matcher';
import type { RunReport } from './run-report';
import type { Selection } from './test-worker';

type Payload<T> = T extends HandlerClass ? PayloadOf<T> : unknown;
type Result<T> = T extends HandlerClass ? ResultOf<T> : unknown;

/** Which job to run next. */
export interface NextJob<T extends JobTarget = JobTarget> {
  /** Only from this queue. Default: all that the module serves. */
  queue?: string;
  /** Only of this kind: a handler's class, or its kind's name. Default: all kinds that this application has handlers of. */
  kind?: T;
}

/**
 * Runs an application's jobs in a test's own process, when the test says so, with a worker's own statements and runner on a real database. Inject
 * it from LeaseTestingModule, or ask `LeaseTesting.of(app)` for an application's whose own LeaseModule has `role: 'producer'`.
 */
export class LeaseTesting implements OnModuleInit {
  private made: Kit | undefined;

  /** @internal Inject it, or ask for it by `of`. */
  constructor(
    private readonly modules: ModulesContainer,
    private readonly name: string,
  ) {}

  /**
   * The kit for an application that imports the ordinary LeaseModule, as `role: 'producer'`: such an application starts no worker, so nothing runs
   * but by the test. Call it once the application has been compiled.
   * @param name of the lease instance. Default 'default'
   * @throws LeaseSetupError if the application runs jobs by itself, or has no such instance
   */
  static async of(app: INestApplicationContext, name = 'default'): Promise<LeaseTesting> {
    const modules = app.get(ModulesContainer);
    const { options } = leaseParts(modules, name);
    if (options.role !== 'producer') {
      throw new LeaseSetupError(
        `LeaseTesting.of: this application runs jobs by itself, with role: '${options.role}', and would take them from the test: give LeaseModule ` +
          "role: 'producer' in tests, for example from an environment variable",
      );
    }
    const { database } = kitOf(modules, name);
    await database.open();
    await database.install();
    return new LeaseTesting(modules, name);
  }

  /** @internal Before the database is opened, so that it is opened with the test's clock. */
  onModuleInit(): void {
    void this.kit;
  }

  /**
   * Claims and runs the next job that is due, as a worker would: payload checked, checkpoint read, outcome written. Without awaiting it, the test
   * goes on while the handler runs.
   * @returns how the run ended and what the job is then; undefined if no job is due
   * @throws what kept the outcome from being written; never what the handler throws, which is in the report
   */
  async runNext<T extends JobTarget>({ queue, kind }: NextJob<T> = {}): Promise<
    RunReport<Payload<T>, Result<T>> | undefined
  > {
    const { worker } = await this.opened();
    return (await worker.runNext(this.selection({ queue, kind }))) as RunReport<Payload<T>, Result<T>> | undefined;
  }

  /**
   * Runs jobs, one after the other, until none is due by the test's clock: of one queue, or of all. Jobs that become due meanwhile, or are
   * enqueued by the handlers, are run too; those that wait for later are not, see `advance`.
   * @returns the runs, in order
   * @throws JobsFailedError after all that, if the last run of a job failed and `throwOnFailure` is not false; DrainLimitError after `maxRuns` runs
   */
  async drain(options: string | DrainOptions = {}): Promise<RunReport[]> {
    const given = typeof options === 'string' ? { queue: options } : options;
    const { worker } = await this.opened();
    return drain(worker, this.selection(given), given);
  }

  /**
   * What the leader's rescue does: takes the leases whose deadline has passed by the test's clock, and those of workers that are gone. A handler
   * of this process that is among those has its signal aborted, since a worker's own timer would have done so.
   * @returns leases taken
   */
  async rescue(): Promise<number> {
    const { worker, parts } = await this.opened();
    // This worker is up, whatever became of the time.
    await worker.renewIfUp();
    const moved = (await parts.rescue.rescueOverdue()) + (await parts.rescue.rescueExpired({ unguarded: true }));
    await worker.attest();
    await parts.failuresTold();
    return moved;
  }

  /**
   * What a worker's beat does every some seconds: compares the leases of the handlers that run here with the database, and aborts their signals
   * where a lease is gone, or the job is to be cancelled or paused. (`jobs.cancel` and `jobs.pause` of this process are told at once.)
   */
  async beat(): Promise<AttestResult> {
    return (await this.opened()).worker.attest();
  }

  /**
   * Takes the lease of a running job away, as if its process had been declared dead: the job is ready again with a crash on its account, or has
   * failed when that was its last. Its handler is not told, as a frozen one would not be; what it writes from now on is refused. `beat()` tells it.
   * @param job one that `runNext` runs just now, or its id
   * @returns the job as it is then
   * @throws JobNotRunningError
   */
  async loseLease(job: string | { id: string }): Promise<JobStatus> {
    const id = typeof job === 'string' ? job : job.id;
    const { worker, parts } = await this.opened();
    await worker.loseLease(id);
    await parts.failuresTold();
    return parts.reader.get(id);
  }

  /** The time that the jobs of this schema live by. */
  async now(): Promise<Date> {
    const { database, send } = await this.opened();
    return database.clock.now(send);
  }

  /**
   * Moves the time of this schema on, at most ten years. It keeps running. Nothing is run by it: `drain`, `runNext` and `rescue` look afterwards.
   * Only Leasehold's time moves, not `Date.now()` nor the database's own.
   * @returns the time then
   * @throws InvalidOptionError; LeaseSetupError where the role may not make the clock's schema
   */
  async advance(duration: Duration): Promise<Date> {
    return this.moved(({ database, send, outside }) => database.clock.advance(duration, send, outside));
  }

  /** Sets the time of this schema, from 1970 to 2199. It keeps running from there. Going back is for a schema without jobs. */
  async setTime(time: Date): Promise<Date> {
    return this.moved(({ database, send, outside }) => database.clock.set(time, send, outside));
  }

  /** The real time again. Closing the application does so too. */
  async resetTime(): Promise<void> {
    await this.moved(({ database, send, outside }) => database.clock.reset(send, outside));
  }

  /**
   * Sends every statement of Leasehold in this application through the test's open transaction: what is enqueued, claimed, settled or read. So it
   * all goes with the test's rollback; no other connection sees it. A statement that is refused does not end the transaction.
   * @param target TypeORM's EntityManager or QueryRunner, or a `pg` client
   * One connection has one transaction, so what is done inside a handler's `lease.transaction` is rolled back with that, `loseLease` too.
   * @returns ends that; call it before the rollback. What still runs then has lost its lease
   * @throws InvalidJobError if no transaction is open there; TestTransactionError while another is in force, or a job runs
   */
  async useTransaction(target: TransactionTarget): Promise<() => Promise<void>> {
    const kit = await this.opened();
    if (kit.worker.isBusy) {
      throw new TestTransactionError('useTransaction while a job runs: await its runNext() first');
    }
    // Of a test that failed before it could say so.
    if (kit.database.test?.isOpen() === false) await kit.leaveTransaction();
    const leave = await kit.database.enter(target, (error) => kit.worker.lose(error.message));
    const bringBack = kit.worker.replace();
    return (kit.leaveTransaction = async () => {
      await leave();
      bringBack();
    });
  }

  /**
   * Expects that a job was enqueued, whatever has become of it since.
   * @param target a handler's class, or its kind's name
   * @param matcher some of the payload's fields, a matcher such as `expect.any(String)`, or a function
   * @returns the first that fits, or with `count` all of them, the oldest first
   * @throws ExpectationError which lists what was enqueued instead
   */
  expectEnqueued<T extends JobTarget>(
    target: T,
    matcher: PayloadMatcher<Payload<T>> | undefined,
    options: EnqueuedOptions & { count: number },
  ): Promise<EnqueuedJob<T>[]>;
  expectEnqueued<T extends JobTarget>(
    target: T,
    matcher?: PayloadMatcher<Payload<T>>,
    options?: EnqueuedOptions & { count?: undefined },
  ): Promise<EnqueuedJob<T>>;
  async expectEnqueued<T extends JobTarget>(
    target: T,
    matcher?: PayloadMatcher<Payload<T>>,
    options: EnqueuedOptions = {},
  ): Promise<EnqueuedJob<T> | EnqueuedJob<T>[] | undefined> {
    const jobs = await (await this.opened()).enqueued.expect(target, matcher, options);
    return options.count === undefined ? jobs[0] : jobs;
  }

  /** Expects that no such job was enqueued. @throws ExpectationError which lists those that were */
  async expectNotEnqueued<T extends JobTarget>(
    target: T,
    matcher?: PayloadMatcher<Payload<T>>,
    options: Omit<EnqueuedOptions, 'count'> = {},
  ): Promise<void> {
    await (await this.opened()).enqueued.expectNone(target, matcher, options);
  }

  /** Deletes every job of the schema, with all that is known about it. Handlers that run have lost their leases. Settings of queues stay. */
  async clear(): Promise<void> {
    const { database, worker } = await this.opened();
    worker.lose('the test has deleted all jobs');
    await database.transaction(async (run) => {
      for (const statement of clearSql(database.schema.quoted)) await run(statement);
    });
  }

  private async moved<T>(move: (kit: Kit) => Promise<T>): Promise<T> {
    const kit = await this.opened();
    const result = await move(kit);
    kit.timeMoved = true;
    await kit.worker.renewIfUp();
    return result;
  }

  private async opened(): Promise<Kit> {
    await this.kit.database.open();
    return this.kit;
  }

  private get kit(): Kit {
    return (this.made ??= kitOf(this.modules, this.name));
  }

  private selection({ queue, kind }: { queue?: string | undefined; kind?: JobTarget | undefined }): Selection {
    const { parts, worker, enqueued } = this.kit;
    worker.assertHandlers();
    const { kinds } = parts.registry;
    const wanted = kind === undefined ? undefined : enqueued.kindOf(kind);
    if (wanted !== undefined && !kinds.includes(wanted)) {
      throw new InvalidOptionError(
        `kind = '${wanted}': no handler of this kind is provided in this application${didYouMean(wanted, kinds)}`,
      );
    }
    return {
      kinds: wanted === undefined ? kinds : [wanted],
      queues: queue === undefined ? parts.options.queues : [queue],
    };
  }
}
