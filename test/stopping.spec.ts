import { setTimeout as sleep } from 'node:timers/promises';
import {
  type Handler,
  type Job,
  JobHandler,
  JobInterruptedError,
  type Lease,
  LeaseLostError,
  QueuesService,
} from '@leasehold/nestjs';
import {
  type Gate,
  RowGate,
  type TestDatabase,
  createTestDatabase,
  eventually,
  gate,
  startHandWorker,
  startLeaseApp,
} from './support';
import { startWorkerProcess } from './support/fleet';
import { untilState } from './support/job-states';

const S = '"leasehold"';
let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'stopping' });
});
afterEach(() => db.query(`TRUNCATE ${S}.jobs, ${S}.ready, ${S}.waiting, ${S}.leases, ${S}.finished, ${S}.queues`));
afterAll(() => db.drop());

/** Runs until its signal aborts, and ends with what that says. */
let begun: Gate<Lease>;
@JobHandler('stop.patient')
class Patient implements Handler<unknown, string> {
  async handle(job: Job, lease: Lease): Promise<string> {
    begun.open(lease);
    if ((job.payload as { save?: unknown } | null)?.save !== undefined) {
      await lease.checkpoint((job.payload as { save: unknown }).save);
    }
    await sleep(60_000, undefined, { signal: lease.signal });
    return 'never';
  }
}

/** Hears of nothing. */
let release: Gate;
@JobHandler('stop.deaf')
class Deaf implements Handler<unknown, string> {
  async handle(_job: Job, lease: Lease): Promise<string> {
    begun.open(lease);
    await release.promise;
    return 'done all the same';
  }
}

beforeEach(() => {
  begun = gate<Lease>();
  release = gate();
});

