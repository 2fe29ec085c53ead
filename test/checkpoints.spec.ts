import {
  CheckpointError,
  type Handler,
  type Job,
  JobHandler,
  JobInterruptedError,
  type Lease,
  LeaseLostError,
} from '@leasehold/nestjs';
import {
  TcpProxy,
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
  db = await createTestDatabase({ name: 'checkpoints' });
});
afterEach(() => db.query(`TRUNCATE ${S}.jobs, ${S}.ready, ${S}.waiting, ${S}.leases, ${S}.finished, ${S}.checkpoints`));
afterAll(() => db.drop());

type Work = (job: Job<unknown, { next: number }>, lease: Lease) => unknown;
let work: Work;
@JobHandler('save.it', { backoff: 0, concurrency: 200 })
class SaveIt implements Handler<unknown, unknown, { next: number }> {
  handle(job: Job<unknown, { next: number }>, lease: Lease): unknown {
    return work(job, lease);
  }
}

describe('R23 checkpoints', () => {
  it('R23 the next run starts with what was saved last, however the run ended; the result is another thing', async () => {
    const seen: unknown[] = [];
    work = async ({ attempt, checkpoint }, lease) => {
      seen.push(checkpoint);
      await lease.checkpoint({ next: (checkpoint?.next ?? 0) + 10 });
      if (attempt === 1 && seen.length === 1) throw new Error('again');
      if (seen.length === 2) lease.snooze(1);
      return 'result';
    };
    const { jobs } = await startLeaseApp(db, { handlers: [SaveIt] });
    const id = await jobs.enqueue(SaveIt, null);
    const job = await untilState(jobs, id, 'completed');
    expect(seen).toEqual([null, { next: 10 }, { next: 20 }]);
    expect(job).toMatchObject({ result: 'result', saved: { checkpoint: { next: 30 }, version: 1 } });
  });

  it('R23 R12 a killed worker: its successor goes on from the checkpoint, under the same attempt', async () => {
    const seen: [number, unknown][] = [];
    const first = await startWorkerProcess(db.url);
    const hand = await startLeaseApp(db, { options: { role: 'worker' } });
    const id = await hand.jobs.enqueue('scripted', { save: { at: 5 }, gate: true });
    await first.started(id);
    await eventually(async () => (await hand.jobs.get(id)).saved);
    first.process.kill('SIGKILL');
    await untilState(hand.jobs, id, 'ready');
    await hand.close();
    @JobHandler('scripted')
    class Successor implements Handler {
      handle({ attempt, checkpoint }: Job): void {
        seen.push([attempt, checkpoint]);
      }
    }
    const second = await startLeaseApp(db, { handlers: [Successor] });
    await untilState(second.jobs, id, 'completed');
    expect(seen).toEqual([[1, { at: 5 }]]);
  });

  it('R17 a zombie saves nothing: not a checkpoint, not its progress, not a line', async () => {
    const lost = gate<Lease>();
    const go = gate();
    const errors: unknown[] = [];
    work = async (_job, lease) => {
      await lease.checkpoint({ next: 1 });
      lost.open(lease);
      await go.promise;
      lease.progress(99);
      lease.log('from the grave');
      await lease.checkpoint({ next: 666 }).catch((error: unknown) => errors.push(error));
    };
    const worker = await startLeaseApp(db, { handlers: [SaveIt] });
    const id = await worker.jobs.enqueue(SaveIt, null);
    const lease = await lost.promise;
    // Nobody tells it: the database has given the job to somebody else.
    await db.query(
      `UPDATE ${S}.leases SET token = nextval('${S}.tokens'), worker_id = 'somebody else' WHERE job_id = $1`,
      [id],
    );
    go.open();
    await eventually(() => errors.length === 1);
    expect(errors[0]).toBeInstanceOf(LeaseLostError);
    expect(lease.signal.reason).toBeInstanceOf(JobInterruptedError);
    expect((await worker.jobs.get(id)).saved).toMatchObject({ checkpoint: { next: 1 }, progress: null, log: [] });
  });

  it('R18 200 checkpoints race 200 stop requests: none fails, none is lost, and the expiry and deadline stay', async () => {
    const hand = await startHandWorker(db, ['by.hand']);
    const ids = await hand.jobs.enqueueMany('by.hand', Array<null>(200).fill(null));
    const claimed = await hand.claims.claim({ kinds: ['by.hand'], limit: 200 });
    const before = await db.query(
      `SELECT job_id::text AS id, deadline_at, token::text FROM ${S}.leases ORDER BY job_id`,
    );
    const saves = claimed.map(({ job }, i) =>
      db.query(`SELECT cancel, pause FROM ${S}.save_v1($1::json, false)`, [
        JSON.stringify([{ job: job.id, token: job.token, worker: job.workerId, version: 1, checkpoint: { i } }]),
      ]),
    );
    const requests = ids.map((id, i) => (i % 2 === 0 ? hand.jobs.cancel(id) : hand.jobs.pause(id)));
    expect((await Promise.all(saves)).every((rows) => rows.length === 1)).toBe(true);
    expect((await Promise.all(requests)).every(({ requested }) => requested)).toBe(true);
    expect(
      await db.query(`SELECT job_id::text AS id, deadline_at, token::text FROM ${S}.leases ORDER BY job_id`),
    ).toEqual(before);
    const kept = await db.one(
      `SELECT count(*) FILTER (WHERE cancel_requested)::int AS cancel, count(*) FILTER (WHERE pause_requested)::int AS pause,
         (SELECT count(*)::int FROM ${S}.checkpoints WHERE version = 1) AS saved FROM ${S}.leases`,
    );
    expect(kept).toEqual({ cancel: 100, pause: 100, saved: 200 });
    await hand.jobs.steerMany('forceCancel', {});
  });

  it('R7 a checkpoint is a boundary: it saves first, and then says why to stop', async () => {
    const began = gate<Lease>();
    const go = gate();
    let reason: unknown;
    work = async (_job, lease) => {
      began.open(lease);
      await go.promise;
      await lease.checkpoint({ next: 3 }).catch((error: unknown) => {
        reason = error;
        throw error;
      });
    };
    // Neither a notification nor a beat tells the handler: the save itself does.
    const worker = await startLeaseApp(db, {
      handlers: [SaveIt],
      options: { wakeUp: 'off', lease: { ttl: '90m', beat: '30m' } },
    });
    const id = await worker.jobs.enqueue(SaveIt, null);
    await began.promise;
    await worker.jobs.pause(id);
    go.open();
    const job = await untilState(worker.jobs, id, 'paused');
    expect(reason).toMatchObject({ reason: 'paused' });
    expect(job.saved).toMatchObject({ checkpoint: { next: 3 } });
  });

  it('saves of one moment go together, and the last of a job is what stands', async () => {
    work = async ({ id }, lease) => {
      const saves = [1, 2, 3, 4, 5].map((next) => lease.checkpoint({ next, id }));
      await Promise.all(saves);
    };
    const worker = await startLeaseApp(db, { handlers: [SaveIt] });
    const ids = await worker.jobs.enqueueMany(SaveIt, Array<null>(100).fill(null));
    for (const id of ids) {
      const job = await worker.jobs.waitFor(id);
      expect(job).toMatchObject({ state: 'completed', saved: { checkpoint: { next: 5, id } } });
    }
    const { writes } = await db.one<{ writes: number }>(
      `SELECT count(DISTINCT saved_at)::int AS writes FROM ${S}.checkpoints`,
    );
    expect(writes).toBeLessThan(60);
  });

  it('a save whose reply is lost is repeated, and resolves when it is there', async () => {
    const proxy = await TcpProxy.start(db.url);
    const cut = gate();
    work = async (_job, lease) => {
      await lease.checkpoint({ next: 1 });
      cut.open();
      await lease.checkpoint({ next: 2 });
      return 'through';
    };
    const worker = await startLeaseApp(db, { handlers: [SaveIt], url: proxy.url(db.url) });
    void cut.promise.then(() => proxy.cut());
    const id = await worker.jobs.enqueue(SaveIt, null);
    const job = await untilState((await startLeaseApp(db, { options: { role: 'producer' } })).jobs, id, 'completed');
    expect(job).toMatchObject({ result: 'through', saved: { checkpoint: { next: 2 } } });
    await worker.close();
    await proxy.close();
  });

  it('F:E1 what cannot be stored is the handler’s error, and the last checkpoint stands', async () => {
    const cycle: Record<string, unknown> = {};
    cycle.self = cycle;
    const errors: unknown[] = [];
    work = async (_job, lease) => {
      await lease.checkpoint({ next: 1, text: 'a\0b\ud800c' });
      for (const bad of [1n, cycle, undefined, 'x'.repeat(1_100_000), () => 1]) {
        await lease.checkpoint(bad).catch((error: unknown) => errors.push(error));
      }
      lease.log('a\0b\ud800c');
      lease.progress(1, 2, 'a\0b\ud800c');
      return null;
    };
    const { jobs } = await startLeaseApp(db, { handlers: [SaveIt] });
    const job = await untilState(jobs, await jobs.enqueue(SaveIt, null), 'completed');
    expect(errors).toHaveLength(5);
    for (const error of errors) expect(error).toBeInstanceOf(CheckpointError);
    expect(job.saved).toMatchObject({
      checkpoint: { next: 1, text: 'a\ufffdb\ufffdc' },
      progress: { current: 1, total: 2, message: 'a\ufffdb\ufffdc' },
      log: [{ line: 'a\ufffdb\ufffdc', attempt: 1 }],
    });
  });
});

