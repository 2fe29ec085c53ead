import {
  type LeaseApp,
  RowGate,
  TcpProxy,
  type TestDatabase,
  createTestDatabase,
  eventually,
  fixture,
  startHandWorker,
  startLeaseApp,
  startWorkerProcess,
} from './support';
import { type Handler, type Job, JobHandler, type Lease, NonRetryableError } from '@leasehold/nestjs';

let db: TestDatabase;
const S = '"leasehold"';

beforeAll(async () => {
  db = await createTestDatabase({ name: 'heartbeat' });
});
afterAll(() => db.drop());
afterEach(() =>
  db.query(`WITH r AS (DELETE FROM ${S}.ready), w AS (DELETE FROM ${S}.waiting) DELETE FROM ${S}.leases`),
);

const claimAll = async (worker: LeaseApp, limit: number) =>
  (await worker.claims.claim({ kinds: ['a'], limit })).map(({ job, signal }) => ({ job, signal }));

describe('renewal', () => {
  it('R4 every worker is renewed, not only the leader, and the job leases with it', async () => {
    const workers = await Promise.all([startHandWorker(db, ['a']), startHandWorker(db, ['a'])]);
    await workers[0].jobs.enqueueMany('a', [1, 2]);
    for (const worker of workers) {
      const [claimed] = await claimAll(worker, 1);
      const before = (await worker.jobs.get(claimed!.job.id)).leaseExpiresAt!;
      await eventually(async () => (await worker.jobs.get(claimed!.job.id)).leaseExpiresAt! > before);
      await worker.settle.complete(claimed!.job);
    }
  });

  it('R4 1 200 leases are attested in chunks that together cover all tokens: none unknown, none gone', async () => {
    const worker = await startHandWorker(db, ['a']);
    await worker.jobs.enqueueMany(
      'a',
      Array.from({ length: 1300 }, (_, i) => i),
    );
    const claimed = [...(await claimAll(worker, 700)), ...(await claimAll(worker, 500))];
    expect(claimed).toHaveLength(1200);
    expect(await worker.heartbeat.renew()).toEqual({ gone: [], stops: [], unknown: [] });
    // Only a stop request: the numbers of the leases are all as they should be.
    const { job: paused } = claimed[600]!;
    await db.query(`UPDATE ${S}.leases SET pause_requested = true WHERE job_id = $1`, [paused.id]);
    expect((await worker.heartbeat.renew()).stops).toEqual([[paused.id, paused.token, 'pause']]);
    // One in the first chunk, one in the last: moved away behind the worker's back.
    const taken = [claimed[3]!, claimed[1150]!];
    await db.query(`SELECT * FROM ${S}.move_v1($1::json, false)`, [
      JSON.stringify(
        taken.map(({ job }) => ({ job: job.id, token: job.token, worker: job.workerId, event: 'return' })),
      ),
    ]);
    // And a lease that the worker does not know, between two that it does, and of an earlier claim.
    await db.query(
      `INSERT INTO ${S}.leases (job_id, token, claim_no, claimed_at, deadline_at, attempt, crashes, releases, snoozes, priority, suspect,
         worker_id, queue, kind)
       SELECT 0, $1::bigint, 0, claimed_at, deadline_at, attempt, crashes, releases, snoozes, priority, suspect, worker_id, queue, kind FROM ${S}.leases LIMIT 1`,
      [taken[0]!.job.token],
    );
    await db.query(
      `INSERT INTO ${S}.jobs (id, max_attempts, max_crashes, max_releases, priority, queue, kind, payload) VALUES (0, 1, 3, 1, 0, 'q', 'a', '1')`,
    );
    const result = await worker.heartbeat.renew();
    expect(result.gone.map(([id]) => id).sort()).toEqual(taken.map(({ job }) => job.id).sort());
    expect(result.unknown).toEqual([['0', taken[0]!.job.token]]);
    for (const { signal } of taken)
      expect(signal.reason).toMatchObject({ code: 'JOB_INTERRUPTED', reason: 'lease-lost' });
    expect(claimed.filter(({ signal }) => signal.aborted)).toHaveLength(3);
    await eventually(async () => (await worker.jobs.get('0')).state === 'ready');
  });

  it('R5 F:B4 an exhausted pool starves neither the beat nor its attestation', async () => {
    const worker = await startHandWorker(db, ['a'], {
      options: { role: 'producer', connection: { url: db.url, poolMax: 2 } },
    });
    await worker.jobs.enqueue('a', {});
    const [claimed] = await claimAll(worker, 1);
    // Both connections of the pool hang at a lock for longer than a TTL.
    const gate = await RowGate.hold(db, `SELECT FROM ${S}.leases WHERE job_id = $1 FOR UPDATE`, [claimed!.job.id]);
    const hanging = [
      worker.settle.complete(claimed!.job),
      worker.claims.claim({ kinds: ['a'], limit: 1 }).catch(() => []),
    ];
    await gate.untilWaiting();
    const before = worker.heartbeat.silentMs;
    await eventually(
      async () =>
        (
          await db.one<{ old: boolean }>(
            `SELECT clock_timestamp() - started_at > interval '3.5 s' AS old FROM ${S}.workers WHERE id = $1`,
            [worker.workers.currentId],
          )
        ).old,
    );
    expect(before).toBeLessThan(3000);
    expect(
      await db.one(`SELECT state, expires_at > clock_timestamp() AS live FROM ${S}.workers WHERE id = $1`, [
        worker.workers.currentId,
      ]),
    ).toEqual({
      state: 'live',
      live: true,
    });
    await gate.release();
    await Promise.all(hanging);
  });

  it('R15 a loop that was blocked makes no gap in the beats, and does not put rescue off', async () => {
    const worker = await startHandWorker(db, ['a']);
    await eventually(() => worker.heartbeat.steadyMs > 600);
    const before = worker.heartbeat.steadyMs;
    const until = performance.now() + 1800; // Over three beats, which go on in their thread.
    while (performance.now() < until);
    await worker.heartbeat.nextBeat();
    expect(worker.heartbeat.steadyMs).toBeGreaterThan(before + 1800);
  });

  it('R6 an id belongs to one registration', async () => {
    const apps = await Promise.all(
      [1, 2, 3].map(() => startHandWorker(db, ['a'], { options: { role: 'producer', workerName: 'same' } })),
    );
    const ids = apps.map(({ workers }) => workers.currentId);
    expect(new Set(ids).size).toBe(3);
    for (const id of ids) expect(id).toMatch(new RegExp(`^same-${process.pid}-[0-9a-f]{10}$`));
    await expect(apps[0]!.workers.register(['a'])).rejects.toThrow(/registered already/);
  });
});

