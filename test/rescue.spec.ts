import { LeaseLostError, RESCUE_TEXT } from '@leasehold/nestjs';
import { VanishedWorkers } from '@leasehold/nestjs/dist/rescue/vanished';
import {
  type LeaseApp,
  RowGate,
  type TestDatabase,
  createTestDatabase,
  startHandWorker,
  startLeaseApp,
} from './support';

let db: TestDatabase;
const S = '"leasehold"';
let rescuer: LeaseApp;

beforeAll(async () => {
  db = await createTestDatabase({ name: 'rescue' });
});
afterAll(() => db.drop());
beforeEach(async () => {
  rescuer = await startLeaseApp(db, { options: { role: 'producer' } });
});

/** A worker as a process that is gone would have left it: leases, and a row that says what the test wants. */
async function abandoned(
  count: number,
  state: string,
  options: { kind?: string; queue?: string; maxCrashes?: number; deadline?: '1h' | 'off' } = {},
) {
  const { kind = 'a', queue = 'default', maxCrashes, deadline = '1h' } = options;
  const id = `gone-${Math.random().toString(36).slice(2)}`;
  await db.query(
    `INSERT INTO ${S}.workers (id, name, host, pid, version, state, kinds, concurrency, ttl_ms, incarnation, expires_at)
     VALUES ($1, 'gone', 'h', 1, '0', 'live', '{a}', 1, 3000, 'earlier', clock_timestamp() + interval '1 h')`,
    [id],
  );
  const jobIds = await rescuer.jobs.enqueueMany(
    kind,
    Array.from({ length: count }, (_, i) => i),
    {
      queue,
      deadline,
      ...(maxCrashes ? { maxCrashes } : {}),
    },
  );
  await db.query(`SELECT ${S}.step_v1($1, '{}', '{}', null, 1, $2, $3, $4, $5, 1, 1e9::bigint)`, [
    id,
    count,
    [queue],
    [kind],
    [count],
  ]);
  await db.query(`UPDATE ${S}.workers SET ${state} WHERE id = $1`, [id]);
  return { id, jobIds };
}

const EXPIRED = `expires_at = clock_timestamp() - interval '1 s'`;
const rescueExpired = () => rescuer.rescue.rescueExpired({ unguarded: true });
const tidy = () => db.query(`WITH r AS (DELETE FROM ${S}.ready) DELETE FROM ${S}.waiting`);
afterEach(tidy);

