import { type Handler, JobHandler, LeaseLostError, RESCUE_TEXT } from '@leasehold/nestjs';
import {
  type LeaseApp,
  RowGate,
  TcpProxy,
  type TestDatabase,
  createTestDatabase,
  eventually,
  startHandWorker,
  startLeaseApp,
} from './support';

let db: TestDatabase;
const S = '"leasehold"';

beforeAll(async () => {
  db = await createTestDatabase({ name: 'settle' });
});
afterAll(() => db.drop());
// A job that waits for its retry would be claimed by a later test.
afterEach(() => db.query(`WITH r AS (DELETE FROM ${S}.ready) DELETE FROM ${S}.waiting`));

const claimOne = async (worker: LeaseApp, kind = 'a') => {
  const [claimed] = await worker.claims.claim({ kinds: [kind], limit: 1 });
  if (!claimed) throw new Error('nothing to claim');
  return claimed.job;
};

/** The state tables that hold the job, one entry a row: law 1 says exactly one. */
const places = async (id: string): Promise<string[]> =>
  (
    await db.query<{ place: string }>(
      `SELECT 'ready' AS place FROM ${S}.ready WHERE job_id = $1 UNION ALL SELECT 'waiting' FROM ${S}.waiting WHERE job_id = $1
       UNION ALL SELECT 'leases' FROM ${S}.leases WHERE job_id = $1 UNION ALL SELECT 'finished' FROM ${S}.finished WHERE job_id = $1`,
      [id],
    )
  ).map(({ place }) => place);

