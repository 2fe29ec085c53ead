import { type EnqueueItem, EnqueueUncertainError, InvalidJobError } from '@leasehold/nestjs';
import { createTestDatabase, RowGate, TcpProxy, type TestDatabase } from './support';
import { type LeaseApp, startLeaseApp } from './support/lease-app';

let db: TestDatabase;
let app: LeaseApp;

beforeAll(async () => {
  db = await createTestDatabase();
});
beforeEach(async () => {
  app = await startLeaseApp(db, { options: { role: 'producer' } });
  await db.query('TRUNCATE leasehold.jobs, leasehold.ready, leasehold.waiting');
});
afterAll(() => db.drop());

const counted = () =>
  db.one(
    `SELECT (SELECT count(*)::int FROM leasehold.jobs) AS jobs, (SELECT count(*)::int FROM leasehold.ready) AS ready`,
  );

/** Number of transactions that wrote these jobs. */
const writes = async (ids: string[]) =>
  (
    await db.one<{ n: number }>('SELECT count(DISTINCT xmin::text)::int AS n FROM leasehold.jobs WHERE id = ANY ($1)', [
      ids,
    ])
  ).n;

describe('enqueueMany', () => {
  it.each([0, 1, 5_461, 65_536, 200_000])('F:E5 %i jobs: all there, ids and places in the order given', async (n) => {
    const ids = await app.jobs.enqueueMany(
      'bulk.many',
      Array.from({ length: n }, (_, i) => i),
    );
    expect(ids).toHaveLength(n);
    expect(await counted()).toEqual({ jobs: n, ready: n });
    // Without statistics the check itself may be planned as a loop over 200 000 times 200 000 rows.
    await db.query('ANALYZE leasehold.jobs, leasehold.ready');
    const wrong = await db.one(
      `SELECT count(*) FILTER (WHERE payload::text::int <> nth - 1)::int AS payloads,
              count(*) FILTER (WHERE place <> nth)::int AS places
       FROM (SELECT j.payload, u.nth, row_number() OVER (ORDER BY r.position) AS place
             FROM unnest($1::bigint[]) WITH ORDINALITY AS u(id, nth)
             JOIN leasehold.jobs j USING (id) JOIN leasehold.ready r ON r.job_id = j.id) x`,
      [ids],
    );
    expect(wrong).toEqual({ payloads: 0, places: 0 });
  });

  it('F:E5 one more than 200 000 is refused, and nothing is written', async () => {
    const error = await app.jobs.enqueueMany('bulk.many', Array<number>(200_001).fill(0)).catch((e: unknown) => e);
    expect(error).toBeInstanceOf(InvalidJobError);
    expect(error).toMatchObject({ field: 'items', message: expect.stringMatching(/at most 200000 .* not 200001/) });
    expect(await counted()).toEqual({ jobs: 0, ready: 0 });
  });

  it('F:E5 more than one statement can hold is still one transaction', async () => {
    const payload = 'x'.repeat(1_000_000);
    const ids = await app.jobs.enqueueMany('bulk.large', Array<string>(40).fill(payload));
    expect(await writes(ids)).toBe(1);
    const bytes = await db.one(`SELECT sum(octet_length(payload::text))::int AS n FROM leasehold.jobs`);
    expect(bytes).toEqual({ n: 40 * 1_000_002 });
  });

  it('a mixed lot: each with its own options', async () => {
    const items: EnqueueItem[] = [
      { handler: 'bulk.a', payload: 1, priority: 7 },
      { handler: 'bulk.b', payload: { two: 2 }, queue: 'other', delay: '1h' },
      { handler: 'bulk.a', payload: null, tags: ['third'] },
    ];
    const ids = await app.jobs.enqueueMany(items);
    const jobs = await Promise.all(ids.map((id) => app.jobs.get(id)));
    expect(jobs).toMatchObject([
      { kind: 'bulk.a', payload: 1, priority: 7, state: 'ready' },
      { kind: 'bulk.b', payload: { two: 2 }, queue: 'other', state: 'scheduled' },
      { kind: 'bulk.a', payload: null, tags: ['third'], state: 'ready' },
    ]);
  });

  const good: EnqueueItem = { handler: 'bulk.good', payload: 1 };
  const bad: [string, EnqueueItem, string][] = [
    ['a wrong option', { ...good, priority: 1e9 }, '[2].priority'],
    ['a wrong payload', { ...good, payload: '\0' }, '[2].payload'],
    ['a class that is no handler', { ...good, handler: class Nothing {} as never }, '[2].handler'],
    ['no item at all', null as never, '[2].item'],
  ];
  it.each(bad)('F:E5 all or nothing: with %s at [2] nothing is written', async (_, item, field) => {
    const error = await app.jobs.enqueueMany([good, good, item, good]).catch((e: unknown) => e);
    expect(error).toBeInstanceOf(InvalidJobError);
    expect(error).toMatchObject({ field, message: expect.stringMatching(/^\[2\] /) });
    expect(await counted()).toEqual({ jobs: 0, ready: 0 });
  });

  it('F:E5 all or nothing: what the database refuses takes the whole call with it', async () => {
    await refusing('unlucky', async () => {
      const payloads = Array.from({ length: 3000 }, (_, i) => (i === 2999 ? 'unlucky' : 'fine'));
      await expect(app.jobs.enqueueMany('bulk.many', payloads)).rejects.toThrow(/unlucky/);
    });
    expect(await counted()).toEqual({ jobs: 0, ready: 0 });
  });
});

