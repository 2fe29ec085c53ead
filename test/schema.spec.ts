import { randomBytes } from 'node:crypto';
import { type Handler, InvalidOptionError, type Job, JobHandler } from '@leasehold/nestjs';
import type { Client } from 'pg';
import { createTestDatabase, eventually, type TestDatabase } from './support';
import { bootError } from './support/boot';
import { untilState } from './support/job-states';
import { rootModule, startLeaseApp } from './support/lease-app';

@JobHandler('schema.job', { maxAttempts: 1 })
class Runs implements Handler<string, string> {
  handle({ payload }: Job<string>): string {
    if (payload === 'fail') throw new Error('as told');
    return payload;
  }
}

/** A role of the test's own, and the database's URL with it. */
async function roleOf(db: TestDatabase): Promise<{ role: string; url: string }> {
  const role = `lh_test_${randomBytes(6).toString('hex')}`;
  const password = randomBytes(12).toString('hex');
  await db.query(`CREATE ROLE ${role} LOGIN PASSWORD '${password}'`);
  await db.query('REVOKE ALL ON SCHEMA public FROM PUBLIC');
  const url = new URL(db.url);
  url.username = role;
  url.password = password;
  return { role, url: url.href };
}

async function dropRole(db: TestDatabase, role: string): Promise<void> {
  await db.query(`DROP OWNED BY ${role} CASCADE`);
  await db.query(`DROP ROLE ${role}`);
}

/** Starts, runs a job that succeeds and one that fails, leads, and stops. */
async function works(url: string, options: { schema?: string; migrate?: boolean }): Promise<void> {
  const app = await startLeaseApp({ url }, { handlers: [Runs], options });
  const [good, bad] = await app.jobs.enqueueMany(Runs, ['yes', 'fail']);
  expect((await untilState(app.jobs, good ?? '', 'completed')).result).toBe('yes');
  await untilState(app.jobs, bad ?? '', 'failed');
  const delayed = await app.jobs.enqueue(Runs, 'later', { delay: 1 });
  await untilState(app.jobs, delayed, 'completed');
  await eventually(() => app.leader.isLeader);
  expect(await app.rescue.rescueExpired({ unguarded: true })).toBe(0);
  expect(await app.rescue.rescueOverdue()).toBe(0);
  expect(await app.rescue.rescueVanished()).toBe(0);
  await app.close();
}

describe('F:E10 names of the schema', () => {
  const names = [
    'My-Queue',
    'select',
    'a"b',
    'a.b',
    "it's",
    'a\\b c',
    'schéma-日本-😀',
    'leasehold_of_sixty_three_bytes_'.padEnd(63, 'x'),
  ];
  it.each(names)(
    'F:E10 %s: boots twice and works, under an empty search_path and without rights on public',
    async (schema) => {
      const db = await createTestDatabase({ name: 'schema_name', settings: { search_path: '' } });
      const { role, url } = await roleOf(db);
      try {
        await db.query(`GRANT CREATE ON DATABASE ${db.name} TO ${role}`);
        for (let i = 0; i < 2; i++) await works(url, { schema });
        const where = await db.query<{ nspname: string }>(
          `SELECT DISTINCT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relowner = '${role}'::regrole
         AND nspname NOT LIKE 'pg\\_toast%'`,
        );
        expect(where).toEqual([{ nspname: schema }]);
      } finally {
        await dropRole(db, role);
        await db.drop();
      }
    },
  );

  it.each(['x'.repeat(64), '日'.repeat(22), '', 'a$b', 'a\0b', '\ud800', 'pg_leasehold', 5])(
    'F:E10 %j is refused before anything is made',
    async (schema) => {
      // The url leads nowhere: the name is refused before anybody connects.
      const root = () => rootModule({ url: 'postgres://127.0.0.1:1/none' }, { options: { schema: schema as string } });
      const error = await bootError(root());
      expect(error).toBeInstanceOf(InvalidOptionError);
      expect(error.message).toMatch(/^schema = /);
    },
  );
});

describe('F:J10 roles with few rights', () => {
  it('F:J10 one that may not create schemas, but owns ours', async () => {
    const db = await createTestDatabase({ name: 'schema_owner' });
    const { role, url } = await roleOf(db);
    try {
      await db.query(`CREATE SCHEMA owned AUTHORIZATION ${role}`);
      await works(url, { schema: 'owned' });
    } finally {
      await dropRole(db, role);
      await db.drop();
    }
  });

  it('F:J10 one that may only read and write rows: partitions are still kept, by their owner’s right', async () => {
    const db = await createTestDatabase({ name: 'schema_writer' });
    const { role, url } = await roleOf(db);
    try {
      await (await startLeaseApp(db)).close();
      await db.query(`GRANT USAGE ON SCHEMA leasehold TO ${role}`);
      await db.query(`GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA leasehold TO ${role}`);
      await db.query(`GRANT SELECT, UPDATE, USAGE ON ALL SEQUENCES IN SCHEMA leasehold TO ${role}`);
      await dropPartitions(db);
      await works(url, { migrate: false });
      await dropRole(db, role);
    } finally {
      await db.drop();
    }
  });
});

