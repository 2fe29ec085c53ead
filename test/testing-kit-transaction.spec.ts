import {
  BatchesService,
  type Handler,
  type Job,
  JobHandler,
  JobsService,
  type Lease,
  NonRetryableError,
  QueuesService,
} from '@leasehold/nestjs';
import { LeaseTesting, LeaseTestingModule, TestTransactionError } from '@leasehold/nestjs/testing';
import { type INestApplicationContext, Injectable, Logger } from '@nestjs/common';
import { Test } from '@nestjs/testing';
import type { Client } from 'pg';
import { DataSource, type QueryRunner } from 'typeorm';
import { type TestDatabase, createTestDatabase, gate } from './support';

@Injectable()
class Script {
  work: (job: Job<number>, lease: Lease) => unknown = () => undefined;
}

@JobHandler('work', { backoff: '10m' })
class Work implements Handler<number> {
  constructor(private readonly script: Script) {}
  handle(job: Job<number>, lease: Lease): unknown {
    return this.script.work(job, lease);
  }
}

let db: TestDatabase;
let dataSource: DataSource;
let app: INestApplicationContext;
let lease: LeaseTesting;
let jobs: JobsService;
let script: Script;
let runner: QueryRunner;

beforeAll(async () => {
  Logger.overrideLogger(false);
  db = await createTestDatabase();
  await db.query('CREATE TABLE notes (text text PRIMARY KEY)');
  dataSource = await new DataSource({ type: 'postgres', url: db.url, installExtensions: false }).initialize();
  app = await Test.createTestingModule({
    imports: [LeaseTestingModule.forRoot({ connection: { dataSource } })],
    providers: [Script, Work],
  }).compile();
  await app.init();
  lease = app.get(LeaseTesting);
  jobs = app.get(JobsService);
  script = app.get(Script);
});
beforeEach(async () => {
  script.work = () => undefined;
  runner = dataSource.createQueryRunner();
  await runner.startTransaction();
});
afterEach(async () => {
  if (runner.isTransactionActive) await runner.rollbackTransaction();
  await runner.release();
  expect(await left()).toEqual({ jobs: 0, finished: 0, ready: 0, leases: 0, keys: 0, moved: '0', notes: 0 });
});
afterAll(async () => {
  await app.close();
  await dataSource.destroy();
  await db.drop();
});

/** What another connection sees. */
const left = () =>
  db.one(
    `SELECT (SELECT count(*)::int FROM leasehold.jobs) AS jobs, (SELECT count(*)::int FROM leasehold.finished) AS finished,
      (SELECT count(*)::int FROM leasehold.ready) AS ready, (SELECT count(*)::int FROM leasehold.leases) AS leases,
      (SELECT count(*)::int FROM leasehold.job_keys) AS keys, (SELECT shift_us FROM leasehold_clock.clock) AS moved,
      (SELECT count(*)::int FROM notes) AS notes`,
  );