describe('versions of checkpoints', () => {
  const kindOf = (version: number, upgrade?: (state: unknown, from: number) => unknown) => {
    @JobHandler('save.versioned', {
      checkpoint: { version, ...(upgrade ? { upgrade } : {}) },
      backoff: 0,
      maxAttempts: 2,
    })
    class Versioned implements Handler {
      async handle({ checkpoint }: Job, lease: Lease): Promise<unknown> {
        if (checkpoint !== null) return { version, checkpoint };
        await lease.checkpoint({ lines: 4 });
        lease.snooze(1);
      }
    }
    return Versioned;
  };
  /** A job that has saved a checkpoint in this version, and waits. */
  async function savedIn(version: number): Promise<string> {
    const kind = kindOf(version);
    const old = await startLeaseApp(db, { handlers: [kind] });
    const id = await old.jobs.enqueue(kind, null);
    await eventually(async () => (await old.jobs.get(id)).saved?.version === version);
    await old.jobs.pause(id).catch(() => undefined);
    await untilState(old.jobs, id, 'paused');
    await old.close();
    return id;
  }

  it('R23 an older one is upgraded by the kind', async () => {
    const id = await pausedIn(1);
    const next = await startLeaseApp(db, {
      handlers: [kindOf(3, (state, from) => ({ ...(state as object), from }))],
    });
    await next.jobs.resume(id);
    expect(await untilState(next.jobs, id, 'completed')).toMatchObject({
      result: { version: 3, checkpoint: { lines: 4, from: 1 } },
    });
  });

  it('R23 without an upgrade it fails, with the reason; it is not lost', async () => {
    const id = await pausedIn(1);
    const next = await startLeaseApp(db, { handlers: [kindOf(2)] });
    await next.jobs.resume(id);
    const job = await untilState(next.jobs, id, 'failed');
    expect(job.reason).toMatch(
      /has version 1 and the handler reads version 2: give its @JobHandler checkpoint.upgrade/,
    );
    expect(job.saved).toMatchObject({ version: 1, checkpoint: { lines: 4 } });
  });

  it('R23 a newer one, in the middle of a deploy, waits for a worker that can read it', async () => {
    const id = await pausedIn(2);
    const old = await startLeaseApp(db, { handlers: [kindOf(1)] });
    await old.jobs.resume(id);
    expect(await untilState(old.jobs, id, 'scheduled')).toMatchObject({ attempt: 0 });
    await old.close();
    const next = await startLeaseApp(db, { handlers: [kindOf(2)] });
    await next.jobs.runNow(id);
    expect(await untilState(next.jobs, id, 'completed')).toMatchObject({ result: { version: 2 } });
  });

  const pausedIn = savedIn;
});

