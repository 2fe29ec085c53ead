import { setTimeout as sleep } from 'node:timers/promises';
import { type Handler, type Job, JobHandler, type JobHandlerOptions, QueuesService } from '@leasehold/nestjs';
import type { Type } from '@nestjs/common';
import {
  type LeaseApp,
  RowGate,
  type TestDatabase,
  createTestDatabase,
  eventually,
  startHandWorker,
  startLeaseApp,
} from './support';
import { untilState } from './support/job-states';

const S = '"leasehold"';
let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'limits' });
});
afterEach(() =>
  db.query(`TRUNCATE ${S}.jobs, ${S}.ready, ${S}.waiting, ${S}.leases, ${S}.finished, ${S}.queues, ${S}.workers`),
);
afterAll(() => db.drop());

/** What ran at the same moment, at most, by a name that each job gives. */
class Tally {
  private readonly now = new Map<string, number>();
  readonly most = new Map<string, number>();
  ran = 0;
  async run(name: string, ms: number): Promise<void> {
    this.ran++;
    const count = (this.now.get(name) ?? 0) + 1;
    this.now.set(name, count);
    this.most.set(name, Math.max(count, this.most.get(name) ?? 0));
    await sleep(ms);
    this.now.set(name, this.now.get(name)! - 1);
  }
}

function tallied(kind: string, tally: Tally, options: JobHandlerOptions, name = (job: Job) => job.kind): Type<Handler> {
  @JobHandler(kind, { concurrency: 50, ...options })
  class Tallied implements Handler {
    async handle(job: Job): Promise<void> {
      await tally.run(name(job), 3 + Math.random() * 6);
    }
  }
  return Tallied;
}

const allDone = (count: number, tally: Tally) =>
  eventually(() => tally.ran >= count, {
    timeoutMs: 40_000,
    state: async () => ({
      ran: tally.ran,
      waiting: await db.query(
        `SELECT reason, blocked_on, concurrency_key, count(*)::int FROM ${S}.waiting GROUP BY 1, 2, 3`,
      ),
      ready: await db.query(`SELECT count(*)::int FROM ${S}.ready`),
    }),
  });

