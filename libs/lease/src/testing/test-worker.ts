import { randomBytes } from 'node:crypto';
import { hostname } from 'node:os';
import { HeldLeases, type HeldLease } from '../claim/held-leases';
import { pollSql } from '../claim/poll.sql';
import type { Lane } from '../claim/wake-up';
import { LeaseSetupError, NotRunningError } from '../errors';
import { attestSql, beatSql } from '../heartbeat/beat.sql';
import type { AttestResult } from '../heartbeat/beat-messages';
import { within } from '../storage/delays';
import { VERSION } from '../version';
import { registerSql, stoppedSql } from '../workers/workers.sql';
import { ForeignWorkerError, JobNotRunningError } from './errors';
import type { LeaseParts } from './lease-parts';
import { RunExchange, RunTools, runnerFor } from './run-parts';
import { type RunReport, errorOf, runOutcome } from './run-report';
import type { TestingDatabase } from './testing-database';

const PROMOTE_LIMIT = 500;
const TOKEN_MIN = '-9223372036854775808';
const TOKEN_MAX = '9223372036854775807';

/** Workers of others: they hold a session lock, which the kit never does. By the real clock. Locks nothing. */
const foreignSql = (s: string): string => `
  SELECT id FROM ${s}.workers
  WHERE state IN ('live', 'draining') AND lock_no IS NOT NULL AND expires_at > pg_catalog.clock_timestamp() ORDER BY id LIMIT 1`;

/** What to run: kinds that this application handles, queues (null: all). */
export interface Selection {
  kinds: string[];
  queues: string[] | null;
}

/**
 * A worker that does nothing by itself: it beats, claims and runs a job when it is told to, with a worker's own statements and runner. It has a row
 * in the registry, since no claim is granted without one.
 */
export class TestWorker {
  private held = new HeldLeases();
  private id: string | undefined;
  private registering: Promise<string> | undefined;
  private readonly tools: RunTools;
  private readonly claiming = new Set<Promise<unknown>>();
  private readonly running = new Set<Promise<unknown>>();

  constructor(
    private readonly parts: LeaseParts,
    private readonly database: TestingDatabase,
  ) {
    this.tools = new RunTools(parts, database);
  }

  get isBusy(): boolean {
    return this.running.size > 0 || this.claiming.size > 0;
  }

  /** Goes on as a new worker that holds nothing; the function returned brings the present one back, and interrupts what the new one runs. */
  replace(): () => void {
    const { id, held } = this;
    const own = new HeldLeases();
    this.id = undefined;
    this.held = own;
    return () => {
      interruptAll(own, 'the transaction that it ran in is over');
      if (this.held !== own) return;
      this.id = id;
      this.held = held;
    };
  }

  /** Nothing that runs can be written any more. */
  lose(why: string): void {
    interruptAll(this.held, why);
  }

  /** Renews this worker's lease, under a new id if it has none. @returns the id */
  async renew(): Promise<string> {
    const { options } = this.parts;
    if (this.id !== undefined) {
      const rows = await this.database.query(beatSql(this.s), [
        this.id,
        options.lease.ttlMs,
        this.held.size,
        0,
        0,
        0,
        null,
      ]);
      if (rows.length > 0) return this.id;
    }
    // Two that begin together are one worker.
    this.registering ??= this.register().finally(() => (this.registering = undefined));
    return (this.id = await this.registering);
  }

  /** The same only if this worker is registered: its lease must not end because time was moved on. */
  async renewIfUp(): Promise<void> {
    if (this.id !== undefined) await this.renew();
  }

  private async register(): Promise<string> {
    const { options, registry } = this.parts;
    const [foreign] = await this.database.query<{ id: string }>(foreignSql(this.s));
    if (foreign) {
      throw new ForeignWorkerError(
        `Worker ${foreign.id} is up on schema ${options.schema}, or was until some seconds ago, and would take the test's jobs: ` +
          'give the tests a database or a schema of their own',
      );
    }
    const id = `testing-${process.pid}-${randomBytes(5).toString('hex')}`;
    await this.database.query(registerSql(this.s), [
      id,
      'testing',
      hostname(),
      process.pid,
      VERSION,
      options.queues,
      registry.kinds,
      1,
      options.lease.ttlMs,
    ]);
    return id;
  }

  /** Promotes all that is due, so that a claim can choose among them. @returns the lanes that hold something for this selection */
  async look({ kinds, queues }: Selection): Promise<Lane[]> {
    for (;;) {
      const [row] = await this.database.query<{ promoted: number; lanes: Lane[] | null; suspects: Lane[] | null }>(
        pollSql(this.s),
        [kinds, queues, PROMOTE_LIMIT, true],
      );
      if (row?.promoted === PROMOTE_LIMIT) continue;
      const lanes = [...(row?.lanes ?? []), ...(row?.suspects ?? [])];
      return [...new Map(lanes.map((lane) => [JSON.stringify(lane), lane])).values()];
    }
  }

  /** Claims and runs the next job; undefined if there is none. Rejects with what kept its outcome from being written. */
  async runNext(selection: Selection): Promise<RunReport | undefined> {
    const { held } = this;
    const exchange = RunExchange.for(this.parts, this.database, held);
    const lease = await tracked(this.claiming, this.claim(selection, exchange, held));
    return lease && tracked(this.running, this.run(lease, exchange));
  }

