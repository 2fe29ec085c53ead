import { types } from 'pg';
import { type Handler, InvalidJobError, type Job, JobHandler, type Lease } from '@leasehold/nestjs';
import { createTestDatabase, fixture, startProcess, type TestDatabase } from './support';
import { untilState } from './support/job-states';
import { startHandWorker, startLeaseApp } from './support/lease-app';

/** Gives back what it was given, and its own ids. */
@JobHandler('edges.echo')
class Echo implements Handler<unknown, unknown> {
  handle(job: Job, lease: Lease): unknown {
    return { payload: job.payload, id: job.id, token: lease.token, createdAt: job.createdAt.toISOString() };
  }
}

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase();
});
afterAll(() => db.drop());

describe('F:E1 text that PostgreSQL cannot store', () => {
  it('F:E1 in one result of twenty: all complete, and that one has replacement characters', async () => {
    @JobHandler('edges.result')
    class Result implements Handler<number, unknown> {
      handle({ payload }: Job<number>): unknown {
        return payload === 7
          ? { text: 'a\0\0\0b', lone: '\ud800', key: { '\0': 1 }, fine: '\\u0000 😀', more: ['\udfff\udfff'] }
          : payload;
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Result] });
    const ids = await jobs.enqueueMany(
      Result,
      Array.from({ length: 20 }, (_, i) => i),
    );
    const results = [];
    for (const id of ids) results.push((await untilState(jobs, id, 'completed')).result);
    const bad = {
      text: 'a\ufffd\ufffd\ufffdb',
      lone: '\ufffd',
      key: { '\ufffd': 1 },
      fine: '\\u0000 😀',
      more: ['\ufffd\ufffd'],
    };
    expect(results).toEqual(Array.from({ length: 20 }, (_, i) => (i === 7 ? bad : i)));
  });

  it('F:E1 in one error of twenty: all fail, and that one has replacement characters', async () => {
    @JobHandler('edges.error', { maxAttempts: 1 })
    class Fails implements Handler<number> {
      handle({ payload }: Job<number>): never {
        const error = new Error(payload === 7 ? 'a\0b \ud800' : 'plain');
        if (payload === 7) Object.assign(error, { name: '\0', stack: 'at \udfff', code: '\0' });
        throw error;
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Fails] });
    const ids = await jobs.enqueueMany(
      Fails,
      Array.from({ length: 20 }, (_, i) => i),
    );
    for (const [i, id] of ids.entries()) {
      const { error, reason } = await untilState(jobs, id, 'failed');
      const message = i === 7 ? 'a\ufffdb \ufffd' : 'plain';
      expect(reason).toBe(`${message} (attempt 1 of 1)`);
      expect(error).toMatchObject(
        i === 7 ? { name: '\ufffd', message, stack: 'at \ufffd', code: '\ufffd' } : { name: 'Error', message },
      );
    }
  });
});

describe('F:E4 ids beyond 2^53', () => {
  const parse = types.getTypeParser(20);
  beforeAll(() => types.setTypeParser(20, Number));
  afterAll(() => types.setTypeParser(20, parse));

  it('F:E4 are the same text everywhere, whatever the application does to pg; and pg is left as it was', async () => {
    const hand = await startHandWorker(db, ['edges.large']);
    await db.query(`SELECT setval(pg_get_serial_sequence('leasehold.jobs', 'id'), 9007199254740992)`);
    await db.query(`SELECT setval('leasehold.tokens', 9007199254740996)`);
    const id = await hand.jobs.enqueue('edges.large', 1);
    expect(id).toBe('9007199254740993');
    const client = await db.client();
    await client.query('BEGIN');
    expect(await hand.jobs.enqueue('edges.large', 2, { client })).toBe('9007199254740994');
    await client.query('COMMIT');
    expect(await hand.jobs.enqueueMany('edges.large', [3])).toEqual(['9007199254740995']);

    const claimed = await hand.claims.claim({ kinds: ['edges.large'], limit: 1 });
    expect(claimed.map(({ job }) => [job.id, job.token])).toEqual([[id, '9007199254740997']]);
    expect(await hand.jobs.get(id)).toMatchObject({ id, state: 'running', token: '9007199254740997' });
    const [first] = claimed;
    if (first) await hand.settle.fail(first.job, new Error('again'), 0);
    expect(await hand.jobs.get(id)).toMatchObject({ id, runs: [{ token: '9007199254740997', attempt: 1 }] });
    const page = await hand.jobs.find({ kind: 'edges.large', limit: 2 });
    expect([page.jobs.map((job) => job.id), page.next]).toEqual([
      ['9007199254740995', '9007199254740994'],
      '9007199254740994',
    ]);
    expect((await hand.jobs.find({ kind: 'edges.large', after: page.next ?? '' })).jobs.map((job) => job.id)).toEqual([
      id,
    ]);
    expect(types.getTypeParser(20)).toBe(Number);

    const { jobs, events } = await startLeaseApp(db, { handlers: [Echo] });
    const echoed = await jobs.enqueue(Echo, null);
    const { result, token } = await untilState(jobs, echoed, 'completed');
    expect(result).toMatchObject({ id: echoed, token });
    expect(events).toContainEqual(expect.objectContaining({ type: 'job.completed', jobId: echoed, token }));
    expect(BigInt(token ?? 0)).toBeGreaterThan(9007199254740997n);
  });
});

