import { type Handler, type Job, JobHandler, LeaseLostError } from '@leasehold/nestjs';
import {
  type LeaseApp,
  TcpProxy,
  type TestDatabase,
  createTestDatabase,
  eventually,
  startHandWorker,
  startLeaseApp,
} from './support';

let db: TestDatabase;
const S = '"leasehold"';

beforeAll(async () => {
  db = await createTestDatabase({ name: 'identity' });
});
afterAll(() => db.drop());
afterEach(() =>
  db.query(`WITH r AS (DELETE FROM ${S}.ready), w AS (DELETE FROM ${S}.waiting) DELETE FROM ${S}.leases`),
);

@JobHandler('note', { concurrency: 5 })
class Note implements Handler {
  static readonly tokens: string[] = [];
  static wait: Promise<void> | undefined;
  async handle(_job: Job, lease: { token: string }): Promise<void> {
    Note.tokens.push(lease.token);
    await Note.wait;
  }
}
beforeEach(() => {
  Note.tokens.length = 0;
  Note.wait = undefined;
});

const kill = (id: string) =>
  db.query(`UPDATE ${S}.workers SET state = 'dead', died_of = 'lease', ended_at = clock_timestamp() WHERE id = $1`, [
    id,
  ]);
const done = (app: LeaseApp, id: string) =>
  eventually(async () => (await app.jobs.get(id)).state === 'completed', {
    timeoutMs: 30_000,
    state: async () => ({
      job: await app.jobs.get(id),
      workers: await app.workers.list(),
      current: app.workers.current,
    }),
  });

describe('an identity that is lost', () => {
  it('again while the process is coming back: it comes back all the same, and claims', async () => {
    const leader = await startLeaseApp(db, { options: { role: 'worker' } });
    await eventually(() => leader.leader.isLeader);
    const proxy = await TcpProxy.start(db.url);
    // The pool goes straight; only beat and leader connections are cut, so it registers and cannot beat.
    const app = await startLeaseApp(db, {
      handlers: [Note],
      options: { connection: { url: db.url, directUrl: proxy.url(db.url) } },
    });
    proxy.refuse(true);
    proxy.cut({ applicationName: /^lh:/ });
    await kill(app.workers.currentId);
    await eventually(() => app.events.some(({ type }) => type === 'worker.fenced'));
    await eventually(() => app.events.filter(({ type }) => type === 'worker.registered').length >= 1);
    // It has a row and no session for longer than the grace, with a leader looking on.
    await eventually(() => leader.heartbeat.steadyMs > 2500);
    proxy.refuse(false);
    await done(app, await app.jobs.enqueue(Note, {}));
    await app.close();
    await proxy.close();
  });

  it('while a claim of it is on the wire: what that brings is given back, and nothing runs twice', async () => {
    const app = await startLeaseApp(db, { handlers: [Note] });
    const old = app.workers.currentId;
    await db.query(`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      IF NEW.worker_id = '${old}' THEN PERFORM pg_sleep(2); END IF; RETURN NEW; END $$`);
    await db.query(`CREATE TRIGGER slow BEFORE INSERT ON ${S}.leases FOR EACH ROW EXECUTE FUNCTION slow()`);
    const id = await app.jobs.enqueue(Note, {});
    await eventually(
      async () =>
        (await db.query(`SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()`))
          .length > 0,
    );
    await kill(old);
    await eventually(() => app.workers.current !== undefined && app.workers.currentId !== old);
    await done(app, id);
    await db.query(`DROP TRIGGER slow ON ${S}.leases`);
    expect(Note.tokens).toHaveLength(1);
    expect((await app.jobs.get(id)).workerId).toBe(app.workers.currentId);
  });

  it('and a shutdown meanwhile: no row is left live, and no beat goes on', async () => {
    const app = await startLeaseApp(db, { handlers: [Note] });
    await db.query(
      `CREATE FUNCTION slow_worker() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NEW; END $$`,
    );
    await db.query(
      `CREATE TRIGGER slow_worker BEFORE INSERT ON ${S}.workers FOR EACH ROW EXECUTE FUNCTION slow_worker()`,
    );
    await kill(app.workers.currentId);
    await eventually(
      async () =>
        (await db.query(`SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()`))
          .length > 0,
    );
    await app.close();
    await db.query(`DROP TRIGGER slow_worker ON ${S}.workers`);
    expect(await db.query(`SELECT id FROM ${S}.workers WHERE state IN ('live', 'draining')`)).toEqual([]);
    expect(
      await db.query(
        `SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'lh:%'`,
      ),
    ).toEqual([]);
  });

  it('before its first beat fails the start, and way 1 does not convict a worker that never beat', async () => {
    const leader = await startLeaseApp(db, { options: { role: 'worker' } });
    await eventually(() => leader.leader.isLeader);
    const worker = await startLeaseApp(db, { options: { role: 'producer' } });
    const identity = await worker.workers.register(['x']);
    await eventually(() => leader.heartbeat.steadyMs > 1500);
    expect(await worker.workers.get(identity.id)).toMatchObject({ state: 'live' });
    await worker.heartbeat.start(identity, () => undefined);
    await worker.close();
    const other = await startLeaseApp(db, { options: { role: 'producer' } });
    const lost = await other.workers.register(['x']);
    await kill(lost.id);
    await expect(other.heartbeat.start(lost, () => undefined)).rejects.toThrow(/lost before its first beat/);
  });

  it('R14 an exclusive store comes back after a half-open beat connection', async () => {
    const proxy = await TcpProxy.start(db.url);
    const app = await startLeaseApp(db, { handlers: [Note], url: proxy.url(db.url), options: { store: 'exclusive' } });
    proxy.freeze({ applicationName: app.workers.current ? /^lh:/ : '' });
    await eventually(() => app.events.some(({ type }) => type === 'worker.fenced'));
    proxy.thaw({ applicationName: /^lh:/ });
    await done(app, await app.jobs.enqueue(Note, {}));
    await app.close();
    await proxy.close();
  });
});