describe('rescue by an expired lease', () => {
  it('R9 R10 R12 closes the run as dead, gives the attempt back, and the next claim issues the same number', async () => {
    const { jobIds } = await abandoned(1, EXPIRED);
    expect(await rescueExpired()).toBe(1);
    const [id] = jobIds;
    let job = await rescuer.jobs.get(id!);
    expect(job).toMatchObject({ state: 'ready', attempt: 0, crashes: 1 });
    expect(job.runs).toMatchObject([{ outcome: 'dead', attempt: 1, error: { message: RESCUE_TEXT.lease } }]);
    const worker = await startHandWorker(db, ['a']);
    const [again] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    expect(again!.job.attempt).toBe(1);
    await worker.settle.fail(again!.job, new Error('own'));
    job = await rescuer.jobs.get(id!);
    expect(job.runs!.map(({ attempt, outcome }) => [attempt, outcome])).toEqual([
      [1, 'dead'],
      [1, 'failed'],
    ]);
    expect(job).toMatchObject({ state: 'scheduled', attempt: 1, crashes: 0 });
  });

  it('R11 a lease without an expiry counts as expired, and so does one without a live worker (F:C1)', async () => {
    const noExpiry = await abandoned(2, 'expires_at = NULL');
    const noRow = await abandoned(2, EXPIRED);
    await db.query(`DELETE FROM ${S}.workers WHERE id = $1`, [noRow.id]);
    const stopped = await abandoned(2, `state = 'stopped', ended_at = clock_timestamp()`);
    expect(await rescueExpired()).toBe(6);
    for (const id of [...noExpiry.jobIds, ...noRow.jobIds, ...stopped.jobIds]) {
      expect(await rescuer.jobs.get(id)).toMatchObject({ state: 'ready', runs: [{ outcome: 'dead' }] });
    }
  });

  it('R11 a lease renewed a moment ago is not taken: a renewal and a rescue cannot both win', async () => {
    const { id, jobIds } = await abandoned(1, EXPIRED);
    // The renewal is under way and has not committed: the rescue passes the row over.
    const renewal = await RowGate.hold(
      db,
      `UPDATE ${S}.workers SET expires_at = clock_timestamp() + interval '1 h' WHERE id = $1`,
      [id],
    );
    expect(await rescueExpired()).toBe(0);
    await renewal.release();
    expect(await rescueExpired()).toBe(0);
    expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({ state: 'running' });
    // The other order: the mark came first, so the renewal finds no live row.
    await db.query(`UPDATE ${S}.workers SET ${EXPIRED} WHERE id = $1`, [id]);
    expect(await rescueExpired()).toBe(1);
    expect(
      await db.query(
        `UPDATE ${S}.workers SET beat_at = beat_at WHERE id = $1 AND state IN ('live', 'draining') RETURNING 1`,
        [id],
      ),
    ).toEqual([]);
  });

  it('R11 a worker never rescues what it is itself running', async () => {
    const worker = await startHandWorker(db, ['a']);
    const id = await worker.jobs.enqueue('a', {}, { deadline: '1h' });
    const [claimed] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    await db.query(`UPDATE ${S}.workers SET ${EXPIRED} WHERE id = $1`, [worker.workers.currentId]);
    await db.query(`UPDATE ${S}.leases SET deadline_at = clock_timestamp() - interval '1 s' WHERE job_id = $1`, [id]);
    expect(await worker.rescue.rescueExpired({ unguarded: true })).toBe(0);
    expect(await worker.rescue.rescueOverdue()).toBe(0);
    expect(await worker.jobs.get(id)).toMatchObject({ state: 'running' });
    expect(await worker.workers.get(worker.workers.currentId)).toMatchObject({ state: 'live' });
    await worker.settle.complete(claimed!.job);
  });

  it('F:A1 paused between read and write: a job completed, or leased anew, meanwhile is not touched, the rest is rescued', async () => {
    const { id, jobIds } = await abandoned(
      3,
      `state = 'dead', ended_at = clock_timestamp(), died_of = 'lease', leases_at_death = 2`,
    );
    const read = await rescuer.rescue.candidates(id);
    expect(read).toHaveLength(3);
    const [done, moved, rest] = jobIds;
    const tokenOf = (jobId: string) => read.find((candidate) => candidate.jobId === jobId)!.token;
    // (a) completed with the valid fence; (b) released, and claimed by another worker.
    await db.query(`SELECT ${S}.step_v1($1, $2, $3, '["mine"]', 0, 0, '{}', '{}', '{}', 0, 0)`, [
      id,
      [done],
      [tokenOf(done!)],
    ]);
    await db.query(`SELECT * FROM ${S}.move_v1($1::json, false)`, [
      JSON.stringify([{ job: moved, token: tokenOf(moved!), worker: id, event: 'giveback' }]),
    ]);
    const worker = await startHandWorker(db, ['a']);
    const [claimed] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    expect(claimed!.job.id).toBe(moved);
    const before = await Promise.all([rescuer.jobs.get(done!), rescuer.jobs.get(moved!)]);
    expect(await rescuer.rescue.take(read, 'lease')).toBe(1);
    expect(await Promise.all([rescuer.jobs.get(done!), rescuer.jobs.get(moved!)])).toEqual(before);
    expect(await rescuer.jobs.get(rest!)).toMatchObject({ state: 'ready', crashes: 1 });
    await worker.settle.complete(claimed!.job);
  });

  it('F:A7 two passes at once over the same 100 leases: each is rescued once', async () => {
    const { jobIds } = await abandoned(100, EXPIRED);
    const other = await startLeaseApp(db, { options: { role: 'producer' } });
    const moved = await Promise.all([
      rescueExpired(),
      other.rescue.rescueExpired({ unguarded: true }),
      rescueExpired(),
    ]);
    // Rows that one pass has locked are left out by the others; a further pass finds nothing.
    expect(moved.reduce((a, b) => a + b) + (await rescueExpired())).toBe(100);
    const { runs } = await db.one<{ runs: number }>(
      `SELECT count(*)::int AS runs FROM ${S}.runs WHERE job_id = ANY ($1)`,
      [jobIds],
    );
    expect(runs).toBe(100);
  });

  it('F:C5 cut off in the middle, the next pass finds what is left, each once; at most 500 a statement', async () => {
    const { id, jobIds } = await abandoned(1200, EXPIRED);
    await db.query(`CREATE TABLE statements (n int)`);
    await db.query(`CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      INSERT INTO public.statements SELECT count(*) FROM gone; RETURN NULL; END $$`);
    await db.query(
      `CREATE TRIGGER note AFTER DELETE ON ${S}.leases REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION note()`,
    );
    // The pass stops at a row that is locked with all after it: what was moved before stays moved.
    const blocker = await RowGate.hold(db, `SELECT FROM ${S}.leases WHERE worker_id = $1 AND job_id > $2 FOR UPDATE`, [
      id,
      jobIds[700],
    ]);
    const first = await rescueExpired();
    expect(first).toBeGreaterThan(0);
    expect(first).toBeLessThan(1200);
    await blocker.rollback();
    const second = await rescueExpired();
    await db.query(`DROP TRIGGER note ON ${S}.leases`);
    expect(first + second).toBe(1200);
    const { most } = await db.one<{ most: number }>('SELECT max(n)::int AS most FROM statements');
    expect(most).toBeLessThanOrEqual(500);
    const { runs } = await db.one<{ runs: number }>(
      `SELECT count(*)::int AS runs FROM ${S}.runs WHERE job_id = ANY ($1)`,
      [jobIds],
    );
    expect(runs).toBe(1200);
  });

  it('F:C8 covers every queue and kind, also those that nobody serves', async () => {
    const lots = await Promise.all([
      abandoned(1, EXPIRED, { queue: 'deserted' }),
      abandoned(1, EXPIRED, { kind: 'unknown-here' }),
      abandoned(1, `${EXPIRED}, started_at = '2020-01-01', beat_at = '2020-01-01'`, { queue: 'ancient', kind: 'old' }),
    ]);
    expect(await rescueExpired()).toBe(3);
    for (const { jobIds } of lots) expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({ state: 'ready' });
  });
});

