import { setTimeout as sleep } from 'node:timers/promises';
import { type Handler, type Job, JobHandler, NonRetryableError, SnoozeError } from '@leasehold/nestjs';
import type { Type } from '@nestjs/common';
import { createTestDatabase, eventually, type TestDatabase } from './support';
import { untilState } from './support/job-states';
import { startHandWorker, startLeaseApp } from './support/lease-app';

const INT_MAX = 2_147_483_647;
const DAY_MS = 86_400_000;

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase();
});
afterAll(() => db.drop());

/** A kind whose jobs are claimed by hand. */
function kindOf(kind: string, options: object): Type<Handler> {
  @JobHandler(kind, options)
  class ByHand implements Handler {
    handle(): void {}
  }
  return ByHand;
}

describe('R25 backoff', () => {
  const bases: [string, number, number][] = [
    ['1ms', 1, DAY_MS],
    ['1s', 1000, DAY_MS],
    ['1d', DAY_MS, DAY_MS],
  ];
  it.each(bases)(
    'R25 F:D5 with a base of %s the delay stays within bounds at any attempt',
    async (base, minMs, maxMs) => {
      const kind = kindOf(`retry.base-${base}`, { backoff: { base }, maxAttempts: INT_MAX });
      const hand = await startHandWorker(db, [`retry.base-${base}`], { handlers: [kind] });
      // Before the claim, which counts one more: the failures are those of attempts 1, 2, 30 …
      for (const attempt of [0, 1, 29, 30, 31, 62, 63, 64, 1022, 1023, 1100, INT_MAX - 2]) {
        const ids = await hand.jobs.enqueueMany(kind, [1, 2, 3]);
        await db.query('UPDATE leasehold.ready SET attempt = $1 WHERE job_id = ANY ($2)', [attempt, ids]);
        const claimed = await hand.claims.claim({ kinds: [`retry.base-${base}`], limit: 3 });
        expect(claimed.map(({ job }) => job.attempt)).toEqual(Array(3).fill(attempt + 1));
        await Promise.all(claimed.map(({ job }) => hand.settle.fail(job, new Error('again'))));
        const rows = await db.query<{ ms: number; attempt: number }>(
          `SELECT extract(epoch FROM w.run_at - r.ended_at)::float8 * 1000 AS ms, w.attempt
         FROM leasehold.waiting w JOIN leasehold.runs r USING (job_id) WHERE job_id = ANY ($1)`,
          [ids],
        );
        expect(rows).toHaveLength(3);
        const ceiling = Math.min(maxMs, minMs * 2 ** (attempt + 1));
        for (const row of rows) {
          expect(row.attempt).toBe(attempt + 1);
          expect(row.ms).toBeGreaterThanOrEqual(minMs - 0.01);
          expect(row.ms).toBeLessThanOrEqual(ceiling + 0.01);
        }
        // Else the next claim finds them due.
        await db.query('DELETE FROM leasehold.waiting WHERE job_id = ANY ($1)', [ids]);
      }
    },
  );

  it('R25 F:D5 the highest attempt there is does not overflow: the budget is spent', async () => {
    const kind = kindOf('retry.last', { maxAttempts: INT_MAX });
    const hand = await startHandWorker(db, ['retry.last'], { handlers: [kind] });
    const id = await hand.jobs.enqueue(kind, 1);
    await db.query('UPDATE leasehold.ready SET attempt = $1 WHERE job_id = $2', [INT_MAX, id]);
    const [claimed] = await hand.claims.claim({ kinds: ['retry.last'], limit: 1 });
    expect(claimed?.job.attempt).toBe(INT_MAX);
    if (claimed) await hand.settle.fail(claimed.job, new Error('the last'));
    expect(await hand.jobs.get(id)).toMatchObject({
      state: 'failed',
      reason: `the last (attempt ${INT_MAX} of ${INT_MAX})`,
    });
  });

  it('R25 delays spread: full jitter between the base and the ceiling', async () => {
    const kind = kindOf('retry.jitter', { backoff: { base: '1s', max: '1h' }, maxAttempts: INT_MAX });
    const hand = await startHandWorker(db, ['retry.jitter'], { handlers: [kind] });
    const ids = await hand.jobs.enqueueMany(kind, Array<number>(200).fill(1));
    await db.query('UPDATE leasehold.ready SET attempt = 50 WHERE job_id = ANY ($1)', [ids]);
    const claimed = await hand.claims.claim({ kinds: ['retry.jitter'], limit: 200 });
    await Promise.all(claimed.map(({ job }) => hand.settle.fail(job, new Error('again'))));
    const spread = await db.one<{ low: number; high: number; n: number }>(
      `SELECT count(*) FILTER (WHERE run_at < clock_timestamp() + interval '30 min')::int AS low,
              count(*) FILTER (WHERE run_at >= clock_timestamp() + interval '30 min')::int AS high, count(DISTINCT run_at)::int AS n
       FROM leasehold.waiting WHERE job_id = ANY ($1)`,
      [ids],
    );
    expect(spread.n).toBeGreaterThan(190);
    // Half of them each, give or take more than chance ever would.
    expect(Math.min(spread.low, spread.high)).toBeGreaterThan(50);
  });

  it('R25 a handler that fails twice and then succeeds: three runs, each failure on record', async () => {
    @JobHandler('retry.twice', { backoff: { base: '1ms', max: '2ms' } })
    class Twice implements Handler<null, number> {
      handle({ attempt }: Job<null>): number {
        if (attempt < 3) throw new Error(`no. ${attempt}`);
        return attempt;
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Twice] });
    expect(await untilState(jobs, await jobs.enqueue(Twice, null), 'completed')).toMatchObject({
      attempt: 3,
      result: 3,
      runs: [
        { attempt: 1, outcome: 'failed', error: { message: 'no. 1' } },
        { attempt: 2, outcome: 'failed', error: { message: 'no. 2' } },
      ],
    });
  });

  it("R25 a kind's maxAttempts of 1 is no retry, and the job's own outranks it", async () => {
    let runs = 0;
    @JobHandler('retry.once', { maxAttempts: 1, backoff: { base: 0, max: 0 } })
    class Once implements Handler {
      handle(): never {
        runs++;
        throw new Error('never again');
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Once] });
    const once = await untilState(jobs, await jobs.enqueue(Once, null), 'failed');
    expect(once).toMatchObject({ attempt: 1, maxAttempts: 1, runs: [], reason: 'never again (attempt 1 of 1)' });
    expect(runs).toBe(1);
    const thrice = await untilState(jobs, await jobs.enqueue(Once, null, { maxAttempts: 3 }), 'failed');
    expect(thrice).toMatchObject({ attempt: 3, reason: 'never again (attempt 3 of 3)' });
    expect(thrice.runs).toHaveLength(2);
  });

  it('NonRetryableError fails at once, whatever attempts are left', async () => {
    @JobHandler('retry.fatal', { maxAttempts: 9 })
    class Fatal implements Handler {
      handle(): never {
        throw new NonRetryableError('the account is closed');
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Fatal] });
    expect(await untilState(jobs, await jobs.enqueue(Fatal, null), 'failed')).toMatchObject({
      attempt: 1,
      runs: [],
      reason: 'the account is closed',
      error: { name: 'NonRetryableError', code: 'NON_RETRYABLE' },
    });
  });
});

