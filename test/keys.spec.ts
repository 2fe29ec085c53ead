import { type Handler, type Job, JobHandler } from '@leasehold/nestjs';
import { Client } from 'pg';
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
import { untilState } from './support/job-states';

const S = '"leasehold"';
let db: TestDatabase;
let hand: LeaseApp;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'keys' });
});
beforeEach(async () => {
  hand = await startHandWorker(db, ['k', 'other']);
});
afterEach(() => db.query(`TRUNCATE ${S}.jobs, ${S}.ready, ${S}.waiting, ${S}.leases, ${S}.finished, ${S}.job_keys`));
afterAll(() => db.drop());

const claim = async (kind = 'k') => (await hand.claims.claim({ kinds: [kind], limit: 1 }))[0]?.job;
const keys = () => db.query(`SELECT key, job_id::text AS job, next_id::text AS next FROM ${S}.job_keys ORDER BY key`);
const jobCount = async () => (await db.one<{ n: number }>(`SELECT count(*)::int AS n FROM ${S}.jobs`)).n;
/** Law 1 for keys: every key's job is unfinished, or its window is open; every unfinished keyed job has its key, or waits for it. */
const stray = () =>
  db.query(
    `SELECT k.key FROM ${S}.job_keys k WHERE coalesce(k.until <= clock_timestamp(), true)
       AND coalesce(${S}.state_v1(k.job_id), 'none') IN ('none', 'completed', 'failed', 'cancelled')
     UNION ALL
     SELECT j.key FROM ${S}.jobs j WHERE j.key IS NOT NULL AND ${S}.state_v1(j.id) NOT IN ('completed', 'failed', 'cancelled')
       AND NOT EXISTS (SELECT FROM ${S}.job_keys k WHERE j.id IN (k.job_id, k.next_id))`,
  );

describe('F:L6 many at once', () => {
  it('F:L6 50 enqueues with one key, on several connections: one job, and all get its id', async () => {
    const apps = await Promise.all(
      Array.from({ length: 5 }, () => startLeaseApp(db, { options: { role: 'producer' } })),
    );
    const answers = await Promise.all(
      Array.from({ length: 50 }, (_, i) => apps[i % 5]!.jobs.enqueueUnique('k', { i }, { key: 'one' })),
    );
    expect(new Set(answers.map(({ id }) => id)).size).toBe(1);
    expect(answers.filter(({ outcome }) => outcome === 'created')).toHaveLength(1);
    expect(answers.every(({ state }) => state === 'ready')).toBe(true);
    expect(await jobCount()).toBe(1);
  });

  it('F:L6 in transactions that roll back: one of those that waited wins, nobody sees a 23505', async () => {
    const clients = await Promise.all(
      Array.from({ length: 5 }, async () => {
        const client = new Client({ connectionString: db.url });
        await client.connect();
        await client.query('BEGIN ISOLATION LEVEL READ COMMITTED');
        return client;
      }),
    );
    try {
      const first = await hand.jobs.enqueueUnique('k', 0, { key: 'rolled', client: clients[0]! });
      expect(first.outcome).toBe('created');
      const others = clients.slice(1).map((client, i) =>
        hand.jobs.enqueueUnique('k', i + 1, { key: 'rolled', client }).then(async (answer) => {
          await client.query(answer.outcome === 'created' ? 'COMMIT' : 'ROLLBACK');
          return answer;
        }),
      );
      // All of them wait for the first one's transaction.
      await eventually(
        async () =>
          (
            await db.query(
              `SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`,
            )
          ).length === 4,
      );
      await clients[0]!.query('ROLLBACK');
      const answers = await Promise.all(others);
      expect(answers.filter(({ outcome }) => outcome === 'created')).toHaveLength(1);
      expect(new Set(answers.map(({ id }) => id)).size).toBe(1);
      expect(answers[0]!.id).not.toBe(first.id);
      expect(await jobCount()).toBe(1);
      expect(await keys()).toEqual([{ key: 'rolled', job: answers[0]!.id, next: null }]);
    } finally {
      await Promise.all(clients.map((client) => client.end()));
    }
  });

  it('F:L6 many keys in one call, in opposite orders at once: no deadlock, one job a key', async () => {
    const before = await db.one<{ n: string }>(
      `SELECT deadlocks::text AS n FROM pg_stat_database WHERE datname = current_database()`,
    );
    const items = Array.from({ length: 200 }, (_, i) => ({ handler: 'k', payload: i, key: `key-${i % 100}` }));
    const lots = await Promise.all(
      Array.from({ length: 8 }, (_, i) => hand.jobs.enqueueMany(i % 2 === 0 ? items : [...items].reverse())),
    );
    expect(await jobCount()).toBe(100);
    expect(lots[0]).toEqual([...lots[1]!].reverse());
    expect(lots[0]!.slice(0, 100)).toEqual(lots[0]!.slice(100));
    const after = await db.one<{ n: string }>(
      `SELECT deadlocks::text AS n FROM pg_stat_database WHERE datname = current_database()`,
    );
    expect(after).toEqual(before);
  });

  it('F:E3 a key that is held costs no id', async () => {
    await hand.jobs.enqueue('k', 1, { key: 'ids' });
    const before = await db.one(`SELECT last_value FROM ${S}.jobs_id_seq`);
    for (let i = 0; i < 20; i++) await hand.jobs.enqueue('k', i, { key: 'ids' });
    expect(await db.one(`SELECT last_value FROM ${S}.jobs_id_seq`)).toEqual(before);
  });
});

