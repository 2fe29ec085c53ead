import { RESCUE_TEXT, type LeaseOptions } from '@leasehold/nestjs';
import {
  type LeaseApp,
  TcpProxy,
  type TestDatabase,
  createTestDatabase,
  eventually,
  killProcesses,
  startLeaseApp,
  startWorkerProcess,
} from './support';

let db: TestDatabase;
let api: LeaseApp;
const S = '"leasehold"';

beforeAll(async () => {
  db = await createTestDatabase({ name: 'kill' });
});
afterAll(() => db.drop());
beforeEach(async () => {
  api = await startLeaseApp(db, { options: { role: 'producer' } });
});
afterEach(async () => {
  await killProcesses();
  await db.query(`WITH r AS (DELETE FROM ${S}.ready), w AS (DELETE FROM ${S}.waiting) DELETE FROM ${S}.leases`);
});

const ONLY = (way: 'session' | 'lease' | 'deadline'): Partial<LeaseOptions> => ({
  rescue: {
    session: way === 'session',
    lease: way === 'lease',
    deadline: way === 'deadline',
    every: '200ms',
    sessionEvery: '200ms',
    sessionGrace: '400ms',
  },
});

const finished = (id: string, state = 'completed') =>
  eventually(async () => (await api.jobs.get(id)).state === state && api.jobs.get(id), {
    timeoutMs: 30_000,
    state: async () => ({
      job: await api.jobs.get(id),
      workers: await api.workers.list(),
      leader: await api.leader.current(),
    }),
  });
const messages = (job: Awaited<ReturnType<typeof finished>>): unknown[] => job.runs!.map(({ error }) => error?.message);

describe('a killed process', () => {
  it('R9 R10 R16 is noticed by its session alone, long before its lease expires', async () => {
    // Default times: with 30 s of lease left, only the session can have told.
    const defaults: Partial<LeaseOptions> = {
      lease: {},
      leader: {},
      poll: '1s',
      rescue: { lease: false, deadline: false },
    };
    const victim = await startWorkerProcess(db.url, defaults);
    const id = await api.jobs.enqueue('scripted', { gate: true });
    await victim.started(id);
    const heir = await startWorkerProcess(db.url, defaults);
    victim.process.kill('SIGKILL');
    await heir.started(id);
    const dead = await api.workers.get(victim.id);
    expect(dead).toMatchObject({ state: 'dead', diedOf: 'session' });
    expect(dead!.expiresAt!.getTime()).toBeGreaterThan(dead!.endedAt!.getTime() + 15_000);
    heir.go(id);
    const job = await finished(id);
    expect(messages(job)).toEqual([RESCUE_TEXT.session]);
    expect(job).toMatchObject({ attempt: 1, workerId: heir.id });
  });

  it('R9 R10 is noticed by its lease alone, when sessions are not looked at', async () => {
    const victim = await startWorkerProcess(db.url, ONLY('lease'));
    const id = await api.jobs.enqueue('scripted', { gate: true });
    await victim.started(id);
    const heir = await startWorkerProcess(db.url, ONLY('lease'));
    victim.process.kill('SIGKILL');
    await heir.started(id, 30_000);
    heir.go(id);
    expect(messages(await finished(id))).toEqual([RESCUE_TEXT.lease]);
  });

  it('R9 R10 R5 a handler that blocks its process for ever, while the beats go on, is caught by its deadline alone', async () => {
    const stuck = await startWorkerProcess(db.url, ONLY('deadline'));
    const id = await api.jobs.enqueue('scripted', { blockMs: 600_000 }, { deadline: '2s', maxAttempts: 1 });
    await stuck.started(id);
    await startWorkerProcess(db.url, ONLY('deadline'));
    const job = await finished(id, 'failed');
    expect(job).toMatchObject({ outcome: 'dead', reason: `${RESCUE_TEXT.deadline} (attempt 1 of 1)` });
    // Its process was renewed all the while, for longer than its TTL.
    expect(await api.workers.get(stuck.id)).toMatchObject({ state: 'live', active: true });
    expect((await api.workers.get(stuck.id))!.loopBlockedMs).toBeGreaterThan(1000); // F:B2: to be seen in the registry.
  });

  it('F:C13 F:C10 SIGKILL and SIGTERM both give the job back to be run', async () => {
    for (const signal of ['SIGKILL', 'SIGTERM'] as const) {
      const options: Partial<LeaseOptions> = { shutdown: { timeout: 0, grace: '1s' } };
      const victim = await startWorkerProcess(db.url, options);
      const id = await api.jobs.enqueue('scripted', { sleepMs: 60_000 });
      await victim.started(id);
      const heir = await startWorkerProcess(db.url, options);
      victim.process.kill(signal);
      expect(await heir.started(id)).toMatchObject({ attempt: 1 });
      heir.process.kill('SIGKILL');
      await heir.process.exited;
      await victim.process.exited;
      await db.query(`DELETE FROM ${S}.leases`);
    }
  });
});