describe('F:D7 extreme numbers in one row', () => {
  const EXTREMES = `
    WITH r AS (UPDATE leasehold.ready SET attempt = ${INT_MAX}, crashes = ${INT_MAX}, releases = ${INT_MAX}, snoozes = ${INT_MAX},
                 priority = 32767, position = 9223372036854775807 WHERE job_id = $1)
    UPDATE leasehold.jobs SET deadline_ms = 9223372036854775807, max_attempts = ${INT_MAX}, max_crashes = ${INT_MAX},
      max_releases = ${INT_MAX}, priority = 32767 WHERE id = $1`;

  it('F:D7 do not stop the others of its lane, and it ends itself', async () => {
    for (const fails of [false, true]) {
      const kind = `retry.extreme-${fails ? 'fails' : 'succeeds'}`;
      @JobHandler(kind)
      class Extreme implements Handler<number> {
        handle({ payload }: Job<number>): void {
          if (payload === 7 && fails) throw new Error('no');
        }
      }
      const producer = await startLeaseApp(db, { handlers: [Extreme], options: { role: 'producer' } });
      const ids = await producer.jobs.enqueueMany(
        Extreme,
        Array.from({ length: 50 }, (_, i) => i),
      );
      const bad = ids[7] ?? '';
      await db.query(EXTREMES, [bad]);
      const { jobs } = await startLeaseApp(db, { handlers: [Extreme] });
      for (const id of ids) await untilState(jobs, id, id === bad && fails ? 'failed' : 'completed');
      expect((await jobs.get(bad)).attempt).toBe(INT_MAX);
    }
  });

  it.each(['snooze', 'release', 'fail'] as const)('F:D7 %s of such a row is recorded', async (outcome) => {
    const kind = kindOf(`retry.extreme-${outcome}`, {});
    const hand = await startHandWorker(db, [`retry.extreme-${outcome}`], { handlers: [kind] });
    const id = await hand.jobs.enqueue(kind, 1);
    await db.query(EXTREMES, [id]);
    await db.query('UPDATE leasehold.ready SET suspect = true WHERE job_id = $1', [id]);
    const [claimed] = await hand.claims.claim({ kinds: [`retry.extreme-${outcome}`], limit: 1 });
    if (!claimed) throw new Error('nothing claimed');
    if (outcome === 'fail') await hand.settle.fail(claimed.job, new Error('no'));
    else if (outcome === 'snooze') await hand.settle.snooze(claimed.job, 1000);
    else await hand.settle.release(claimed.job);
    const job = await hand.jobs.get(id);
    expect(job.state).not.toBe('running');
    expect(job.reason ?? '').not.toMatch(/could not be stored/);
  });

  it('F:D7 F:G9 nor a rescue of the others', async () => {
    const kind = kindOf('retry.extreme-rescue', {});
    const hand = await startHandWorker(db, ['retry.extreme-rescue'], { handlers: [kind] });
    const ids = await hand.jobs.enqueueMany(kind, [1, 2, 3]);
    await hand.claims.claim({ kinds: ['retry.extreme-rescue'], limit: 3 });
    const worker = hand.workers.currentId;
    await hand.heartbeat.stop();
    await db.query(
      `UPDATE leasehold.leases SET attempt = ${INT_MAX}, crashes = ${INT_MAX}, releases = ${INT_MAX}, suspect = true WHERE job_id = $1`,
      [ids[1]],
    );
    await db.query(
      `UPDATE leasehold.workers SET state = 'dead', ended_at = clock_timestamp(), died_of = 'lease', leases_at_death = 2 WHERE id = $1`,
      [worker],
    );
    const { rescue, jobs } = await startLeaseApp(db, { options: { role: 'producer' } });
    expect(await rescue.rescueOrphans()).toBe(3);
    for (const id of ids) expect(['ready', 'failed']).toContain((await jobs.get(id)).state);
  });
});

