import {
  type JobsService,
  type LeaseOptions,
  QueuesService,
  RetentionService,
  UnknownJobError,
} from '@leasehold/nestjs';
import { RowGate, type TestDatabase, createTestDatabase, eventually, startHandWorker, startLeaseApp } from './support';
import { type FinishedJobs, finishedJobs, jobsLeft, rowsAbout } from './support/finished-jobs';

let db: TestDatabase;
const S = '"leasehold"';
const NOTHING = { jobs: 0, finished: 0, runs: 0, checkpoints: 0 };

beforeAll(async () => {
  db = await createTestDatabase();
  await (await startLeaseApp(db, { options: { role: 'producer' } })).close();
});
afterAll(() => db.drop());
beforeEach(() => db.query(`TRUNCATE ${S}.finished, ${S}.queues`));

/** An application that prunes by hand only: its process never leads. */
const pruner = async (retention: LeaseOptions['retention'] = {}, options: Partial<LeaseOptions> = {}) => {
  const app = await startLeaseApp(db, { options: { role: 'producer', retention, ...options } });
  return Object.assign(app, { retention: app.app.get(RetentionService) });
};

const finished = (which?: FinishedJobs): Promise<string[]> => finishedJobs(db, which);
const left = (ids: string[]): Promise<string[]> => jobsLeft(db, ids);
const statesOf = (jobs: JobsService, ids: string[]) => Promise.all(ids.map(async (id) => (await jobs.get(id)).state));

describe('F:F8 what has not finished', () => {
  it('F:F8 is never deleted, however old: running, waiting for a retry, blocked, ready, paused, scheduled', async () => {
    const retention = { completed: 0, failed: 0, cancelled: 0 };
    const hand = await startHandWorker(db, ['busy', 'failing'], { options: { retention } });
    const { jobs } = hand;
    const running = await jobs.enqueue('busy', 1);
    const serial = await jobs.enqueue('busy', 2, { key: 'one', keyMode: 'serial' });
    const failing = await jobs.enqueue('failing', 1);
    const claimed = await hand.claims.claim({ kinds: ['busy', 'failing'], limit: 3 });
    await hand.settle.fail(claimed.find(({ job }) => job.id === failing)!.job, new Error('again'));
    const blocked = await jobs.enqueue('busy', 3, { key: 'one', keyMode: 'serial' });
    const ready = await jobs.enqueue('idle', 1);
    const paused = await jobs.enqueue('idle', 2);
    await jobs.pause(paused);
    const far = await jobs.enqueue('idle', 3, { delay: '60d' });
    const ids = [running, serial, failing, blocked, ready, paused, far];
    const states = ['running', 'running', 'scheduled', 'blocked', 'ready', 'paused', 'scheduled'];
    expect(await statesOf(jobs, ids)).toEqual(states);
    await db.query(`UPDATE ${S}.jobs SET created_at = created_at - interval '400 d' WHERE id = ANY ($1)`, [ids]);
    await db.query(`UPDATE ${S}.ready SET since = since - interval '400 d' WHERE job_id = ANY ($1)`, [ids]);
    await db.query(`UPDATE ${S}.leases SET claimed_at = claimed_at - interval '400 d' WHERE job_id = ANY ($1)`, [ids]);
    await db.query(`UPDATE ${S}.waiting SET run_at = run_at - interval '400 d' WHERE job_id = $1`, [failing]);
    const [old] = await finished({ age: '400 d' });

    expect(await hand.app.get(RetentionService).prune()).toEqual({ deleted: 1, held: 0 });
    expect(await left([...ids, old!])).toEqual(ids);
    expect(await statesOf(jobs, ids)).toEqual(states);
  });

  it('F:F8 a job’s time counts from when it finished, not from when it was made', async () => {
    const app = await pruner({ completed: '7d' });
    const [slow] = await finished({ age: '6 d 23 h' });
    await db.query(`UPDATE ${S}.jobs SET created_at = clock_timestamp() - interval '400 d' WHERE id = $1`, [slow]);
    const [over] = await finished({ age: '7 d 1 min' });
    expect(await app.retention.prune()).toEqual({ deleted: 1, held: 0 });
    expect(await left([slow!, over!])).toEqual([slow]);
    await expect(app.jobs.get(over!)).rejects.toThrow(UnknownJobError);
  });
});