describe('progress and log', () => {
  it('R17 they are coalesced, bounded, and there at the end', async () => {
    const go = gate();
    work = async (_job, lease) => {
      for (let i = 1; i <= 500; i++) {
        lease.progress(i, 500, `line ${i}`);
        lease.log(`line ${i} ${'x'.repeat(3000)}`);
      }
      await go.promise;
      lease.progress(500, 500, 'done');
      lease.log('the last');
    };
    const { jobs } = await startLeaseApp(db, { handlers: [SaveIt] });
    const id = await jobs.enqueue(SaveIt, null);
    const running = await eventually(async () => (await jobs.get(id)).saved);
    expect(running.progress).toEqual({ current: 500, total: 500, message: 'line 500' });
    expect(running.log).toHaveLength(200);
    expect(running.log[199]!.line).toMatch(/^line 500 x{1991}…$/);
    expect(running.log.every(({ at }) => at instanceof Date && !Number.isNaN(at.getTime()))).toBe(true);
    go.open();
    const done = await untilState(jobs, id, 'completed');
    expect(done.saved).toMatchObject({ progress: { message: 'done' } });
    expect(done.saved!.log.at(-1)!.line).toBe('the last');
    expect(done.saved!.log).toHaveLength(200);
  });

  it('R17 a run that ends waits for its own notes, not for all that others go on to write', async () => {
    const stop = gate();
    let over = false;
    void stop.promise.then(() => (over = true));
    work = async ({ payload }, lease) => {
      if (payload === 'ends') return lease.progress(1, 1, 'said at the end');
      // Two in turn, so that there is always one on the wire.
      const busy = async (): Promise<void> => {
        while (!over) await lease.checkpoint(1);
      };
      await Promise.all([busy(), busy()]);
    };
    const { jobs } = await startLeaseApp(db, { handlers: [SaveIt] });
    const goesOn = await jobs.enqueue(SaveIt, 'goes on');
    await untilState(jobs, goesOn, 'running');
    const ends = await jobs.enqueue(SaveIt, 'ends');
    const done = await untilState(jobs, ends, 'completed');
    expect(done.saved).toMatchObject({ progress: { message: 'said at the end' } });
    stop.open();
    await untilState(jobs, goesOn, 'completed');
  });

  it('what is no number is refused to the handler by name', async () => {
    work = (_job, lease) => lease.progress(NaN);
    const { jobs } = await startLeaseApp(db, { handlers: [SaveIt] });
    const id = await jobs.enqueue(SaveIt, null, { maxAttempts: 1 });
    expect((await untilState(jobs, id, 'failed')).reason).toMatch(/progress\(NaN, undefined\): .* finite numbers/);
  });
});