describe('budgets', () => {
  it('R13 a crash costs no attempt; short of a conviction the last one never counts', async () => {
    // Two jobs of one dead worker: neither was alone, so neither can be the proven culprit however often it happens.
    for (let round = 0; round < 6; round++) {
      const lot = await abandoned(2, EXPIRED);
      const ids = lot.jobIds;
      await db.query(`UPDATE ${S}.leases SET crashes = 2 WHERE worker_id = $1`, [lot.id]);
      await rescueExpired();
      for (const id of ids)
        expect(await rescuer.jobs.get(id)).toMatchObject({ state: 'ready', attempt: 0, crashes: 2, suspect: true });
      await tidy();
    }
  });

  it('R13 a suspect that dies alone has spent its budget: failed, with the count in the reason', async () => {
    const { jobIds } = await abandoned(1, EXPIRED, { maxCrashes: 1 });
    await rescueExpired();
    const job = await rescuer.jobs.get(jobIds[0]!);
    expect(job).toMatchObject({ state: 'failed', outcome: 'dead', attempt: 1, crashes: 1 });
    expect(job.reason).toBe(
      'heartbeat stale: worker presumed dead (crashed its worker 1 times, the last time running alone; maxCrashes 1)',
    );
  });

  it('R13 a suspect that was not alone when its worker died is not convicted, however often', async () => {
    const { id, jobIds } = await abandoned(2, EXPIRED);
    await db.query(`UPDATE ${S}.leases SET suspect = true, crashes = 2 WHERE worker_id = $1`, [id]);
    await rescueExpired();
    for (const jobId of jobIds) {
      expect(await rescuer.jobs.get(jobId)).toMatchObject({ state: 'ready', crashes: 2, suspect: true });
    }
  });

  it('R13 a suspect is claimed alone, by a worker that holds nothing else, and keeps it from claiming more', async () => {
    const worker = await startHandWorker(db, ['a', 'b']);
    const [plain, other] = await worker.jobs.enqueueMany('a', [1, 2]);
    const suspect = await worker.jobs.enqueue('b', {}, { maxCrashes: 1 });
    const claim = () => worker.claims.claim({ kinds: ['a', 'b'], limit: 5 });
    let got = await claim();
    expect(got.map(({ job }) => job.id)).toEqual([plain, other]);
    expect(await claim()).toEqual([]); // It holds two leases: the suspect waits.
    for (const { job } of got) await worker.settle.complete(job);
    got = await claim();
    expect(got.map(({ job }) => [job.id, job.suspect])).toEqual([[suspect, true]]);
    const late = await worker.jobs.enqueue('a', {});
    expect(await claim()).toEqual([]); // It runs a suspect: nothing else.
    await worker.settle.complete(got[0]!.job);
    got = await claim();
    expect(got.map(({ job }) => job.id)).toEqual([late]);
    await worker.settle.complete(got[0]!.job);
  });

  it('R24 F:D3 a worker that died while draining charges a release, not a crash', async () => {
    const { jobIds } = await abandoned(1, `${EXPIRED}, state = 'draining', draining_at = clock_timestamp()`);
    await rescueExpired();
    expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({
      state: 'ready',
      attempt: 0,
      crashes: 0,
      releases: 1,
      runs: [{ outcome: 'dead' }],
    });
  });

  it('leases claimed after their worker was declared dead go back uncharged', async () => {
    const { jobIds } = await abandoned(
      1,
      `state = 'dead', died_of = 'lease', leases_at_death = 0, ended_at = clock_timestamp() - interval '1 min'`,
    );
    await rescueExpired();
    expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({ state: 'ready', attempt: 0, crashes: 0, releases: 0 });
  });

  it('F:C9 an exhausted job does not come back, and those behind it run', async () => {
    const { jobIds } = await abandoned(1, EXPIRED, { maxCrashes: 1 });
    const worker = await startHandWorker(db, ['a']);
    const behind = await worker.jobs.enqueueMany('a', [1, 2, 3, 4, 5]);
    await rescueExpired();
    const got = await worker.claims.claim({ kinds: ['a'], limit: 10 });
    expect(got.map(({ job }) => job.id)).toEqual(behind);
    expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({ state: 'failed' });
    for (const { job } of got) await worker.settle.complete(job);
  });
});