@JobHandler('listening', { concurrency: 20 })
class Listening implements Handler<{ then?: 'return' | 'throw' }, string> {
  static readonly running = new Map<string, Lease>();
  async handle(job: Job<{ then?: 'return' | 'throw' }>, lease: Lease): Promise<string> {
    Listening.running.set(job.id, lease);
    await new Promise<void>((resolve) => lease.signal.addEventListener('abort', () => resolve()));
    if (job.payload.then === 'throw') throw new NonRetryableError('stopped');
    if (job.payload.then === 'return') return 'all the same';
    lease.signal.throwIfAborted();
    return 'unreachable';
  }
}

const runningLease = (id: string): Promise<Lease> => eventually(() => Listening.running.get(id));

describe('stop requests', () => {
  it.each([
    ['cancel', 'cancelled', 'cancelled', 'cancelled'],
    ['pause', 'paused', 'paused', 'paused'],
  ])(
    'a %s request reaches the handler by a beat, with its reason, and decides where the job goes',
    async (request, reason, state, outcome) => {
      const app = await startLeaseApp(db, { handlers: [Listening] });
      const id = await app.jobs.enqueue(Listening, { then: 'throw' });
      const lease = await runningLease(id);
      await db.query(`UPDATE ${S}.leases SET ${request}_requested = true WHERE job_id = $1`, [id]);
      await eventually(() => lease.signal.aborted);
      expect(lease.signal.reason).toMatchObject({ reason });
      expect(() => lease.assertHeld()).toThrow(/was (cancelled|paused)/);
      await eventually(async () => (await app.jobs.get(id)).state === state, { state: () => app.jobs.get(id) });
      const job = await app.jobs.get(id);
      expect(job.outcome ?? job.runs![0]!.outcome).toBe(outcome);
      expect(job.attempt).toBe(state === 'paused' ? 0 : 1);
    },
  );

  it('a success that meets a cancel request wins', async () => {
    const app = await startLeaseApp(db, { handlers: [Listening] });
    const id = await app.jobs.enqueue(Listening, { then: 'return' });
    await runningLease(id);
    await db.query(`UPDATE ${S}.leases SET cancel_requested = true WHERE job_id = $1`, [id]);
    await eventually(async () => (await app.jobs.get(id)).state === 'completed', { state: () => app.jobs.get(id) });
    expect(await app.jobs.get(id)).toMatchObject({ result: 'all the same' });
  });

  it('R17 a handler that ends because its lease is lost is abandoned, never marked failed', async () => {
    const app = await startLeaseApp(db, { handlers: [Listening] });
    const id = await app.jobs.enqueue(Listening, {}, { maxAttempts: 1 });
    const lease = await runningLease(id);
    Listening.running.delete(id);
    await db.query(`SELECT * FROM ${S}.move_v1($1::json, false)`, [
      JSON.stringify([{ job: id, token: lease.token, worker: app.workers.currentId, event: 'crash', reason: 'test' }]),
    ]);
    await eventually(() => lease.signal.aborted);
    expect(lease.signal.reason).toMatchObject({ reason: 'lease-lost' });
    const next = await runningLease(id); // The same worker claims it anew, under another token.
    expect(BigInt(next.token)).toBeGreaterThan(BigInt(lease.token));
    await eventually(() => app.events.some((event) => event.type === 'job.refused' && event.token === lease.token));
    expect(await app.jobs.get(id)).toMatchObject({
      state: 'running',
      attempt: 1,
      crashes: 1,
      runs: [{ outcome: 'dead' }],
    });
    await db.query(`UPDATE ${S}.leases SET cancel_requested = true WHERE job_id = $1`, [id]);
  });

  it('F:A4 F:A8 F:A10 a passed deadline aborts the handler, gives the job up once, and a late outcome is refused; the slot shows as stuck', async () => {
    @JobHandler('deaf', { concurrency: 1 })
    class Deaf implements Handler {
      static end: () => void = () => undefined;
      static bodies = 0;
      async handle(_job: Job, lease: Lease): Promise<string> {
        Deaf.bodies++;
        await new Promise<void>((resolve) => (Deaf.end = resolve));
        return `attempt ${lease.attempt}`;
      }
    }
    const app = await startLeaseApp(db, { handlers: [Deaf] });
    const id = await app.jobs.enqueue(Deaf, {}, { deadline: '300ms', maxAttempts: 2 });
    await eventually(async () => (await app.jobs.get(id)).state === 'scheduled', { state: () => app.jobs.get(id) });
    expect(await app.jobs.get(id)).toMatchObject({
      attempt: 1,
      runs: [{ outcome: 'dead', error: { message: 'hard deadline exceeded' } }],
    });
    await eventually(async () => (await app.workers.get(app.workers.currentId))!.stuck === 1);
    await db.query(`UPDATE ${S}.waiting SET run_at = clock_timestamp() WHERE job_id = $1`, [id]);
    await eventually(async () => (await app.jobs.get(id)).state === 'ready');
    expect(Deaf.bodies).toBe(1); // The only slot is taken by the body that does not listen.
    Deaf.end();
    await eventually(() => app.events.some((event) => event.type === 'job.refused'));
    await eventually(() => Deaf.bodies === 2);
    Deaf.end();
    await eventually(async () => (await app.jobs.get(id)).state === 'completed', { state: () => app.jobs.get(id) });
    expect(await app.jobs.get(id)).toMatchObject({ result: 'attempt 2' });
  });
});

