import {
  type Handler,
  type Job,
  JobHandler,
  type JobHandlerOptions,
  type JobStatus,
  type Lease,
  NonRetryableError,
} from '@leasehold/nestjs';
import { type TestDatabase, createTestDatabase, eventually, startHandWorker, startLeaseApp } from './support';
import { untilState } from './support/job-states';

const S = '"leasehold"';
let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'failing' });
});
afterEach(() => db.query(`TRUNCATE ${S}.jobs, ${S}.ready, ${S}.waiting, ${S}.leases, ${S}.finished`));
afterAll(() => db.drop());

/** A handler that throws what it is told to. */
function failing(kind: string, options: JobHandlerOptions, thrown: () => unknown = () => new Error('no')) {
  @JobHandler(kind, options)
  class Failing implements Handler {
    handle(): never {
      throw thrown();
    }
  }
  return Failing;
}

/** Milliseconds from the end of the last run to the next. */
const delays = (id: string) =>
  db.query<{ ms: number }>(
    `SELECT (extract(epoch FROM w.run_at - r.ended_at) * 1000)::float8 AS ms FROM ${S}.waiting w
     JOIN ${S}.runs r USING (job_id) WHERE job_id = $1 ORDER BY r.id DESC LIMIT 1`,
    [id],
  );

describe('R25 backoff', () => {
  it('R25 a duration is always that', async () => {
    const kind = failing('fail.fixed', { backoff: '90s' });
    const { jobs } = await startLeaseApp(db, { handlers: [kind] });
    const id = await jobs.enqueue(kind, null);
    await untilState(jobs, id, 'scheduled');
    for (const attempt of [1, 2, 3]) {
      expect(await delays(id)).toEqual([{ ms: 90_000 }]);
      await jobs.runNow(id);
      await eventually(async () => (await jobs.get(id)).runs?.length === attempt + 1);
    }
  });

  it('R25 a function of the attempt and the error; what is no duration falls back to the default', async () => {
    const asked: [number, unknown][] = [];
    const answers: unknown[] = ['2m', 5000, undefined, 'soon', -1, NaN, '99999d'];
    const kind = failing('fail.function', {
      maxAttempts: 99,
      backoff: (attempt, error) => {
        asked.push([attempt, (error as Error).message]);
        if (attempt > answers.length) throw new Error('broken itself');
        return answers[attempt - 1] as number;
      },
    });
    const { jobs } = await startLeaseApp(db, { handlers: [kind] });
    const id = await jobs.enqueue(kind, null);
    const seen: number[] = [];
    for (let attempt = 1; attempt <= answers.length + 1; attempt++) {
      await eventually(async () => (await jobs.get(id)).runs?.length === attempt && (await delays(id)).length === 1);
      seen.push((await delays(id))[0]!.ms);
      await jobs.runNow(id);
    }
    expect(asked.slice(0, 8).map(([attempt]) => attempt)).toEqual([1, 2, 3, 4, 5, 6, 7, 8]);
    expect(asked[0]).toEqual([1, 'no']);
    expect(seen.slice(0, 2)).toEqual([120_000, 5000]);
    // Full jitter from 1 s to 2^attempt seconds.
    for (const attempt of [3, 4, 5, 6, 8]) {
      expect(seen[attempt - 1]).toBeGreaterThanOrEqual(1000);
      expect(seen[attempt - 1]).toBeLessThanOrEqual(1000 * 2 ** attempt);
    }
    // Ten years, no more.
    expect(seen[6]).toBeCloseTo(315_576_000_000, -4);
  });

  it("R25 a job's own backoff outranks its kind's; one that is none is refused by name", async () => {
    const kind = failing('fail.own', { backoff: '90s' });
    const { jobs } = await startLeaseApp(db, { handlers: [kind] });
    const id = await jobs.enqueue(kind, null, { backoff: '7s' });
    await untilState(jobs, id, 'scheduled');
    expect(await delays(id)).toEqual([{ ms: 7000 }]);
    for (const backoff of ['soon', { base: '2d', max: '1d' }, () => 1]) {
      await expect(jobs.enqueue(kind, null, { backoff: backoff as never })).rejects.toMatchObject({
        code: 'INVALID_JOB',
        field: 'backoff',
      });
    }
  });
});

describe('snoozing', () => {
  it('F:A6 lease.snooze spends no attempt, ends the run at once, and is bounded', async () => {
    let after = 0;
    @JobHandler('fail.snooze', { maxSnoozes: 3 })
    class Snoozing implements Handler {
      handle(_job: Job, lease: Lease): void {
        lease.snooze('1ms');
        after++;
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Snoozing] });
    const job = await untilState(jobs, await jobs.enqueue(Snoozing, null), 'failed');
    expect(job).toMatchObject({ attempt: 1, snoozes: 4, reason: 'snoozed 3 times (maxSnoozes 3)', outcome: 'snoozed' });
    expect(job.runs?.map(({ outcome, attempt }) => [outcome, attempt])).toEqual(Array(3).fill(['snoozed', 1]));
    expect(after).toBe(0);
    const own = await untilState(jobs, await jobs.enqueue(Snoozing, null, { maxSnoozes: 0 }), 'failed');
    expect(own.reason).toBe('snoozed 0 times (maxSnoozes 0)');
  });
});

