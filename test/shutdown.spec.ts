import { Inject, Injectable, Module, type Type } from '@nestjs/common';
import { ScheduleModule } from '@nestjs/schedule';
import {
  type Handler,
  InjectLease,
  type Job,
  JobHandler,
  type JobInterruptedError,
  JobsService,
  type Lease,
  type LeaseOptions,
  NotRunningError,
  WorkerLifecycle,
} from '@leasehold/nestjs';
import { Pool } from 'pg';
import { DataSource } from 'typeorm';
import {
  createTestDatabase,
  eventually,
  fixture,
  type Gate,
  gate,
  RowGate,
  startProcess,
  type TestDatabase,
} from './support';
import { boot, close, leaseModule, moduleOf } from './support/boot';
import { untilState } from './support/job-states';
import { type LeaseApp, startLeaseApp } from './support/lease-app';

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase();
  await (await startLeaseApp(db)).close();
});
afterAll(() => db.drop());

/** What a handler below waits for, by job id, and how it was interrupted. */
const gates = new Map<string, Gate>();
const started = new Map<string, Gate>();
const reasons = new Map<string, string>();
const gateOf = (gatesById: Map<string, Gate>, id: string): Gate => {
  const found = gatesById.get(id) ?? gate();
  gatesById.set(id, found);
  return found;
};

/** Waits for its gate, or for its abort unless it is deaf. */
@JobHandler('shutdown.gated')
class Gated implements Handler<{ deaf?: boolean }, string> {
  async handle(job: Job<{ deaf?: boolean }>, { signal }: Lease): Promise<string> {
    const aborted = new Promise<void>((_, reject) => {
      signal.addEventListener('abort', () => {
        reasons.set(job.id, (signal.reason as JobInterruptedError).reason);
        reject(signal.reason as Error);
      });
    });
    aborted.catch(() => undefined);
    gateOf(started, job.id).open();
    const go = gateOf(gates, job.id).promise;
    await (job.payload.deaf ? go : Promise.race([go, aborted]));
    return 'done';
  }
}

const start = (options: Partial<LeaseOptions> = {}): Promise<LeaseApp> =>
  startLeaseApp(db, { handlers: [Gated], options });

/** Enqueues a gated job and waits until it runs. */
async function running(jobs: JobsService, payload: { deaf?: boolean } = {}): Promise<string> {
  const id = await jobs.enqueue(Gated, payload);
  await gateOf(started, id).promise;
  return id;
}

const untilWorker = (id: string, state: string) =>
  eventually(
    async () =>
      (await db.one<{ state: string }>('SELECT state FROM leasehold.workers WHERE id = $1', [id])).state === state,
    {
      what: `Worker ${id} becoming ${state}`,
      state: () => db.query('SELECT * FROM leasehold.workers WHERE id = $1', [id]),
    },
  );

const status = (id: string) =>
  db.one<{ state: string; attempt: number; crashes: number; releases: number; token: string | null }>(
    'SELECT state, attempt, crashes, releases, token FROM leasehold.job_status WHERE id = $1',
    [id],
  );

const untilNoSession = () =>
  eventually(
    async () => {
      const rows = await db.query(
        `SELECT FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
         AND application_name NOT LIKE 'lh_test%'`,
      );
      return rows.length === 0;
    },
    {
      state: () => db.query('SELECT application_name, query FROM pg_stat_activity WHERE datname = current_database()'),
    },
  );

