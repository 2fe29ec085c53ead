import {
  COMMANDS,
  EVENTS,
  IllegalTransitionError,
  JOB_STATES,
  type JobCommand,
  type JobEvent,
  type JobState,
  LeaseEvents,
  UnknownJobError,
  placeAfter,
} from '@leasehold/nestjs';
import { type LeaseApp, RowGate, type TestDatabase, createTestDatabase, startHandWorker } from './support';

const S = '"leasehold"';
const ALL_COMMANDS = Object.keys(COMMANDS) as JobCommand[];

let db: TestDatabase;
let hand: LeaseApp;
let nth = 0;

beforeAll(async () => {
  db = await createTestDatabase({ name: 'transitions' });
});
beforeEach(async () => {
  hand = await startHandWorker(db, ['t']);
});
afterEach(() => db.query(`TRUNCATE ${S}.jobs, ${S}.ready, ${S}.waiting, ${S}.leases, ${S}.finished, ${S}.job_keys`));
afterAll(() => db.drop());

/** Law 1: the rows that a job has in the state tables. */
const rowsOf = async (id: string): Promise<string[]> =>
  (
    await db.query<{ place: string }>(
      `SELECT 'ready' AS place FROM ${S}.ready WHERE job_id = $1 UNION ALL SELECT reason FROM ${S}.waiting WHERE job_id = $1
       UNION ALL SELECT 'running' FROM ${S}.leases WHERE job_id = $1 UNION ALL SELECT state FROM ${S}.finished WHERE job_id = $1`,
      [id],
    )
  ).map(({ place }) => place);

const claim = async (id: string) => {
  const [claimed] = await hand.claims.claim({ kinds: ['t'], limit: 1 });
  if (claimed?.job.id !== id) throw new Error(`claimed ${claimed?.job.id} instead of ${id}`);
  return claimed.job;
};

/** A job in this state, come there the usual way. */
async function jobIn(state: JobState, options: object = {}): Promise<string> {
  const { jobs, settle } = hand;
  const enqueue = (more: object = {}) => jobs.enqueue('t', { n: ++nth }, { ...options, ...more });
  switch (state) {
    case 'ready':
      return enqueue();
    case 'scheduled':
      return enqueue({ delay: '1h' });
    case 'blocked': {
      const key = `blocked-${++nth}`;
      const holder = await jobs.enqueue('t', {}, { key, priority: -9 });
      await claim(holder);
      return enqueue({ key, keyMode: 'serial' });
    }
    case 'paused': {
      const id = await enqueue();
      await jobs.pause(id);
      return id;
    }
    case 'cancelled': {
      const id = await enqueue();
      await jobs.cancel(id);
      return id;
    }
    default: {
      const id = await enqueue({ priority: -10 });
      const job = await claim(id);
      if (state === 'completed') await settle.complete(job, 'done');
      if (state === 'failed')
        await hand.settle.fail(job, Object.assign(new Error('broken')), 0).then(() => failForGood(id));
      return id;
    }
  }
}

/** Out of attempts: the next failure is the last. */
async function failForGood(id: string): Promise<void> {
  await db.query(`UPDATE ${S}.jobs SET max_attempts = 1 WHERE id = $1`, [id]);
  await hand.jobs.runNow(id);
  await hand.settle.fail(await claim(id), new Error('broken'));
}

const order = (hand: LeaseApp, command: JobCommand, id: string) =>
  command === 'reprioritise' ? hand.jobs.reprioritise(id, 5) : hand.jobs[command](id);

/** What a command leaves behind, by the table. */
const after = (effect: string, from: JobState): JobState | null => {
  switch (effect) {
    case 'unchanged':
    case 'requested':
    case 'withdrawn':
    case 'reprioritised':
      return from;
    case 'revoked':
      return 'cancelled';
    case 'deleted':
      return null;
    case 'resumed':
    case 'hurried':
    case 'retried':
      return 'ready';
    default:
      return effect as JobState;
  }
};