describe('F:L4 modes', () => {
  it('F:L4 ignore: the answer names the job and its state, in whatever state that is, until it has finished', async () => {
    const first = await hand.jobs.enqueueUnique('k', 'old', { key: 'a' });
    const again = () => hand.jobs.enqueueUnique('k', 'new', { key: 'a' });
    expect(await again()).toEqual({ id: first.id, outcome: 'existing', state: 'ready' });
    await hand.jobs.pause(first.id);
    expect(await again()).toEqual({ id: first.id, outcome: 'existing', state: 'paused' });
    await hand.jobs.resume(first.id);
    const job = await claim();
    expect(await again()).toEqual({ id: first.id, outcome: 'existing', state: 'running' });
    await hand.settle.fail(job!, new Error('again'), 60_000);
    expect(await again()).toEqual({ id: first.id, outcome: 'existing', state: 'scheduled' });
    await hand.jobs.cancel(first.id);
    const second = await again();
    expect(second).toMatchObject({ outcome: 'created', state: 'ready' });
    expect(second.id).not.toBe(first.id);
    expect((await hand.jobs.get(first.id)).payload).toBe('old');
  });

  it('a key is unique within its kind, or within its queue if told so', async () => {
    const options = { key: 'same' };
    const ids = [
      await hand.jobs.enqueue('k', 1, options),
      await hand.jobs.enqueue('other', 1, options),
      await hand.jobs.enqueue('k', 1, { ...options, keyScope: 'queue' }),
      await hand.jobs.enqueue('k', 1, { ...options, keyScope: 'queue', queue: 'elsewhere' }),
    ];
    expect(new Set(ids).size).toBe(4);
    expect(await hand.jobs.enqueue('other', 1, { ...options, keyScope: 'queue' })).toBe(ids[2]);
  });

  it('F:L4 replace: payload and time of a job that has not started; one that has is left alone', async () => {
    const options = { key: 'r', keyMode: 'replace' as const };
    const { id } = await hand.jobs.enqueueUnique('k', { v: 1 }, { ...options, delay: '1h' });
    expect(await hand.jobs.enqueueUnique('k', { v: 2, more: 'x'.repeat(100) }, { ...options, delay: '2h' })).toEqual({
      id,
      outcome: 'replaced',
      state: 'scheduled',
    });
    const two = await hand.jobs.get(id);
    expect(two.payload).toMatchObject({ v: 2 });
    expect(two.runAt!.getTime() - (await db.now()).getTime()).toBeGreaterThan(3_600_000);
    // Due at once, then put off again.
    await hand.jobs.enqueue('k', { v: 3 }, options);
    await db.query(`SELECT ${S}.poll_v1('{k}', null, 10)`);
    expect(await hand.jobs.get(id)).toMatchObject({ state: 'ready', payload: { v: 3 } });
    expect(await hand.jobs.enqueueUnique('k', { v: 4 }, options)).toMatchObject({
      id,
      outcome: 'replaced',
      state: 'ready',
    });
    await hand.jobs.enqueue('k', { v: 5 }, { ...options, delay: '1h' });
    expect(await hand.jobs.get(id)).toMatchObject({ state: 'scheduled', payload: { v: 5 } });
    await hand.jobs.runNow(id);
    const job = await claim();
    expect(job?.payload).toEqual({ v: 5 });
    expect(await hand.jobs.enqueueUnique('k', { v: 6 }, options)).toEqual({
      id,
      outcome: 'existing',
      state: 'running',
    });
    await hand.settle.fail(job!, new Error('again'), 60_000);
    expect(await hand.jobs.enqueueUnique('k', { v: 6 }, options)).toEqual({
      id,
      outcome: 'existing',
      state: 'scheduled',
    });
    expect((await hand.jobs.get(id)).payload).toEqual({ v: 5 });
  });

  it('F:L4 replace brings the place of the new payload with it', async () => {
    const options = { key: 'moves', keyMode: 'replace' as const };
    await hand.jobs.enqueue('k', 'holder', { concurrencyKey: 'a', priority: -1 });
    const id = await hand.jobs.enqueue('k', 1, { ...options, concurrencyKey: 'a' });
    expect((await hand.claims.claim({ kinds: ['k'], limit: 5 })).map(({ job }) => job.payload)).toEqual(['holder']);
    expect(await hand.jobs.get(id)).toMatchObject({ state: 'blocked', blockedOn: 'limit' });
    await hand.jobs.enqueue('k', 2, { ...options, concurrencyKey: 'b' });
    expect(await hand.jobs.get(id)).toMatchObject({ state: 'ready', concurrencyKey: 'b' });
    expect(await claim()).toMatchObject({ id, payload: 2 });
  });

  it('F:L4 replace meets a claim: what is being claimed is left alone, what is being replaced is not claimed', async () => {
    const options = { key: 'race', keyMode: 'replace' as const };
    const id = await hand.jobs.enqueue('k', 'old', options);
    const claimed = await RowGate.hold(
      db,
      `SELECT jobs FROM ${S}.step_v1($1, '{}', '{}', null, 9, 1, '{default}', '{k}', '{1}', 0, 1000000)`,
      [hand.workers.currentId],
    );
    const answer = hand.jobs.enqueueUnique('k', 'new', options);
    await claimed.untilWaiting();
    await claimed.release();
    expect(await answer).toEqual({ id, outcome: 'existing', state: 'running' });
    expect((await hand.jobs.get(id)).payload).toBe('old');

    const other = await hand.jobs.enqueue('k', 'old', { ...options, key: 'other way' });
    const client = new Client({ connectionString: db.url });
    await client.connect();
    await client.query('BEGIN ISOLATION LEVEL READ COMMITTED');
    await hand.jobs.enqueue('k', 'new', { ...options, key: 'other way', client });
    expect(await claim()).toBeUndefined();
    await client.query('COMMIT');
    await client.end();
    expect(await claim()).toMatchObject({ id: other, payload: 'new' });
  });

  it('F:L6 a finished job that is being retried keeps its key: who would take it over waits, and looks again', async () => {
    // Its window keeps the row of the key after its end.
    const id = await hand.jobs.enqueue('k', 1, { key: 'back', keyMode: { throttle: '1h' } });
    await hand.jobs.cancel(id);
    const retried = await RowGate.hold(db, `SELECT answer FROM ${S}.steer_v1('retry', ARRAY[$1::bigint], null, 0)`, [
      id,
    ]);
    const answer = hand.jobs.enqueueUnique('k', 2, { key: 'back' });
    await retried.untilWaiting();
    await retried.release();
    expect(await answer).toEqual({ id, outcome: 'existing', state: 'ready' });
  });

  it('F:L4 serial: one running and one waiting, which starts when the first has ended, however that ends', async () => {
    const options = { key: 's', keyMode: 'serial' as const };
    let running = await hand.jobs.enqueueUnique('k', 1, options);
    for (const end of ['complete', 'fatal', 'cancel', 'revoke', 'crash'] as const) {
      const job = (await claim())!;
      expect(job.id).toBe(running.id);
      const next = await hand.jobs.enqueueUnique('k', end, options);
      expect(next).toMatchObject({ outcome: 'created', state: 'blocked' });
      expect(await hand.jobs.enqueueUnique('k', 'third', options)).toEqual({
        id: next.id,
        outcome: 'existing',
        state: 'blocked',
      });
      expect(await hand.jobs.get(next.id)).toMatchObject({ blockedOn: 'key', state: 'blocked' });
      expect(await claim()).toBeUndefined();
      if (end === 'complete') await hand.settle.complete(job);
      if (end === 'fatal') {
        await db.query(`UPDATE ${S}.jobs SET max_attempts = 1 WHERE id = $1`, [job.id]);
        await hand.settle.fail(job, new Error('no'));
      }
      if (end === 'cancel') {
        await hand.jobs.cancel(job.id);
        await hand.settle.stopped(job);
      }
      if (end === 'revoke') await hand.jobs.forceCancel(job.id);
      if (end === 'crash') {
        await db.query(`UPDATE ${S}.leases SET suspect = true, crashes = 9 WHERE job_id = $1`, [job.id]);
        await db.query(`SELECT ${S}.move_v1($1::json, true)`, [
          JSON.stringify([{ job: job.id, token: job.token, worker: job.workerId, event: 'crash', alone: true }]),
        ]);
      }
      expect([end, await hand.jobs.get(next.id)]).toMatchObject([end, { state: 'ready', blockedOn: null }]);
      expect(await stray()).toEqual([]);
      running = next;
    }
  });

  it('F:L4 serial: a retry of the first keeps the second waiting; cancelling the second lets a third come', async () => {
    const options = { key: 's', keyMode: 'serial' as const };
    await hand.jobs.enqueue('k', 1, options);
    const job = (await claim())!;
    const second = await hand.jobs.enqueue('k', 2, options);
    await hand.settle.fail(job, new Error('again'), 60_000);
    expect((await hand.jobs.get(second)).state).toBe('blocked');
    await hand.jobs.pause(second);
    expect(await hand.jobs.resume(second)).toMatchObject({ state: 'blocked' });
    await hand.jobs.cancel(second);
    await hand.jobs.runNow(job.id);
    expect((await claim())?.id).toBe(job.id);
    const third = await hand.jobs.enqueueUnique('k', 3, options);
    expect(third).toMatchObject({ outcome: 'created', state: 'blocked' });
    await hand.jobs.delete(third.id);
    expect(await keys()).toEqual([{ key: 's', job: job.id, next: null }]);
  });

  it('F:L4 serial: one that has not started cannot start before the caller’s transaction has ended, so it sees its writes', async () => {
    const id = await hand.jobs.enqueue('k', 1, { key: 's' });
    const client = new Client({ connectionString: db.url });
    await client.connect();
    await client.query('BEGIN ISOLATION LEVEL READ COMMITTED');
    expect(await hand.jobs.enqueueUnique('k', 2, { key: 's', keyMode: 'serial', client })).toMatchObject({
      id,
      outcome: 'existing',
    });
    expect(await claim()).toBeUndefined();
    await client.query('COMMIT');
    await client.end();
    expect((await claim())?.id).toBe(id);
  });

  it('F:L4 throttle: nothing for the period, also when the job has finished; then again', async () => {
    const options = { key: 't', keyMode: { throttle: '1h' as const } };
    const first = await hand.jobs.enqueueUnique('k', 1, options);
    await hand.settle.complete((await claim())!);
    expect(await hand.jobs.enqueueUnique('k', 2, options)).toEqual({
      id: first.id,
      outcome: 'existing',
      state: 'completed',
    });
    expect(await stray()).toEqual([]);
    await db.query(`UPDATE ${S}.job_keys SET until = clock_timestamp() - interval '1 s'`);
    const second = await hand.jobs.enqueueUnique('k', 3, options);
    expect(second).toMatchObject({ outcome: 'created' });
    // Over while the job still waits: the period is what counts.
    await db.query(`UPDATE ${S}.job_keys SET until = clock_timestamp() - interval '1 s'`);
    expect(await hand.jobs.enqueueUnique('k', 4, options)).toMatchObject({ outcome: 'created' });
    expect(await jobCount()).toBe(3);
  });

  it('F:L4 debounce: so long after the last call, with its payload, and at most maxWait after the first', async () => {
    const options = { key: 'd', keyMode: { debounce: '10m' as const, maxWait: '15m' as const } };
    const leftMin = async (id: string) =>
      ((await hand.jobs.get(id)).runAt!.getTime() - (await db.now()).getTime()) / 60_000;
    const first = await hand.jobs.enqueueUnique('k', 1, options);
    expect(first).toMatchObject({ outcome: 'created', state: 'scheduled' });
    expect(await leftMin(first.id)).toBeCloseTo(10, 0);
    await db.query(`UPDATE ${S}.jobs SET created_at = created_at - interval '3 min'`);
    await db.query(`UPDATE ${S}.waiting SET run_at = run_at - interval '3 min'`);
    expect(await hand.jobs.enqueueUnique('k', 2, options)).toMatchObject({ id: first.id, outcome: 'replaced' });
    expect(await leftMin(first.id)).toBeCloseTo(10, 0);
    await db.query(`UPDATE ${S}.jobs SET created_at = created_at - interval '7 min'`);
    await hand.jobs.enqueue('k', 3, options);
    expect(await leftMin(first.id)).toBeCloseTo(5, 0);
    expect((await hand.jobs.get(first.id)).payload).toBe(3);
    await hand.jobs.runNow(first.id);
    expect((await claim())?.payload).toBe(3);
    const second = await hand.jobs.enqueueUnique('k', 4, options);
    expect(second).toMatchObject({ outcome: 'created', state: 'scheduled' });
    expect(await keys()).toEqual([{ key: 'd', job: second.id, next: null }]);
  });

  it('what is no key or mode is refused by name, and nothing is written', async () => {
    const wrong: [string, object][] = [
      ['key', { key: '' }],
      ['key', { key: 'a\0' }],
      ['key', { key: '\ud800' }],
      ['key', { key: 'x'.repeat(501) }],
      ['keyMode', { keyMode: 'replace' }],
      ['keyScope', { keyScope: 'queue' }],
      ['keyScope', { key: 'a', keyScope: 'job' }],
      ['keyMode', { key: 'a', keyMode: 'often' }],
      ['keyMode', { key: 'a', keyMode: { throttle: '1s', debounce: '1s' } }],
      ['keyMode.throttle', { key: 'a', keyMode: { throttle: 0 } }],
      ['keyMode.maxWait', { key: 'a', keyMode: { debounce: '1s', maxWait: 'long' } }],
      ['keyMode', { key: 'a', keyMode: { debounce: '1s' }, delay: '1s' }],
      ['concurrencyKey', { concurrencyKey: '' }],
      ['concurrencyPerKey', { concurrencyKey: 'a', concurrencyPerKey: 0 }],
    ];
    for (const [field, options] of wrong) {
      await expect(hand.jobs.enqueue('k', 1, options)).rejects.toMatchObject({ code: 'INVALID_JOB', field });
    }
    expect(await jobCount()).toBe(0);
    expect(await keys()).toEqual([]);
  });
});