describe('limits of the fleet', () => {
  it('R3 of a kind: never more than so many on all workers together, and the others are not held up', async () => {
    const tally = new Tally();
    const limited = tallied('lim.kind', tally, { fleetConcurrency: 3 });
    const free = tallied('lim.free', tally, {});
    const workers = await Promise.all([1, 2, 3].map(() => startLeaseApp(db, { handlers: [limited, free] })));
    await workers[0]!.jobs.enqueueMany(limited, Array<null>(90).fill(null));
    await workers[0]!.jobs.enqueueMany(free, Array<null>(150).fill(null));
    await allDone(240, tally);
    expect(tally.most.get('lim.kind')).toBeLessThanOrEqual(3);
    expect(tally.most.get('lim.kind')).toBeGreaterThan(1);
    expect(tally.most.get('lim.free')).toBeGreaterThan(3);
  });

  it('R3 of a queue, over all its kinds, set for the fleet in the database', async () => {
    const tally = new Tally();
    const kinds = ['lim.a', 'lim.b'].map((kind) => tallied(kind, tally, { queue: 'narrow' }, (job) => job.queue));
    const workers = await Promise.all([1, 2, 3].map(() => startLeaseApp(db, { handlers: kinds })));
    await workers[0]!.app.get(QueuesService).configure('narrow', { maxRunning: 4 });
    for (const kind of kinds) await workers[0]!.jobs.enqueueMany(kind, Array<null>(60).fill(null));
    await allDone(120, tally);
    expect(tally.most.get('narrow')).toBeLessThanOrEqual(4);
    expect(tally.most.get('narrow')).toBeGreaterThan(2);
  });

  it('of a key of the payload: each key its own places, over kinds and queues, and blocked ones leave the lane', async () => {
    const tally = new Tally();
    const key = ({ payload }: Job) => (payload as { tenant: string }).tenant;
    const options = { concurrencyKey: ({ tenant }: { tenant: string }) => tenant, concurrencyPerKey: 2 };
    const kinds = [
      tallied('lim.k1', tally, options, key),
      tallied('lim.k2', tally, { ...options, queue: 'other' }, key),
    ];
    const workers = await Promise.all([1, 2, 3].map(() => startLeaseApp(db, { handlers: kinds })));
    const payloads = Array.from({ length: 120 }, (_, i) => ({ tenant: `t${i % 4}` }));
    for (const kind of kinds) await workers[0]!.jobs.enqueueMany(kind, payloads as never);
    await allDone(240, tally);
    for (const tenant of ['t0', 't1', 't2', 't3']) {
      expect([tenant, tally.most.get(tenant)]).toEqual([tenant, 2]);
    }
    await eventually(async () => (await db.query(`SELECT FROM ${S}.leases`)).length === 0);
    expect(await db.query(`SELECT FROM ${S}.waiting`)).toEqual([]);
  });

  it('R12 R15 a lost worker gives its places back by being rescued', async () => {
    const hand = await startHandWorker(db, ['lim.lost']);
    const other = await startHandWorker(db, ['lim.lost']);
    const ids = await hand.jobs.enqueueMany('lim.lost', [1, 2, 3], { concurrencyKey: 'one' });
    const claimed = await hand.claims.claim({ kinds: ['lim.lost'], limit: 3 });
    expect(claimed.map(({ job }) => job.id)).toEqual([ids[0]]);
    expect(await other.claims.claim({ kinds: ['lim.lost'], limit: 3 })).toEqual([]);
    expect((await hand.jobs.get(ids[1]!)).blockedOn).toBe('limit');
    await hand.heartbeat.stop();
    await db.query(`UPDATE ${S}.workers SET expires_at = clock_timestamp() - interval '1 h' WHERE id = $1`, [
      claimed[0]!.job.workerId,
    ]);
    await other.rescue.rescueExpired({ unguarded: true });
    const next = await other.claims.claim({ kinds: ['lim.lost'], limit: 3 });
    expect(next.map(({ job }) => job.id)).toEqual([ids[0]]);
    await other.settle.complete(next[0]!.job);
    expect((await other.claims.claim({ kinds: ['lim.lost'], limit: 3 })).map(({ job }) => job.id)).toEqual([ids[1]]);
  });

  it('a blocked key costs a claim nothing: its jobs are not in the lane, and what is behind them starts', async () => {
    const hand = await startHandWorker(db, ['lim.cost']);
    await hand.jobs.enqueueMany('lim.cost', Array<null>(900).fill(null), { concurrencyKey: 'busy' });
    const free = await hand.jobs.enqueue('lim.cost', 'free');
    expect(await hand.claims.claim({ kinds: ['lim.cost'], limit: 10 })).toHaveLength(1);
    // All of a full key leave the lane at once, not those alone that a claim has met.
    const lanes = await db.one(
      `SELECT (SELECT count(*)::int FROM ${S}.ready) AS ready, (SELECT count(*)::int FROM ${S}.waiting WHERE blocked_on = 'limit') AS parked`,
    );
    expect(lanes).toEqual({ ready: 1, parked: 899 });
    const claimed = await hand.claims.claim({ kinds: ['lim.cost'], limit: 10 });
    expect(claimed.map(({ job }) => job.id)).toEqual([free]);
  });

  it('a ready job that nobody can claim holds no place: of a kind without a worker, or in a paused queue', async () => {
    const hand = await startHandWorker(db, ['lim.held']);
    await hand.app.get(QueuesService).pause('still');
    const place = { concurrencyKey: 'h' };
    const [first, second, third] = await hand.jobs.enqueueMany('lim.held', [1, 2, 3], place);
    const [running] = await hand.claims.claim({ kinds: ['lim.held'], limit: 3 });
    expect(running!.job.id).toBe(first);
    await hand.jobs.enqueue('lim.nobody', null, place);
    await hand.jobs.enqueue('lim.held', null, { ...place, queue: 'still' });
    await hand.settle.complete(running!.job);
    expect((await hand.jobs.get(second!)).state).toBe('ready');
    expect((await hand.jobs.get(third!)).blockedOn).toBe('limit');
  });

  it('a full key’s jobs of a paused queue do not stand before those that can run', async () => {
    const hand = await startHandWorker(db, ['lim.front']);
    const place = { concurrencyKey: 'f' };
    await hand.app.get(QueuesService).pause('still');
    await hand.jobs.enqueueMany('lim.front', Array<null>(50).fill(null), { ...place, queue: 'still' });
    await hand.app.get(QueuesService).pause('later');
    const [first, second] = await hand.jobs.enqueueMany('lim.front', [1, 2], place);
    const [running] = await hand.claims.claim({ kinds: ['lim.front'], limit: 3 });
    expect(running!.job.id).toBe(first);
    // What was parked before its queue was paused neither.
    await db.query(
      `WITH d AS (DELETE FROM ${S}.ready WHERE queue = 'still' RETURNING *)
       INSERT INTO ${S}.waiting (job_id, priority, reason, blocked_on, queue, kind, concurrency_key)
       SELECT job_id, priority, 'blocked', 'limit', queue, kind, concurrency_key FROM d`,
    );
    await hand.settle.complete(running!.job);
    expect((await hand.jobs.get(second!)).state).toBe('ready');
  });

  it('they are promoted first in, first out, the more urgent ones before', async () => {
    const hand = await startHandWorker(db, ['lim.order']);
    const enqueue = (payload: number, priority = 0) =>
      hand.jobs.enqueue('lim.order', payload, { concurrencyKey: 'o', priority });
    for (const payload of [1, 2, 3, 4]) await enqueue(payload);
    await enqueue(5, -1);
    const order: unknown[] = [];
    for (let i = 0; i < 5; i++) {
      const [claimed] = await hand.claims.claim({ kinds: ['lim.order'], limit: 5 });
      order.push(claimed!.job.payload);
      await hand.settle.complete(claimed!.job);
    }
    expect(order).toEqual([5, 1, 2, 3, 4]);
  });

  it('a job that waits for its retry gives its place to another, and gets one again when it is due', async () => {
    const hand = await startHandWorker(db, ['lim.retry']);
    const [a, b] = await hand.jobs.enqueueMany('lim.retry', ['a', 'b'], { concurrencyKey: 'r' });
    const [first] = await hand.claims.claim({ kinds: ['lim.retry'], limit: 2 });
    expect(first!.job.id).toBe(a);
    await hand.settle.fail(first!.job, new Error('later'), 60_000);
    const [second] = await hand.claims.claim({ kinds: ['lim.retry'], limit: 2 });
    expect(second!.job.id).toBe(b);
    await hand.jobs.runNow(a!);
    expect(await hand.claims.claim({ kinds: ['lim.retry'], limit: 2 })).toEqual([]);
    await hand.settle.complete(second!.job);
    expect((await hand.claims.claim({ kinds: ['lim.retry'], limit: 2 }))[0]!.job.id).toBe(a);
  });

  it('R1 two claims at the same moment do not share the last place: the second counts after the first has committed', async () => {
    const [one, two] = await Promise.all([startHandWorker(db, ['lim.race']), startHandWorker(db, ['lim.race'])]);
    await one.jobs.enqueueMany('lim.race', [1, 2, 3, 4], { concurrencyKey: 'race' });
    // The first holds its claim open: its lease is there, and not committed.
    const gate = await RowGate.hold(
      db,
      `SELECT jobs FROM ${S}.step_v1($1, '{}', '{}', null, 1, 1, '{default}', '{lim.race}', '{1}', 0, 1000000)`,
      [one.workers.currentId],
    );
    expect(gate.rows[0]!.jobs).not.toBeNull();
    expect(await two.claims.claim({ kinds: ['lim.race'], limit: 4 })).toEqual([]);
    await gate.release();
    expect(await two.claims.claim({ kinds: ['lim.race'], limit: 4 })).toEqual([]);
    expect((await db.query(`SELECT FROM ${S}.leases`)).length).toBe(1);
  });

  it('a settle that frees a place while a claim parks the next one: that one is seen', async () => {
    const hand = await startHandWorker(db, ['lim.gap']);
    const [first, second] = await hand.jobs.enqueueMany('lim.gap', [1, 2], { concurrencyKey: 'gap' });
    const [held] = await hand.claims.claim({ kinds: ['lim.gap'], limit: 1 });
    expect(held!.job.id).toBe(first);
    // The claim parks the second job, and holds its transaction.
    const gate = await RowGate.hold(
      db,
      `SELECT jobs FROM ${S}.step_v1($1, '{}', '{}', null, 9, 1, '{default}', '{lim.gap}', '{1}', 0, 1000000)`,
      [hand.workers.currentId],
    );
    expect(gate.rows[0]!.jobs).toBeNull();
    const settled = hand.settle.complete(held!.job);
    await gate.untilWaiting();
    await gate.release();
    await settled;
    expect((await hand.jobs.get(second!)).state).toBe('ready');
  });

  it('F:C9 what was missed is promoted by the next poll', async () => {
    const hand = await startHandWorker(db, ['lim.missed']);
    const id = await hand.jobs.enqueue('lim.missed', 1, { concurrencyKey: 'missed' });
    await db.query(
      `WITH d AS (DELETE FROM ${S}.ready WHERE job_id = $1 RETURNING *)
       INSERT INTO ${S}.waiting (job_id, priority, reason, blocked_on, queue, kind, concurrency_key)
       SELECT job_id, priority, 'blocked', 'limit', queue, kind, concurrency_key FROM d`,
      [id],
    );
    expect((await hand.claims.claim({ kinds: ['lim.missed'], limit: 1 }))[0]?.job.id).toBe(id);
  });

  it('D1 a suspect under limits still runs alone, and keeps to them', async () => {
    const hand = await startHandWorker(db, ['lim.suspect']);
    const ids = await hand.jobs.enqueueMany('lim.suspect', [1, 2], { concurrencyKey: 's', maxCrashes: 1 });
    const [first] = await hand.claims.claim({ kinds: ['lim.suspect'], limit: 2 });
    expect(first!.job).toMatchObject({ id: ids[0], suspect: true });
    const other = await startHandWorker(db, ['lim.suspect']);
    expect(await other.claims.claim({ kinds: ['lim.suspect'], limit: 2 })).toEqual([]);
    await hand.settle.complete(first!.job);
    expect((await other.claims.claim({ kinds: ['lim.suspect'], limit: 2 }))[0]!.job.id).toBe(ids[1]);
  });
});