describe('R22 the table of commands', () => {
  it.each(ALL_COMMANDS)('R22 F:L3 %s, of a job in every state', async (command) => {
    for (const state of JOB_STATES) await tryOnce(command, state);
  });

  async function tryOnce(command: JobCommand, state: JobState): Promise<void> {
    const effect = COMMANDS[command][state];
    const id = await jobIn(state);
    expect(await rowsOf(id)).toEqual([state]);
    const before = await hand.jobs.get(id);
    const what = `${command} ${state}`;
    if (effect === undefined) {
      await expect(order(hand, command, id)).rejects.toMatchObject({
        name: 'IllegalTransitionError',
        code: 'ILLEGAL_TRANSITION',
        jobId: id,
        command,
        state,
      });
      expect(await hand.jobs.get(id)).toEqual(before);
      expect(await rowsOf(id)).toEqual([state]);
      return;
    }
    const to = after(effect, state);
    const unchanged = effect === 'unchanged' || effect === 'withdrawn';
    expect([what, await order(hand, command, id)]).toEqual([
      what,
      {
        jobId: id,
        changed: !unchanged,
        requested: effect === 'requested',
        from: state,
        state: to,
      },
    ]);
    expect(await rowsOf(id)).toEqual(to === null ? [] : [to]);
    if (to === null) await expect(hand.jobs.get(id)).rejects.toThrow(UnknownJobError);
    if (effect === 'unchanged') expect(await hand.jobs.get(id)).toEqual(before);
    await hand.jobs.steerMany('forceCancel', {});
  }

  it.each(ALL_COMMANDS)('F:L3 %s twice at once is one effect, in every state', async (command) => {
    for (const state of JOB_STATES) await tryTwice(command, state);
  });

  async function tryTwice(command: JobCommand, state: JobState): Promise<void> {
    const effect = COMMANDS[command][state];
    const id = await jobIn(state);
    const events: string[] = [];
    hand.app.get(LeaseEvents).on('job.steered', ({ from, to }) => events.push(`${from} ${to}`));
    const answers = await Promise.allSettled([order(hand, command, id), order(hand, command, id)]);
    const refused = answers.filter(({ status }) => status === 'rejected') as PromiseRejectedResult[];
    const changed = answers.filter((answer) => answer.status === 'fulfilled' && answer.value.changed);
    for (const { reason } of refused) {
      expect(reason).toMatchObject({ code: expect.stringMatching(/^(ILLEGAL_TRANSITION|UNKNOWN_JOB)$/) });
    }
    const count = [command, state, changed.length, refused.length];
    if (effect === undefined) expect(count).toEqual([command, state, 0, 2]);
    else if (effect === 'unchanged' || effect === 'withdrawn') expect(count).toEqual([command, state, 0, 0]);
    // A request or a priority that is there already is written again, to the same end.
    else if (effect === 'requested' || effect === 'reprioritised') expect(count).toEqual([command, state, 2, 0]);
    else expect([command, state, changed.length, events.length]).toEqual([command, state, 1, 1]);
    const to = effect === undefined ? state : after(effect, state);
    expect(await rowsOf(id)).toEqual(to === null ? [] : [to]);
    expect((await db.query(`SELECT FROM ${S}.runs WHERE job_id = $1`, [id])).length).toBeLessThanOrEqual(2);
    await hand.jobs.steerMany('forceCancel', {});
  }

  it('R22 a job that nobody knows is unknown, and an id that is none is refused', async () => {
    for (const command of ALL_COMMANDS) {
      await expect(order(hand, command, '999999999')).rejects.toThrow(UnknownJobError);
      await expect(order(hand, command, 'abc')).rejects.toMatchObject({ code: 'INVALID_JOB', field: 'id' });
    }
  });

  it('R22 F:L3 a job that moves between the look and the lock is looked for again', async () => {
    const id = await jobIn('ready');
    // A claim of somebody else holds its row; meanwhile the command waits for it.
    const gate = await RowGate.hold(
      db,
      `WITH d AS (DELETE FROM ${S}.ready WHERE job_id = $1 RETURNING *)
       INSERT INTO ${S}.waiting (job_id, run_at, priority, reason, queue, kind)
       SELECT job_id, clock_timestamp() + interval '1 h', priority, 'scheduled', queue, kind FROM d`,
      [id],
    );
    const cancelled = hand.jobs.cancel(id);
    await gate.untilWaiting();
    await gate.release();
    expect(await cancelled).toMatchObject({ changed: true, from: 'scheduled', state: 'cancelled' });
    expect(await rowsOf(id)).toEqual(['cancelled']);
  });

  it('R22 retry: fresh budgets, the error cleared, the last run kept, and its checkpoint', async () => {
    const id = await jobIn('failed');
    await db.query(
      `INSERT INTO ${S}.checkpoints (job_id, token, saved_at, version, checkpoint) VALUES ($1, 1, clock_timestamp(), 1, '{"at":7}')`,
      [id],
    );
    expect(await hand.jobs.get(id)).toMatchObject({ state: 'failed', attempt: 2, outcome: 'failed' });
    await hand.jobs.retry(id);
    expect(await hand.jobs.get(id)).toMatchObject({
      state: 'ready',
      attempt: 0,
      crashes: 0,
      releases: 0,
      snoozes: 0,
      error: null,
      reason: null,
      finishedAt: null,
      saved: { checkpoint: { at: 7 } },
    });
    expect((await hand.jobs.get(id)).runs).toMatchObject([
      { outcome: 'failed', attempt: 1 },
      { outcome: 'failed', attempt: 2, error: { message: 'broken' } },
    ]);
    const job = await claim(id);
    expect(job).toMatchObject({ attempt: 1, checkpoint: { at: 7 }, checkpointVersion: 1 });
  });

  it('R22 runNow and reprioritise change the order in which jobs start', async () => {
    const late = await hand.jobs.enqueue('t', 'late', { delay: '1h' });
    const first = await hand.jobs.enqueue('t', 'first');
    const last = await hand.jobs.enqueue('t', 'last');
    await hand.jobs.reprioritise(last, -5);
    await hand.jobs.runNow(late);
    const claimed = await hand.claims.claim({ kinds: ['t'], limit: 3 });
    expect(claimed.map(({ job }) => job.payload)).toEqual(['last', 'late', 'first']);
    expect((await hand.jobs.get(first)).priority).toBe(0);
    await expect(hand.jobs.reprioritise(first, 40_000)).rejects.toMatchObject({ field: 'priority' });
  });

  it('R22 a row that a foreign key of the user holds is not deleted', async () => {
    const id = await jobIn('completed');
    for (const how of ['', 'ON DELETE RESTRICT', 'DEFERRABLE INITIALLY DEFERRED']) {
      await db.query(`CREATE TABLE orders (job bigint REFERENCES ${S}.jobs (id) ${how})`);
      await db.query('INSERT INTO orders VALUES ($1)', [id]);
      await expect(hand.jobs.delete(id)).rejects.toThrow(IllegalTransitionError);
      expect([how, await rowsOf(id)]).toEqual([how, ['completed']]);
      await db.query('DROP TABLE orders');
    }
    expect(await hand.jobs.delete(id)).toMatchObject({ state: null });
    for (const table of ['jobs', 'runs', 'checkpoints', 'finished']) {
      const column = table === 'jobs' ? 'id' : 'job_id';
      expect(await db.query(`SELECT FROM ${S}.${table} WHERE ${column} = $1`, [id])).toEqual([]);
    }
  });
});