describe("the test's own transaction", () => {
  it('R28 to R31 a batch in it: drained in order, ended with its hook, and gone with the rollback', async () => {
    const release = await lease.useTransaction(runner);
    const batches = app.get(BatchesService);
    const ran: unknown[] = [];
    script.work = ({ payload }) => {
      ran.push(payload);
      if (payload === 9) throw new NonRetryableError('nine');
    };
    const { id } = await batches.create(
      'in the test',
      [
        { handler: Work, payload: 3, dependsOn: ['2'], name: '3' },
        { handler: Work, payload: 2, dependsOn: ['1'], name: '2' },
        { handler: Work, payload: 1, name: '1' },
      ],
      { onCompleted: { handler: 'work', payload: {} } },
    );
    await lease.drain();
    expect(ran).toEqual([1, 2, 3, { batch: expect.objectContaining({ id, status: 'completed', completed: 3 }) }]);
    expect(await batches.get(id)).toMatchObject({ status: 'completed', done: 1 });
    const failing = await batches.create('fails', [
      { handler: Work, payload: 9, name: '9' },
      { handler: Work, payload: 10, dependsOn: ['9'] },
    ]);
    await lease.drain({ throwOnFailure: false });
    expect(await batches.get(failing.id)).toMatchObject({ status: 'failed', counts: { failed: 2 } });
    await runner.rollbackTransaction();
    await release();
    await expect(batches.get(id)).rejects.toThrow(/no batch/);
  });

  it('takes everything with it, the time and the worker too', async () => {
    const workers = await db.query('SELECT id FROM leasehold.workers');
    const end = await lease.useTransaction(runner.manager);
    const id = await jobs.enqueue(Work, 1, { delay: '1h', key: 'one' });
    expect(await jobs.enqueueUnique(Work, 2, { key: 'one' })).toEqual({ id, outcome: 'existing', state: 'scheduled' });
    await jobs.enqueueMany(Work, [3, 4], { tags: ['lot'] });
    await lease.advance('30d');
    expect(await lease.drain()).toMatchObject([{ outcome: 'completed' }, { outcome: 'completed' }, { job: { id } }]);
    expect(await jobs.counts()).toMatchObject({ completed: 3 });
    // bigint as text, as ever, although the application's own connection would parse it otherwise.
    expect(await jobs.get(id)).toMatchObject({
      id,
      token: expect.stringMatching(/^\d+$/),
      createdAt: expect.any(Date),
    });
    expect(await runner.query('SELECT count(*)::int AS count FROM leasehold.finished')).toEqual([{ count: 3 }]);
    expect(await left()).toMatchObject({ jobs: 0, moved: '0' });
    await end();
    await runner.rollbackTransaction();
    expect(await db.query('SELECT id FROM leasehold.workers')).toEqual(workers);
    // And on without it.
    await lease.expectNotEnqueued(Work);
    expect(await lease.drain()).toEqual([]);
  });

  it('sees what the application enqueues there by itself, before and after', async () => {
    const { manager } = runner;
    await jobs.enqueue(Work, 1, { manager });
    await lease.expectNotEnqueued(Work);
    await lease.expectEnqueued(Work, 1, { manager });
    await lease.expectEnqueued(Work, 1, { queryRunner: runner, count: 1 });
    const end = await lease.useTransaction(runner);
    await jobs.enqueue(Work, 2, { manager });
    expect((await lease.drain()).map(({ job }) => job.payload)).toEqual([1, 2]);
    await end();
  });

  it('survives a statement that is refused', async () => {
    const end = await lease.useTransaction(runner.manager);
    await runner.query(`INSERT INTO notes VALUES ('kept')`);
    // What the database refuses for its content: the run fails, the transaction goes on.
    script.work = (_job, held) => held.checkpoint({ at: 1 }).then(() => 'fine');
    await db.query('ALTER TABLE leasehold.finished ADD CONSTRAINT no_words CHECK (result IS NULL)');
    try {
      const id = await jobs.enqueue(Work, 1);
      expect(await lease.runNext()).toMatchObject({ outcome: 'failed', job: { id, state: 'failed' } });
      await expect(jobs.retry('77')).rejects.toThrow('There is no job 77');
      expect(await runner.query('SELECT text FROM notes')).toEqual([{ text: 'kept' }]);
    } finally {
      await end();
      await runner.rollbackTransaction();
      await db.query('ALTER TABLE leasehold.finished DROP CONSTRAINT no_words');
    }
  });

  it("a handler's transaction is a part of it", async () => {
    const end = await lease.useTransaction(runner.manager);
    script.work = ({ payload }, held) =>
      held.transaction(async (manager) => {
        await manager.query('INSERT INTO notes VALUES ($1)', [`note ${payload}`]);
        await held.checkpoint({ in: 'the middle' });
        await manager.transaction((inner) => inner.query('INSERT INTO notes VALUES ($1)', [`inner ${payload}`]));
        if (payload === 2) throw new Error('no');
        await held.completeIn(manager, payload);
      });
    await jobs.enqueueMany(Work, [1, 2]);
    expect(await lease.runNext()).toMatchObject({ outcome: 'completed', job: { result: 1 } });
    expect(await lease.runNext()).toMatchObject({ outcome: 'failed', error: { message: 'no' } });
    expect(await runner.query('SELECT text FROM notes ORDER BY 1')).toEqual([{ text: 'inner 1' }, { text: 'note 1' }]);
    // Under a lease that is lost there is none.
    let refusal: unknown;
    script.work = async (job, held) => {
      await lease.loseLease(job);
      await held
        .transaction((manager) => manager.query(`INSERT INTO notes VALUES ('zombie')`))
        .catch((error: unknown) => (refusal = error));
    };
    await jobs.enqueue(Work, 3);
    expect(await lease.runNext()).toMatchObject({ outcome: 'refused', job: { state: 'ready', crashes: 1 } });
    expect(refusal).toMatchObject({ code: 'LEASE_LOST' });
    expect(await runner.query(`SELECT FROM notes WHERE text = 'zombie'`)).toEqual([]);
    await end();
  });

  it("takes a pg client; a handler's manager then has no connection", async () => {
    const client: Client = await db.client();
    await client.query('BEGIN');
    const end = await lease.useTransaction(client);
    await jobs.enqueue(Work, 1);
    script.work = (_job, held) => held.transaction(async (tx) => void (await tx.query('SELECT 1')), { client });
    expect(await lease.runNext()).toMatchObject({ outcome: 'completed' });
    await jobs.enqueue(Work, 2);
    script.work = (_job, held) => held.transaction(async () => undefined);
    expect(await lease.runNext()).toMatchObject({
      outcome: 'failed',
      error: { message: expect.stringContaining('give useTransaction an EntityManager') },
    });
    await end();
    await client.query('ROLLBACK');
    expect(client.listenerCount('error')).toBeGreaterThan(0);
  });

  it('works in a serializable transaction, and leaves its settings alone', async () => {
    const client = await db.client();
    await client.query('BEGIN ISOLATION LEVEL SERIALIZABLE');
    await client.query('SELECT 1');
    const settings = async (): Promise<unknown> =>
      (await client.query(`SELECT current_setting('search_path') AS path, current_setting('timezone') AS zone`)).rows;
    const before = await settings();
    const end = await lease.useTransaction(client);
    await app.get(QueuesService).pause('default');
    await jobs.enqueue(Work, 1, { delay: '1h' });
    await lease.advance('2h');
    expect(await lease.drain()).toEqual([]);
    await app.get(QueuesService).resume('default');
    expect(await lease.drain()).toHaveLength(1);
    expect(await settings()).toEqual(before);
    await end();
    await client.query('ROLLBACK');
  });

  it('says so when the transaction is over, has failed, is not there, or is another', async () => {
    const { manager } = dataSource;
    await expect(lease.useTransaction(manager)).rejects.toThrow(/manager has no open transaction/);
    const end = await lease.useTransaction(runner.manager);
    await expect(lease.useTransaction(runner.manager)).rejects.toThrow(TestTransactionError);
    await jobs.enqueue(Work, 1);
    await expect(runner.query('SELECT 1 / 0')).rejects.toThrow();
    await expect(jobs.enqueue(Work, 2)).rejects.toThrow(/useTransaction has failed: a statement of the test/);
    await expect(lease.drain()).rejects.toThrow(TestTransactionError);
    await runner.rollbackTransaction();
    await expect(jobs.enqueue(Work, 3)).rejects.toThrow(/useTransaction is over: call the function/);
    // The next test's takes its place, though nobody has ended the first.
    const other = dataSource.createQueryRunner();
    await other.startTransaction();
    const endOther = await lease.useTransaction(other);
    await end();
    await jobs.enqueue(Work, 4);
    expect(await lease.drain()).toHaveLength(1);
    await endOther();
    await endOther();
    await other.rollbackTransaction();
    await other.release();
  });

  it('a handler that still runs when it ends has lost its lease', async () => {
    const [started, go] = [gate(), gate()];
    let reason: unknown;
    script.work = async (_job, held) => {
      started.open();
      held.signal.addEventListener('abort', () => void (reason = held.signal.reason));
      await go.promise;
      await held.checkpoint({ late: true });
    };
    const end = await lease.useTransaction(runner.manager);
    const id = await jobs.enqueue(Work, 1);
    const run = lease.runNext();
    await started.promise;
    await expect(lease.useTransaction(runner.manager)).rejects.toThrow(/while a job runs/);
    await end();
    await runner.rollbackTransaction();
    expect(reason).toMatchObject({ reason: 'lease-lost', message: expect.stringContaining('is over') });
    go.open();
    // The job went with the rollback.
    await expect(run).rejects.toThrow(`There is no job ${id}`);
  });

  it('a run whose transaction the test ends under it rejects, and does not hang', async () => {
    const [started, go] = [gate(), gate()];
    script.work = async () => {
      started.open();
      await go.promise;
    };
    const end = await lease.useTransaction(runner.manager);
    await jobs.enqueue(Work, 1);
    const run = lease.runNext();
    await started.promise;
    await runner.rollbackTransaction();
    go.open();
    await expect(run).rejects.toThrow(/useTransaction is over/);
    await end();
  });
});