describe('requests to stop', () => {
  it('R21 a cancel is on the lease before it is answered, reaches the handler by NOTIFY, and ends the job', async () => {
    // The next beat is half an hour away: only the notification can be it.
    const worker = await startLeaseApp(db, {
      handlers: [Patient],
      options: { lease: { ttl: '90m', beat: '30m' }, wakeUp: 'notify' },
    });
    const other = await startLeaseApp(db, { options: { role: 'producer' } });
    const id = await other.jobs.enqueue('stop.patient', null);
    const lease = await begun.promise;
    await worker.jobs.find();
    expect(await other.jobs.cancel(id, { reason: 'the customer left' })).toMatchObject({
      changed: true,
      requested: true,
      from: 'running',
      state: 'running',
    });
    const job = await other.jobs.waitFor(id);
    expect(job).toMatchObject({ state: 'cancelled', outcome: 'cancelled', reason: 'the customer left' });
    expect(lease.signal.reason).toMatchObject({ reason: 'cancelled', jobId: id });
    expect(worker.events.map(({ type }) => type)).toContain('job.stopped');
  });

  it('R21 F:I4 a notification that is lost costs a beat, no more', async () => {
    const worker = await startLeaseApp(db, { handlers: [Patient], options: { wakeUp: 'off' } });
    const id = await worker.jobs.enqueue(Patient, null);
    await begun.promise;
    await worker.jobs.cancel(id);
    expect(await untilState(worker.jobs, id, 'cancelled')).toMatchObject({ attempt: 1, runs: [] });
  });

  it('R21 R23 a pause keeps the checkpoint and spends nothing; resume goes on from there', async () => {
    const worker = await startLeaseApp(db, { handlers: [Patient] });
    const id = await worker.jobs.enqueue(Patient, { save: { done: 12 } });
    await begun.promise;
    await eventually(async () => (await worker.jobs.get(id)).saved);
    await worker.jobs.pause(id);
    const paused = await untilState(worker.jobs, id, 'paused');
    expect(paused).toMatchObject({ attempt: 0, runs: [{ outcome: 'paused', attempt: 1 }], pauseRequested: false });
    begun = gate<Lease>();
    await worker.jobs.resume(id);
    await begun.promise;
    expect((await worker.jobs.get(id)).saved).toMatchObject({ checkpoint: { done: 12 } });
    await worker.jobs.cancel(id);
    await worker.jobs.waitFor(id);
  });

  it('R21 a pause that is withdrawn before the handler has heard of it is as if it had never been', async () => {
    const worker = await startLeaseApp(db, { handlers: [Deaf] });
    const id = await worker.jobs.enqueue(Deaf, null);
    await begun.promise;
    await worker.jobs.pause(id);
    expect(await worker.jobs.resume(id)).toMatchObject({ changed: true, from: 'running', state: 'running' });
    release.open();
    expect(await worker.jobs.waitFor(id)).toMatchObject({ state: 'completed', result: 'done all the same' });
  });

  it('F:L1 a success that comes first wins over a cancel, and the job says so', async () => {
    const worker = await startLeaseApp(db, { handlers: [Deaf] });
    const id = await worker.jobs.enqueue(Deaf, null);
    await begun.promise;
    expect(await worker.jobs.cancel(id)).toMatchObject({ requested: true });
    release.open();
    expect(await worker.jobs.waitFor(id)).toMatchObject({
      state: 'completed',
      reason: 'it completed before it saw the cancel request',
    });
    await expect(worker.jobs.cancel(id)).rejects.toMatchObject({ code: 'ILLEGAL_TRANSITION', state: 'completed' });
  });

  it('F:L1 cancels at any moment of short jobs: the answer and the final state agree', async () => {
    @JobHandler('stop.short', { concurrency: 20 })
    class Short implements Handler {
      async handle(_job: Job, lease: Lease): Promise<void> {
        await sleep(Math.random() * 8, undefined, { signal: lease.signal });
      }
    }
    const worker = await startLeaseApp(db, { handlers: [Short] });
    const ids = await worker.jobs.enqueueMany(Short, Array<null>(1000).fill(null));
    const answers = new Map<string, string>();
    await Promise.all(
      ids.map(async (id, i) => {
        await sleep(i / 3 + Math.random() * 20);
        answers.set(
          id,
          await worker.jobs.cancel(id).then(
            ({ requested }) => (requested ? 'requested' : 'cancelled'),
            (error: { state?: string }) => `refused: ${error.state}`,
          ),
        );
      }),
    );
    const wrong: string[] = [];
    const seen = new Set<string>();
    for (const id of ids) {
      const { state, reason } = await worker.jobs.waitFor(id);
      const answer = answers.get(id)!;
      seen.add(`${answer} ${state}`);
      const agrees =
        answer === 'cancelled'
          ? state === 'cancelled'
          : answer === 'refused: completed'
            ? state === 'completed' && reason === null
            : answer === 'requested' && (state === 'cancelled' || /before it saw the cancel/.test(reason ?? ''));
      if (!agrees) wrong.push(`${id}: ${answer}, ${state}, ${reason}`);
    }
    expect(wrong).toEqual([]);
    expect(seen.size).toBeGreaterThan(1);
  });

  it('R21 F:D2 a request survives the death of the worker: cancelled is not run again, paused is kept', async () => {
    const worker = await startWorkerProcess(db.url);
    const watcher = await startLeaseApp(db, { options: { role: 'worker' } });
    const [cancel, pause] = (await watcher.jobs.enqueueMany('scripted', [
      { gate: true, deaf: true },
      { gate: true, deaf: true },
    ])) as [string, string];
    await Promise.all([worker.started(cancel), worker.started(pause)]);
    await watcher.jobs.cancel(cancel, { reason: 'wanted' });
    await watcher.jobs.pause(pause);
    worker.process.kill('SIGKILL');
    expect(await untilState(watcher.jobs, cancel, 'cancelled')).toMatchObject({ outcome: 'dead', reason: 'wanted' });
    expect(await untilState(watcher.jobs, pause, 'paused')).toMatchObject({ crashes: 1, attempt: 0 });
  });

  it('F:D2 a job that kills its workers is cancelled while it runs, and between two crashes', async () => {
    const jobs = (await startLeaseApp(db, { options: { role: 'worker' } })).jobs;
    const id = await jobs.enqueue('scripted', { kill: true }, { maxCrashes: 20 });
    const first = await startWorkerProcess(db.url);
    await first.started(id);
    await untilState(jobs, id, 'ready');
    expect(await jobs.cancel(id)).toMatchObject({ from: 'ready', state: 'cancelled' });
    expect(await jobs.get(id)).toMatchObject({ crashes: 1 });
  });

  it('R17 R21 force-cancel takes the lease from a handler that hears nothing: what it says later is refused', async () => {
    const worker = await startLeaseApp(db, { handlers: [Deaf] });
    const id = await worker.jobs.enqueue(Deaf, null);
    const lease = await begun.promise;
    expect(await worker.jobs.forceCancel(id, { reason: 'enough' })).toMatchObject({
      changed: true,
      state: 'cancelled',
    });
    expect(await worker.jobs.get(id)).toMatchObject({ state: 'cancelled', reason: 'enough', outcome: 'cancelled' });
    await expect(lease.checkpoint({ late: true })).rejects.toThrow(/lease|cancelled/);
    release.open();
    await eventually(() => worker.events.some(({ type }) => type === 'job.refused'));
    expect(await worker.jobs.get(id)).toMatchObject({ state: 'cancelled', result: null, saved: null });
  });

  it('R21 cancel outranks pause, and a job that was asked for both is cancelled', async () => {
    const worker = await startLeaseApp(db, { handlers: [Patient] });
    const hand = await startHandWorker(db, ['by.hand']);
    const id = await hand.jobs.enqueue('by.hand', null);
    const [claimed] = await hand.claims.claim({ kinds: ['by.hand'], limit: 1 });
    await worker.jobs.pause(id);
    await worker.jobs.cancel(id);
    await eventually(() => claimed?.signal.aborted);
    expect(claimed?.signal.reason).toBeInstanceOf(JobInterruptedError);
    await hand.settle.stopped(claimed!.job);
    expect(await worker.jobs.get(id)).toMatchObject({ state: 'cancelled' });
    await expect(hand.settle.complete(claimed!.job)).rejects.toThrow(LeaseLostError);
  });

  it('R21 a lease that somebody keeps locked: contended, and the others of the lot are done', async () => {
    const hand = await startHandWorker(db, ['by.hand']);
    const ids = await hand.jobs.enqueueMany('by.hand', [1, 2, 3]);
    await hand.claims.claim({ kinds: ['by.hand'], limit: 3 });
    const held = await RowGate.hold(db, `SELECT FROM ${S}.leases WHERE job_id = $1 FOR UPDATE`, [ids[1]]);
    await expect(hand.jobs.cancel(ids[1]!)).rejects.toMatchObject({ code: 'JOB_CONTENDED', jobId: ids[1] });
    expect(await hand.jobs.steerMany('cancel', { kind: 'by.hand' })).toMatchObject({ requested: 2, skipped: 1 });
    await held.release();
    expect(await hand.jobs.cancel(ids[1]!)).toMatchObject({ requested: true });
  });

  it('a list of requests that is too long for one notification brings a beat instead', async () => {
    const hand = await startHandWorker(db, ['by.hand'], { options: { lease: { ttl: '90m', beat: '30m' } } });
    // A producer hears nothing before it listens.
    const listening = hand.jobs
      .waitFor(await hand.jobs.enqueue('nobody', null), { timeout: 20_000 })
      .catch(() => undefined);
    await hand.jobs.enqueueMany('by.hand', Array<null>(400).fill(null));
    const claimed = await hand.claims.claim({ kinds: ['by.hand'], limit: 400 });
    await eventually(
      async () =>
        (
          await db.query(
            `SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'leasehold main'`,
          )
        ).length,
    );
    await sleep(200);
    expect(await hand.jobs.steerMany('cancel', { kind: 'by.hand' }, { limit: 400 })).toMatchObject({ requested: 400 });
    await eventually(() => claimed.every(({ signal }) => signal.aborted), {
      state: () => claimed.filter(({ signal }) => signal.aborted).length,
    });
    await hand.jobs.steerMany('forceCancel', {});
    await listening;
  });
});