describe('single enqueues', () => {
  it('made in one tick share a statement, and each gets its own id', async () => {
    const ids = await Promise.all(Array.from({ length: 100 }, (_, i) => app.jobs.enqueue('bulk.tick', i)));
    expect(await writes(ids)).toBe(1);
    for (const i of [0, 50, 99]) expect((await app.jobs.get(ids[i] ?? '')).payload).toBe(i);
  });

  it('made while an insert is on the wire share the next one', async () => {
    const jam = await RowGate.hold(db, 'LOCK TABLE leasehold.jobs IN SHARE MODE');
    const first = app.jobs.enqueue('bulk.wire', 'first');
    await jam.untilWaiting();
    const others = [];
    for (let i = 0; i < 5; i++) {
      others.push(app.jobs.enqueue('bulk.wire', i));
      await new Promise((resolve) => setImmediate(resolve));
    }
    await jam.release();
    const ids = await Promise.all(others);
    expect(await writes(ids)).toBe(1);
    expect(await writes([await first, ...ids])).toBe(2);
  });

  it('stand each for itself: what the database refuses in one does not fail the others', async () => {
    const payloads = ['a', 'b', 'unlucky', 'd', 'e'];
    const results = await refusing('unlucky', () =>
      Promise.allSettled(payloads.map((payload) => app.jobs.enqueue('bulk.apart', payload))),
    );
    expect(results.map(({ status }) => status)).toEqual([
      'fulfilled',
      'fulfilled',
      'rejected',
      'fulfilled',
      'fulfilled',
    ]);
    expect(await counted()).toEqual({ jobs: 4, ready: 4 });
  });
});

describe('a lost connection', () => {
  let proxy: TcpProxy;
  beforeEach(async () => {
    proxy = await TcpProxy.start(db.url);
    app = await startLeaseApp(db, { url: proxy.url(db.url), options: { role: 'producer' } });
  });
  afterEach(async () => {
    await app.close();
    await proxy.close();
  });

  const ways: [string, () => Promise<unknown>][] = [
    ['enqueue', () => app.jobs.enqueue('bulk.lost', 1)],
    ['enqueueMany', () => app.jobs.enqueueMany('bulk.lost', [1, 2])],
  ];
  it.each(ways)('%s: a reply that was cut off is EnqueueUncertainError, and the jobs are there', async (_, enqueue) => {
    const lost = proxy.dropRepliesAfter(/enqueue_v1/);
    await expect(enqueue()).rejects.toThrow(EnqueueUncertainError);
    expect(lost.count).toBe(1);
    expect((await db.query(`SELECT FROM leasehold.jobs WHERE kind = 'bulk.lost'`)).length).toBeGreaterThan(0);
    expect(await app.jobs.enqueue('bulk.after', 1)).toMatch(/^\d+$/);
  });

  it.each(ways)('%s: without a connection it is certain that nothing was written', async (_, enqueue) => {
    proxy.refuse();
    const error: unknown = await enqueue().catch((e: unknown) => e);
    expect(error).toMatchObject({ code: 'ECONNRESET' });
    expect(error).not.toBeInstanceOf(EnqueueUncertainError);
    proxy.refuse(false);
    expect(await counted()).toEqual({ jobs: 0, ready: 0 });
    expect(await app.jobs.enqueue('bulk.after', 1)).toMatch(/^\d+$/);
  });

  it('many calls that wait for a connection are all told at once', async () => {
    app = await startLeaseApp(db, {
      url: proxy.url(db.url),
      options: { role: 'producer', connection: { url: proxy.url(db.url), queryTimeout: '1s' } },
    });
    proxy.freeze();
    // One limit for all: two hundred of them, one after the other, would be longer than this test may take.
    const results = await Promise.allSettled(Array.from({ length: 200 }, (_, i) => app.jobs.enqueue('bulk.frozen', i)));
    proxy.thaw();
    expect(new Set(results.map(({ status }) => status))).toEqual(new Set(['rejected']));
  });
});

/** While `work` runs the database refuses jobs whose payload is this text. */
async function refusing<T>(text: string, work: () => Promise<T>): Promise<T> {
  await db.query(`ALTER TABLE leasehold.jobs ADD CONSTRAINT ${text} CHECK (payload::text <> '"${text}"')`);
  try {
    return await work();
  } finally {
    await db.query(`ALTER TABLE leasehold.jobs DROP CONSTRAINT ${text}`);
  }
}
