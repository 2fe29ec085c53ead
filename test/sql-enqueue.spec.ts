import { type Handler, type Job, JobHandler } from '@leasehold/nestjs';
import { Client } from 'pg';
import { type LeaseApp, type TestDatabase, createTestDatabase, startHandWorker, startLeaseApp } from './support';
import { untilState } from './support/job-states';

const S = '"leasehold"';
let db: TestDatabase;
let hand: LeaseApp;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'sql-enqueue' });
});
beforeEach(async () => {
  hand = await startHandWorker(db, ['sql']);
});
afterAll(() => db.drop());

const enqueue = async (args: string, values: unknown[] = []): Promise<string> =>
  (await db.one<{ id: string }>(`SELECT ${S}.enqueue(${args})::text AS id`, values)).id;

describe('the SQL function enqueue', () => {
  it('with nothing but a kind: the same job as enqueue() of the same makes', async () => {
    const [bySql, byApi] = [await enqueue(`'sql'`), await hand.jobs.enqueue('sql', null)];
    const [one, two] = await Promise.all([hand.jobs.get(bySql), hand.jobs.get(byApi)]);
    const same = { id: '', createdAt: new Date(0) };
    expect({ ...one, ...same }).toEqual({ ...two, ...same });
  });

  it('every parameter arrives', async () => {
    const id = await enqueue(
      `'sql', '{"a": [1, 2]}', queue => 'mail', priority => -3, delay => '2 hours', max_attempts => 4, max_crashes => 5, max_releases => 6,
       max_snoozes => 7, deadline => '90 seconds', tags => '{x,y}', concurrency_key => 'tenant', concurrency_per_key => 2, key => 'k',
       key_scope => 'queue', key_mode => 'replace'`,
    );
    expect(await hand.jobs.get(id)).toMatchObject({
      kind: 'sql',
      payload: { a: [1, 2] },
      queue: 'mail',
      priority: -3,
      state: 'scheduled',
      maxAttempts: 4,
      maxCrashes: 5,
      maxReleases: 6,
      maxSnoozes: 7,
      tags: ['x', 'y'],
      key: 'k',
      concurrencyKey: 'tenant',
    });
    expect(
      await db.one(`SELECT deadline_ms::int, concurrency_max, key_space FROM ${S}.jobs WHERE id = $1`, [id]),
    ).toEqual({
      deadline_ms: 90_000,
      concurrency_max: 2,
      key_space: 'queue:mail',
    });
    // The key is the same as the API's.
    const again = await hand.jobs.enqueueUnique('sql', 'new', {
      key: 'k',
      keyScope: 'queue',
      queue: 'mail',
      keyMode: 'replace',
    });
    expect(again).toMatchObject({ id, outcome: 'replaced' });
    expect(await enqueue(`'sql', key => 'k', key_scope => 'queue', queue => 'mail'`)).toBe(id);
    expect(await enqueue(`'sql', deadline => null, run_at => '2020-01-01 00:00:00+00'`)).toBeDefined();
    const throttled = await enqueue(`'sql', key => 't', key_mode => 'throttle', key_period => '1 hour'`);
    expect(await enqueue(`'sql', key => 't', key_mode => 'throttle', key_period => '1 hour'`)).toBe(throttled);
    const put = await enqueue(`'sql', key => 'd', key_mode => 'debounce', key_period => '1 hour'`);
    expect((await hand.jobs.get(put)).state).toBe('scheduled');
    const debounced = `'sql', key => 'w', key_mode => 'debounce', key_period => '1 hour', key_max_wait => '1 second'`;
    const soon = await enqueue(debounced);
    expect(await enqueue(debounced)).toBe(soon);
    const { runAt, createdAt } = await hand.jobs.get(soon);
    expect(runAt!.getTime() - createdAt.getTime()).toBe(1000);
  });

  it.each([
    [`''`, 'kind'],
    [`null`, 'kind'],
    [`repeat('x', 201)`, 'kind'],
    [`'sql', null`, 'payload'],
    [`'sql', to_json(repeat('x', 1100000))`, 'payload'],
    [`'sql', '"\\u0000"'`, 'payload'],
    [`'sql', queue => ''`, 'queue'],
    [`'sql', priority => 40000`, 'priority'],
    [`'sql', priority => null`, 'priority'],
    [`'sql', run_at => 'infinity'`, 'run_at'],
    [`'sql', run_at => '1950-01-01 00:00:00+00'`, 'run_at'],
    [`'sql', delay => '-1 second'`, 'delay'],
    [`'sql', delay => '11 years'`, 'delay'],
    [`'sql', delay => '1 s', run_at => now()`, 'delay'],
    [`'sql', deadline => '0'`, 'deadline'],
    [`'sql', max_attempts => 0`, 'max_attempts'],
    [`'sql', max_crashes => 0`, 'max_crashes'],
    [`'sql', max_releases => -1`, 'max_releases'],
    [`'sql', max_snoozes => null`, 'max_snoozes'],
    [`'sql', tags => array_fill('t'::text, ARRAY[21])`, 'tags'],
    [`'sql', tags => ARRAY['']`, 'tags'],
    [`'sql', tags => '{{a,b},{c,d}}'`, 'tags'],
    [`'sql', key_mode => 'bogus'`, 'key_mode'],
    [`'sql', key_period => '-1 s'`, 'key_period'],
    [`'sql', concurrency_key => ''`, 'concurrency_key'],
    [`'sql', concurrency_per_key => 0`, 'concurrency_per_key'],
    [`'sql', key => ''`, 'key'],
    [`'sql', key => 'k', key_mode => 'often'`, 'key_mode'],
    [`'sql', key => 'k', key_scope => 'job'`, 'key_scope'],
    [`'sql', key => 'k', key_mode => 'throttle'`, 'key_period'],
    [`'sql', key => 'k', key_period => '1 s'`, 'key_period'],
    [`'sql', key_max_wait => '1 s'`, 'key_max_wait'],
    [`'sql', key => 'k', key_mode => 'throttle', key_period => '1 s', key_max_wait => '1 s'`, 'key_max_wait'],
    [`'sql', key => 'k', key_mode => 'debounce', key_period => '1 s', key_max_wait => '0 s'`, 'key_max_wait'],
    [`'sql', concurrency_key => 'k', concurrency_per_key => 1000001`, 'concurrency_per_key'],
    [`'sql', key => 'k', key_mode => 'debounce', key_period => '1 s', delay => '1 s'`, 'key_mode'],
  ])('F:E1 %s is refused, %s is named, and nothing is written', async (args, field) => {
    const before = await db.one(`SELECT count(*)::int AS n FROM ${S}.jobs`);
    await expect(enqueue(args)).rejects.toMatchObject({
      code: '22023',
      message: expect.stringContaining(`enqueue: ${field} must`) as string,
    });
    expect(await db.one(`SELECT count(*)::int AS n FROM ${S}.jobs`)).toEqual(before);
  });

  it('from a trigger, in a transaction: there at the commit, gone at the rollback, and a worker hears of it at once', async () => {
    const ran: unknown[] = [];
    @JobHandler('sql.order')
    class Order implements Handler {
      handle({ payload }: Job): void {
        ran.push(payload);
      }
    }
    // No poll for a minute: only the notification can be it.
    const worker = await startLeaseApp(db, { handlers: [Order], options: { poll: '1m' } });
    await db.query('CREATE TABLE orders (id int PRIMARY KEY, total int)');
    await db.query(`CREATE FUNCTION order_placed() RETURNS trigger LANGUAGE plpgsql AS $$
      BEGIN PERFORM ${S}.enqueue('sql.order', json_build_object('order', NEW.id)); RETURN NEW; END $$`);
    await db.query('CREATE TRIGGER placed AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION order_placed()');
    const client = new Client({ connectionString: db.url });
    await client.connect();
    await client.query('BEGIN ISOLATION LEVEL READ COMMITTED');
    await client.query('INSERT INTO orders VALUES (1, 10)');
    await client.query('ROLLBACK');
    await client.query('INSERT INTO orders VALUES (2, 20)');
    await client.end();
    const [job] = (await worker.jobs.find({ kind: 'sql.order' })).jobs;
    await untilState(worker.jobs, job!.id, 'completed');
    expect(ran).toEqual([{ order: 2 }]);
    expect((await worker.jobs.find({ kind: 'sql.order' })).jobs).toHaveLength(1);
  });
});