describe('the final failure', () => {
  it('the hook and the event, once, whatever the cause: an error, a spent budget, a lost worker', async () => {
    const told: JobStatus[] = [];
    let reads = 0;
    @JobHandler('fail.hook', { maxAttempts: 2, backoff: 0 })
    class Hooked implements Handler<string> {
      handle({ payload }: Job<string>): never {
        reads++;
        throw payload === 'fatal' ? new NonRetryableError('never') : new Error('again');
      }
      onFailed(job: JobStatus<string>): void {
        told.push(job);
        throw new Error('the hook itself is broken');
      }
    }
    const worker = await startLeaseApp(db, { handlers: [Hooked] });
    const fatal = await worker.jobs.enqueue(Hooked, 'fatal');
    const spent = await worker.jobs.enqueue(Hooked, 'spent');
    await eventually(() => told.length === 2);
    expect(told.find(({ id }) => id === fatal)).toMatchObject({ state: 'failed', reason: 'never', payload: 'fatal' });
    expect(told.find(({ id }) => id === spent)).toMatchObject({
      reason: 'again (attempt 2 of 2)',
      runs: [{ attempt: 1 }],
    });
    expect(reads).toBe(3);
    // Lost with its last crash, rescued by this process.
    const hand = await startHandWorker(db, ['fail.hook'], { handlers: [Hooked] });
    await worker.close();
    const lost = await hand.jobs.enqueue(Hooked, 'lost', { maxCrashes: 1 });
    await hand.claims.claim({ kinds: ['fail.hook'], limit: 1 });
    await hand.heartbeat.stop();
    await db.query(`UPDATE ${S}.workers SET expires_at = clock_timestamp() - interval '1 h'`);
    const rescuer = await startLeaseApp(db, { handlers: [Hooked], options: { role: 'producer' } });
    await rescuer.rescue.rescueExpired({ unguarded: true });
    await eventually(() => told.some(({ id }) => id === lost));
    expect(told.find(({ id }) => id === lost)).toMatchObject({
      reason: expect.stringMatching(/^heartbeat stale: .* maxCrashes 1\)$/) as string,
      outcome: 'dead',
    });
    expect(told).toHaveLength(3);
    expect(
      [...worker.events, ...rescuer.events].flatMap((event) =>
        event.type === 'job.finally-failed' ? [event.jobId] : [],
      ),
    ).toEqual(expect.arrayContaining([fatal, spent, lost]));
  });
});

describe('R13 what a lost lease costs', () => {
  it.each([
    ['refund', 0, 'ready'],
    ['charge', 1, 'ready'],
  ] as const)('R13 onLost %s: attempt %i afterwards', async (onLost, attempt, state) => {
    const kind = failing(`fail.lost-${onLost}`, { onLost });
    const hand = await startHandWorker(db, [`fail.lost-${onLost}`], { handlers: [kind] });
    const id = await hand.jobs.enqueue(kind, null);
    const [claimed] = await hand.claims.claim({ kinds: [`fail.lost-${onLost}`], limit: 1 });
    await crash(claimed!.job);
    expect(await hand.jobs.get(id)).toMatchObject({ state, attempt, crashes: 1 });
  });

  it('R13 onLost charge: out of attempts is out of attempts, though no crash budget is spent', async () => {
    const kind = failing('fail.lost-last', { onLost: 'charge', maxAttempts: 1 });
    const hand = await startHandWorker(db, ['fail.lost-last'], { handlers: [kind] });
    const id = await hand.jobs.enqueue(kind, null);
    const [claimed] = await hand.claims.claim({ kinds: ['fail.lost-last'], limit: 1 });
    await crash(claimed!.job);
    expect(await hand.jobs.get(id)).toMatchObject({
      state: 'failed',
      outcome: 'dead',
      reason: 'gone (attempt 1 of 1, charged since onLost is charge)',
    });
  });

  const crash = (job: { id: string; token: string; workerId: string }) =>
    db.query(`SELECT * FROM ${S}.move_v1($1::json, false)`, [
      JSON.stringify([{ job: job.id, token: job.token, worker: job.workerId, event: 'crash', reason: 'gone' }]),
    ]);
});

describe('F:E1 results that cannot be stored', () => {
  const cycle: Record<string, unknown> = {};
  cycle.self = cycle;
  it.each([
    ['a BigInt', () => ({ n: 1n }), /cannot be stored as JSON/],
    ['a cycle', () => cycle, /cannot be stored as JSON/],
    ['20 MB', () => 'x'.repeat(20_000_000), /20000002 bytes of JSON, more than resultMaxBytes = 1048576/],
    [
      'a toJSON that throws',
      () => ({
        toJSON: () => {
          throw new Error('no');
        },
      }),
      /cannot be stored as JSON: no/,
    ],
  ])('F:E1 %s: failed for good with the reason, never stuck and never run again', async (_what, result, reason) => {
    let runs = 0;
    @JobHandler('fail.result')
    class Unstorable implements Handler {
      handle(): unknown {
        runs++;
        return result();
      }
    }
    const { jobs } = await startLeaseApp(db, { handlers: [Unstorable] });
    const job = await untilState(jobs, await jobs.enqueue(Unstorable, null), 'failed');
    expect(job.reason).toMatch(reason);
    expect(job.error).toMatchObject({ name: 'ResultNotStorable' });
    expect(runs).toBe(1);
  });
});
