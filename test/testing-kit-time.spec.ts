import {
  type Handler,
  type Job,
  JobHandler,
  JobsService,
  type Lease,
  LeaseSetupError,
  RescueService,
  RetentionService,
  WorkersService,
} from '@leasehold/nestjs';
import { LeaseTesting, LeaseTestingModule, type LeaseTestingOptions } from '@leasehold/nestjs/testing';
import { type INestApplicationContext, Injectable, Logger } from '@nestjs/common';
import { Test } from '@nestjs/testing';
import { Client } from 'pg';
import { type TestDatabase, createTestDatabase, gate, onServer, startLeaseApp } from './support';

const DAY_MS = 86_400_000;

@Injectable()
class Script {
  work: (job: Job<number>, lease: Lease) => unknown = () => undefined;
}

@JobHandler('work', { backoff: { base: '10m', max: '10m' }, deadline: '5m' })
class Work implements Handler<number> {
  constructor(private readonly script: Script) {}
  async handle(job: Job<number>, lease: Lease): Promise<void> {
    await this.script.work(job, lease);
  }
}

let db: TestDatabase;
const apps: INestApplicationContext[] = [];

beforeAll(async () => {
  Logger.overrideLogger(false);
  db = await createTestDatabase();
});
afterEach(async () => {
  for (const app of apps.splice(0)) await app.close();
  await db.query('DROP SCHEMA IF EXISTS leasehold, leasehold_clock CASCADE');
});
afterAll(() => db.drop());

async function start(options: Partial<LeaseTestingOptions> = {}) {
  const app = await Test.createTestingModule({
    imports: [LeaseTestingModule.forRoot({ connection: { url: db.url }, ...options })],
    providers: [Script, Work],
  }).compile();
  apps.push(app);
  await app.init();
  return { app, lease: app.get(LeaseTesting), jobs: app.get(JobsService), script: app.get(Script) };
}

/** Within the time that a statement or two may take. */
const about = (time: Date | null | undefined, ms: number): void => {
  expect(Math.abs((time?.getTime() ?? NaN) - ms)).toBeLessThan(5000);
};