describe('how long', () => {
  const survivors = async (app: { retention: RetentionService }, queue: string, ages: string[]): Promise<string[]> => {
    const made = new Map<string, string>();
    for (const state of ['completed', 'failed', 'cancelled'] as const) {
      for (const age of ages) made.set((await finished({ state, age, queue }))[0]!, `${state} ${age}`);
    }
    await app.retention.prune();
    return (await left([...made.keys()])).map((id) => made.get(id)!);
  };

  it('seven days, and thirty if it failed, unless the module says otherwise', async () => {
    const kept = ['completed 6 d', 'failed 6 d', 'failed 8 d', 'cancelled 6 d'];
    expect(await survivors(await pruner(), 'plain', ['6 d', '8 d', '31 d'])).toEqual(kept);
  });

  it('each state has its own time, and "forever" is for ever', async () => {
    const app = await pruner({ completed: '1h', failed: 'forever', cancelled: '3d' });
    expect(await survivors(app, 'plain', ['1 min', '2 h', '400 d'])).toEqual([
      'completed 1 min',
      'failed 1 min',
      'failed 2 h',
      'failed 400 d',
      'cancelled 1 min',
      'cancelled 2 h',
    ]);
  });

  it("a queue's own time wins over the module's, in both directions, state by state", async () => {
    const app = await pruner({ completed: '1h', failed: 'forever', cancelled: '1d' });
    const own = { completed: 'forever', failed: '1h', cancelled: null } as const;
    await app.app.get(QueuesService).configure('own', { retention: own });
    expect(await survivors(app, 'own', ['1 min', '2 h', '2 d'])).toEqual([
      'completed 1 min',
      'completed 2 h',
      'completed 2 d',
      'failed 1 min',
      'cancelled 1 min',
      'cancelled 2 h',
    ]);
    expect(await survivors(app, 'other', ['2 h'])).toEqual(['failed 2 h', 'cancelled 2 h']);
  });

  it("with the module's all for ever, a queue's own still counts, and the others keep everything", async () => {
    const app = await pruner({ completed: 'forever', failed: 'forever', cancelled: 'forever' });
    expect(await survivors(app, 'own', ['400 d'])).toEqual(['completed 400 d', 'failed 400 d', 'cancelled 400 d']);
    await app.app.get(QueuesService).configure('own', { retention: { failed: '1h' } });
    expect(await survivors(app, 'own', ['2 h'])).toEqual(['completed 2 h', 'cancelled 2 h']);
    expect(await survivors(app, 'other', ['2 h'])).toEqual(['completed 2 h', 'failed 2 h', 'cancelled 2 h']);
  });
});