describe('self-fence', () => {
  it('R7 F:B6 cut off from the database for a TTL, all jobs are aborted before others may take them; the process comes back anew', async () => {
    const proxy = await TcpProxy.start(db.url);
    const app = await startLeaseApp(db, { handlers: [Listening], url: proxy.url(db.url) });
    const old = app.workers.currentId;
    const id = await app.jobs.enqueue(Listening, {});
    const lease = await runningLease(id);
    proxy.freeze();
    await eventually(() => lease.signal.aborted);
    const expired = await db.one<{ expired: boolean }>(
      `SELECT expires_at < clock_timestamp() AS expired FROM ${S}.workers WHERE id = $1`,
      [old],
    );
    expect(lease.signal.reason).toMatchObject({ reason: 'lease-lost' });
    expect(expired).toEqual({ expired: false });
    expect(() => lease.assertHeld()).toThrow();
    proxy.cut();
    proxy.thaw();
    await eventually(
      () =>
        app.events.filter(({ type }) => type === 'worker.registered').length >= 1 &&
        app.workers.current !== undefined &&
        app.workers.currentId !== old,
    );
    // What it gave back itself is charged nothing, and runs again.
    Listening.running.delete(id);
    await runningLease(id);
    expect(await db.one(`SELECT state, died_of FROM ${S}.workers WHERE id = $1`, [old])).toEqual({
      state: 'dead',
      died_of: 'self',
    });
    const job = await app.jobs.find({ state: 'running' });
    expect(job.jobs[0]).toMatchObject({ id, attempt: 1, crashes: 0, workerId: app.workers.currentId });
    await db.query(`UPDATE ${S}.leases SET cancel_requested = true WHERE job_id = $1`, [id]);
    await eventually(async () => (await db.query(`SELECT FROM ${S}.leases WHERE job_id = $1`, [id])).length === 0);
    await app.close();
    await proxy.close();
  });

  it('R7 declared dead, it aborts what it holds and never revives its old row', async () => {
    const app = await startLeaseApp(db, { handlers: [Listening] });
    const old = app.workers.currentId;
    const id = await app.jobs.enqueue(Listening, {});
    const lease = await runningLease(id);
    await db.query(
      `UPDATE ${S}.workers SET state = 'dead', died_of = 'lease', ended_at = clock_timestamp() WHERE id = $1`,
      [old],
    );
    await eventually(() => lease.signal.aborted);
    await eventually(() => app.workers.current !== undefined && app.workers.currentId !== old);
    expect(await db.one(`SELECT state FROM ${S}.workers WHERE id = $1`, [old])).toEqual({ state: 'dead' });
    Listening.running.delete(id);
    await runningLease(id);
    await db.query(`UPDATE ${S}.leases SET cancel_requested = true WHERE job_id = $1`, [id]);
  });

  it('a beat connection that is cut, and another that hangs for two beats, cost no worker its leases', async () => {
    const proxy = await TcpProxy.start(db.url);
    const app = await startLeaseApp(db, { handlers: [Listening], url: proxy.url(db.url) });
    const leader = await startLeaseApp(db, { options: { role: 'worker' } });
    const id = app.workers.currentId;
    const job = await app.jobs.enqueue(Listening, {});
    const lease = await runningLease(job);
    const beats = { applicationName: /^lh:/ };
    proxy.cut(beats);
    await app.heartbeat.nextBeat();
    proxy.freeze(beats);
    await eventually(() => app.heartbeat.silentMs > 1000);
    proxy.cut(beats);
    proxy.thaw(beats);
    await app.heartbeat.nextBeat();
    await eventually(() => leader.heartbeat.steadyMs > 3000); // A rescuer that was there all the time.
    expect(app.workers.currentId).toBe(id);
    expect(lease.signal.aborted).toBe(false);
    expect(await app.jobs.get(job)).toMatchObject({ state: 'running', crashes: 0, runs: [] });
    await db.query(`UPDATE ${S}.leases SET cancel_requested = true WHERE job_id = $1`, [job]);
    await app.close();
    await proxy.close();
  });
});