describe('F:J1 the drain comes before other modules close what handlers use', () => {
  @Module({})
  class PoolModule {
    constructor(@Inject(Pool) private readonly pool: Pool) {}
    async onModuleDestroy(): Promise<void> {
      await this.pool.end();
    }
  }
  @Module({})
  class TypeOrmModule {
    constructor(@Inject(DataSource) private readonly source: DataSource) {}
    async onModuleDestroy(): Promise<void> {
      await this.source.destroy();
    }
  }

  @JobHandler('shutdown.uses', { concurrency: 5 })
  class Uses implements Handler<null, string> {
    constructor(
      private readonly jobs: JobsService,
      @Inject(Pool) private readonly pool: Pool,
      @Inject(DataSource) private readonly source: DataSource,
    ) {}
    async handle(job: Job<null>): Promise<string> {
      gateOf(started, job.id).open();
      await gateOf(gates, job.id).promise;
      await this.pool.query('SELECT 1');
      return this.source.transaction(async (manager) => {
        await this.jobs.enqueue('shutdown.more', job.id, { manager });
        return this.jobs.enqueue('shutdown.more', job.id);
      });
    }
  }

  const databaseModules = () => [
    {
      module: PoolModule,
      global: true,
      providers: [
        { provide: Pool, useFactory: () => new Pool({ connectionString: db.url, application_name: 'lh_user_pool' }) },
      ],
      exports: [Pool],
    },
    {
      module: TypeOrmModule,
      global: true,
      providers: [
        {
          provide: DataSource,
          useFactory: () => new DataSource({ type: 'postgres', url: db.url, installExtensions: false }).initialize(),
        },
      ],
      exports: [DataSource],
    },
  ];

  const orders: [string, () => Type][] = [
    [
      'after',
      () => moduleOf({ imports: [ScheduleModule.forRoot(), leaseModule(db), ...databaseModules()], providers: [Uses] }),
    ],
    [
      'before',
      () => moduleOf({ imports: [ScheduleModule.forRoot(), ...databaseModules(), leaseModule(db)], providers: [Uses] }),
    ],
    [
      'above',
      () => {
        const below = moduleOf({ imports: [leaseModule(db), ...databaseModules()] });
        return moduleOf({ imports: [ScheduleModule.forRoot(), moduleOf({ imports: [below], providers: [Uses] })] });
      },
    ],
  ];
  it.each(orders)('F:J1 with the database modules imported %s ours', async (_, root) => {
    const app = await boot(root());
    const jobs = app.get(JobsService);
    const ids = await jobs.enqueueMany(Uses, [null, null, null]);
    for (const id of ids) await gateOf(started, id).promise;
    const worker = await db.one<{ worker_id: string }>('SELECT worker_id FROM leasehold.leases WHERE job_id = $1', [
      ids[0],
    ]);
    const closing = close(app);
    await untilWorker(worker.worker_id, 'draining');
    for (const id of ids) gateOf(gates, id).open();
    await closing;
    for (const id of ids) {
      expect(await status(id)).toMatchObject({ state: 'completed', attempt: 1 });
      const more = await db.query(
        `SELECT s.state FROM leasehold.job_status s WHERE kind = 'shutdown.more' AND payload #>> '{}' = $1`,
        [id],
      );
      expect(more).toEqual([{ state: 'ready' }, { state: 'ready' }]);
    }
    await untilNoSession();
  });

  it('F:J1 shutdown hooks of other modules can still enqueue', async () => {
    const ids: string[] = [];
    @Injectable()
    class Farewell {
      constructor(private readonly jobs: JobsService) {}
      async onModuleDestroy(): Promise<void> {
        ids.push(await this.jobs.enqueue('shutdown.farewell', 'onModuleDestroy'));
      }
      async beforeApplicationShutdown(): Promise<void> {
        ids.push(await this.jobs.enqueue('shutdown.farewell', 'beforeApplicationShutdown'));
      }
    }
    await close(await boot(moduleOf({ imports: [ScheduleModule.forRoot(), leaseModule(db)], providers: [Farewell] })));
    expect(ids).toHaveLength(2);
    for (const id of ids) expect(await status(id)).toMatchObject({ state: 'ready' });
  });

  it('F:J1 two instances drain at once: neither claims while the other still waits', async () => {
    @JobHandler('shutdown.gated', { instance: 'second' })
    class Second extends Gated {
      override handle(job: Job<{ deaf?: boolean }>, lease: Lease): Promise<string> {
        return super.handle({ ...job, id: `second ${job.id}` }, lease);
      }
    }
    @Injectable()
    class Reach {
      constructor(
        readonly jobs: JobsService,
        @InjectLease(JobsService, 'second') readonly second: JobsService,
      ) {}
    }
    const options = { shutdown: { timeout: '20s', grace: '500ms' } } as const;
    const app = await boot(
      moduleOf({
        imports: [
          ScheduleModule.forRoot(),
          leaseModule(db, options),
          leaseModule(db, { ...options, name: 'second', schema: 'second' }),
        ],
        providers: [Gated, Second, Reach],
      }),
    );
    const { jobs, second } = app.get(Reach);
    const first = await running(jobs);
    const other = `second ${await second.enqueue(Second, {})}`;
    await gateOf(started, other).promise;
    const closing = close(app);
    const live = (schema: string) =>
      db.query(`SELECT FROM ${schema}.workers WHERE state = 'live' AND expires_at > clock_timestamp()`);
    await eventually(async () => (await live('leasehold')).length === 0 && (await live('second')).length === 0);
    for (const id of [first, other]) gateOf(gates, id).open();
    await closing;
    expect(await status(first)).toMatchObject({ state: 'completed' });
  });
});