describe('time', () => {
  it('a delay, a backoff and a whole life of failing', async () => {
    const { lease, jobs, script } = await start({ maxAttempts: 3 });
    script.work = () => {
      throw new Error('down');
    };
    const id = await jobs.enqueue(Work, 1, { delay: '1h' });
    const began = (await lease.now()).getTime();
    expect(await lease.drain({ throwOnFailure: false })).toEqual([]);
    about(await lease.advance('59m'), began + 59 * 60_000);
    expect(await lease.drain({ throwOnFailure: false })).toEqual([]);
    await lease.advance('1m');
    for (let attempt = 1; attempt <= 3; attempt++) {
      expect(await lease.drain({ throwOnFailure: false })).toMatchObject([{ outcome: 'failed', job: { id, attempt } }]);
      await lease.advance('10m');
    }
    const job = await jobs.get(id);
    expect(job).toMatchObject({ state: 'failed', attempt: 3, runs: [{ attempt: 1 }, { attempt: 2 }] });
    about(job.createdAt, began);
    about(job.runs?.[1]?.startedAt, began + 70 * 60_000);
    about(job.finishedAt, began + 80 * 60_000);
    await lease.resetTime();
    about(await lease.now(), Date.now());
  });

  it('a deadline: rescue() takes the lease and aborts the handler', async () => {
    const { lease, jobs, script } = await start();
    const started = gate();
    script.work = (_job, { signal }) => {
      started.open();
      return new Promise((_, reject) => signal.addEventListener('abort', () => reject(signal.reason as Error)));
    };
    const id = await jobs.enqueue(Work, 1);
    const run = lease.runNext();
    await started.promise;
    await lease.advance('4m');
    // The worker's own lease, of 30 s, is renewed with every move of the time.
    expect(await lease.rescue()).toBe(0);
    expect((await jobs.get(id)).state).toBe('running');
    await lease.advance('2m');
    expect(await lease.rescue()).toBe(1);
    expect(await run).toMatchObject({
      outcome: 'refused',
      error: { message: expect.stringContaining('hard deadline exceeded') },
      job: {
        id,
        state: 'scheduled',
        attempt: 1,
        runs: [{ outcome: 'dead', error: { message: 'hard deadline exceeded' } }],
      },
    });
  });

  it('a job finishes after thirty days, and in other days still; retention follows', async () => {
    const { app, lease, jobs } = await start();
    const today = Date.now();
    const first = await jobs.enqueue(Work, 1, { delay: '30d' });
    await lease.advance('30d');
    expect(await lease.drain()).toHaveLength(1);
    about((await jobs.get(first)).finishedAt, today + 30 * DAY_MS);
    await lease.setTime(new Date('2040-02-29T23:59:58Z'));
    const second = await jobs.enqueue(Work, 2);
    await lease.drain();
    about((await jobs.get(second)).createdAt, Date.parse('2040-02-29T23:59:58Z'));
    await lease.advance('3s');
    const third = await jobs.enqueue(Work, 3);
    await lease.drain();
    expect((await jobs.get(third)).finishedAt?.toISOString()).toMatch(/^2040-03-01T00:00:/);

    // Seven days after the last one, of which the one of long ago is past its time already.
    const retention = app.get(RetentionService);
    expect(await retention.prune()).toMatchObject({ deleted: 1 });
    await lease.advance('8d');
    expect(await retention.prune()).toMatchObject({ deleted: 2 });
    await retention.dropEmptyDays();
    await lease.resetTime();
    await jobs.enqueue(Work, 4);
    expect(await lease.drain()).toMatchObject([{ outcome: 'completed' }]);
  });

  it('holds in a transaction of the application, in SQL, and for any connection', async () => {
    const { lease, jobs } = await start();
    await lease.advance('1d');
    const client = await db.client();
    await client.query('BEGIN');
    await jobs.enqueue(Work, 1, { client, delay: '1h' });
    await client.query(`SELECT leasehold.enqueue('work', '2', delay => '1 h')`);
    await client.query('COMMIT');
    expect(await lease.drain()).toEqual([]);
    await lease.advance('1h');
    expect((await lease.drain()).map(({ job }) => job.payload)).toEqual([1, 2]);
    // What is not Leasehold's has the database's own time.
    about((await client.query<{ now: Date }>('SELECT clock_timestamp() AS now')).rows[0]?.now, Date.now());
  });

  it('a handler completes its job in a transaction at the time of the test', async () => {
    const { lease, jobs, script } = await start();
    const client = await db.client();
    script.work = (_job, held) => held.transaction(async (tx) => void (await held.completeIn(tx, 'done')), { client });
    const id = await jobs.enqueue(Work, 1);
    await lease.advance('20d');
    expect(await lease.runNext()).toMatchObject({ outcome: 'completed', job: { id, result: 'done' } });
    about((await jobs.get(id)).finishedAt, Date.now() + 20 * DAY_MS);
  });

  it('stays on when a worker is looked for, and the kit registers anew when it was declared dead', async () => {
    const { app, lease, jobs } = await start();
    await jobs.enqueueMany(Work, [1, 2]);
    await lease.runNext();
    await lease.advance('1h');
    const workers = app.get(WorkersService);
    const [before] = await workers.list({ activeOnly: true });
    expect(await app.get(RescueService).rescueExpired({ unguarded: true })).toBe(0);
    expect(await workers.list({ activeOnly: true })).toMatchObject([{ id: before?.id }]);
    await db.query('DELETE FROM leasehold.workers');
    expect(await lease.drain()).toHaveLength(1);
    expect(await workers.list({ activeOnly: true })).toHaveLength(1);
  });
});