const partitions = async (db: TestDatabase) =>
  (
    await db.query<{ name: string }>(
      `SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = 'leasehold.finished'::regclass ORDER BY 1`,
    )
  ).map(({ name }) => name);

async function dropPartitions(db: TestDatabase): Promise<void> {
  for (const name of await partitions(db)) await db.query(`DROP TABLE ${name}`);
}

describe('partitions of finished jobs', () => {
  let db: TestDatabase;
  beforeAll(async () => {
    db = await createTestDatabase();
  });
  afterAll(() => db.drop());

  it('are made from yesterday to fourteen days ahead, in UTC, at every boot', async () => {
    for (let i = 0; i < 2; i++) {
      await (await startLeaseApp(db)).close();
      const expected = await db.query<{ name: string }>(
        `SELECT 'leasehold.finished_' || to_char(day, 'YYYYMMDD') AS name
         FROM generate_series((clock_timestamp() AT TIME ZONE 'UTC')::date - 1, (clock_timestamp() AT TIME ZONE 'UTC')::date + 14, interval '1 day') AS day`,
      );
      expect(await partitions(db)).toEqual(expected.map(({ name }) => name));
      await db.query(`DROP TABLE ${expected[5]?.name}, ${expected[15]?.name}`);
    }
  });

  it.each([
    ['succeeds', 'yes', 'completed'],
    ['fails', 'fail', 'failed'],
  ] as const)('a job that %s when there is none makes it', async (_, payload, state) => {
    const { jobs } = await startLeaseApp(db, { handlers: [Runs] });
    await dropPartitions(db);
    await untilState(jobs, await jobs.enqueue(Runs, payload), state);
    expect((await partitions(db)).length).toBe(16);
  });

  it('a CHECK of the operator’s own is no missing partition: the job ends with that reason', async () => {
    const { jobs } = await startLeaseApp(db, { handlers: [Runs] });
    await db.query(`ALTER TABLE leasehold.finished ADD CONSTRAINT own CHECK (result::text <> '"unwanted"')`);
    const ids = await jobs.enqueueMany(Runs, ['fine', 'unwanted', 'fine']);
    for (const [i, id] of ids.entries()) {
      const job = await untilState(jobs, id, i === 1 ? 'failed' : 'completed');
      if (i === 1) expect(job.reason).toMatch(/could not be stored: .*"own"/);
    }
    await db.query('ALTER TABLE leasehold.finished DROP CONSTRAINT own');
  });
});