describe('a connection that is cut for two seconds', () => {
  it('costs a live worker nothing at default times', async () => {
    const defaults = { lease: {}, rescue: {}, leader: {} };
    const leader = await startLeaseApp(db, { options: { ...defaults, role: 'worker' } });
    await eventually(() => leader.leader.isLeader);
    const proxy = await TcpProxy.start(db.url);
    const app = await startLeaseApp(db, {
      handlers: [Note],
      options: { ...defaults, connection: { url: db.url, directUrl: proxy.url(db.url) } },
    });
    const { currentId } = app.workers;
    for (let round = 0; round < 2; round++) {
      const beat = app.heartbeat.nextBeat();
      proxy.refuse(true);
      proxy.cut({ applicationName: /^lh:/ });
      await new Promise((resolve) => setTimeout(resolve, 2000));
      proxy.refuse(false);
      await beat;
    }
    await new Promise((resolve) => setTimeout(resolve, 1500));
    expect(app.workers.currentId).toBe(currentId);
    expect(await app.workers.get(currentId)).toMatchObject({ state: 'live' });
    await app.close();
    await proxy.close();
  });
});

describe('what keeps a worker from claiming', () => {
  it('F:A10 is not a handler that never ends beside a job that must run alone', async () => {
    let open: () => void = () => undefined;
    @JobHandler('never')
    class Never implements Handler {
      handle(): Promise<void> {
        return new Promise((resolve) => (open = resolve));
      }
    }
    const app = await startLeaseApp(db, { handlers: [Never, Note], options: { suspects: { patience: '200ms' } } });
    const never = await app.jobs.enqueue(Never, {}, { deadline: '200ms', maxAttempts: 1 });
    await eventually(async () => (await app.jobs.get(never)).state === 'failed');
    await app.jobs.enqueue(Note, {}, { maxCrashes: 1 });
    await new Promise((resolve) => setTimeout(resolve, 600));
    await done(app, await app.jobs.enqueue(Note, {}));
    open();
    await eventually(async () => (await app.jobs.counts()).ready === 0); // And the suspect, once the process is empty.
  });

  it('R13 patience: a suspect gets its turn although other work never ends', async () => {
    Note.wait = undefined;
    @JobHandler('busy', { concurrency: 3 })
    class Busy implements Handler {
      async handle(): Promise<void> {
        await new Promise((resolve) => setTimeout(resolve, 30));
      }
    }
    const app = await startLeaseApp(db, {
      handlers: [Busy, Note],
      options: { suspects: { patience: '300ms' }, concurrency: 3 },
    });
    await app.jobs.enqueueMany(
      Busy,
      Array.from({ length: 2000 }, () => ({})),
    );
    await eventually(async () => (await app.jobs.counts()).completed > 0);
    const suspect = await app.jobs.enqueue(Note, {}, { maxCrashes: 1, priority: 9 });
    await done(app, suspect);
    expect((await app.jobs.counts()).ready).toBeGreaterThan(100);
  });
});

describe('by hand', () => {
  it('the deadline of a job claimed by hand ends it, also on a leader', async () => {
    const app = await startLeaseApp(db, { options: { role: 'worker' } });
    await eventually(() => app.leader.isLeader);
    const id = await app.jobs.enqueue('by hand', {}, { deadline: '300ms', maxAttempts: 1 });
    const [claimed] = await app.claims.claim({ kinds: ['by hand'], limit: 1 });
    await eventually(async () => (await app.jobs.get(id)).state === 'failed', { state: () => app.jobs.get(id) });
    expect(claimed!.signal.reason).toMatchObject({ reason: 'deadline' });
  });

  it('nothing waits for ever: renew and nextBeat without beats, settles after the end', async () => {
    const worker = await startHandWorker(db, ['a']);
    await worker.jobs.enqueue('a', {});
    const [claimed] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    const pending = worker.heartbeat.nextBeat();
    pending.catch(() => undefined);
    await worker.heartbeat.stop();
    await expect(worker.heartbeat.renew()).rejects.toMatchObject({ code: 'NOT_RUNNING' });
    await expect(worker.heartbeat.nextBeat()).rejects.toMatchObject({ code: 'NOT_RUNNING' });
    await worker.close();
    await expect(worker.settle.complete(claimed!.job)).rejects.toThrow(LeaseLostError);
  });
});