describe('a schema that was there before', () => {
  it('is given the clock, its column defaults too, and keeps what a path had', async () => {
    const before = await startLeaseApp(db);
    await before.close();
    const path = async (name: string) =>
      (
        await db.one<{ path: string[] | null }>(
          `SELECT (SELECT array_agg(x) FROM unnest(proconfig) x WHERE x LIKE 'search_path%') AS path FROM pg_proc
         WHERE proname = $1 AND pronamespace = 'leasehold'::regnamespace`,
          [name],
        )
      ).path;
    expect(await path('step_v1')).toBeNull();
    const { lease, jobs } = await start({ migrate: false });
    expect(await path('step_v1')).toEqual(['search_path=leasehold_clock, pg_catalog, "$user", public']);
    expect(await path('drop_empty_day_v1')).toEqual(['search_path=leasehold_clock, pg_catalog, pg_temp']);
    expect(await path('state_v1')).toBeNull();
    await lease.setTime(new Date('2001-01-01T00:00:00Z'));
    const id = await jobs.enqueue(Work, 1);
    await lease.drain();
    const job = await jobs.get(id);
    expect(job.createdAt.getUTCFullYear()).toBe(2001);
    expect(job).toMatchObject({ state: 'completed' });

    // A second start finds nothing to do, and the real time.
    const again = await start();
    expect(await path('step_v1')).toEqual(['search_path=leasehold_clock, pg_catalog, "$user", public']);
    about(await again.lease.now(), Date.now());
    expect(
      await db.query(
        `SELECT t.relname FROM pg_attrdef d JOIN pg_class t ON t.oid = d.adrelid
         WHERE t.relnamespace = 'leasehold'::regnamespace AND pg_get_expr(d.adbin, d.adrelid) = 'clock_timestamp()'`,
      ),
    ).toEqual([]);
  });

  it('time cannot be moved by a role that may not make the clock, and all else works', async () => {
    const before = await startLeaseApp(db);
    await before.close();
    const role = `kit_${db.name.slice(-6)}`;
    await db.query(`CREATE ROLE ${role} LOGIN PASSWORD 'x'`);
    try {
      await db.query(`GRANT USAGE ON SCHEMA leasehold TO ${role}`);
      for (const what of ['TABLES', 'SEQUENCES', 'FUNCTIONS']) {
        await db.query(`GRANT ALL ON ALL ${what} IN SCHEMA leasehold TO ${role}`);
      }
      const url = new URL(db.url);
      [url.username, url.password] = [role, 'x'];
      const { app, lease, jobs } = await start({ connection: { url: url.href }, migrate: false });
      await jobs.enqueue(Work, 1);
      expect(await lease.drain()).toHaveLength(1);
      about(await lease.now(), Date.now());
      const error = await lease.advance('1h').catch((e: unknown) => e as Error);
      expect(error).toBeInstanceOf(LeaseSetupError);
      expect((error as Error).message).toMatch(/may not make the schema leasehold_clock.*permission denied/);
      await app.close();
    } finally {
      await db.query(`DROP OWNED BY ${role}`);
      await db.query(`DROP ROLE ${role}`);
    }
  });

  it('refuses what is no duration and no time, and names too long for a clock beside them', async () => {
    const { lease } = await start();
    await expect(lease.advance('5 minutes' as never)).rejects.toThrow(/advance\("5 minutes"\): it must be a duration/);
    await expect(lease.setTime(new Date('no'))).rejects.toThrow(/it must be a Date/);
    await expect(lease.advance('4000d')).rejects.toThrow(/at most ten years/);
    const long = await start({ schema: 'x'.repeat(58) });
    await expect(long.lease.advance('1h')).rejects.toThrow(/leaves no room for '_clock'/);
  });

  it('eight starts at once, of which one makes schema and clock', async () => {
    const kits = await Promise.all(Array.from({ length: 8 }, () => start()));
    await Promise.all(kits.map(({ jobs }, i) => jobs.enqueue(Work, i)));
    expect(await kits[0]?.lease.drain()).toHaveLength(8);
  });

  it('does not follow the time zone of a session', async () => {
    const { lease, jobs } = await start();
    await lease.setTime(new Date('2035-03-24T12:00:00Z'));
    await lease.advance('1d');
    const id = await jobs.enqueue(Work, 1);
    const url = new URL(db.url);
    const createdAt = await onServer(url.href, async (client: Client) => {
      await client.query(`SET timezone = 'Europe/Berlin'`);
      await client.query(`SELECT leasehold.enqueue('work', '2')`);
      const { rows } = await client.query<{ at: Date }>(
        'SELECT created_at AS at FROM leasehold.jobs ORDER BY id DESC LIMIT 1',
      );
      return rows[0]?.at;
    });
    about((await jobs.get(id)).createdAt, Date.parse('2035-03-25T12:00:00Z'));
    about(createdAt, Date.parse('2035-03-25T12:00:00Z'));
  });
});