describe('F:L5 a key never outlives its job', () => {
  it('F:L5 whatever ends the job lets its key go in the same transaction', async () => {
    const ends: Record<string, (id: string) => Promise<unknown>> = {
      completed: async () => hand.settle.complete((await claim())!),
      'failed for good': async (id) => {
        await db.query(`UPDATE ${S}.jobs SET max_attempts = 1 WHERE id = $1`, [id]);
        await hand.settle.fail((await claim())!, new Error('no'));
      },
      'cancelled before it ran': (id) => hand.jobs.cancel(id),
      'cancelled while it ran': async (id) => {
        const job = (await claim())!;
        await hand.jobs.cancel(id);
        await hand.settle.stopped(job);
      },
      'force-cancelled': async (id) => {
        await claim();
        await hand.jobs.forceCancel(id);
      },
      deleted: (id) => hand.jobs.delete(id),
      'deleted when paused': async (id) => {
        await hand.jobs.pause(id);
        await hand.jobs.delete(id);
      },
      'given back to be cancelled': async (id) => {
        const job = (await claim())!;
        await hand.jobs.cancel(id);
        await hand.settle.release(job);
      },
    };
    for (const [how, end] of Object.entries(ends)) {
      const id = await hand.jobs.enqueue('k', how, { key: how });
      await end(id);
      expect([how, await keys()]).toEqual([how, []]);
    }
    expect(await stray()).toEqual([]);
  });

  it('F:L5 what does not end it keeps the key: crash, release, snooze, retry', async () => {
    const id = await hand.jobs.enqueue('k', 1, { key: 'kept' });
    const crash = async () => {
      const job = (await claim())!;
      await db.query(`SELECT ${S}.move_v1($1::json, true)`, [
        JSON.stringify([{ job: job.id, token: job.token, worker: job.workerId, event: 'crash' }]),
      ]);
    };
    await crash();
    await hand.settle.release((await claim())!);
    await hand.settle.snooze((await claim())!, 60_000);
    expect(await keys()).toEqual([{ key: 'kept', job: id, next: null }]);
    await hand.jobs.runNow(id);
    await hand.settle.complete((await claim())!);
    expect(await keys()).toEqual([]);
    await hand.jobs.retry(id);
    expect(await keys()).toEqual([{ key: 'kept', job: id, next: null }]);
  });

  it('R22 a retry whose key another job holds by now is refused, and names the holder', async () => {
    const first = await hand.jobs.enqueue('k', 1, { key: 'moved on' });
    await hand.jobs.cancel(first);
    const second = await hand.jobs.enqueue('k', 2, { key: 'moved on' });
    await expect(hand.jobs.retry(first)).rejects.toMatchObject({
      code: 'ILLEGAL_TRANSITION',
      state: 'cancelled',
      message: expect.stringContaining(`its key is held by job ${second}`) as string,
    });
    expect(await hand.jobs.get(first)).toMatchObject({ state: 'cancelled', reason: 'cancelled' });
    await hand.jobs.cancel(second);
    await hand.jobs.retry(first);
    expect(await keys()).toEqual([{ key: 'moved on', job: first, next: null }]);
  });

  it('F:L5 a settle never waits for somebody’s open transaction at a key; what it leaves counts for nothing, and the sweep repairs it', async () => {
    const options = { key: 'held', keyMode: 'serial' as const };
    const first = await hand.jobs.enqueue('k', 1, options);
    const job = (await claim())!;
    // Somebody enqueues the next one, and keeps the transaction open.
    const client = new Client({ connectionString: db.url });
    await client.connect();
    await client.query('BEGIN ISOLATION LEVEL READ COMMITTED');
    const next = await hand.jobs.enqueueUnique('k', 2, { ...options, client });
    expect(next.outcome).toBe('created');
    await hand.settle.complete(job);
    expect((await hand.jobs.get(first)).state).toBe('completed');
    await client.query('COMMIT');
    await client.end();
    expect(await hand.jobs.get(next.id)).toMatchObject({ state: 'blocked' });
    const sweep = () => db.one<{ repaired: number }>(`SELECT repaired FROM ${S}.sweep_keys_v1('', '', 1000)`);
    expect(await sweep()).toEqual({ repaired: 1 });
    expect(await hand.jobs.get(next.id)).toMatchObject({ state: 'ready' });
    expect(await keys()).toEqual([{ key: 'held', job: next.id, next: null }]);
    expect(await sweep()).toEqual({ repaired: 0 });
    // And a key whose job has finished behind its back.
    await hand.jobs.enqueue('k', 3, { key: 'orphan' });
    const held = await RowGate.hold(db, `SELECT FROM ${S}.job_keys WHERE key = 'orphan' FOR UPDATE`);
    await hand.jobs.steerMany('cancel', {});
    await held.release();
    expect((await keys()).map(({ key }) => key)).toEqual(['orphan']);
    expect(await stray()).toHaveLength(1);
    expect(await hand.jobs.enqueueUnique('k', 4, { key: 'orphan' })).toMatchObject({ outcome: 'created' });
    await hand.jobs.steerMany('cancel', {});
    expect(await stray()).toEqual([]);
  });

  it('F:L5 nothing is left behind after a storm of enqueues, claims, ends and steering', async () => {
    @JobHandler('k', { concurrency: 10, backoff: 1, maxAttempts: 2 })
    class Storm implements Handler<number> {
      handle({ payload }: Job<number>): void {
        if (payload % 7 === 0) throw new Error('no');
      }
    }
    const worker = await startLeaseApp(db, { handlers: [Storm] });
    const modes = ['ignore', 'replace', 'serial', { debounce: 20, maxWait: 60 }] as const;
    await Promise.all(
      Array.from({ length: 400 }, async (_, i) => {
        await new Promise((resolve) => setTimeout(resolve, Math.random() * 1500));
        const { id } = await hand.jobs.enqueueUnique('k', i, {
          key: `storm-${i % 9}`,
          keyMode: modes[i % modes.length]!,
          maxAttempts: 2,
          backoff: 1,
        });
        if (i % 11 === 0) await hand.jobs.cancel(id).catch(() => undefined);
        if (i % 13 === 0) await hand.jobs.retry(id).catch(() => undefined);
      }),
    );
    await eventually(
      async () =>
        (
          await db.one<{ n: number }>(
            `SELECT (SELECT count(*) FROM ${S}.ready) + (SELECT count(*) FROM ${S}.waiting) + (SELECT count(*) FROM ${S}.leases) AS n`,
          )
        ).n.toString() === '0',
      { state: () => db.query(`SELECT * FROM ${S}.waiting`), timeoutMs: 30_000 },
    );
    await db.query(`SELECT ${S}.sweep_keys_v1('', '', 1000)`);
    expect(await keys()).toEqual([]);
    await worker.close();
  });
});

