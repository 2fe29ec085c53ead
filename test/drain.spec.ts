import { type Handler, type Job, JobHandler, type Lease } from '@leasehold/nestjs';
import {
  type LeaseApp,
  RowGate,
  type TestDatabase,
  createTestDatabase,
  eventually,
  startHandWorker,
  startLeaseApp,
  startWorkerProcess,
} from './support';

let db: TestDatabase;
let api: LeaseApp;
const S = '"leasehold"';

beforeAll(async () => {
  db = await createTestDatabase({ name: 'drain' });
});
afterAll(() => db.drop());
beforeEach(async () => {
  api = await startLeaseApp(db, { options: { role: 'producer' } });
});

const state = (id: string) => async () => ({ job: await api.jobs.get(id), workers: await api.workers.list() });

describe('a drain', () => {
  it('R24 of a handler that ignores the abort: its lease stays, beats go on, nothing runs twice while the process lives', async () => {
    @JobHandler('deaf')
    class Deaf implements Handler {
      static bodies = 0;
      static end: () => void = () => undefined;
      async handle(): Promise<string> {
        Deaf.bodies++;
        await new Promise<void>((resolve) => (Deaf.end = resolve));
        return 'after all';
      }
    }
    const options = { shutdown: { timeout: '100ms', grace: '100ms' } } as const;
    const old = await startLeaseApp(db, { handlers: [Deaf], options });
    const id = await api.jobs.enqueue(Deaf, {});
    await eventually(() => Deaf.bodies === 1);
    const worker = old.workers.currentId;
    await old.close();
    await startLeaseApp(db, { handlers: [Deaf], options });
    const beat = (await api.workers.get(worker))!.beatAt;
    // Longer than a TTL, with a rescuer watching.
    await eventually(async () => (await api.workers.get(worker))!.beatAt.getTime() > beat.getTime() + 3500);
    expect(await api.workers.get(worker)).toMatchObject({ state: 'draining', active: true, stuck: 1 });
    expect(await api.jobs.get(id)).toMatchObject({ state: 'running', workerId: worker, runs: [] });
    expect(Deaf.bodies).toBe(1);
    // When it ends after all its outcome counts, and the worker signs off.
    Deaf.end();
    await eventually(async () => (await api.jobs.get(id)).state === 'completed', { state: state(id) });
    await eventually(async () => (await api.workers.get(worker))!.state === 'stopped', { state: state(id) });
    expect(Deaf.bodies).toBe(1);
  });

  it('R24 and when its process ends instead, the job is rescued, charging a release', async () => {
    const victim = await startWorkerProcess(db.url, { shutdown: { timeout: '100ms', grace: '100ms' } });
    const id = await api.jobs.enqueue('scripted', { sleepMs: 60_000, deaf: true });
    await victim.started(id);
    const heir = await startWorkerProcess(db.url);
    victim.process.kill('SIGTERM'); // Nest ends the process once its hooks have run.
    await victim.process.exited;
    await heir.started(id);
    expect(await api.jobs.get(id)).toMatchObject({ attempt: 1, crashes: 0, releases: 1, runs: [{ outcome: 'dead' }] });
    heir.process.kill('SIGKILL');
    await heir.process.exited;
    await db.query(`DELETE FROM ${S}.leases`);
  });

  it('F:D3 three deploys during one long job spend no attempt; it ends after the third', async () => {
    const id = await api.jobs.enqueue('scripted', { sleepMs: 1500 }, { maxAttempts: 1 });
    for (let deploy = 0; deploy < 3; deploy++) {
      const worker = await startWorkerProcess(db.url, { shutdown: { timeout: 0, grace: '2s' } });
      expect(await worker.started(id)).toMatchObject({ attempt: 1 });
      worker.process.kill('SIGTERM');
      expect(await worker.interrupted(id)).toMatchObject({ reason: 'drain' });
      await worker.process.exited;
      expect(await api.jobs.get(id)).toMatchObject({ state: 'ready', attempt: 0, releases: deploy + 1 });
    }
    const last = await startWorkerProcess(db.url);
    await last.started(id);
    await eventually(async () => (await api.jobs.get(id)).state === 'completed', { state: state(id) });
    const job = await api.jobs.get(id);
    expect(job).toMatchObject({ attempt: 1, releases: 3 });
    expect(job.runs!.map(({ outcome }) => outcome)).toEqual(['released', 'released', 'released']);
    last.process.kill('SIGTERM');
    await last.process.exited;
  });

  it('a job that only ever is released ends too: maxReleases', async () => {
    const worker = await startLeaseApp(db, { options: { role: 'producer', maxReleases: 1 } });
    const identity = await worker.workers.register(['r']);
    await worker.heartbeat.start(identity, () => undefined);
    const id = await worker.jobs.enqueue('r', {});
    for (const expected of ['ready', 'failed']) {
      const [claimed] = await worker.claims.claim({ kinds: ['r'], limit: 1 });
      await worker.settle.release(claimed!.job);
      expect((await worker.jobs.get(id)).state).toBe(expected);
    }
    expect((await worker.jobs.get(id)).reason).toMatch(/released 1 times; maxReleases 1/);
    await worker.heartbeat.stop();
  });

  it('F:C6 a claim that is in flight when the drain begins is given back, and none is made after', async () => {
    @JobHandler('quick')
    class Quick implements Handler {
      static bodies = 0;
      async handle(): Promise<void> {
        Quick.bodies++;
      }
    }
    const app = await startLeaseApp(db, { handlers: [Quick] });
    await db.query(`INSERT INTO ${S}.queues (name) VALUES ('default') ON CONFLICT DO NOTHING`);
    // The claim is made and stands at the door: its insert waits for a lock that the test holds.
    const gate = await RowGate.hold(db, `LOCK TABLE ${S}.leases IN SHARE MODE`);
    const ids = await api.jobs.enqueueMany(Quick, [{}, {}, {}]);
    await gate.untilWaiting();
    const closing = app.close();
    await eventually(
      async () =>
        (await api.workers.list()).some(
          ({ id, state: s }) =>
            id === app.events.find((e) => e.type === 'worker.registered')?.workerId && s === 'draining',
        ) || app.events.some(({ type }) => type === 'worker.draining'),
    );
    await gate.release();
    await closing;
    for (const id of ids)
      expect(await api.jobs.get(id)).toMatchObject({ state: 'ready', attempt: 0, releases: 0, runs: [] });
    expect(Quick.bodies).toBe(0);
    expect(await db.query(`SELECT FROM ${S}.leases`)).toEqual([]);
    await db.query(`DELETE FROM ${S}.ready`);
  });

  it("a user's pause that arrives in the middle of a drain wins", async () => {
    @JobHandler('listens')
    class Listens implements Handler {
      static started = false;
      async handle(_job: Job, lease: Lease): Promise<void> {
        Listens.started = true;
        await new Promise<void>((resolve) => lease.signal.addEventListener('abort', () => resolve()));
        lease.signal.throwIfAborted();
      }
    }
    const app = await startLeaseApp(db, {
      handlers: [Listens],
      options: { shutdown: { timeout: '200ms', grace: '2s' } },
    });
    const id = await api.jobs.enqueue(Listens, {});
    await eventually(() => Listens.started);
    const closing = app.close();
    await db.query(`UPDATE ${S}.leases SET pause_requested = true WHERE job_id = $1`, [id]);
    await closing;
    expect(await api.jobs.get(id)).toMatchObject({ state: 'paused', attempt: 0 });
  });

  it('R24 of a process that claims by hand: its leases are told to stop, and it signs off when they are settled', async () => {
    const worker = await startLeaseApp(db, {
      options: { role: 'producer', shutdown: { timeout: '100ms', grace: '5s' } },
    });
    const identity = await worker.workers.register(['by-hand']);
    await worker.heartbeat.start(identity, () => undefined);
    const id = await worker.jobs.enqueue('by-hand', {});
    const [claimed] = await worker.claims.claim({ kinds: ['by-hand'], limit: 1 });
    claimed!.signal.addEventListener('abort', () => void worker.settle.release(claimed!.job));
    await worker.close();
    expect(claimed!.signal.reason).toMatchObject({ reason: 'drain' });
    expect(await api.jobs.get(id)).toMatchObject({ state: 'ready', attempt: 0, releases: 1 });
    expect(await api.workers.get(identity.id)).toMatchObject({ state: 'stopped' });
    await db.query(`DELETE FROM ${S}.ready`);
  });

  it('R24 a job claimed by hand that ends on a stop request goes where the request says', async () => {
    const worker = await startHandWorker(db, ['by-hand']);
    for (const [request, state] of [
      ['cancel', 'cancelled'],
      ['pause', 'paused'],
    ] as const) {
      const id = await worker.jobs.enqueue('by-hand', {});
      const [claimed] = await worker.claims.claim({ kinds: ['by-hand'], limit: 1 });
      await db.query(`UPDATE ${S}.leases SET ${request}_requested = true WHERE job_id = $1`, [id]);
      await worker.heartbeat.renew();
      expect(claimed!.signal.aborted).toBe(true);
      await worker.settle.stopped(claimed!.job);
      expect((await worker.jobs.get(id)).state).toBe(state);
    }
  });
});