describe('F:J3 the drain gives handlers their time', () => {
  it('F:J3 long enough: the job completes, its attempt unchanged', async () => {
    const app = await start({ shutdown: { timeout: '20s' } });
    const id = await running(app.jobs);
    const worker = app.workers.currentId;
    const closing = app.close();
    await untilWorker(worker, 'draining');
    for (let beats = 0; beats < 2; beats++) await app.heartbeat.nextBeat();
    gateOf(gates, id).open();
    await closing;
    expect(await status(id)).toMatchObject({ state: 'completed', attempt: 1, releases: 0 });
    expect(reasons.get(id)).toBeUndefined();
    await untilWorker(worker, 'stopped');
  });

  it('F:J3 too short: aborted with reason drain, back in ready with nothing charged, claimable at once', async () => {
    const app = await start({ shutdown: { timeout: '50ms' } });
    const id = await running(app.jobs);
    await app.close();
    expect(reasons.get(id)).toBe('drain');
    expect(await status(id)).toMatchObject({ state: 'ready', attempt: 0, crashes: 0, releases: 1 });
    const runs = await db.query('SELECT attempt, outcome FROM leasehold.runs WHERE job_id = $1', [id]);
    expect(runs).toEqual([{ attempt: 1, outcome: 'released' }]);

    gateOf(gates, id).open();
    const next = await start();
    expect(await untilState(next.jobs, id, 'completed')).toMatchObject({ attempt: 1, result: 'done' });
  });

  it('F:J3 a handler that ends well after the abort has completed its job', async () => {
    const app = await start({ shutdown: { timeout: '50ms', grace: '20s' } });
    const id = await running(app.jobs, { deaf: true });
    const closing = app.close();
    await eventually(() => reasons.get(id) === 'drain');
    gateOf(gates, id).open();
    await closing;
    expect(await status(id)).toMatchObject({ state: 'completed', attempt: 1 });
  });
});