  private async claim(selection: Selection, exchange: RunExchange, held: HeldLeases): Promise<HeldLease | undefined> {
    const workerId = await this.renew();
    const lanes = await this.look(selection);
    if (lanes.length === 0) return undefined;
    const reply = await exchange.claim({
      workerId,
      want: 1,
      lanes,
      limits: lanes.map(() => 1),
      fleet: lanes.map(([, kind]) => this.parts.registry.get(kind)?.fleetConcurrency ?? null),
      suspects: held.size === 0 ? 1 : 0,
    });
    if (exchange.failure !== undefined) throw exchange.failure as Error;
    if (!reply.ok) throw new NotRunningError(`The database refuses worker ${workerId} of the testing kit a job`);
    return reply.leases[0];
  }

  private async run(lease: HeldLease, exchange: RunExchange): Promise<RunReport> {
    await runnerFor(this.parts, exchange, this.tools).run(lease, () => undefined);
    await exchange.idle();
    await this.parts.followUps.idle();
    await this.parts.failuresTold();
    if (exchange.failure !== undefined) throw exchange.failure as Error;
    const { reported } = exchange;
    const error = errorOf(reported?.outcome);
    const job = await this.parts.reader.get(lease.job.id);
    return { job, outcome: runOutcome(reported), ...(error ? { error } : {}) };
  }

  /** Somebody has given a running job a command: its handler hears of it. */
  steered(jobId: string, command: string): void {
    const reason =
      command === 'pause' ? 'paused' : command === 'cancel' || command === 'forceCancel' ? 'cancelled' : undefined;
    if (!reason) return;
    for (const lease of this.held.all()) if (lease.job.id === jobId) lease.interrupt(reason);
  }

  /** What the next beat of a worker would find: leases that are gone, requests to stop. Those who work under them are told. */
  async attest(): Promise<AttestResult> {
    const none: AttestResult = { gone: [], stops: [], unknown: [] };
    if (this.id === undefined) return none;
    const { jobs, tokens, below } = this.held.attested(await this.renew());
    const [row] = await this.database.query<{ [K in keyof AttestResult]: AttestResult[K] | null }>(attestSql(this.s), [
      this.id,
      jobs,
      tokens,
      TOKEN_MIN,
      TOKEN_MAX,
      below,
    ]);
    const now = (await this.database.clock.now((text, values) => this.database.query(text, values))).getTime();
    for (const [job, token] of row?.gone ?? []) {
      const lease = this.held.get(`${job}:${token}`);
      // Its worker's own timer would have ended it with this reason, had the time passed by itself.
      const late = lease?.deadlineAt != null && lease.deadlineAt.getTime() <= now;
      if (lease && !lease.settling) lease.interrupt(late ? 'deadline' : 'lease-lost');
    }
    for (const [job, token, request] of row?.stops ?? []) {
      this.held.get(`${job}:${token}`)?.interrupt(request === 'cancel' ? 'cancelled' : 'paused');
    }
    return { gone: row?.gone ?? [], stops: row?.stops ?? [], unknown: [] };
  }

  /** Takes the lease away as a rescue does; its holder is not told. @throws JobNotRunningError */
  async loseLease(jobId: string): Promise<void> {
    // One that is being claimed just now will be there then.
    await Promise.allSettled(this.claiming);
    const lease = [...this.held.all()].find(({ job, settling }) => job.id === jobId && !settling);
    if (!lease) {
      const { state } = await this.parts.reader.get(jobId);
      throw new JobNotRunningError(
        jobId,
        `is ${state} and not run by this kit: begin it with runNext(), without awaiting that, and have its handler wait for the test`,
      );
    }
    const { token, workerId } = lease.job;
    const move = { event: 'crash', alone: this.held.size === 1 };
    if ((await this.parts.rescue.take([{ jobId, token, workerId, move }], 'session')) === 0) {
      throw new JobNotRunningError(jobId, 'has lost this lease already');
    }
  }

  /** Aborts what runs, waits for it a while, and signs off. @returns ids of jobs whose handlers ignore the abort */
  async stop(graceMs: number): Promise<string[]> {
    for (const lease of this.held.all()) lease.interrupt('drain');
    await within(graceMs, Promise.allSettled([...this.claiming, ...this.running]));
    const stuck = [...this.held.all()].map(({ job }) => job.id);
    if (this.id !== undefined) await this.database.query(stoppedSql(this.s), [this.id]);
    this.id = undefined;
    return stuck;
  }

  /** @throws LeaseSetupError if nobody here handles any kind */
  assertHandlers(): void {
    if (this.parts.registry.kinds.length > 0) return;
    throw new LeaseSetupError(
      'No handler is provided in this application: add the classes with @JobHandler to the providers of the test module',
    );
  }

  private get s(): string {
    return this.database.schema.quoted;
  }
}

function interruptAll(held: HeldLeases, why: string): void {
  for (const lease of held.all()) lease.interrupt('lease-lost', why);
}

async function tracked<T>(set: Set<Promise<unknown>>, work: Promise<T>): Promise<T> {
  set.add(work);
  try {
    return await work;
  } finally {
    set.delete(work);
  }
}