describe('limits in one process', () => {
  it('R3 of a kind, and of the process', async () => {
    const tally = new Tally();
    const narrow = tallied('lim.narrow', tally, { concurrency: 2 });
    const wide = tallied('lim.wide', tally, { concurrency: 40 }, () => 'process');
    const { jobs } = await startLeaseApp(db, { handlers: [narrow, wide], options: { concurrency: 8 } });
    await jobs.enqueueMany(narrow, Array<null>(30).fill(null));
    await jobs.enqueueMany(wide, Array<null>(100).fill(null));
    await allDone(130, tally);
    expect(tally.most.get('lim.narrow')).toBe(2);
    expect(tally.most.get('process')).toBeLessThanOrEqual(8);
  });
});

describe('a limit that is set while jobs run', () => {
  it('R3 counts what runs already', async () => {
    const hand = await startHandWorker(db, ['lim.late']);
    await hand.jobs.enqueueMany('lim.late', Array<null>(20).fill(null), { queue: 'late' });
    const running = await hand.claims.claim({ kinds: ['lim.late'], limit: 8 });
    await hand.app.get(QueuesService).configure('late', { maxRunning: 5 });
    expect(await hand.claims.claim({ kinds: ['lim.late'], limit: 8 })).toEqual([]);
    for (const { job } of running.slice(0, 4)) await hand.settle.complete(job);
    expect(await hand.claims.claim({ kinds: ['lim.late'], limit: 8 })).toHaveLength(1);
  });
});