describe('F:J4 close() at any moment', () => {
  it.each(['idle', 'right after the start'])('F:J4 %s', async (when) => {
    const app = await start();
    const id = app.workers.currentId;
    if (when === 'idle') await app.heartbeat.nextBeat();
    await app.close();
    await untilWorker(id, 'stopped');
    await untilNoSession();
  });

  it('F:J4 while a claim is on the wire: what it brings goes back, unstarted and uncharged', async () => {
    const app = await start({ shutdown: { timeout: '20s' } });
    const worker = app.workers.currentId;
    const jam = await RowGate.hold(db, 'LOCK TABLE leasehold.leases IN SHARE MODE');
    const ids = await app.jobs.enqueueMany(Gated, [{}, {}, {}]);
    await jam.untilWaiting();
    const closing = app.close();
    await untilWorker(worker, 'draining');
    await jam.release();
    await closing;
    for (const id of ids) {
      expect(await status(id)).toMatchObject({ state: 'ready', attempt: 0, releases: 0 });
      expect(await db.query('SELECT FROM leasehold.runs WHERE job_id = $1', [id])).toEqual([]);
      expect(started.get(id)).toBeUndefined();
    }
    await untilWorker(worker, 'stopped');
    await db.query('DELETE FROM leasehold.ready WHERE job_id = ANY ($1)', [ids]);
  });

  it('F:J4 past a handler that ignores the abort: it keeps its lease while it runs, and the rest ends with it', async () => {
    const app = await start({ shutdown: { timeout: '50ms', grace: '50ms' } });
    const worker = app.workers.currentId;
    const id = await running(app.jobs, { deaf: true });
    await app.close();
    expect(await status(id)).toMatchObject({ state: 'running' });
    await untilWorker(worker, 'draining');
    gateOf(gates, id).open();
    await untilWorker(worker, 'stopped');
    expect(await status(id)).toMatchObject({ state: 'completed', attempt: 1 });
    await untilNoSession();
  });

  it('F:J4 while the start is not finished: nothing is claimed, nothing stays', async () => {
    let lifecycle: WorkerLifecycle | undefined;
    @Injectable()
    class Grab {
      constructor(grabbed: WorkerLifecycle) {
        lifecycle = grabbed;
      }
    }
    const id = await (await start({ role: 'producer' })).jobs.enqueue(Gated, {});
    const jam = await RowGate.hold(db, 'LOCK TABLE leasehold.workers IN EXCLUSIVE MODE');
    const booting = boot(
      moduleOf({
        imports: [ScheduleModule.forRoot(), leaseModule(db, { workerName: 'starting' })],
        providers: [Gated, Grab],
      }),
    );
    await jam.untilWaiting();
    const draining = lifecycle?.drain();
    await jam.release();
    await draining;
    await close(await booting);
    expect(await status(id)).toMatchObject({ state: 'ready', attempt: 0 });
    const rows = await db.query("SELECT state FROM leasehold.workers WHERE name = 'starting'");
    expect(rows).toEqual([{ state: 'stopped' }]);
    await expect(lifecycle?.start()).rejects.toThrow(NotRunningError);
    await db.query('DELETE FROM leasehold.ready WHERE job_id = $1', [id]);
  });

  it('F:J4 twice, and at once: both wait for the one drain', async () => {
    const app = await start({ shutdown: { timeout: '20s' } });
    const worker = app.workers.currentId;
    const id = await running(app.jobs);
    const both = [app.lifecycle.close(), app.lifecycle.close()];
    await untilWorker(worker, 'draining');
    gateOf(gates, id).open();
    await Promise.all(both);
    await app.close();
    expect(await status(id)).toMatchObject({ state: 'completed' });
  });

  it('F:J4 afterwards there are no events, and every call says that the module is shut down', async () => {
    const app = await start();
    const id = await app.jobs.enqueue('shutdown.other', null);
    await app.close();
    const seen = app.events.length;
    expect(app.events.at(-1)).toMatchObject({ type: 'worker.stopped' });
    await expect(app.jobs.enqueue('shutdown.other', null)).rejects.toThrow(NotRunningError);
    await expect(app.jobs.enqueueMany('shutdown.other', [1, 2])).rejects.toThrow(NotRunningError);
    await expect(app.jobs.get(id)).rejects.toThrow(NotRunningError);
    await expect(app.lifecycle.start()).rejects.toThrow(NotRunningError);
    await untilNoSession();
    expect(app.events).toHaveLength(seen);
  });

  const children: [string, Record<string, string>][] = [
    ['a worker that ran a job', { LEASE_JOB: '1' }],
    ['a worker that ran none', {}],
    ['a producer', { LEASE_OPTIONS: JSON.stringify({ role: 'producer' }) }],
  ];
  it.each(children)('F:J4 no timer and no socket is left: the process of %s ends by itself', async (_, env) => {
    const child = startProcess(fixture('closing'), { env: { LEASE_URL: db.url, ...env } });
    expect(await child.untilExit()).toEqual({ code: 0, signal: null });
    expect(child.lines).toEqual(['closed']);
  });
});