describe('a frozen process', () => {
  it('R7 R17 loses its jobs to others; when it wakes, its late writes are refused and it comes back under a new id', async () => {
    const frozen = await startWorkerProcess(db.url);
    const id = await api.jobs.enqueue('scripted', { gate: true, deaf: true });
    const { token } = await frozen.started(id);
    frozen.process.kill('SIGSTOP');
    const heir = await startWorkerProcess(db.url);
    const second = await heir.started(id, 30_000);
    expect(BigInt(second.token)).toBeGreaterThan(BigInt(token));
    frozen.process.kill('SIGCONT');
    frozen.go(id); // Its handler goes on as if nothing had happened, and returns.
    const refused = await frozen.event('job.refused');
    expect(refused).toMatchObject({ jobId: id, token });
    const { workerId } = await frozen.event('worker.fenced');
    expect(workerId).toBe(frozen.id);
    expect((await frozen.event('worker.registered')).workerId).not.toBe(frozen.id);
    heir.go(id);
    const job = await finished(id);
    expect(job).toMatchObject({ workerId: heir.id, token: second.token });
    expect(messages(job)).toEqual([RESCUE_TEXT.lease]); // Its session was there all the time.
    // Back at work under its new name.
    heir.process.kill('SIGKILL');
    const next = await api.jobs.enqueue('scripted', {});
    await frozen.started(next);
    expect((await api.workers.get(frozen.id))!.state).toBe('dead');
  });
});

describe('a blocked event loop', () => {
  it('R5 for three TTLs keeps its lease: the beat has its own thread and connection', async () => {
    const quick: Partial<LeaseOptions> = { lease: { ttl: '1200ms', beat: '400ms' } };
    const busy = await startWorkerProcess(db.url, quick);
    const id = await api.jobs.enqueue('scripted', { blockMs: 3600 });
    await busy.started(id);
    const other = await startWorkerProcess(db.url, quick);
    const job = await finished(id);
    expect(job).toMatchObject({ attempt: 1, crashes: 0, runs: [], workerId: busy.id });
    expect(other.process.hasExited).toBe(false);
  });

  it('beyond lease.maxBlocked is not renewed any more', async () => {
    const options: Partial<LeaseOptions> = { lease: { ttl: '1200ms', beat: '400ms', maxBlocked: '1500ms' } };
    const busy = await startWorkerProcess(db.url, options);
    const id = await api.jobs.enqueue('scripted', { blockMs: 60_000 }, { maxCrashes: 1 });
    await busy.started(id);
    await startWorkerProcess(db.url, options);
    expect(await finished(id, 'failed')).toMatchObject({ outcome: 'dead' });
  });
});

describe('a job that kills its process', () => {
  it('R13 F:D1 ends within its budget and is named, and no neighbour is failed for it', async () => {
    let over = false;
    const options: Partial<LeaseOptions> = { suspects: { patience: '500ms' } };
    const supervise = async (): Promise<void> => {
      while (!over) {
        const worker = await startWorkerProcess(db.url, options);
        await worker.process.exited;
      }
    };
    const fleet = [supervise(), supervise()];
    const innocent = await api.jobs.enqueueMany(
      'scripted',
      Array.from({ length: 20 }, () => ({ sleepMs: 1000 })),
    );
    const poison = await api.jobs.enqueue('scripted', { kill: true }, { priority: -1 });
    const job = await finished(poison, 'failed');
    expect(job.reason).toMatch(/crashed its worker 3 times, the last time running alone; maxCrashes 3/);
    expect(job.runs!.filter(({ outcome }) => outcome === 'dead')).toHaveLength(2); // And the last one stands in `finished`.
    for (const id of innocent) expect(await finished(id)).toMatchObject({ attempt: 1 });
    over = true;
    await killProcesses();
    await Promise.allSettled(fleet);
  });
});

describe('the leader', () => {
  type Leader = Awaited<ReturnType<typeof startWorkerProcess>>;

  const rescuedWhen = async (fail: (leader: Leader, proxy: TcpProxy) => Promise<void>): Promise<void> => {
    const proxy = await TcpProxy.start(db.url);
    const leader = await startWorkerProcess(proxy.url(db.url), { queues: ['of the leader'] });
    await leader.event('leader.acquired');
    const workers = [
      await startWorkerProcess(db.url, { queues: ['default'] }),
      await startWorkerProcess(db.url, { queues: ['default'] }),
    ];
    const holder = (id: string): Promise<Leader> =>
      eventually(
        async () => {
          const { state, workerId } = await api.jobs.get(id);
          return state === 'running' && workers.find((worker) => worker.id === workerId && !worker.process.hasExited);
        },
        { timeoutMs: 30_000, state: async () => ({ job: await api.jobs.get(id), leader: await api.leader.current() }) },
      );
    const id = await api.jobs.enqueue('scripted', { gate: true });
    const victim = await holder(id);
    await victim.started(id);
    await fail(leader, proxy);
    victim.process.kill('SIGKILL');
    await victim.process.exited;
    const heir = await holder(id);
    await heir.started(id);
    heir.go(id);
    await finished(id);
    expect((await api.leader.current()).workerId).toBe(heir.id);
    leader.process.kill('SIGKILL');
    await leader.process.exited;
    await proxy.close();
  };

  it('R15 frozen: another leads, and rescues', () => rescuedWhen(async (leader) => leader.process.kill('SIGSTOP')));

  it('R15 F:G6 black-holed: another leads, and rescues', () =>
    rescuedWhen(async (_leader, proxy) => {
      proxy.freeze();
    }));

  it('R15 blocked by one of its own handlers: another leads, and rescues', () =>
    rescuedWhen(async (leader) => {
      const id = await api.jobs.enqueue('scripted', { blockMs: 60_000 }, { queue: 'of the leader' });
      await leader.started(id);
    }));
});