describe('limits of a queue in one process', () => {
  it('R3 over all its kinds, and the other queues are not held up', async () => {
    const tally = new Tally();
    const kinds = ['lim.q1', 'lim.q2'].map((kind) => tallied(kind, tally, {}, (job) => job.queue));
    const { jobs } = await startLeaseApp(db, { handlers: kinds, options: { queueConcurrency: { small: 3 } } });
    for (const kind of kinds) {
      await jobs.enqueueMany(kind, Array<null>(60).fill(null), { queue: 'small' });
      await jobs.enqueueMany(kind, Array<null>(60).fill(null), { queue: 'big' });
    }
    await allDone(240, tally);
    expect(tally.most.get('small')).toBe(3);
    expect(tally.most.get('big')).toBeGreaterThan(3);
  });
});

describe('the rate of a queue', () => {
  const started = async (hand: LeaseApp, limit = 50) =>
    (await hand.claims.claim({ kinds: ['lim.rate'], limit })).length;

  it('so many in any period in the whole fleet, by the database’s clock; unstarted ones take nothing', async () => {
    const [one, two] = await Promise.all([startHandWorker(db, ['lim.rate']), startHandWorker(db, ['lim.rate'])]);
    await one.app.get(QueuesService).configure('metered', { rate: { limit: 10, per: '1h' } });
    await one.jobs.enqueueMany('lim.rate', Array<null>(60).fill(null), { queue: 'metered' });
    expect((await started(one, 4)) + (await started(two))).toBe(10);
    expect(await started(one)).toBe(0);
    // Half an hour later, five more.
    await db.query(`UPDATE ${S}.queues SET bucket_at = bucket_at - interval '30 min'`);
    const more = await two.claims.claim({ kinds: ['lim.rate'], limit: 50 });
    expect(more).toHaveLength(5);
    await db.query(`SELECT ${S}.move_v1($1::json, false)`, [
      JSON.stringify(
        more.slice(0, 3).map(({ job }) => ({ job: job.id, token: job.token, worker: job.workerId, event: 'giveback' })),
      ),
    ]);
    expect(await started(one)).toBe(3);
    // Full again after a rest, and no fuller than full.
    await db.query(`UPDATE ${S}.queues SET bucket_at = bucket_at - interval '30 days'`);
    expect(await started(one)).toBe(10);
    await one.app.get(QueuesService).configure('metered', { rate: null });
    expect(await started(one)).toBe(35);
  });

  it('workers keep to it, and the other queues are not held up', async () => {
    const tally = new Tally();
    const kind = tallied('lim.meter', tally, {}, (job) => job.queue);
    const workers = await Promise.all([1, 2].map(() => startLeaseApp(db, { handlers: [kind] })));
    await workers[0]!.app.get(QueuesService).configure('metered', { rate: { limit: 7, per: '10m' } });
    await workers[0]!.jobs.enqueueMany(kind, Array<null>(40).fill(null), { queue: 'metered' });
    await workers[0]!.jobs.enqueueMany(kind, Array<null>(100).fill(null), { queue: 'open' });
    await allDone(107, tally);
    await sleep(600);
    expect(tally.ran).toBe(107);
  });
});