describe('plans made on empty tables', () => {
  const READY = 300_000;
  let db: TestDatabase;
  let client: Client;

  beforeAll(async () => {
    db = await createTestDatabase({ name: 'schema_plans' });
    await (await startLeaseApp(db)).close();
    await db.query(`
      INSERT INTO leasehold.workers (id, name, host, pid, version, state, kinds, concurrency, ttl_ms, incarnation, expires_at)
      VALUES ('w', 'w', 'h', 1, '0', 'live', '{a,b,c}', 1, 1, '', clock_timestamp() + interval '1 day')`);
    client = await db.client();
  }, 120_000);
  afterAll(() => db.drop());

  const claim = async (): Promise<[id: string, token: string][]> => {
    const { rows } = await client.query<{ jobs: [number, ...[key: string][]] | null }>(
      `SELECT jobs::json FROM leasehold.step_v1('w', '{}', '{}', null, 1, 10, '{q,q,q}', '{a,b,c}', '{5,5,5}', 0, 1000000000)`,
    );
    const [, ...jobs] = rows[0]?.jobs ?? [0];
    return jobs.map(([key]) => key.split(':') as [string, string]);
  };

  /** One of everything that a worker asks all the time. */
  async function turn(): Promise<number> {
    await client.query(`SELECT * FROM leasehold.poll_v1('{a,b,c}', null, 500)`);
    const claimed = await claim();
    const ids = claimed.map(([id]) => id);
    const tokens = claimed.map(([, token]) => token);
    const range = ['-9223372036854775808', '9223372036854775807', '0'];
    await client.query(`SELECT * FROM leasehold.attest_v1('w', $1, $2, $3, $4, $5)`, [ids, tokens, ...range]);
    await client.query(`SELECT FROM leasehold.step_v1('w', $1, $2, null, 2, 0, '{}', '{}', '{}', 0, 1)`, [
      ids.slice(0, 5),
      tokens.slice(0, 5),
    ]);
    const moves = claimed
      .slice(5)
      .map(([job, token]) => ({ job, token, worker: 'w', event: 'fail', error: { message: 'x' } }));
    await client.query(`SELECT FROM leasehold.move_v1($1, false)`, [JSON.stringify(moves)]);
    return claimed.length;
  }

  const read = async () => {
    await client.query('SELECT pg_stat_force_next_flush()');
    await client.query('SELECT 1');
    const { seq } = await db.one<{ seq: number }>(
      `SELECT sum(seq_tup_read)::int AS seq FROM pg_stat_user_tables WHERE relname IN ('ready', 'leases', 'jobs', 'waiting')`,
    );
    const { entries } = await db.one<{ entries: number }>(
      `SELECT sum(idx_tup_read)::int AS entries FROM pg_stat_user_indexes WHERE relname IN ('ready', 'leases', 'jobs', 'waiting')`,
    );
    return { seq, entries };
  };

  it('serve 300 000 ready jobs by index, reading only what is taken', async () => {
    for (let i = 0; i < 20; i++) expect(await turn()).toBe(0);
    await db.query(
      `WITH j AS (
         INSERT INTO leasehold.jobs (queue, kind, payload, priority, max_attempts, max_crashes, max_releases)
         SELECT 'q', (ARRAY['a', 'b', 'c'])[1 + i % 3], '1', 0, 20, 3, 20 FROM generate_series(1, ${READY}) i RETURNING id, kind)
       INSERT INTO leasehold.ready (job_id, queue, kind, priority) SELECT id, 'q', kind, 0 FROM j`,
    );
    const before = await read();
    let taken = 0;
    for (let i = 0; i < 20; i++) taken += await turn();
    expect(taken).toBe(200);
    const after = await read();
    expect(after.seq - before.seq).toBe(0);
    // Some dozens a job, dead entries at the head of a lane among them; one scan of an index in each turn would be millions.
    expect(after.entries - before.entries).toBeLessThan(taken * 250);
  });

  it('settle and move one job of 30 000 leased ones without reading the others', async () => {
    // A plan made while `leases` is empty reads it as a whole, once for each outcome, unless it is kept from it (see `few`).
    const plans = await db.client();
    await db.query('TRUNCATE leasehold.leases');
    for (let i = 0; i < 10; i++) {
      await plans.query(`SELECT FROM leasehold.step_v1('w', '{1,2}', '{1,2}', null, 1, 0, '{}', '{}', '{}', 0, 1)`);
      await plans.query(`SELECT FROM leasehold.move_v1('[{"job":1,"token":1,"worker":"w","event":"return"}]', false)`);
    }
    await db.query(
      `INSERT INTO leasehold.leases (job_id, token, claim_no, claimed_at, attempt, crashes, releases, snoozes, priority, suspect, worker_id, queue, kind)
       SELECT id, id, 1, now(), 1, 0, 0, 0, 0, false, 'w', 'q', kind FROM leasehold.jobs ORDER BY id LIMIT 30000`,
    );
    const [one, two] = await db.query<{ id: string }>(
      `SELECT job_id::text AS id FROM leasehold.leases ORDER BY 1 LIMIT 2`,
    );
    const before = await read();
    const settled = await plans.query<{ applied: string | null }>(
      `SELECT applied FROM leasehold.step_v1('w', $1, $1, null, 1, 0, '{}', '{}', '{}', 0, 1)`,
      [[one!.id]],
    );
    const moved = await plans.query(`SELECT FROM leasehold.move_v1($1, false)`, [
      JSON.stringify([{ job: two!.id, token: two!.id, worker: 'w', event: 'return' }]),
    ]);
    await plans.query('SELECT pg_stat_force_next_flush()');
    await plans.end();
    expect([settled.rows[0]!.applied, moved.rowCount]).toEqual([null, 1]);
    const after = await read();
    expect(after.entries - before.entries).toBeLessThan(100);
    expect(after.seq - before.seq).toBe(0);
  });

  it('settle a job with a key among 30 000 keys, reading its own alone', async () => {
    const client = await db.client();
    for (let i = 0; i < 10; i++) await client.query(`SELECT leasehold.release_keys_v1('{1}')`);
    await db.query(
      `INSERT INTO leasehold.job_keys (key_space, key, job_id) SELECT 'kind:a', i::text, 1000000 + i FROM generate_series(1, 30000) i`,
    );
    const seqAndKeys = async () => {
      await client.query('SELECT pg_stat_force_next_flush()');
      return db.one<{ seq: number; entries: number }>(
        `SELECT (SELECT seq_tup_read::int FROM pg_stat_user_tables WHERE relname = 'job_keys') AS seq,
           (SELECT sum(idx_tup_read)::int FROM pg_stat_user_indexes WHERE relname = 'job_keys') AS entries`,
      );
    };
    const before = await seqAndKeys();
    await client.query(
      `INSERT INTO leasehold.leases (job_id, token, claim_no, claimed_at, attempt, crashes, releases, snoozes, priority, suspect, keyed, worker_id,
         queue, kind) VALUES (1000007, 1, 1, now(), 1, 0, 0, 0, 0, false, true, 'w', 'q', 'a')`,
    );
    await client.query(
      `SELECT applied FROM leasehold.step_v1('w', '{1000007}', '{1}', null, 1, 0, '{}', '{}', '{}', 0, 1)`,
    );
    const after = await seqAndKeys();
    await client.end();
    expect(await db.query(`SELECT FROM leasehold.job_keys WHERE job_id = 1000007`)).toEqual([]);
    expect(after.seq - before.seq).toBe(0);
    expect(after.entries - before.entries).toBeLessThan(50);
  });
});