describe('F:F6 a large backlog', () => {
  it('F:F6 shrinks to nothing under a statement_timeout of two seconds, runs and checkpoints with it', async () => {
    const ids = [
      ...(await finished({ count: 60_000, age: '40 d', history: true })),
      ...(await finished({ count: 40_000, age: '41 d', history: true })),
    ];
    await finished({ count: 3000, age: '1 d' });

    // The function has a bound of its own, whatever it is asked for.
    const session = await db.client();
    await session.query(`SET statement_timeout = '2s'`);
    const began = performance.now();
    const { rows } = await session.query<{ deleted: number; next_from: Date | null }>(
      `SELECT deleted, next_from FROM ${S}.prune_v1(1, 1, 1, '-infinity', 0, 1000000)`,
    );
    expect(performance.now() - began).toBeLessThan(1500);
    expect(rows[0]!.deleted).toBeGreaterThan(100);
    expect(rows[0]!.next_from).not.toBeNull();

    // Four fifths of this for the server: its limit comes before the client's.
    const app = await pruner({}, { connection: { url: db.url, queryTimeout: '2500ms' } });
    expect((await app.retention.prune()).deleted).toBe(100_000 - rows[0]!.deleted);
    expect(await rowsAbout(db, ids)).toEqual(NOTHING);
    expect(await db.one(`SELECT count(*)::int AS n FROM ${S}.finished`)).toEqual({ n: 3000 });
  });

  it('F:F6 a pass gets past what is kept, a bounded number of jobs at a time, and ends', async () => {
    const kept = await finished({ count: 250, age: '20 d', state: 'failed' });
    const [over] = await finished({ age: '20 d' });
    const deleted: number[] = [];
    let place: { from: string | null; after: string | null } = { from: '-infinity', after: '0' };
    while (place.from !== null && deleted.length < 50) {
      const row = await db.one<{ deleted: number } & typeof place>(
        `SELECT deleted, next_from::text AS from, next_after::text AS after FROM ${S}.prune_v1(604800000, null, null, $1, $2, 100)`,
        [place.from, place.after],
      );
      deleted.push(row.deleted);
      place = row;
    }
    expect(deleted).toEqual([0, 0, 1]);
    expect(await left([...kept, over!])).toEqual(kept);
  });

  it('F:F6 less is tried at once when a batch does not get through: a foreign key without an index', async () => {
    await db.query(`CREATE TABLE slow (job_id bigint REFERENCES ${S}.jobs ON DELETE CASCADE);
      CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.02); RETURN OLD; END';
      CREATE TRIGGER dawdle BEFORE DELETE ON slow FOR EACH ROW EXECUTE FUNCTION dawdle()`);
    try {
      const ids = await finished({ count: 60, age: '40 d' });
      await db.query('INSERT INTO slow SELECT unnest($1::bigint[])', [ids]);
      // Sixty take 1.2 s, and the server's limit is 0.4 s.
      const app = await pruner({}, { connection: { url: db.url, queryTimeout: '500ms' } });
      expect(await app.retention.prune()).toEqual({ deleted: 60, held: 0 });
    } finally {
      await db.query('DROP TABLE slow');
    }
  });

  it('F:F6 a pass that the leader began goes on in its next tick, and the pass after it rests', async () => {
    const app = await pruner();
    const ids = await finished({ count: 2500, age: '40 d' });
    let batches = 0;
    expect(await app.retention.pruneFor(20_000, () => batches++ < 1)).toBe(1000);
    expect(await app.retention.pruneFor(20_000)).toBe(1500);
    expect(await left(ids)).toEqual([]);
    await finished({ age: '40 d' });
    expect(await app.retention.pruneFor(20_000)).toBe(0); // It rests.
    expect(await app.retention.prune()).toEqual({ deleted: 1, held: 0 }); // By hand it is always at once.
  });
});

describe('a job that is taken back meanwhile', () => {
  it('R22 F:F8 retried first: pruning passes it by without waiting, and it stays whole', async () => {
    const app = await pruner({ completed: '1h' });
    const [id, other] = await finished({ count: 2, age: '1 d', history: true });
    const gate = await RowGate.hold(db, `SELECT * FROM ${S}.steer_v1('retry', ARRAY[$1::bigint], null, 0)`, [id]);
    let pruned = false;
    const pruning = app.retention.prune().finally(() => (pruned = true));
    await eventually(async () => pruned || (await gate.waiters()) > 0, { everyMs: 5 });
    await gate.release();
    expect(await pruning).toEqual({ deleted: 1, held: 0 });
    expect(await app.jobs.get(id!)).toMatchObject({ state: 'ready', payload: 1, attempt: 0 });
    expect(await rowsAbout(db, [id!])).toEqual({ jobs: 1, finished: 0, runs: 2, checkpoints: 1 });
    expect(await left([other!])).toEqual([]);
  });

  it.each([
    ['commits', 'release'],
    ['rolls back', 'rollback'],
  ] as const)('R22 F:F8 pruned first: the retry waits, and when that %s it is told the truth', async (_, end) => {
    const app = await pruner();
    const [id] = await finished({ age: '1 d', history: true });
    const gate = await RowGate.hold(db, `SELECT deleted FROM ${S}.prune_v1(1000, 1000, 1000, '-infinity', 0, 1000)`);
    expect(gate.rows).toEqual([{ deleted: 1 }]);
    const retry = app.jobs.retry(id!);
    retry.catch(() => undefined);
    await gate.untilWaiting();
    await gate[end]();
    if (end === 'release') await expect(retry).rejects.toThrow(UnknownJobError);
    else expect(await retry).toMatchObject({ changed: true, state: 'ready' });
    expect(await left([id!])).toEqual(end === 'release' ? [] : [id]);
  });
});

