import { RetentionService } from '@leasehold/nestjs';
import type { Client } from 'pg';
import { RowGate, type TestDatabase, createTestDatabase, startHandWorker, startLeaseApp } from './support';
import { finishedJobs, jobsLeft, makeDay } from './support/finished-jobs';

let db: TestDatabase;
const S = '"leasehold"';

beforeAll(async () => {
  db = await createTestDatabase();
  await (await startLeaseApp(db, { options: { role: 'producer' } })).close();
});
afterAll(() => db.drop());

const retentionOf = async (): Promise<RetentionService> =>
  (await startLeaseApp(db, { options: { role: 'producer' } })).app.get(RetentionService);

describe('F:F2 everything at once', () => {
  const JOBS = 3000;
  const TIME_MS = 6000;
  const tally = new Map<string, number>();
  const errors = new Map<string, number>();
  const count = (map: Map<string, number>, what: string, n = 1) => map.set(what, (map.get(what) ?? 0) + n);

  /** Does something over and over on a session of its own; what it throws is on record. */
  async function actor(name: string, step: (client: Client) => Promise<number>): Promise<void> {
    const client = await db.client(name);
    for (const until = performance.now() + TIME_MS; performance.now() < until;) {
      try {
        count(tally, name, await step(client));
      } catch (error) {
        count(errors, `${name}: ${(error as { code?: string }).code ?? ''} ${String(error)}`);
      }
    }
  }

  const number = async (client: Client, sql: string, params: unknown[] = []): Promise<number> =>
    (await client.query<{ n: number | null }>(sql, params)).rows[0]?.n ?? 0;

  /** In no order: what order a caller happens to use must not matter. */
  async function steer(command: string, client: Client): Promise<number> {
    const sql = `SELECT array_agg(id)::text[] AS ids FROM (SELECT id FROM ${S}.jobs ORDER BY random() LIMIT 100) x`;
    const { rows } = await client.query<{ ids: string[] | null }>(sql);
    const done = `answer IN ('retried', 'cancelled', 'deleted', 'revoked', 'requested')`;
    return number(
      client,
      `SELECT count(*) FILTER (WHERE ${done})::int AS n FROM ${S}.steer_v1($1, $2::bigint[], null, 0)`,
      [command, rows[0]?.ids ?? []],
    );
  }

  async function move(event: 'crash' | 'complete', client: Client): Promise<number> {
    const { rows } = await client.query<{ moves: string | null }>(
      `SELECT json_agg(json_build_object('job', l.job_id, 'token', l.token, 'worker', l.worker_id, 'event', $1::text) ORDER BY random())::text AS moves
       FROM (SELECT * FROM ${S}.leases ORDER BY random() LIMIT 100) l`,
      [event],
    );
    return number(client, `SELECT count(*)::int AS n FROM ${S}.move_v1($1, $2)`, [rows[0]?.moves, event === 'crash']);
  }

  /** New finished jobs for those that were deleted, and rows of the user's that point at any two. */
  async function feed(client: Client): Promise<number> {
    if ((await number(client, `SELECT count(*)::int AS n FROM ${S}.jobs`)) < JOBS) {
      await finishedJobs(db, { count: 500, history: true });
    }
    // In no order either, and many in one transaction: they wait for whoever deletes, and nobody for them.
    const some = `(SELECT id, row_number() OVER (ORDER BY random()) AS n FROM ${S}.jobs)`;
    const insert = `INSERT INTO documents SELECT a.id, b.id FROM ${some} a JOIN ${some} b USING (n) LIMIT 100`;
    await client.query(insert).catch((error: { code?: string }) => {
      if (error.code !== '23503') throw error; // One of those jobs has just gone.
    });
    return 100;
  }

  const deadlocks = async (): Promise<number> =>
    (await db.one<{ n: number }>('SELECT deadlocks::int AS n FROM pg_stat_database WHERE datname = current_database()'))
      .n;

  it('F:F2 four passes of retention, four of rescue, settles, bulk retries, cancels and deletions: no deadlock, and no job in two places or in none', async () => {
    await db.query(`
      INSERT INTO ${S}.workers (id, name, host, pid, version, state, kinds, concurrency, ttl_ms, incarnation, expires_at)
      VALUES ('w', 'w', 'h', 1, '0', 'live', '{old}', 1, 1, '', clock_timestamp() + interval '1 day');
      CREATE TABLE documents (a bigint REFERENCES ${S}.jobs ON DELETE SET NULL, b bigint REFERENCES ${S}.jobs ON DELETE CASCADE);
      CREATE INDEX ON documents (a); CREATE INDEX ON documents (b)`);
    const before = await deadlocks();
    const claim = `SELECT json_array_length(jobs::json) AS n FROM ${S}.step_v1('w', '{}', '{}', null, 1, 200, '{default}', '{old}', '{200}', 0, 1000000000)`;
    const prune = `SELECT deleted AS n FROM ${S}.prune_v1(700, 700, 700, '-infinity', 0, 1000)`;
    await Promise.all([
      ...[1, 2, 3, 4].map(() => actor('prune', (client) => number(client, prune))),
      ...[1, 2, 3, 4].map(() => actor('rescue', (client) => move('crash', client))),
      ...['retry', 'retry', 'cancel', 'forceCancel', 'delete'].map((command) =>
        actor(command, (client) => steer(command, client)),
      ),
      actor('complete', (client) => move('complete', client)),
      actor('claim', (client) => number(client, claim)),
      actor('feed', feed),
    ]);
    expect(Object.fromEntries(errors)).toEqual({});
    for (const [what, n] of tally) expect([what, n > 0]).toEqual([what, true]);
    // The statistics of a session are there when it has ended, or a second after its last statement.
    const session = await db.client();
    await session.query('SELECT pg_sleep(1.1)');
    expect((await deadlocks()) - before).toBe(0);

    const lost = await db.query(
      `SELECT j.id, x.places FROM ${S}.jobs j CROSS JOIN LATERAL (SELECT
         (SELECT count(*) FROM ${S}.ready WHERE job_id = j.id) + (SELECT count(*) FROM ${S}.waiting WHERE job_id = j.id)
         + (SELECT count(*) FROM ${S}.leases WHERE job_id = j.id) + (SELECT count(*) FROM ${S}.finished WHERE job_id = j.id) AS places) x
       WHERE x.places <> 1`,
    );
    expect(lost).toEqual([]);
    for (const table of ['ready', 'waiting', 'leases', 'finished', 'runs', 'checkpoints']) {
      const stray = `SELECT job_id FROM ${S}.${table} x WHERE NOT EXISTS (SELECT FROM ${S}.jobs j WHERE j.id = x.job_id)`;
      expect([table, await db.query(stray)]).toEqual([table, []]);
    }
    await db.query(`DROP TABLE documents; TRUNCATE ${S}.finished`);
  });
});