describe('weights of queues', () => {
  it('R3 queues share a worker’s slots by weight, whatever their priorities; within one priority counts', async () => {
    const hand = await startHandWorker(db, ['lim.weight']);
    const queues = hand.app.get(QueuesService);
    await queues.configure('heavy', { weight: 3 });
    await queues.configure('light', { weight: 1 });
    await hand.jobs.enqueueMany(
      'lim.weight',
      Array.from({ length: 400 }, (_, i) => i),
      { queue: 'heavy', priority: 10 },
    );
    await hand.jobs.enqueueMany(
      'lim.weight',
      Array.from({ length: 400 }, (_, i) => i),
      { queue: 'light', priority: -10 },
    );
    await hand.jobs.enqueue('lim.weight', 'urgent', { queue: 'heavy', priority: 5 });
    const first = await hand.claims.claim({ kinds: ['lim.weight'], limit: 40 });
    const count = (queue: string) => first.filter(({ job }) => job.queue === queue).length;
    expect(count('heavy') + count('light')).toBe(40);
    expect(count('heavy')).toBeGreaterThanOrEqual(29);
    expect(count('heavy')).toBeLessThanOrEqual(31);
    expect(first.find(({ job }) => job.queue === 'heavy' && job.payload === 'urgent')).toBeDefined();
    // One at a time: by chance, in the same proportion.
    let heavy = 0;
    for (let i = 0; i < 200; i++) {
      const [claimed] = await hand.claims.claim({ kinds: ['lim.weight'], limit: 1 });
      if (claimed!.job.queue === 'heavy') heavy++;
    }
    expect(heavy).toBeGreaterThan(115);
    expect(heavy).toBeLessThan(185);
  });
});

describe('waiting for a job', () => {
  it('waitFor resolves when it has finished; a notification brings it at once', async () => {
    @JobHandler('lim.wait')
    class Wait implements Handler<number, number> {
      async handle({ payload }: Job<number>): Promise<number> {
        await sleep(payload);
        return payload;
      }
    }
    const worker = await startLeaseApp(db, { handlers: [Wait] });
    const producer = await startLeaseApp(db, { options: { role: 'producer' } });
    const done = await producer.jobs.waitFor<typeof Wait>(await producer.jobs.enqueue('lim.wait', 50));
    expect(done).toMatchObject({ state: 'completed', result: 50 });
    const slow = await worker.jobs.enqueue(Wait, 1500);
    await expect(worker.jobs.waitFor(slow, { timeout: '100ms' })).rejects.toMatchObject({
      code: 'WAIT_TIMEOUT',
      jobId: slow,
      state: expect.stringMatching(/ready|running/) as string,
    });
    await expect(worker.jobs.waitFor('99999999')).rejects.toMatchObject({ code: 'UNKNOWN_JOB' });
    await expect(worker.jobs.waitFor(slow, { timeout: 'soon' as never })).rejects.toMatchObject({ field: 'timeout' });
    const stop = new AbortController();
    const given = worker.jobs.waitFor(slow, { signal: stop.signal });
    stop.abort(new Error('enough'));
    await expect(given).rejects.toThrow('enough');
    await untilState(worker.jobs, slow, 'completed');
  });

  it('F:I4 without a listener it is found by looking', async () => {
    const hand = await startHandWorker(db, ['lim.look'], { options: { wakeUp: 'off' } });
    const id = await hand.jobs.enqueue('lim.look', 1);
    const waiting = hand.jobs.waitFor(id);
    const [claimed] = await hand.claims.claim({ kinds: ['lim.look'], limit: 1 });
    await hand.settle.complete(claimed!.job, 'seen');
    expect(await waiting).toMatchObject({ result: 'seen' });
  });
});