describe("foreign keys of the user's", () => {
  const documents = (action: string) =>
    db.query(`DROP TABLE IF EXISTS documents;
      CREATE TABLE documents (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job_id bigint REFERENCES ${S}.jobs ${action})`);
  const point = (ids: string[]) => db.query('INSERT INTO documents (job_id) SELECT unnest($1::bigint[])', [ids]);
  const pointers = async () =>
    (await db.query<{ job_id: string | null }>('SELECT job_id::text FROM documents ORDER BY id')).map(
      ({ job_id }) => job_id,
    );
  afterEach(() => db.query('DROP TABLE IF EXISTS documents CASCADE'));

  it.each(['NO ACTION', 'RESTRICT', 'NO ACTION DEFERRABLE INITIALLY DEFERRED'])(
    'F:F8 ON DELETE %s holds its jobs, whole; the others go',
    async (action) => {
      await documents(`ON DELETE ${action}`);
      const app = await pruner();
      const ids = await finished({ count: 500, age: '40 d', history: true });
      const held = ids.filter((_, i) => i % 50 === 7);
      await point(held);
      expect(await app.retention.prune()).toEqual({ deleted: 490, held: 10 });
      expect(await rowsAbout(db, ids)).toEqual({ jobs: 10, finished: 10, runs: 10, checkpoints: 10 });
      // From now on they are seen to be held: nothing is tried, and nothing written.
      const again = `SELECT deleted, held, why FROM ${S}.prune_v1(1, 1, 1, '-infinity', 0, 1000)`;
      expect(await db.one(again)).toEqual({ deleted: 0, held: 10, why: null });
      await db.query('DELETE FROM documents');
      expect(await app.retention.prune()).toEqual({ deleted: 10, held: 0 });
      expect(await rowsAbout(db, ids)).toEqual(NOTHING);
    },
  );

  it.each(['NO ACTION', 'RESTRICT', 'NO ACTION DEFERRABLE INITIALLY DEFERRED'])(
    'F:F8 one that cannot be looked up, since it stands behind one that cascades, holds its jobs as well (%s)',
    async (action) => {
      await documents('ON DELETE CASCADE');
      await db.query(`CREATE TABLE pages (document bigint REFERENCES documents ON DELETE ${action})`);
      const app = await pruner();
      const ids = await finished({ count: 500, age: '40 d', history: true });
      await point(ids);
      const held = [ids[3]!, ids[250]!, ids[499]!];
      await db.query('INSERT INTO pages SELECT id FROM documents WHERE job_id = ANY ($1)', [held]);
      expect(await app.retention.prune()).toEqual({ deleted: 497, held: 3 });
      expect(await rowsAbout(db, ids)).toEqual({ jobs: 3, finished: 3, runs: 3, checkpoints: 3 });
      expect(await pointers()).toEqual(held);
      await db.query('DROP TABLE pages');
    },
  );

  it('rows that cascade go along, those that are set to null stay', async () => {
    await documents('ON DELETE CASCADE');
    const app = await pruner();
    await point(await finished({ count: 3, age: '40 d' }));
    await app.retention.prune();
    expect(await pointers()).toEqual([]);
    await documents('ON DELETE SET NULL');
    await point(await finished({ count: 3, age: '40 d' }));
    await app.retention.prune();
    expect(await pointers()).toEqual([null, null, null]);
  });

  it('F:F2 references that are being made are not waited for, and hold their jobs', async () => {
    await documents('ON DELETE CASCADE');
    const app = await pruner();
    const ids = await finished({ count: 100, age: '40 d' });
    const half = ids.filter((_, i) => i % 2 === 0);
    const gate = await RowGate.hold(db, 'INSERT INTO documents (job_id) SELECT unnest($1::bigint[])', [half]);
    expect(await app.retention.prune()).toEqual({ deleted: 50, held: 50 });
    await gate.release();
    expect(await left(ids)).toEqual(half);
    expect(await app.retention.prune()).toEqual({ deleted: 50, held: 0 });
  });

  it("a row of the user's that somebody has locked is waited for no longer than a moment", async () => {
    await documents('ON DELETE CASCADE');
    const app = await pruner();
    const ids = await finished({ count: 300, age: '40 d' });
    await point(ids);
    const gate = await RowGate.hold(db, 'SELECT FROM documents WHERE job_id = $1 FOR UPDATE', [ids[42]]);
    const { deleted, held } = await app.retention.prune();
    expect(deleted + held).toBe(300);
    expect(deleted).toBeGreaterThanOrEqual(200);
    expect(await left([ids[42]!])).toEqual([ids[42]]);
    await gate.release();
    await app.retention.prune();
    expect(await rowsAbout(db, ids)).toEqual(NOTHING);
  });

  it('a trigger that keeps a row of jobs keeps all of that job', async () => {
    const [id] = await finished({ age: '40 d', history: true });
    const others = await finished({ count: 20, age: '40 d', history: true });
    await db.query(`CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
      CREATE TRIGGER keep BEFORE DELETE ON ${S}.jobs FOR EACH ROW WHEN (OLD.id = ${id}) EXECUTE FUNCTION keep()`);
    try {
      const app = await pruner();
      expect(await app.retention.prune()).toEqual({ deleted: 20, held: 1 });
      expect(await rowsAbout(db, [id!, ...others])).toEqual({ jobs: 1, finished: 1, runs: 1, checkpoints: 1 });
    } finally {
      await db.query(`DROP TRIGGER keep ON ${S}.jobs`);
    }
  });
});