describe('F:D8 whatever a handler throws', () => {
  class Throwing extends Error {
    override get message(): string {
      throw new Error('the getter throws');
    }
    override get stack(): string {
      throw new Error('the getter throws');
    }
  }
  const hostile = new Proxy(
    {},
    {
      get: () => {
        throw new Error('no');
      },
    },
  );
  const huge = Object.assign(new Error('m'.repeat(5_000_000)), { stack: 's'.repeat(5_000_000) });
  const thrown: [string, unknown, RegExp][] = [
    ['undefined', undefined, /^threw undefined$/],
    ['null', null, /^threw null$/],
    ['text', 'x', /^threw "x"$/],
    ['zero', 0, /^threw 0$/],
    ['a BigInt', 5n, /^threw 5$|bigint/i],
    ['an object', { a: 1 }, /^threw \{"a":1\}$/],
    ['an object with a message', { message: 'like an error' }, /^like an error$/],
    ['a symbol', Symbol('s'), /^threw Symbol\(s\)$/],
    ['a function', () => 1, /^threw \(\) => 1$/],
    ['an Error whose getters throw', new Throwing(), /^no message$/],
    ['a proxy that throws', hostile, /cannot be read/],
    ['an Error of 5 MB', huge, /^m+… \(5000000 characters\)$/],
    ['an AggregateError', new AggregateError([new Error('one'), 'two'], 'both'), /^both$/],
    ['a frozen Error', Object.freeze(new Error('frozen')), /^frozen$/],
    ['an Error without a message', new Error(), /^no message$/],
    ['an Error with a cyclic cause', cyclicCause(), /^round$/],
  ];

  it.each(thrown)('F:D8 %s becomes a readable, bounded error of a failed attempt', async (name, value, message) => {
    const kind = `retry.throws-${name}`;
    @JobHandler(kind, { backoff: { base: 0, max: 0 }, maxAttempts: 2 })
    class Throws implements Handler<string> {
      handle({ payload }: Job<string>): Promise<void> {
        if (payload === 'throws') throw value;
        return sleep(1).then(() => {
          throw value;
        });
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Throws] });
    for (const payload of ['throws', 'rejects']) {
      const { error, runs, attempt, reason } = await untilState(jobs, await jobs.enqueue(Throws, payload), 'failed');
      expect(attempt).toBe(2);
      expect(error?.message).toMatch(message);
      expect(reason).toMatch(/\(attempt 2 of 2\)$/);
      expect(runs).toMatchObject([{ outcome: 'failed', error: { message: error?.message } }]);
      expect(JSON.stringify(error).length).toBeLessThan(20_000);
    }
  });

  it('F:D8 an AggregateError keeps its errors, a cause is kept, and both are bounded', async () => {
    @JobHandler('retry.throws-nested', { maxAttempts: 1 })
    class Nested implements Handler {
      handle(): never {
        const errors = Array.from({ length: 1000 }, (_, i) => new Error(`no. ${i}`));
        throw new AggregateError(errors, 'many', { cause: new TypeError('the cause') });
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Nested] });
    const { error } = await untilState(jobs, await jobs.enqueue(Nested, null), 'failed');
    expect(error).toMatchObject({ message: 'many', cause: { name: 'TypeError', message: 'the cause' } });
    expect(error?.errors?.map((one) => one.message)).toEqual(['no. 0', 'no. 1', 'no. 2', 'no. 3', 'no. 4']);
  });
});