describe('empty partitions', () => {
  const days = async (): Promise<string[]> =>
    (
      await db.query<{ name: string }>(
        `SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = '${S}.finished'::regclass ORDER BY 1`,
      )
    ).map(({ name }) => name);

  it('are dropped two days after their end; one that holds a job is not, nor one that is younger', async () => {
    const retention = await retentionOf();
    await retention.dropEmptyDays();
    const [id] = await finishedJobs(db, { age: '50 d' });
    const full = await makeDay(db, 50);
    await makeDay(db, 2);
    const before = await days();
    const empty = [await makeDay(db, 51), await makeDay(db, 49), await makeDay(db, 4)];
    expect(await retention.dropEmptyDays()).toEqual(empty);
    expect(await days()).toEqual(before);
    expect(await retention.prune()).toEqual({ deleted: 1, held: 0 });
    expect(await retention.dropEmptyDays()).toEqual([full]);
    expect(await jobsLeft(db, [id!])).toEqual([]);
  });

  it('one that a view of the user’s stands on stays, and stands in nobody’s way', async () => {
    const retention = await retentionOf();
    const viewed = await makeDay(db, 60);
    const other = await makeDay(db, 59);
    await db.query(`CREATE VIEW seen AS SELECT * FROM ${viewed}`);
    expect(await retention.dropEmptyDays()).toEqual([other]);
    await db.query('DROP VIEW seen');
    expect(await retention.dropEmptyDays()).toEqual([viewed]);
  });

  it('a job that comes back into a day while it is found empty keeps it', async () => {
    const retention = await retentionOf();
    const [id] = await finishedJobs(db, { age: '50 d' });
    const day = await makeDay(db, 51);
    // It moves there, and has not committed: a look from outside finds the day empty.
    const move = `UPDATE ${S}.finished SET finished_at = finished_at - interval '1 day' WHERE job_id = $1`;
    const late = await RowGate.hold(db, move, [id]);
    const dropping = retention.dropEmptyDays();
    await late.untilWaiting();
    await late.release();
    expect(await dropping).not.toContain(day);
    expect(await db.query(`SELECT job_id::text AS id FROM ${day}`)).toEqual([{ id }]);
    await db.query(`TRUNCATE ${S}.finished`);
    await retention.dropEmptyDays();
  });

  it.each([
    ['reads all of them', () => `SELECT count(*) FROM ${S}.finished`],
    ['reads the day', (day: string) => `SELECT count(*) FROM ${day}`],
    ['writes to the day', (day: string) => `DELETE FROM ${day}`],
  ])('an open transaction that %s keeps it, and settles hardly wait', async (_, statement) => {
    const hand = await startHandWorker(db, ['settling']);
    const retention = hand.app.get(RetentionService);
    const name = await makeDay(db, 70);
    await hand.jobs.enqueueMany('settling', Array<number>(200).fill(1));
    const claimed = await hand.claims.claim({ kinds: ['settling'], limit: 200 });
    const gate = await RowGate.hold(db, statement(name));
    let isDropping = true;
    const dropping = retention.dropEmptyDays().finally(() => (isDropping = false));
    let longest = 0;
    let settled = 0;
    for (; isDropping && settled < claimed.length; settled++) {
      const began = performance.now();
      await hand.settle.complete(claimed[settled]!.job);
      longest = Math.max(longest, performance.now() - began);
    }
    expect(await dropping).toEqual([]);
    expect(settled).toBeGreaterThanOrEqual(1);
    expect(longest).toBeLessThan(900);
    expect(await days()).toContain(name);
    await gate.release();
    expect(await retention.dropEmptyDays()).toEqual([name]);
    await Promise.all(claimed.slice(settled).map(({ job }) => hand.settle.complete(job)));
  });

  it('two that drop at once drop each day once', async () => {
    const both = [await retentionOf(), await retentionOf()];
    const names: string[] = [];
    for (let daysAgo = 90; daysAgo > 80; daysAgo--) names.push(await makeDay(db, daysAgo));
    const dropped: string[] = [];
    for (let i = 0; i < 20 && dropped.length < names.length; i++) {
      dropped.push(...(await Promise.all(both.map((retention) => retention.dropEmptyDays()))).flat());
    }
    expect(dropped.sort()).toEqual(names);
  });
});
