import { type Handler, type Job, JobHandler, type Lease } from '@leasehold/nestjs';
import { Database } from '@leasehold/nestjs/dist/storage/database';
import { DataSource } from 'typeorm';
import {
  type LeaseApp,
  RowGate,
  TcpProxy,
  type TestDatabase,
  createTestDatabase,
  eventually,
  startLeaseApp,
} from './support';

let db: TestDatabase;

@JobHandler('note', { concurrency: 50 })
class Note implements Handler {
  async handle(): Promise<void> {}
}

beforeAll(async () => {
  db = await createTestDatabase({ name: 'wake_up' });
});
afterAll(() => db.drop());

/** With a poll this rare, only a wake-up can have told. */
const RARE_POLL = { poll: '1h', leader: { probe: '500ms', retry: '100ms' } } as const;
const completed = (app: LeaseApp, id: string) =>
  eventually(async () => (await app.jobs.get(id)).state === 'completed', { state: () => app.jobs.get(id) });
const listeners = async (): Promise<number> =>
  (
    await db.one<{ n: number }>(
      `SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'leasehold main'`,
    )
  ).n;

describe('wake-ups', () => {
  it('tell other processes at once, after the commit, also of an enqueue in the user’s own transaction', async () => {
    const worker = await startLeaseApp(db, { handlers: [Note], options: RARE_POLL });
    const producer = await startLeaseApp(db, { options: { role: 'producer' } });
    await eventually(async () => (await listeners()) === 1);
    await completed(worker, await producer.jobs.enqueue('note', {}));
    const source = await new DataSource({ type: 'postgres', url: db.url, installExtensions: false }).initialize();
    const id = await source.transaction((manager) => producer.jobs.enqueue('note', {}, { manager }));
    await completed(worker, id);
    await source.destroy();
  });

  it('F:I4 whatever else is said on the channel, the listener stays and hears the next', async () => {
    const worker = await startLeaseApp(db, { handlers: [Note], options: RARE_POLL });
    const producer = await startLeaseApp(db, { options: { role: 'producer' } });
    await eventually(async () => (await listeners()) === 1);
    const [{ pid }] = (await db.query(
      `SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'leasehold main'`,
    )) as [{ pid: number }];
    const { channel } = worker.app.get(Database).schema;
    const odd = [
      '',
      'x',
      '7',
      'null',
      '[',
      '[null]',
      '[[]]',
      '[[1,{}]]',
      '[["a","b","c"]]',
      '{}',
      '{"stop":7,"ended":{},"await":[null]}',
    ];
    for (const payload of odd) await db.query('SELECT pg_notify($1, $2)', [channel, payload]);
    await completed(worker, await producer.jobs.enqueue('note', {}));
    const sessions = await db.query(
      `SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'leasehold main'`,
    );
    expect(sessions).toEqual([{ pid }]);
  });

  it('F:I4 a listener whose session is ended, or hangs in silence, is made anew, and looks at what it missed', async () => {
    const proxy = await TcpProxy.start(db.url);
    const worker = await startLeaseApp(db, { handlers: [Note], options: RARE_POLL, url: proxy.url(db.url) });
    const producer = await startLeaseApp(db, { options: { role: 'producer' } });
    const main = { applicationName: 'leasehold main' };
    await eventually(async () => (await listeners()) === 1);
    proxy.refuse(true);
    proxy.cut(main);
    const missed = await producer.jobs.enqueue('note', {});
    proxy.refuse(false);
    await completed(worker, missed);
    await eventually(() => worker.leader.isLeader);
    proxy.freeze(main);
    const silent = await producer.jobs.enqueue('note', {});
    await eventually(() => !worker.leader.isLeader); // It has noticed: the connection is being replaced.
    proxy.cut(main);
    proxy.thaw(main);
    await completed(worker, silent);
    await worker.close();
    await proxy.close();
  });

  it('F:I4 F:I8 without any wake-up the poll finds what is due', async () => {
    const worker = await startLeaseApp(db, { handlers: [Note], options: { wakeUp: 'off' } });
    await completed(worker, await worker.jobs.enqueue(Note, {}));
    expect(await worker.jobs.unhandledKinds()).toEqual([]);
  });

  it('a due row that somebody else has locked is not asked for in a busy loop, and runs when it is free', async () => {
    const app = await startLeaseApp(db, { handlers: [Note], options: { poll: '1s' } });
    const id = await app.jobs.enqueue(Note, {}, { delay: '1h' });
    await db.query(`UPDATE "leasehold".waiting SET run_at = clock_timestamp() + interval '2 s' WHERE job_id = $1`, [
      id,
    ]);
    const lock = await RowGate.hold(db, `SELECT FROM "leasehold".waiting WHERE job_id = $1 FOR UPDATE`, [id]);
    await eventually(
      async () =>
        (await db.query(`SELECT FROM "leasehold".waiting WHERE job_id = $1 AND run_at < clock_timestamp()`, [id]))
          .length > 0,
    );
    const polls = jest.spyOn(app.app.get(Database), 'query');
    await new Promise((resolve) => setTimeout(resolve, 2000));
    expect(polls.mock.calls.filter(([text]) => text.includes('poll_v1')).length).toBeLessThan(10);
    polls.mockRestore();
    await lock.release();
    await completed(app, id);
  });

  it('R3 many more jobs than slots, of several kinds and queues: all run, and no kind over its limit', async () => {
    const running = new Map<string, number>();
    const most = new Map<string, number>();
    const body = async (kind: string): Promise<void> => {
      const now = (running.get(kind) ?? 0) + 1;
      running.set(kind, now);
      most.set(kind, Math.max(most.get(kind) ?? 0, now));
      await new Promise((resolve) => setTimeout(resolve, 2));
      running.set(kind, (running.get(kind) ?? 1) - 1);
    };
    @JobHandler('narrow', { concurrency: 2 })
    class Narrow implements Handler {
      handle(): Promise<void> {
        return body('narrow');
      }
    }
    @JobHandler('wide', { concurrency: 30 })
    class Wide implements Handler {
      handle(): Promise<void> {
        return body('wide');
      }
    }
    const app = await startLeaseApp(db, { handlers: [Narrow, Wide], options: { concurrency: 20 } });
    await app.jobs.enqueueMany([
      ...Array.from({ length: 200 }, (_, i) => ({ handler: 'narrow', payload: i, queue: i % 2 ? 'one' : 'two' })),
      ...Array.from({ length: 600 }, (_, i) => ({ handler: 'wide', payload: i, queue: `q${i % 5}` })),
    ]);
    await eventually(
      async () => {
        const { ready, running: leased } = await app.jobs.counts();
        return ready + leased === 0;
      },
      { timeoutMs: 30_000, state: () => app.jobs.counts() },
    );
    expect(most.get('narrow')).toBeLessThanOrEqual(2);
    expect(most.get('wide')).toBeLessThanOrEqual(20);
    expect(most.get('wide')).toBeGreaterThan(5);
  });
});