describe('lease.extend', () => {
  it('R2 moves the deadline, in the database and here, bounded by maxExtension; a passed one stays passed', async () => {
    const seen: (Date | null)[] = [];
    let error: unknown;
    work = async (_job, lease) => {
      seen.push(lease.deadlineAt, await lease.extend('10m'), await lease.extend('1s'), await lease.extend('100h'));
      await db.query(`UPDATE ${S}.leases SET deadline_at = clock_timestamp() - interval '1 ms'`);
      error = await lease.extend('5m').catch((e: unknown) => e);
    };
    const { jobs } = await startLeaseApp(db, { handlers: [SaveIt], options: { maxExtension: '1h' } });
    await untilState(jobs, await jobs.enqueue(SaveIt, null, { deadline: '1m' }), 'completed');
    const [first, ten, same, most] = seen.map((at) => at!.getTime());
    expect(ten! - first!).toBeGreaterThan(8.9 * 60_000);
    expect(ten! - first!).toBeLessThan(9.5 * 60_000);
    expect(same).toBe(ten);
    expect(most! - first!).toBeGreaterThan(58 * 60_000);
    expect(most! - first!).toBeLessThanOrEqual(59 * 60_000 + 100);
    expect(error).toBeInstanceOf(LeaseLostError);
  });

  it('R2 a job that extends in time is not ended by its own timer, one without a deadline has none', async () => {
    work = async (_job, lease) => {
      const before = lease.remainingMs;
      await lease.extend('1m');
      await new Promise((resolve) => setTimeout(resolve, Math.min(before, 1500) + 300));
      lease.assertHeld();
      return lease.remainingMs > 30_000;
    };
    const { jobs } = await startLeaseApp(db, { handlers: [SaveIt] });
    expect(await untilState(jobs, await jobs.enqueue(SaveIt, null, { deadline: '1s' }), 'completed')).toMatchObject({
      result: true,
    });
    work = async (_job, lease) => [await lease.extend('1m'), lease.remainingMs === Infinity];
    expect(await untilState(jobs, await jobs.enqueue(SaveIt, null, { deadline: 'off' }), 'completed')).toMatchObject({
      result: [null, true],
    });
  });
});