describe('a lost reply', () => {
  it('R19 an enqueue with a key is repeated, and gets the job that is there', async () => {
    const proxy = await TcpProxy.start(db.url);
    const app = await startLeaseApp(db, { options: { role: 'producer' }, url: proxy.url(db.url) });
    await app.jobs.enqueue('k', 0);
    const held: RowGate = await RowGate.hold(db, `LOCK TABLE ${S}.job_keys IN EXCLUSIVE MODE`);
    const answer = app.jobs.enqueueUnique('k', 1, { key: 'lost' });
    await held.untilWaiting();
    proxy.cut();
    await held.release();
    expect(await answer).toMatchObject({
      outcome: expect.stringMatching(/created|existing/) as string,
      state: 'ready',
    });
    expect((await db.query(`SELECT FROM ${S}.jobs WHERE key = 'lost'`)).length).toBe(1);
    await app.close();
    await proxy.close();
  });
});

describe('jobs of a handler', () => {
  it('F:L4 serial in a worker: never two at once, and the last enqueue is always seen', async () => {
    let data = 0;
    let seen = 0;
    let at = 0;
    let most = 0;
    @JobHandler('k.sync', { concurrency: 10 })
    class Sync implements Handler {
      async handle(): Promise<void> {
        most = Math.max(most, ++at);
        seen = data;
        await new Promise((resolve) => setTimeout(resolve, 3));
        at--;
      }
    }
    const worker = await startLeaseApp(db, { handlers: [Sync] });
    let last = '';
    for (let i = 1; i <= 60; i++) {
      data = i;
      last = await worker.jobs.enqueue(Sync, null, { key: 'sync', keyMode: 'serial' });
    }
    await untilState(worker.jobs, last, 'completed');
    expect(seen).toBe(60);
    expect(most).toBe(1);
  });
});