describe('F:E7 hosts that are not in UTC', () => {
  it('F:E7 the same instants with the database in Auckland and the worker in Kolkata', async () => {
    const auckland = await createTestDatabase({
      name: 'edges_auckland',
      settings: { timezone: 'Pacific/Auckland', datestyle: 'SQL, DMY', intervalstyle: 'sql_standard' },
    });
    try {
      const producer = await startLeaseApp(auckland, { options: { role: 'producer' } });
      const { jobs } = producer;
      const runAt = new Date('2100-06-01T00:30:00Z');
      const client = await auckland.client();
      await client.query('BEGIN');
      const given = await jobs.enqueue('scripted', {}, { runAt: '2100-06-01T06:00:00+05:30', client });
      await client.query('COMMIT');
      const delayed = await jobs.enqueue('scripted', {}, { delay: '1h' });
      expect((await jobs.get(given)).runAt).toEqual(runAt);
      const stored = await auckland.one(
        'SELECT extract(epoch FROM run_at)::float8 * 1000 AS ms FROM leasehold.waiting WHERE job_id = $1',
        [given],
      );
      expect(stored).toEqual({ ms: runAt.getTime() });
      const { seconds } = await auckland.one<{ seconds: number }>(
        `SELECT extract(epoch FROM w.run_at - j.created_at)::float8 AS seconds
         FROM leasehold.waiting w JOIN leasehold.jobs j ON j.id = w.job_id WHERE w.job_id = $1`,
        [delayed],
      );
      expect(Math.abs(seconds - 3600)).toBeLessThan(60);

      const worker = startProcess(fixture('worker'), { env: { TZ: 'Asia/Kolkata', LEASE_URL: auckland.url } });
      await worker.next((message) => 'ready' in message);
      const { now } = await auckland.one<{ now: number }>(
        'SELECT extract(epoch FROM clock_timestamp())::float8 * 1000 AS now',
      );
      const id = await jobs.enqueue('scripted', {});
      const done = await untilState(jobs, id, 'completed');
      for (const at of [done.createdAt, done.startedAt, done.finishedAt]) {
        expect(Math.abs((at?.getTime() ?? 0) - now)).toBeLessThan(60_000);
      }
      expect(await jobs.get(delayed)).toMatchObject({ state: 'scheduled' });
      worker.kill('SIGKILL');
      await worker.exited;
      await producer.close();
    } finally {
      await auckland.drop();
    }
  });
});

describe('F:E9 payloads of any size up to the limit', () => {
  it.each([
    ['7.9 kB', 'x'.repeat(7900)],
    ['8.1 kB', 'x'.repeat(8100)],
    ['1 MB of multi-byte characters', '日本語😀'.repeat(76_000)],
    ['exactly the limit', 'x'.repeat(1024 * 1024 - 2)],
  ])('F:E9 %s arrives as it was sent', async (_, payload) => {
    const { jobs } = await startLeaseApp(db, { handlers: [Echo], options: { resultMaxBytes: 2 * 1024 * 1024 } });
    const id = await jobs.enqueue(Echo, payload);
    const { result } = await untilState<{ payload: string }>(jobs, id, 'completed');
    expect(result?.payload === payload).toBe(true);
  });

  it('F:E9 one byte over the limit is refused', async () => {
    const { jobs } = await startLeaseApp(db, { options: { role: 'producer', payloadMaxBytes: 100 } });
    await jobs.enqueue('edges.sized', 'é'.repeat(49));
    await expect(jobs.enqueue('edges.sized', `${'é'.repeat(49)}x`)).rejects.toThrow(InvalidJobError);
    await expect(jobs.enqueue('edges.sized', 'é'.repeat(50))).rejects.toThrow(
      /102 bytes of JSON, more than payloadMaxBytes = 100/,
    );
  });

  it('F:E9 a result that is too large, a BigInt or a cycle fails the job for good, with the reason', async () => {
    const cycle: unknown[] = [];
    cycle.push(cycle);
    const results: [unknown, RegExp][] = [
      ['x'.repeat(2000), /2002 bytes of JSON, more than resultMaxBytes = 1000/],
      [1n, /cannot be stored as JSON: .*BigInt/],
      [cycle, /cannot be stored as JSON: .*circular/],
    ];
    @JobHandler('edges.unstorable')
    class Unstorable implements Handler<number, unknown> {
      handle({ payload }: Job<number>): unknown {
        return results[payload]?.[0];
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Unstorable], options: { resultMaxBytes: 1000 } });
    for (const [i, [, reason]] of results.entries()) {
      const failed = await untilState(jobs, await jobs.enqueue(Unstorable, i), 'failed');
      expect(failed).toMatchObject({ attempt: 1, runs: [], error: { name: 'ResultNotStorable' } });
      expect(failed.reason).toMatch(reason);
    }
  });

  it("F:E9 more lanes than a notification holds are still found, and fail nobody's transaction", async () => {
    const queues = Array.from({ length: 60 }, (_, i) => `queue-${i}-${'q'.repeat(150)}`);
    const { jobs } = await startLeaseApp(db, { handlers: [Echo] });
    const items = queues.map((queue) => ({ handler: Echo, payload: queue, queue }));
    const client = await db.client();
    await client.query('BEGIN');
    const ids = await jobs.enqueueMany(items, { client });
    await client.query('COMMIT');
    ids.push(...(await jobs.enqueueMany(items)));
    for (const id of ids) await untilState(jobs, id, 'completed');
  });
});