describe('long jobs', () => {
  it('F:B1 a job that runs for two TTLs while it beats is not rescued before its own deadline, also one longer than the module’s', async () => {
    let ends = 0;
    @JobHandler('long', { deadline: '1m' })
    class Long implements Handler {
      async handle(_job: Job, lease: Lease): Promise<number> {
        const before = lease.remainingMs;
        await new Promise((resolve) => setTimeout(resolve, 6500));
        lease.assertHeld();
        ends++;
        return before;
      }
    }
    const apps = [
      await startLeaseApp(db, { handlers: [Long], options: { deadline: '2s' } }),
      await startLeaseApp(db, { handlers: [Long], options: { deadline: '2s' } }),
    ];
    const id = await apps[0]!.jobs.enqueue(Long, {});
    await completed(apps[0]!, id);
    expect(await apps[0]!.jobs.get(id)).toMatchObject({ attempt: 1, crashes: 0, runs: [] });
    expect(ends).toBe(1);
  });

  it('F:J5 a pool that is exhausted at shutdown does not keep a job from being given back', async () => {
    @JobHandler('stops')
    class Stops implements Handler {
      static started = false;
      async handle(_job: Job, lease: Lease): Promise<void> {
        Stops.started = true;
        await new Promise<void>((resolve) => lease.signal.addEventListener('abort', () => resolve()));
        lease.signal.throwIfAborted();
      }
    }
    const app = await startLeaseApp(db, {
      handlers: [Stops],
      options: { connection: { url: db.url, poolMax: 2 }, shutdown: { timeout: '100ms', grace: '3s' } },
    });
    const id = await app.jobs.enqueue(Stops, {});
    await eventually(() => Stops.started);
    // The user's own queries through our services hang at a lock on both connections.
    const gate = await RowGate.hold(db, 'LOCK TABLE "leasehold".queues IN ACCESS EXCLUSIVE MODE');
    const hanging = Promise.allSettled([1, 2, 3].map(() => app.jobs.enqueue('foreign', {})));
    await gate.untilWaiting();
    const closing = app.close();
    setTimeout(() => void gate.release(), 1000);
    await closing;
    await hanging;
    const api = await startLeaseApp(db, { options: { role: 'producer' } });
    expect(await api.jobs.get(id)).toMatchObject({ state: 'ready', attempt: 0, releases: 1 });
  });
});