describe('R22 the table of events', () => {
  const stops = [{}, { cancel: true }, { pause: true }, { cancel: true, pause: true }];
  const moves = (Object.keys(EVENTS) as JobEvent[]).filter((event) => EVENTS[event].from === 'running');

  it.each(moves)('R22 R21 R24 %s: with and without requests to stop, within its budget and beyond', async (event) => {
    for (const stop of stops) for (const spent of [false, true]) await tryEvent(event, { ...stop, spent });
  });

  async function tryEvent(
    event: JobEvent,
    { cancel, pause, spent }: { cancel?: boolean; pause?: boolean; spent: boolean },
  ): Promise<void> {
    const id = await jobIn('running');
    const budget = EVENTS[event].budget;
    // One more of them is one too many. A crash convicts only a suspect that ran alone.
    if (spent) {
      await db.query(
        `UPDATE ${S}.leases SET attempt = 7, crashes = 7, releases = 7, snoozes = 7, suspect = $2 WHERE job_id = $1`,
        [id, event === 'crash'],
      );
      await db.query(
        `UPDATE ${S}.jobs SET max_attempts = 7, max_crashes = 8, max_releases = 7, max_snoozes = 7 WHERE id = $1`,
        [id],
      );
    }
    const { attempt, token } = await db.one<{ attempt: number; token: string }>(
      `UPDATE ${S}.leases SET cancel_requested = $2, pause_requested = $3 WHERE job_id = $1 RETURNING attempt, token::text`,
      [id, cancel ?? false, pause ?? false],
    );
    if (event === 'deadline') {
      await db.query(`UPDATE ${S}.leases SET deadline_at = clock_timestamp() - interval '1 s' WHERE job_id = $1`, [id]);
    }
    const move = {
      job: id,
      token,
      worker: (await db.one<{ worker_id: string }>(`SELECT worker_id FROM ${S}.leases WHERE job_id = $1`, [id]))
        .worker_id,
      event,
      error: { message: 'an error' },
      delayMs: event === 'snooze' ? 60_000 : undefined,
      alone: true,
    };
    const moved = await db.query<{ place: string; attempt: number }>(
      `SELECT place, attempt FROM ${S}.move_v1($1::json, false)`,
      [JSON.stringify([move])],
    );
    const place = placeAfter(event, { cancel: cancel ?? false, pause: pause ?? false, spent });
    expect(moved).toMatchObject([{ place, attempt }]);
    expect(await rowsOf(id)).toEqual([place]);
    const job = await hand.jobs.get(id);
    expect(job.cancelRequested || job.pauseRequested).toBe(false);
    if (!['completed', 'failed', 'cancelled'].includes(place)) {
      expect(job.attempt).toBe(EVENTS[event].attempt === 'spent' ? attempt : attempt - 1);
    }
    if (place === 'failed' && budget && spent && event !== 'fatal')
      expect(job.reason).toMatch(/\d of \d|maxCrashes|maxReleases|maxSnoozes/);
    if (event === 'complete' && cancel) expect(job.reason).toMatch(/completed before it saw the cancel request/);
    // The same move again finds nothing: its lease is gone (R17).
    expect(await db.query(`SELECT FROM ${S}.move_v1($1::json, false)`, [JSON.stringify([move])])).toEqual([]);
    expect(await rowsOf(id)).toEqual([place]);
    await hand.jobs.steerMany('cancel', {});
  }

  it('R22 the other events: promote, unblock and claim, each from its state only', async () => {
    expect(EVENTS.promote).toMatchObject({ from: 'scheduled', to: 'ready' });
    expect(EVENTS.claim).toMatchObject({ from: 'ready', to: 'running' });
    expect(EVENTS.unblock).toMatchObject({ from: 'blocked', to: 'ready' });
    for (const state of JOB_STATES) {
      const id = await jobIn(state);
      // Due, free and claimable as far as its time and its key go.
      await db.query(`UPDATE ${S}.waiting SET run_at = clock_timestamp() - interval '1 s' WHERE job_id = $1`, [id]);
      await db.query(`SELECT ${S}.poll_v1('{t}', null, 100)`);
      expect([state, await rowsOf(id)]).toEqual([state, [state === 'scheduled' ? 'ready' : state]]);
      const claimed = await hand.claims.claim({ kinds: ['t'], limit: 10 });
      expect([state, claimed.some(({ job }) => job.id === id)]).toEqual([
        state,
        state === 'ready' || state === 'scheduled',
      ]);
      await db.query(`SELECT ${S}.unblock_v1($1, 'key')`, [id]);
      expect([state, await rowsOf(id)]).toEqual([
        state,
        [state === 'blocked' ? 'ready' : state === 'ready' || state === 'scheduled' ? 'running' : state],
      ]);
      await db.query(`TRUNCATE ${S}.ready, ${S}.waiting, ${S}.leases`);
    }
  });
});