describe('whole queues', () => {
  it('a paused queue starts nothing, survives a restart, and goes on when resumed; the others are not held up', async () => {
    const ran: string[] = [];
    @JobHandler('stop.queued')
    class Queued implements Handler<string> {
      handle({ payload }: Job<string>): void {
        ran.push(payload);
      }
    }
    const first = await startLeaseApp(db, { handlers: [Queued] });
    expect(await first.app.get(QueuesService).pause('slow')).toBe(true);
    expect(await first.app.get(QueuesService).pause('slow')).toBe(false);
    await first.jobs.enqueue(Queued, 'slow 1', { queue: 'slow' });
    await first.jobs.waitFor(await first.jobs.enqueue(Queued, 'other 1'));
    await first.close();
    const second = await startLeaseApp(db, { handlers: [Queued] });
    const queues = second.app.get(QueuesService);
    expect(await queues.get('slow')).toMatchObject({ paused: true });
    await second.jobs.enqueue(Queued, 'slow 2', { queue: 'slow' });
    await second.jobs.waitFor(await second.jobs.enqueue(Queued, 'other 2'));
    expect(ran).toEqual(['other 1', 'other 2']);
    expect(await queues.resume('slow')).toBe(true);
    expect(await queues.resume('slow')).toBe(false);
    await eventually(() => ran.length === 4);
    expect(ran.slice(2)).toEqual(['slow 1', 'slow 2']);
    expect(await queues.list()).toMatchObject([{ name: 'slow', paused: false, maxRunning: null }]);
    await expect(queues.pause('')).rejects.toMatchObject({ code: 'INVALID_OPTION' });
    await expect(queues.configure('slow', { maxRuning: 1 } as never)).rejects.toThrow(/did you mean 'maxRunning'/);
  });
});