describe('clocks', () => {
  it('R8 F:H6 a process whose clock is an hour off, either way, changes nothing', async () => {
    const api = await startLeaseApp(db, { options: { role: 'producer' } });
    const [fast, slow] = await Promise.all(
      ['3600000', '-3600000'].map((offset) =>
        startWorkerProcess(db.url, {}, { FAKE_CLOCK_OFFSET_MS: offset, NODE_OPTIONS: `-r "${fixture('fake-clock')}"` }),
      ),
    );
    const later = await api.jobs.enqueue('scripted', {}, { delay: '10m' });
    const ids = await api.jobs.enqueueMany(
      'scripted',
      Array.from({ length: 8 }, () => ({ sleepMs: 3500 })),
    );
    for (const id of ids) {
      await eventually(async () => (await api.jobs.get(id)).state === 'completed', {
        timeoutMs: 30_000,
        state: () => api.jobs.get(id),
      });
      expect(await api.jobs.get(id)).toMatchObject({ attempt: 1, crashes: 0, runs: [] });
    }
    expect(await api.jobs.get(later)).toMatchObject({ state: 'scheduled' });
    for (const worker of [fast!, slow!]) {
      const info = await api.workers.get(worker.id);
      expect(info).toMatchObject({ state: 'live', active: true });
      expect(Math.abs(info!.clockSkewMs)).toBeGreaterThan(3_000_000); // To be seen in the registry.
    }
  });
});