describe('settling under the fence', () => {
  it('R17 F:B9 every write of an old token is refused and changes nothing', async () => {
    const [old, next] = await Promise.all([startHandWorker(db, ['a']), startHandWorker(db, ['a'])]);
    const id = await old.jobs.enqueue('a', {});
    const stale = await claimOne(old);
    await db.query(`SELECT * FROM ${S}.move_v1($1::json, false)`, [
      JSON.stringify([{ job: id, token: stale.token, worker: stale.workerId, event: 'crash' }]),
    ]);
    const fresh = await claimOne(next);
    const before = await next.jobs.get(id);
    for (const write of [
      old.settle.complete(stale, 'stale'),
      old.settle.fail(stale, new Error('stale')),
      old.settle.snooze(stale, 10),
      old.settle.release(stale),
    ]) {
      await expect(write).rejects.toThrow(LeaseLostError);
    }
    expect(await next.jobs.get(id)).toEqual(before);
    await next.settle.complete(fresh, 'fresh');
    await expect(old.settle.complete(stale, 'stale')).rejects.toMatchObject({
      code: 'LEASE_LOST',
      jobId: id,
      token: stale.token,
    });
    expect(await next.jobs.get(id)).toMatchObject({ state: 'completed', result: 'fresh', token: fresh.token });
  });

  it('R6 the same worker may claim its own rescued job while the stale run lives: the token decides, not the owner', async () => {
    const worker = await startHandWorker(db, ['a']);
    const id = await worker.jobs.enqueue('a', {});
    const stale = await claimOne(worker);
    await db.query(`SELECT * FROM ${S}.move_v1($1::json, false)`, [
      JSON.stringify([{ job: id, token: stale.token, worker: stale.workerId, event: 'return' }]),
    ]);
    const fresh = await claimOne(worker);
    expect(fresh.workerId).toBe(stale.workerId);
    const byEvent = (event: string, token: string) => ({
      job: id,
      token,
      worker: stale.workerId,
      event,
      reason: 'stale',
    });
    for (const event of ['fail', 'fatal', 'snooze', 'release', 'giveback', 'crash', 'deadline', 'complete']) {
      for (const skip of [true, false]) {
        const moved = await db.query(`SELECT * FROM ${S}.move_v1($1::json, $2)`, [
          JSON.stringify([byEvent(event, stale.token)]),
          skip,
        ]);
        expect([event, moved]).toEqual([event, []]);
      }
    }
    await expect(worker.settle.complete(stale)).rejects.toThrow(LeaseLostError);
    await worker.settle.complete(fresh, 1);
    expect(await places(id)).toEqual(['finished']);
  });

  it('R6 a stale token in the same batch does not take the valid one down with it', async () => {
    const worker = await startHandWorker(db, ['a']);
    const id = await worker.jobs.enqueue('a', {});
    const job = await claimOne(worker);
    const move = (token: string) => ({
      job: id,
      token,
      worker: job.workerId,
      event: 'fail',
      error: { message: token },
    });
    const stale = String(BigInt(job.token) - 1n);
    const moved = await db.query(`SELECT token::text FROM ${S}.move_v1($1::json, false)`, [
      JSON.stringify([move(stale), move(job.token)]),
    ]);
    expect(moved).toEqual([{ token: job.token }]);
    expect((await worker.jobs.get(id)).runs).toMatchObject([{ error: { message: job.token } }]);
  });

  it('law 4: a success does not share the refusal of the claim that rode with it', async () => {
    @JobHandler('rides', { concurrency: 1 })
    class Rides implements Handler {
      static open: () => void = () => undefined;
      handle(): Promise<void> {
        return new Promise((resolve) => (Rides.open = resolve));
      }
    }
    const app = await startLeaseApp(db, { handlers: [Rides] });
    const id = await app.jobs.enqueue(Rides, {});
    await eventually(async () => (await app.jobs.get(id)).state === 'running');
    const refused = await app.jobs.enqueue(Rides, {});
    await db.query(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      IF NEW.job_id = ${refused} THEN RAISE EXCEPTION 'injected'; END IF; RETURN NEW; END $$`);
    await db.query(`CREATE TRIGGER refuse BEFORE INSERT ON ${S}.leases FOR EACH ROW EXECUTE FUNCTION refuse()`);
    Rides.open();
    await eventually(async () => (await app.jobs.get(id)).finishedAt !== null, { state: () => app.jobs.get(id) });
    expect(await app.jobs.get(id)).toMatchObject({ state: 'completed' });
    await db.query(`DROP TRIGGER refuse ON ${S}.leases`);
    await eventually(async () => (await app.jobs.get(refused)).state === 'running', {
      state: () => app.jobs.get(refused),
    });
    Rides.open();
  });

  it('R6 R17 a late completion beside the present one, of the same job and in the same batch: each gets its own answer', async () => {
    const worker = await startHandWorker(db, ['a']);
    await worker.jobs.enqueue('a', {});
    const [first] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    await worker.settle.release(first!.job);
    const [second] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    const [late, present] = await Promise.allSettled([
      worker.settle.complete(first!.job, 'late'),
      worker.settle.complete(second!.job, 'present'),
    ]);
    expect(late).toMatchObject({ status: 'rejected', reason: { code: 'LEASE_LOST' } });
    expect(present.status).toBe('fulfilled');
    expect(await worker.jobs.get(second!.job.id)).toMatchObject({ state: 'completed', result: 'present' });
  });

  it('F:A2 completion and rescue interleaved in both orders: one outcome, the loser is told', async () => {
    const worker = await startHandWorker(db, ['a']);
    const crash = (job: { id: string; token: string; workerId: string }, skip: boolean): [string, unknown[]] => [
      `SELECT * FROM ${S}.move_v1($1::json, $2)`,
      [
        JSON.stringify([
          { job: job.id, token: job.token, worker: job.workerId, event: 'crash', reason: RESCUE_TEXT.lease },
        ]),
        skip,
      ],
    ];
    // The rescue moved first and has not committed: the completion waits at the row, then finds it gone.
    let id = await worker.jobs.enqueue('a', {});
    let job = await claimOne(worker);
    let gate = await RowGate.hold(db, ...crash(job, true));
    const late = worker.settle.complete(job);
    late.catch(() => undefined);
    await gate.untilWaiting();
    await gate.release();
    await expect(late).rejects.toThrow(LeaseLostError);
    expect(await places(id)).toEqual(['ready']);
    await worker.settle.complete(await claimOne(worker));

    // The completion moved first: the rescue passes the locked row over, and later finds nothing.
    id = await worker.jobs.enqueue('a', {});
    job = await claimOne(worker);
    gate = await RowGate.hold(db, `SELECT * FROM ${S}.step_v1($1, $2, $3, null, 0, 0, '{}', '{}', '{}', 0, 0)`, [
      job.workerId,
      [job.id],
      [job.token],
    ]);
    expect(await db.query(...crash(job, true))).toEqual([]);
    await gate.release();
    expect(await db.query(...crash(job, true))).toEqual([]);
    expect(await worker.jobs.get(id)).toMatchObject({ state: 'completed', attempt: 1, crashes: 0, runs: [] });
  });

  it('F:A2 a hundred completions racing a hundred rescues: exactly one outcome each', async () => {
    const worker = await startHandWorker(db, ['a']);
    const ids = await worker.jobs.enqueueMany(
      'a',
      Array.from({ length: 100 }, (_, i) => i),
    );
    const claimed = (await worker.claims.claim({ kinds: ['a'], limit: 100 })).map(({ job }) => job);
    const answers = await Promise.all(
      claimed.map(async (job, i) => {
        const rescue = async (): Promise<number> =>
          (
            await db.query(`SELECT * FROM ${S}.move_v1($1::json, true)`, [
              JSON.stringify([{ job: job.id, token: job.token, worker: job.workerId, event: 'crash' }]),
            ])
          ).length;
        const complete = (): Promise<number> =>
          worker.settle.complete(job).then(
            () => 1,
            () => 0,
          );
        const [a, b] = await (i % 2 ? Promise.all([rescue(), complete()]) : Promise.all([complete(), rescue()]));
        return a + b;
      }),
    );
    // A rescue that passed a locked row over may leave one to neither for this pass; never is it to both.
    expect(Math.max(...answers)).toBe(1);
    for (const id of ids) expect(await places(id)).toHaveLength(1);
    await db.query(`DELETE FROM ${S}.ready`);
  });

  it('R19 write conflicts are repeated, and applied once', async () => {
    const worker = await startHandWorker(db, ['a']);
    await db.query(`CREATE SEQUENCE tries`);
    await db.query(`CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      IF nextval('public.tries') <= 4 THEN RAISE EXCEPTION 'injected' USING ERRCODE = CASE WHEN random() < 0.5 THEN '40001' ELSE '40P01' END; END IF;
      RETURN OLD; END $$`);
    const id = await worker.jobs.enqueue('a', {});
    const job = await claimOne(worker);
    await db.query(`CREATE TRIGGER conflict BEFORE DELETE ON ${S}.leases FOR EACH ROW EXECUTE FUNCTION conflict()`);
    await worker.settle.complete(job, 'done');
    await db.query(`DROP TRIGGER conflict ON ${S}.leases`);
    expect(await worker.jobs.get(id)).toMatchObject({ state: 'completed', result: 'done' });
    expect(await db.one(`SELECT last_value::int AS n FROM tries`)).toEqual({ n: 5 });
  });

  it('R19 F:F2 settles of the same jobs in opposite orders do not deadlock', async () => {
    const worker = await startHandWorker(db, ['a']);
    await worker.jobs.enqueueMany(
      'a',
      Array.from({ length: 200 }, (_, i) => i),
    );
    const jobs = (await worker.claims.claim({ kinds: ['a'], limit: 200 })).map(({ job }) => job);
    const deadlocks = async (): Promise<number> =>
      (
        await db.one<{ n: number }>(
          `SELECT deadlocks::int AS n FROM pg_stat_database WHERE datname = current_database()`,
        )
      ).n;
    const before = await deadlocks();
    const clients = await Promise.all([db.client(), db.client()]);
    const results = await Promise.all(
      [jobs, [...jobs].reverse()].map((list, i) =>
        clients[i]!.query(`SELECT * FROM ${S}.move_v1($1::json, false)`, [
          JSON.stringify(
            list.map((job) => ({ job: job.id, token: job.token, worker: job.workerId, event: 'release' })),
          ),
        ]),
      ),
    );
    await Promise.all(clients.map((client) => client.end()));
    expect(results.map(({ rowCount }) => rowCount ?? 0).sort((a, b) => a - b)).toEqual([0, 200]);
    expect(await deadlocks()).toBe(before);
    await db.query(`DELETE FROM ${S}.ready`);
  });

  it('F:E1 one outcome that the database refuses for its content does not fail its batch', async () => {
    const worker = await startHandWorker(db, ['a']);
    const ids = await worker.jobs.enqueueMany(
      'a',
      Array.from({ length: 20 }, (_, i) => i),
    );
    const jobs = (await worker.claims.claim({ kinds: ['a'], limit: 20 })).map(({ job }) => job);
    await db.query(`CREATE FUNCTION picky() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      IF NEW.result::text = '"bad"' THEN RAISE EXCEPTION 'injected' USING ERRCODE = '22021'; END IF; RETURN NEW; END $$`);
    await db.query(`CREATE TRIGGER picky BEFORE INSERT ON ${S}.finished FOR EACH ROW EXECUTE FUNCTION picky()`);
    await Promise.all(jobs.map((job, i) => worker.settle.complete(job, i === 7 ? 'bad' : 'good')));
    await db.query(`DROP TRIGGER picky ON ${S}.finished`);
    const states = await Promise.all(ids.map((id) => worker.jobs.get(id)));
    expect(states.filter(({ state }) => state === 'completed')).toHaveLength(19);
    expect(states[7]).toMatchObject({ state: 'failed', outcome: 'failed' });
    expect(states[7]!.reason).toMatch(/could not be stored: injected/);
  });

  it('a result that is no JSON, or too large, fails the job for good and says why', async () => {
    const worker = await startHandWorker(db, ['a'], { options: { resultMaxBytes: 100 } });
    const cycle: { self?: unknown } = {};
    cycle.self = cycle;
    for (const [result, why] of [
      [10n, /BigInt/],
      [cycle, /circular/],
      ['x'.repeat(200), /resultMaxBytes = 100/],
    ] as const) {
      const id = await worker.jobs.enqueue('a', {});
      await worker.settle.complete(await claimOne(worker), result);
      const job = await worker.jobs.get(id);
      expect(job.state).toBe('failed');
      expect(job.reason).toMatch(why);
    }
  });
});

describe('replies that are lost', () => {
  let proxy: TcpProxy;
  beforeEach(async () => {
    proxy = await TcpProxy.start(db.url);
  });
  afterEach(() => proxy.close());

  it('a settle whose reply is cut off is applied once, and is no lost lease', async () => {
    const worker = await startHandWorker(db, ['a'], { url: proxy.url(db.url) });
    const id = await worker.jobs.enqueue('a', {});
    const job = await claimOne(worker);
    const drop = proxy.dropRepliesAfter(/leasehold_step/);
    await worker.settle.complete(job, { n: 1 });
    expect(drop.count).toBe(1);
    expect(await places(id)).toEqual(['finished']);
    expect(await worker.jobs.get(id)).toMatchObject({ state: 'completed', result: { n: 1 }, runs: [] });
  });

  it('so is a failure: one run, one charge', async () => {
    const worker = await startHandWorker(db, ['a'], { url: proxy.url(db.url) });
    const id = await worker.jobs.enqueue('a', {}, { maxAttempts: 5 });
    const job = await claimOne(worker);
    const drop = proxy.dropRepliesAfter(/move_v1/);
    await worker.settle.fail(job, new Error('no'));
    expect(drop.count).toBe(1);
    const after = await worker.jobs.get(id);
    expect(after).toMatchObject({ state: 'scheduled', attempt: 1 });
    expect(after.runs).toMatchObject([{ outcome: 'failed', attempt: 1, error: { message: 'no' } }]);
  });

  it.each(['giveback', 'crash'])('a repeat that finds another outcome than its own says lost: %s', async (event) => {
    const worker = await startHandWorker(db, ['a'], { url: proxy.url(db.url) });
    const id = await worker.jobs.enqueue('a', {});
    const job = await claimOne(worker);
    // The first try never arrives; before the second one a rescue has come and gone, and a new owner has finished.
    proxy.freeze({ applicationName: /^leasehold$/ });
    const late = worker.settle.complete(job, 'old');
    late.catch(() => undefined);
    await db.query(`SELECT * FROM ${S}.move_v1($1::json, false)`, [
      JSON.stringify([{ job: id, token: job.token, worker: job.workerId, event }]),
    ]);
    const other = await startHandWorker(db, ['a']);
    await other.settle.complete(await claimOne(other), 'new');
    proxy.cut({ applicationName: /^leasehold$/ });
    proxy.thaw({ applicationName: /^leasehold$/ });
    await expect(late).rejects.toThrow(LeaseLostError);
    expect(await other.jobs.get(id)).toMatchObject({ state: 'completed', result: 'new' });
  });

  it('a claim whose reply is cut off is given back by a beat: no attempt, no run', async () => {
    const worker = await startHandWorker(db, ['a'], { url: proxy.url(db.url) });
    const id = await worker.jobs.enqueue('a', {});
    proxy.dropRepliesAfter(/leasehold_step/);
    await expect(worker.claims.claim({ kinds: ['a'], limit: 1 })).rejects.toThrow(/reply to the claim was lost/);
    expect(await places(id)).toEqual(['leases']);
    await eventually(async () => (await places(id))[0] === 'ready', { state: () => worker.jobs.get(id) });
    expect(await worker.jobs.get(id)).toMatchObject({ attempt: 0, crashes: 0, runs: [] });
    await worker.settle.complete(await claimOne(worker));
  });

  it('a lease that is gone because its own outcome has arrived is not taken for lost while the answer is on the wire', async () => {
    const worker = await startHandWorker(db, ['a'], { url: proxy.url(db.url) });
    const id = await worker.jobs.enqueue('a', {});
    const [claimed] = await worker.claims.claim({ kinds: ['a'], limit: 1 });
    proxy.delay(500, { applicationName: /^leasehold$/ });
    const settled = worker.settle.complete(claimed!.job);
    await eventually(async () => (await places(id))[0] === 'finished');
    const seen = await worker.heartbeat.renew();
    expect(seen.gone).toEqual([[id, claimed!.job.token]]);
    expect(claimed!.signal.aborted).toBe(false);
    proxy.delay(0);
    await settled;
  });

  it('a lease whose claim is still on the wire is never taken for unknown', async () => {
    const worker = await startHandWorker(db, ['a'], { url: proxy.url(db.url) });
    const id = await worker.jobs.enqueue('a', {});
    proxy.delay(300, { applicationName: /^leasehold$/ });
    const claim = worker.claims.claim({ kinds: ['a'], limit: 1 });
    await eventually(async () => (await places(id))[0] === 'leases');
    const seen = await worker.heartbeat.renew();
    expect(seen.unknown).toEqual([]);
    const [claimed] = await claim;
    expect(claimed?.job.id).toBe(id);
    proxy.delay(0);
    await worker.settle.complete(claimed!.job);
    expect(await places(id)).toEqual(['finished']);
  });
});