describe('wherever it runs', () => {
  it('F:E10 a schema of any name', async () => {
    const options = { schema: `it's 100%s "a"`, retention: { cancelled: 0 }, role: 'producer' } as const;
    const app = await startLeaseApp(db, { options });
    const [id] = await app.jobs.enqueueMany('plain', [1, 2]);
    await app.jobs.cancel(id!);
    const retention = app.app.get(RetentionService);
    expect(await retention.prune()).toEqual({ deleted: 1, held: 0 });
    expect(await retention.dropEmptyDays()).toEqual([]);
    expect(await app.jobs.counts()).toMatchObject({ ready: 1, cancelled: 0 });
  });

  it('F:J10 a role that may only read and write rows, not even of the table whose foreign key holds a job', async () => {
    const role = `lh_test_${Math.random().toString(36).slice(2)}`;
    await db.query(`CREATE ROLE ${role} LOGIN PASSWORD 'few';
      GRANT USAGE ON SCHEMA leasehold TO ${role};
      GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA leasehold TO ${role};
      GRANT SELECT, UPDATE, USAGE ON ALL SEQUENCES IN SCHEMA leasehold TO ${role};
      CREATE TABLE secret (job_id bigint REFERENCES ${S}.jobs)`);
    try {
      const url = Object.assign(new URL(db.url), { username: role, password: 'few' }).href;
      // In a partition that was made after the grant.
      const ids = await finished({ count: 20, age: '77 d', history: true });
      await db.query('INSERT INTO secret VALUES ($1)', [ids[5]]);
      const app = await startLeaseApp(db, { url, options: { role: 'producer', migrate: false } });
      const retention = app.app.get(RetentionService);
      expect(await retention.prune()).toEqual({ deleted: 19, held: 1 });
      await db.query('DROP TABLE secret');
      expect(await retention.prune()).toEqual({ deleted: 1, held: 0 });
      expect(await retention.dropEmptyDays()).toContainEqual(expect.stringMatching(/^leasehold\.finished_/));
      await app.close();
    } finally {
      await db.query(`DROP TABLE IF EXISTS secret; DROP OWNED BY ${role} CASCADE; DROP ROLE ${role}`);
    }
  });
});