describe('many at once', () => {
  it('R22 a filter: counted before, bounded, each job for itself', async () => {
    const old = await hand.jobs.enqueueMany('t', Array<number>(30).fill(1), { tags: ['old'] });
    const later = await hand.jobs.enqueueMany('t', Array<number>(10).fill(1), { tags: ['old'], delay: '1h' });
    const others = await hand.jobs.enqueueMany('t', Array<number>(5).fill(1));
    expect(await hand.jobs.countFor('cancel', { tag: 'old' })).toBe(40);
    expect(await hand.jobs.countFor('cancel', { tag: 'old', state: 'scheduled' })).toBe(10);
    expect(await hand.jobs.countFor('retry', { tag: 'old' })).toBe(0);
    expect(await hand.jobs.steerMany('cancel', { tag: 'old' }, { limit: 25, reason: 'not needed' })).toEqual({
      changed: 25,
      requested: 0,
      unchanged: 0,
      skipped: 0,
      next: old[24],
    });
    expect((await hand.jobs.get(old[0]!)).reason).toBe('not needed');
    expect(await hand.jobs.steerMany('cancel', { tag: 'old' }, { after: old[24]! })).toMatchObject({
      changed: 15,
      next: null,
    });
    const states = await Promise.all([...old, ...later, ...others].map(async (id) => (await hand.jobs.get(id)).state));
    expect(states).toEqual([...Array<string>(40).fill('cancelled'), ...Array<string>(5).fill('ready')]);
    expect(await hand.jobs.steerMany('retry', { state: 'cancelled', kind: 't', tag: 'old' })).toMatchObject({
      changed: 40,
    });
    await expect(hand.jobs.steerMany('cancel', {}, { limit: 0 })).rejects.toMatchObject({ field: 'limit' });
    await expect(hand.jobs.steerMany('cancel', { state: 'redy' as 'ready' })).rejects.toThrow(/did you mean 'ready'/);
    await expect(hand.jobs.steerMany('explode' as 'cancel', {})).rejects.toThrow(/no command/);
  });
});