function cyclicCause(): Error {
  const error = new Error('round');
  error.cause = error;
  return error;
}

describe('R26 jobs for later', () => {
  it("R26 run when the database's clock says so, once, whatever the number of workers", async () => {
    const seen: string[] = [];
    @JobHandler('retry.later')
    class Later implements Handler {
      handle({ id }: Job): void {
        seen.push(id);
      }
    }
    const first = await startLeaseApp(db, { handlers: [Later] });
    for (let i = 0; i < 2; i++) await startLeaseApp(db, { handlers: [Later] });
    const ids = await first.jobs.enqueueMany(Later, Array<null>(60).fill(null), { delay: '30d' });
    const marker = await first.jobs.enqueue(Later, null);
    await untilState(first.jobs, marker, 'completed');
    expect((await first.jobs.counts()).scheduled).toBeGreaterThanOrEqual(60);
    expect(seen).toEqual([marker]);

    await db.query(`UPDATE leasehold.waiting SET run_at = clock_timestamp() - interval '1 s' WHERE job_id = ANY ($1)`, [
      ids,
    ]);
    for (const id of ids) expect(await untilState(first.jobs, id, 'completed')).toMatchObject({ attempt: 1, runs: [] });
    expect([...seen].sort()).toEqual([marker, ...ids].sort());
  });

  it('R26 a due job needs no leader', async () => {
    @JobHandler('retry.leaderless')
    class Leaderless implements Handler {
      handle(): void {}
    }
    const app = await startLeaseApp(db, {
      handlers: [Leaderless],
      options: { leader: { probe: '500ms', retry: '1h' } },
    });
    const id = await app.jobs.enqueue(Leaderless, null, { delay: '30d' });
    await db.query(`UPDATE leasehold.waiting SET run_at = clock_timestamp() WHERE job_id = $1`, [id]);
    await untilState(app.jobs, id, 'completed');
    expect(app.leader.isLeader).toBe(false);
  });
});

describe('F:A6 snoozing', () => {
  it('F:A6 two hundred jobs on two workers: each is put off once, and its handler seen exactly twice', async () => {
    const seen = new Map<string, number>();
    @JobHandler('retry.snooze', { concurrency: 10, maxAttempts: 1 })
    class Snoozing implements Handler<number, string> {
      async handle({ id, attempt }: Job<number>): Promise<string> {
        await sleep(20);
        const times = (seen.get(id) ?? 0) + 1;
        seen.set(id, times);
        if (times === 1) throw new SnoozeError(100);
        return `attempt ${attempt}`;
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Snoozing] });
    await startLeaseApp(db, { handlers: [Snoozing] });
    const ids = await jobs.enqueueMany(
      Snoozing,
      Array.from({ length: 200 }, (_, i) => i),
    );
    await eventually(
      async () => {
        const { n } = await db.one<{ n: number }>(
          `SELECT count(*)::int AS n FROM leasehold.finished WHERE job_id = ANY ($1) AND state = 'completed'`,
          [ids],
        );
        return n === ids.length;
      },
      { timeoutMs: 30_000, state: () => jobs.counts() },
    );
    expect(new Set(ids.map((id) => seen.get(id)))).toEqual(new Set([2]));
    for (const id of [ids[0], ids[199]]) {
      expect(await jobs.get(id ?? '')).toMatchObject({
        attempt: 1,
        snoozes: 1,
        result: 'attempt 1',
        runs: [{ outcome: 'snoozed', attempt: 1 }],
      });
    }
    const workers = await db.one<{ n: number }>(
      'SELECT count(DISTINCT worker_id)::int AS n FROM leasehold.finished WHERE job_id = ANY ($1)',
      [ids],
    );
    expect(workers.n).toBe(2);
  });
});