describe('stop requests outrank the requeue', () => {
  it.each([
    ['cancel', 'cancel_requested = true, pause_requested = true', 'cancelled'],
    ['pause', 'pause_requested = true', 'paused'],
  ])('%s', async (_name, flags, state) => {
    const { id, jobIds } = await abandoned(1, EXPIRED);
    await db.query(`UPDATE ${S}.leases SET ${flags} WHERE worker_id = $1`, [id]);
    await rescueExpired();
    expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({ state, cancelRequested: false, pauseRequested: false });
  });
});

describe('rescue by a passed deadline', () => {
  const overdue = (id: string) =>
    db.query(`UPDATE ${S}.leases SET deadline_at = clock_timestamp() - interval '1 s' WHERE worker_id = $1`, [id]);

  it('R9 R10 R13 takes the job whatever its worker says, charges an attempt, and goes through the backoff', async () => {
    const { id, jobIds } = await abandoned(2, 'beat_at = clock_timestamp()');
    await overdue(id);
    expect(await rescueExpired()).toBe(0); // Its worker lives: the other scan has nothing to say.
    expect(await rescuer.rescue.rescueOverdue()).toBe(2);
    const job = await rescuer.jobs.get(jobIds[0]!);
    expect(job).toMatchObject({ state: 'scheduled', attempt: 1, crashes: 0 });
    expect(job.runs).toMatchObject([{ outcome: 'dead', error: { message: RESCUE_TEXT.deadline } }]);
    expect(job.runAt!.getTime()).toBeGreaterThan((await db.now()).getTime() - 1000);
  });

  it('out of attempts: failed, with the reason', async () => {
    const { id, jobIds } = await abandoned(1, 'beat_at = clock_timestamp()');
    await db.query(`UPDATE ${S}.leases SET attempt = 20 WHERE worker_id = $1`, [id]);
    await overdue(id);
    await rescuer.rescue.rescueOverdue();
    expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({
      state: 'failed',
      outcome: 'dead',
      reason: 'hard deadline exceeded (attempt 20 of 20)',
    });
  });

  it('F:C12 the deadline stands on the lease and holds after a crash too; one that was moved since the read has not passed', async () => {
    const { id, jobIds } = await abandoned(2, 'beat_at = clock_timestamp()');
    await overdue(id);
    const gate = await RowGate.hold(
      db,
      `UPDATE ${S}.leases SET deadline_at = clock_timestamp() + interval '1 h' WHERE job_id = $1`,
      [jobIds[0]],
    );
    expect(await rescuer.rescue.rescueOverdue()).toBe(1);
    await gate.release();
    expect(await rescuer.rescue.rescueOverdue()).toBe(0);
    const [read] = await db.query<{ token: string }>(`SELECT token::text FROM ${S}.leases WHERE job_id = $1`, [
      jobIds[0],
    ]);
    const late = { jobId: jobIds[0]!, token: read!.token, workerId: id, move: { event: 'deadline' } };
    expect(await rescuer.rescue.take([late], 'deadline')).toBe(0); // As read before the deadline was moved.
    expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({ state: 'running' });
    await db.query(`UPDATE ${S}.workers SET ${EXPIRED} WHERE id = $1`, [id]);
    await rescueExpired();
  });

  it("'off' is not in the scan", async () => {
    const { id, jobIds } = await abandoned(1, 'beat_at = clock_timestamp()', { deadline: 'off' });
    expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({ deadlineAt: null });
    expect(await rescuer.rescue.rescueOverdue()).toBe(0);
    await db.query(`UPDATE ${S}.workers SET ${EXPIRED} WHERE id = $1`, [id]);
    await rescueExpired();
  });

  it('each scan works by an index', async () => {
    const client = await db.client();
    await client.query('SET enable_seqscan = off');
    const plan = async (sql: string): Promise<string> =>
      (await client.query<{ 'QUERY PLAN': string }>(`EXPLAIN ${sql}`)).rows.map((row) => row['QUERY PLAN']).join('\n');
    expect(
      await plan(
        `SELECT job_id FROM ${S}.leases WHERE deadline_at <= (SELECT clock_timestamp()) ORDER BY deadline_at LIMIT 500`,
      ),
    ).toContain('leases_deadline');
    expect(await plan(`SELECT job_id FROM ${S}.leases WHERE worker_id = 'x' ORDER BY token LIMIT 500`)).toContain(
      'leases_worker',
    );
    expect(
      await plan(
        `SELECT FROM ${S}.workers WHERE state IN ('live', 'draining') AND expires_at < (SELECT clock_timestamp())`,
      ),
    ).toContain('workers_live');
    await client.end();
  });
});

