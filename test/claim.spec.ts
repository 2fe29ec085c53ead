import { Database } from '@leasehold/nestjs/dist/storage/database';
import { RowGate, type TestDatabase, createTestDatabase, eventually, startHandWorker, startLeaseApp } from './support';

let db: TestDatabase;
const S = '"leasehold"';
const NESTED_LOOPS = ['hashjoin', 'mergejoin', 'hashagg', 'material', 'memoize', 'sort'];

beforeAll(async () => {
  db = await createTestDatabase({ name: 'claim' });
});
afterAll(() => db.drop());
afterEach(async () => {
  // Whatever a test left ready would be claimed by the next one.
  await db.query(`DELETE FROM ${S}.ready`);
});

describe('claiming', () => {
  it('R1 of many rivals exactly one gets each job', async () => {
    const workers = await Promise.all(Array.from({ length: 4 }, () => startHandWorker(db, ['a'])));
    const ids = await workers[0]!.jobs.enqueueMany(
      'a',
      Array.from({ length: 400 }, (_, i) => ({ i })),
    );
    const claimed: string[] = [];
    const claim = async (worker: (typeof workers)[number]): Promise<void> => {
      for (;;) {
        const got = await worker.claims.claim({ kinds: ['a'], limit: 7 });
        if (got.length === 0) return;
        expect(got.length).toBeLessThanOrEqual(7);
        for (const { job } of got) {
          claimed.push(job.id);
          await worker.settle.complete(job);
        }
      }
    };
    await Promise.all([...workers, ...workers].map(claim));
    expect(claimed.sort()).toEqual([...ids].sort());
  });

  it('R2 a claim records owner, token, deadline and the expiry of its worker, by the database’s clock', async () => {
    const worker = await startHandWorker(db, ['a']);
    const id = await worker.jobs.enqueue('a', {}, { deadline: '90s' });
    const before = await db.now();
    const [claimed] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    const row = await worker.jobs.get(id);
    expect(row).toMatchObject({
      state: 'running',
      attempt: 1,
      workerId: worker.workers.currentId,
      token: claimed!.job.token,
    });
    expect(row.deadlineAt!.getTime() - row.claimedAt!.getTime()).toBe(90_000);
    expect(row.claimedAt!.getTime()).toBeGreaterThanOrEqual(before.getTime());
    expect(row.leaseExpiresAt!.getTime()).toBeGreaterThan(before.getTime());
    await worker.settle.release(claimed!.job);
    const [again] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    expect(BigInt(again!.job.token)).toBeGreaterThan(BigInt(claimed!.job.token));
    await worker.settle.complete(again!.job);
  });

  it('R2 the deadline comes from the job, else the kind, else the queue, else the module', async () => {
    const worker = await startHandWorker(db, ['a'], { options: { deadline: '7m' } });
    await db.query(
      `INSERT INTO ${S}.queues (name, deadline_ms) VALUES ('slow', 1000), ('free', 0) ON CONFLICT DO NOTHING`,
    );
    const deadlineOf = async (id: string): Promise<string | null> =>
      (await db.one<{ ms: string | null }>(`SELECT deadline_ms::text AS ms FROM ${S}.jobs WHERE id = $1`, [id])).ms;
    expect(await deadlineOf(await worker.jobs.enqueue('a', {}))).toBe('420000');
    expect(await deadlineOf(await worker.jobs.enqueue('a', {}, { queue: 'slow' }))).toBe('1000');
    expect(await deadlineOf(await worker.jobs.enqueue('a', {}, { queue: 'free' }))).toBeNull();
    expect(await deadlineOf(await worker.jobs.enqueue('a', {}, { queue: 'slow', deadline: '2s' }))).toBe('2000');
    expect(await deadlineOf(await worker.jobs.enqueue('a', {}, { queue: 'slow', deadline: 'off' }))).toBeNull();
  });

  it('R3 highest priority first, then oldest, across kinds and queues', async () => {
    const worker = await startHandWorker(db, ['a', 'b']);
    const ids = await worker.jobs.enqueueMany([
      { handler: 'a', payload: 0, priority: 5 },
      { handler: 'b', payload: 1, priority: 0 },
      { handler: 'a', payload: 2, priority: 0, queue: 'other' },
      { handler: 'b', payload: 3, priority: -1 },
      { handler: 'a', payload: 4, priority: 0 },
    ]);
    const order: string[] = [];
    for (const limit of [1, 2, 5]) {
      const got = await worker.claims.claim({ kinds: ['a', 'b'], limit });
      order.push(...got.map(({ job }) => job.id));
      for (const { job } of got) await worker.settle.complete(job);
    }
    expect(order).toEqual([3, 1, 2, 4, 0].map((i) => ids[i]));
  });

  it('R3 a paused queue, a full kind and kinds of others at the head block nobody', async () => {
    const worker = await startHandWorker(db, ['a']);
    await db.query(
      `INSERT INTO ${S}.queues (name, paused) VALUES ('paused', true) ON CONFLICT (name) DO UPDATE SET paused = true`,
    );
    await worker.jobs.enqueueMany([
      { handler: 'a', payload: 1, queue: 'paused', priority: -9 },
      { handler: 'foreign', payload: 2, priority: -9 },
    ]);
    const id = await worker.jobs.enqueue('a', {});
    const got = await worker.claims.claim({ kinds: ['a'], limit: 10 });
    expect(got.map(({ job }) => job.id)).toEqual([id]);
    await worker.settle.complete(got[0]!.job);
  });

  it('R3 rows that a rival has locked are passed over, not waited for', async () => {
    const worker = await startHandWorker(db, ['a']);
    const [first, second] = await worker.jobs.enqueueMany('a', [1, 2]);
    const rival = await RowGate.hold(db, `SELECT FROM ${S}.ready WHERE job_id = $1 FOR UPDATE`, [first]);
    const got = await worker.claims.claim({ kinds: ['a'], limit: 2 });
    await rival.rollback();
    expect(got.map(({ job }) => job.id)).toEqual([second]);
    await worker.settle.complete(got[0]!.job);
  });

  it('F:F1 never more than asked, under forced nested loops and stale statistics, beside rivals', async () => {
    const worker = await startHandWorker(db, ['a', 'b']);
    await db.query(`ALTER TABLE ${S}.ready SET (autovacuum_enabled = off)`);
    await worker.jobs.enqueueMany(
      'a',
      Array.from({ length: 900 }, (_, i) => i),
    );
    await worker.jobs.enqueueMany(
      'b',
      Array.from({ length: 900 }, (_, i) => i),
    );
    await db.query(`ANALYZE ${S}.ready`);
    await db.query(`DELETE FROM ${S}.ready WHERE position % 3 <> 0`); // Statistics now lie by a factor of three.
    // The function's pinned plans are one guard; here the statement itself has to hold without them.
    const step = `${S}.step_v1(text, bigint[], bigint[], json, bigint, int, text[], text[], int[], int, bigint, int[], int[], int[], bigint[], bigint[], int[], int[])`;
    const { pins } = await db.one<{ pins: string[] }>(
      `SELECT proconfig AS pins FROM pg_proc WHERE oid = $1::regprocedure`,
      [step],
    );
    await db.query(`ALTER FUNCTION ${step} RESET ALL`);
    const clients = await Promise.all(Array.from({ length: 6 }, () => db.client()));
    const counts: number[] = [];
    let naive = 0;
    await Promise.all(
      clients.map(async (client, i) => {
        for (const name of [...NESTED_LOOPS, ...[[], ['nestloop'], ['tidscan', 'indexscan', 'bitmapscan']][i % 3]!]) {
          await client.query(`SET enable_${name} = off`);
        }
        await client.query('SET jit = off'); // The costs of switched-off plans would have each claim compiled.
        if (i === 0) {
          // What these settings do to the usual form, which asks for one row: the test would be worth nothing if they did not.
          await client.query('BEGIN');
          const { rowCount } = await client.query(
            `DELETE FROM ${S}.ready WHERE ctid IN (SELECT ctid FROM ${S}.ready WHERE queue = 'default' AND kind = 'a' AND NOT suspect
               ORDER BY priority, position LIMIT 1 FOR UPDATE SKIP LOCKED)`,
          );
          await client.query('ROLLBACK');
          naive = rowCount ?? 0;
        }
        for (let n = 0; n < 25; n++) {
          const { rows } = await client.query<{ jobs: string | null }>(
            `SELECT jobs FROM ${S}.step_v1($1, '{}', '{}', null, $2, $3, '{default,default}', '{a,b}', '{1000,1000}', 0, 1e9::bigint)`,
            [worker.workers.currentId, n, 1 + (n % 5)],
          );
          const got = rows[0]?.jobs ? (JSON.parse(rows[0].jobs) as unknown[]).length - 1 : 0;
          counts.push(got - (1 + (n % 5)));
        }
        await client.end();
      }),
    );
    expect(naive).toBeGreaterThan(1);
    expect(Math.max(...counts)).toBe(0);
    for (const pin of pins) await db.query(`ALTER FUNCTION ${step} SET ${pin.replace('=', ' = ')}`);
    const { leases, distinct } = await db.one<{ leases: number; distinct: number }>(
      `SELECT count(*)::int AS leases, count(DISTINCT job_id)::int AS distinct FROM ${S}.leases WHERE worker_id = $1`,
      [worker.workers.currentId],
    );
    expect(leases).toBe(distinct);
    await db.query(`ALTER TABLE ${S}.ready RESET (autovacuum_enabled)`);
    await db.query(`DELETE FROM ${S}.leases`);
  });

  it('a claim brings at most claim.maxBytes of payload, and at least one job', async () => {
    const worker = await startHandWorker(db, ['a'], { options: { claim: { maxBytes: 1000 } } });
    await worker.jobs.enqueueMany('a', ['x'.repeat(5000), 'y'.repeat(400), 'z'.repeat(400), 'w'.repeat(400)]);
    const sizes: number[] = [];
    for (
      let got = await worker.claims.claim({ kinds: ['a'], limit: 10 });
      got.length > 0;
      got = await worker.claims.claim({ kinds: ['a'], limit: 10 })
    ) {
      sizes.push(got.length);
      for (const { job } of got) await worker.settle.complete(job);
    }
    expect(sizes).toEqual([1, 2, 1]);
  });

  it('payloads too long for the text of a large claim come as rows: each job has its own, in order', async () => {
    const worker = await startHandWorker(db, ['a']);
    const payloads = [0, 100, 511, 600, 5000, 90_000].map((length, i) => ({ i, text: 'ä'.repeat(length) }));
    await worker.jobs.enqueueMany('a', [...payloads, null, 'last']);
    const got = await worker.claims.claim({ kinds: ['a'], limit: 10 });
    expect(got.map(({ job }) => job.payload)).toEqual([...payloads, null, 'last']);
    for (const { job } of got) await worker.settle.complete(job);
  });

  it('when those rows cannot be read their jobs go back uncharged, and the others are there', async () => {
    const worker = await startHandWorker(db, ['a']);
    const [, long] = await worker.jobs.enqueueMany('a', ['short', 'x'.repeat(70_000)]);
    const database = worker.app.get(Database);
    const query = jest.spyOn(database, 'query').mockImplementation((text, values, options) => {
      if (options?.name !== 'leasehold_payloads') return Database.prototype.query.call(database, text, values, options);
      return Promise.reject(new Error('Connection terminated unexpectedly'));
    });
    const got = await worker.claims.claim({ kinds: ['a'], limit: 10 });
    query.mockRestore();
    expect(got.map(({ job }) => job.payload)).toEqual(['short']);
    await eventually(async () => (await worker.jobs.get(long!)).state === 'ready');
    const [again] = await worker.claims.claim({ kinds: ['a'], limit: 10 });
    expect(again!.job).toMatchObject({ id: long, attempt: 1, crashes: 0, payload: 'x'.repeat(70_000) });
    for (const { job } of [...got, again!]) await worker.settle.complete(job);
  });

  it('a worker that is dead, draining or expired is refused', async () => {
    const worker = await startHandWorker(db, ['a']);
    await worker.jobs.enqueue('a', {});
    await db.query(`UPDATE ${S}.workers SET state = 'draining' WHERE id = $1`, [worker.workers.currentId]);
    await expect(worker.claims.claim({ kinds: ['a'], limit: 1 })).rejects.toThrow(/does not hold worker/);
    expect(
      await db.one(`SELECT count(*)::int AS n FROM ${S}.leases WHERE worker_id = $1`, [worker.workers.currentId]),
    ).toEqual({ n: 0 });
  });

  it('claiming by hand needs a registration', async () => {
    const producer = await startLeaseApp(db, { options: { role: 'producer' } });
    await expect(producer.claims.claim({ kinds: ['a'], limit: 1 })).rejects.toThrow(/register/);
    await expect(producer.claims.claim({ kinds: ['a'], limit: 0 })).rejects.toThrow(/whole number from 1 to 1000/);
  });

  it('what has not started after buffer.age is given back to the head of its lane, with no attempt spent', async () => {
    const worker = await startHandWorker(db, ['a']);
    const [first, second] = await worker.jobs.enqueueMany('a', [1, 2]);
    const [claimed] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    const [row] = await db.query<{ place: string }>(`SELECT place FROM ${S}.move_v1($1::json, false)`, [
      JSON.stringify([
        { job: claimed!.job.id, token: claimed!.job.token, worker: claimed!.job.workerId, event: 'giveback' },
      ]),
    ]);
    expect(row?.place).toBe('ready');
    const got = await worker.claims.claim({ kinds: ['a'], limit: 2 });
    expect(got.map(({ job }) => [job.id, job.attempt])).toEqual([
      [first, 1],
      [second, 1],
    ]);
    expect((await worker.jobs.get(first!)).runs).toEqual([]);
    for (const { job } of got) await worker.settle.complete(job);
  });

  it('the hot statements use the indexes they are meant to', async () => {
    const worker = await startHandWorker(db, ['a']);
    await worker.jobs.enqueueMany(
      'a',
      Array.from({ length: 20_000 }, (_, i) => i),
    );
    await db.query('SELECT pg_stat_force_next_flush()').catch(() => undefined);
    const scans = async (): Promise<Record<string, number>> => {
      const rows = await db.query<{ relname: string; n: string }>(
        `SELECT relname, seq_scan::text AS n FROM pg_stat_user_tables WHERE schemaname = 'leasehold' AND relname IN ('ready', 'leases', 'jobs')`,
      );
      return Object.fromEntries(rows.map((row) => [row.relname, Number(row.n)]));
    };
    // Counters arrive late: take a reading that has stopped moving.
    const settled = async (): Promise<Record<string, number>> => {
      let last = '';
      return eventually(
        async () => {
          const now = await scans();
          const same = JSON.stringify(now) === last;
          last = JSON.stringify(now);
          return same && now;
        },
        { everyMs: 1200 },
      );
    };
    const before = await settled();
    const client = await db.client();
    for (let n = 0; n < 20; n++) {
      await client.query(
        `SELECT * FROM ${S}.step_v1($1, $2, $3, null, 1, 10, '{default}', '{a}', '{10}', 0, 1e9::bigint)`,
        [
          worker.workers.currentId,
          ...(await client
            .query<{ jobs: string[]; tokens: string[] }>(
              `SELECT coalesce(array_agg(job_id), '{}') AS jobs, coalesce(array_agg(token), '{}') AS tokens FROM (
                 SELECT job_id, token FROM ${S}.leases WHERE worker_id = '${worker.workers.currentId}' ORDER BY token LIMIT 10) l`,
            )
            .then(({ rows }) => [rows[0]!.jobs, rows[0]!.tokens])),
        ],
      );
    }
    await client.query('SELECT 1');
    await client.end();
    const after = await settled();
    expect(after.ready).toBe(before.ready);
    expect(after.jobs).toBe(before.jobs);
    await db.query(`DELETE FROM ${S}.leases`);
  });
});