describe('rescue by a lost session', () => {
  const looks = async (times: number): Promise<number> => {
    let moved = 0;
    for (let i = 0; i < times; i++) {
      moved += await rescuer.rescue.rescueVanished();
      await new Promise((resolve) => setTimeout(resolve, 250));
    }
    return moved;
  };

  it('R9 R10 takes a worker of this server’s incarnation whose lock is nowhere, and none of an earlier one', async () => {
    const earlier = await abandoned(1, 'lock_no = 2000000001');
    expect(await looks(4)).toBe(0); // The server has restarted since it beat: it lost its session with everybody.
    await db.query(`UPDATE ${S}.workers SET incarnation = ${S}.incarnation_v1() WHERE id = $1`, [earlier.id]);
    expect(await looks(4)).toBe(1);
    expect((await rescuer.jobs.get(earlier.jobIds[0]!)).runs).toMatchObject([
      { outcome: 'dead', error: { message: RESCUE_TEXT.session } },
    ]);
  });

  it('R11 a beat between the looks, or between the last look and the mark, saves it', async () => {
    const { id, jobIds } = await abandoned(1, `lock_no = 2000000002, incarnation = ${S}.incarnation_v1()`);
    for (let i = 0; i < 4; i++) {
      await looks(1);
      await db.query(`UPDATE ${S}.workers SET beat_at = clock_timestamp() WHERE id = $1`, [id]);
    }
    expect(await rescuer.jobs.get(jobIds[0]!)).toMatchObject({ state: 'running' });
    await looks(1);
    const renewal = await RowGate.hold(db, `UPDATE ${S}.workers SET beat_at = clock_timestamp() WHERE id = $1`, [id]);
    await new Promise((resolve) => setTimeout(resolve, 450));
    const marking = rescuer.rescue.rescueVanished();
    await renewal.untilWaiting();
    await renewal.release();
    expect(await marking).toBe(0);
    expect(await rescuer.workers.get(id)).toMatchObject({ state: 'live' });
    await db.query(`UPDATE ${S}.workers SET state = 'stopped', ended_at = clock_timestamp() WHERE id = $1`, [id]);
    await rescueExpired();
  });

  it('a fleet that seems to vanish at once is left to its leases; one worker of it is not', () => {
    const look = (id: string, gone: boolean) => ({ id, lock_no: 1, beat_at: 'then', gone });
    const many = new VanishedWorkers(100, 1000);
    const all = ['a', 'b', 'c'].map((id) => look(id, true));
    expect(many.judge(all, 0)).toEqual({ dead: [], resting: true });
    expect(many.judge(all, 900)).toEqual({ dead: [], resting: true });
    expect(many.judge(all, 1001)).toEqual({ dead: [], resting: true }); // Seen anew: still all at once.
    const few = new VanishedWorkers(100, 1000);
    const one = [look('a', true), look('b', false), look('c', false)];
    expect(few.judge(one, 0).dead).toEqual([]);
    expect(few.judge(one, 99).dead).toEqual([]);
    expect(few.judge(one, 100).dead.map(({ id }) => id)).toEqual(['a']);
  });
});

describe('one row that cannot be moved', () => {
  it('law 4 F:D7 keeps no other from being rescued', async () => {
    const { jobIds } = await abandoned(5, EXPIRED);
    await db.query(`UPDATE ${S}.jobs SET backoff = '{"baseMs":"x"}' WHERE id = $1`, [jobIds[2]]);
    expect(await rescueExpired()).toBe(4);
    expect(await rescuer.jobs.get(jobIds[2]!)).toMatchObject({ state: 'running' });
    await db.query(`UPDATE ${S}.jobs SET backoff = NULL WHERE id = $1`, [jobIds[2]]);
    expect(await rescueExpired()).toBe(1);
  });
});

describe('what a rescued worker hears', () => {
  it('R17 its late write is a lost lease', async () => {
    const worker = await startHandWorker(db, ['a']);
    const id = await worker.jobs.enqueue('a', {});
    const [claimed] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    await db.query(`UPDATE ${S}.workers SET ${EXPIRED} WHERE id = $1`, [worker.workers.currentId]);
    expect(await rescueExpired()).toBe(1);
    await expect(worker.settle.complete(claimed!.job)).rejects.toThrow(LeaseLostError);
    expect(await worker.jobs.get(id)).toMatchObject({ state: 'ready' });
  });
});
