import { setTimeout as sleep } from 'node:timers/promises';
import { type Handler, type Job, JobHandler, type Lease, LeaseLostError, LeaseSetupError } from '@leasehold/nestjs';
import { DataSource } from 'typeorm';
import { RowGate, type TestDatabase, createTestDatabase, eventually, gate, startLeaseApp } from './support';
import { untilState } from './support/job-states';

const S = '"leasehold"';
let db: TestDatabase;
let dataSource: DataSource;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'locked-lease' });
  dataSource = await new DataSource({ type: 'postgres', url: db.url }).initialize();
});
afterAll(async () => {
  await dataSource.destroy();
  await db.drop();
});

let work: (job: Job, lease: Lease) => unknown;
@JobHandler('locked', { backoff: 0, maxAttempts: 1 })
class Locked implements Handler {
  handle(job: Job, lease: Lease): unknown {
    return work(job, lease);
  }
}
const start = (options: object = {}) =>
  startLeaseApp(db, { handlers: [Locked], options: { connection: { dataSource }, ...options } });

const lockLease = (id: string) => RowGate.hold(db, `SELECT FROM ${S}.leases WHERE job_id = $1 FOR UPDATE`, [id]);

describe('a lease that somebody else keeps locked', () => {
  it('R17 holds up no outcome but its own: neither completions nor failures', async () => {
    const go = gate();
    const began: string[] = [];
    work = async ({ id, payload }) => {
      began.push(id);
      await go.promise;
      if (payload === 'fails') throw new Error('as told');
      return payload;
    };
    const { jobs } = await start();
    const completes = await jobs.enqueueMany(Locked, ['locked', 'one', 'two']);
    const fails = await jobs.enqueueMany(Locked, ['fails', 'fails']);
    await eventually(() => began.length === 5);
    const gates = [await lockLease(completes[0]!), await lockLease(fails[0]!)];
    go.open();
    for (const id of completes.slice(1)) await untilState(jobs, id, 'completed');
    await untilState(jobs, fails[1]!, 'failed');
    // Those that come later neither.
    expect((await jobs.waitFor(await jobs.enqueue(Locked, 'later'))).state).toBe('completed');
    for (const id of [completes[0]!, fails[0]!]) expect((await jobs.get(id)).state).toBe('running');
    for (const one of gates) await one.release();
    expect(await untilState(jobs, completes[0]!, 'completed')).toMatchObject({ result: 'locked', runs: [] });
    await untilState(jobs, fails[0]!, 'failed');
  });

  it.each([
    ['six of them', 6, {}],
    ['with a short time limit for statements', 1, { connection: { queryTimeout: '1s' } }],
  ])('R17 nor claims: %s', async (_what, count, options) => {
    const go = gate();
    let began = 0;
    work = async ({ payload }) => {
      if (payload !== 'locked') return;
      began++;
      await go.promise;
    };
    const { connection, ...rest } = options as { connection?: object };
    const { jobs } = await start({ ...rest, connection: { dataSource, ...connection } });
    const locked = await jobs.enqueueMany(Locked, Array<string>(count).fill('locked'));
    await eventually(() => began === count);
    const gates = await Promise.all(locked.map(lockLease));
    go.open();
    // The first may wait with them for as long as a settle waits; all that come after it do not.
    for (let i = 0; i < 20; i++) await untilState(jobs, await jobs.enqueue(Locked, i), 'completed');
    for (const id of locked) expect((await jobs.get(id)).state).toBe('running');
    for (const one of gates) await one.release();
    for (const id of locked) await untilState(jobs, id, 'completed');
  });

  it('R20 nor do many that wait for one: their handlers’ own transactions leave the pool to others', async () => {
    const go = gate();
    let inside = 0;
    work = async ({ payload }, lease) => {
      if (payload === 'quick') return;
      await dataSource.transaction(async (manager) => {
        await (payload === 'extends' ? lease.checkpointIn(manager, 1) : lease.completeIn(manager));
        inside++;
        if (payload === 'extends') void lease.extend('1m').catch(() => undefined);
        await go.promise;
      });
    };
    const { jobs } = await start();
    const open = [
      ...(await jobs.enqueueMany(Locked, Array<string>(4).fill('extends'))),
      ...(await jobs.enqueueMany(Locked, Array<string>(4).fill('completes'), { deadline: '300ms' })),
    ];
    await eventually(() => inside === 8);
    await eventually(
      async () =>
        (await db.query(`SELECT FROM ${S}.leases WHERE deadline_at < clock_timestamp() - interval '300 ms'`)).length ===
        4,
    );
    const waiting = await db.query(
      `SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'leasehold' AND wait_event_type = 'Lock'`,
    );
    expect(waiting).toEqual([]);
    await untilState(jobs, await jobs.enqueue(Locked, 'quick'), 'completed');
    go.open();
    for (const id of open) await untilState(jobs, id, 'completed');
  });

  it('R20 F:A10 nor does one whose own transaction holds it when its deadline passes', async () => {
    const go = gate();
    work = async ({ payload }, lease) => {
      if (payload === 'fails') throw new Error('as told');
      await dataSource
        .transaction(async (manager) => {
          await lease.checkpointIn(manager, { step: 1 });
          await go.promise;
        })
        .catch(() => undefined);
    };
    const { jobs } = await start();
    const open = await jobs.enqueue(Locked, 'open', { deadline: '200ms' });
    await eventually(
      async () =>
        (await db.query(`SELECT FROM ${S}.leases WHERE job_id = $1 AND deadline_at < clock_timestamp()`, [open]))
          .length > 0,
    );
    for (const id of await jobs.enqueueMany(Locked, ['fails', 'fails'])) await untilState(jobs, id, 'failed');
    expect((await jobs.get(open)).state).toBe('running');
    go.open();
    expect(await untilState(jobs, open, 'failed')).toMatchObject({ reason: expect.stringMatching(/deadline/) });
  });

  it('R17 its outcome is refused, not kept for ever, when the lease is gone by the time that it is free', async () => {
    const go = gate();
    work = () => go.promise;
    const worker = await start();
    const id = await worker.jobs.enqueue(Locked, null);
    await untilState(worker.jobs, id, 'running');
    const held = await lockLease(id);
    go.open();
    await held.untilWaiting();
    await held.query(`UPDATE ${S}.leases SET token = nextval('${S}.tokens'), worker_id = 'other' WHERE job_id = $1`, [
      id,
    ]);
    await held.release();
    await eventually(() => worker.events.some((event) => event.type === 'job.refused' && event.jobId === id));
    await worker.jobs.forceCancel(id);
  });

  it('R23 holds up no checkpoint but its own, and its own is stored when it is free', async () => {
    const saved: unknown[] = [];
    const go = gate();
    let running = 0;
    work = async ({ payload }, lease) => {
      running++;
      await go.promise;
      await lease.checkpoint({ of: payload });
      saved.push(payload);
    };
    const { jobs } = await start();
    const [locked, free] = (await jobs.enqueueMany(Locked, ['locked', 'free'])) as [string, string];
    await eventually(() => running === 2);
    const held = await lockLease(locked);
    go.open();
    await untilState(jobs, free, 'completed');
    expect(saved).toEqual(['free']);
    await held.release();
    await untilState(jobs, locked, 'completed');
    expect(saved).toEqual(['free', 'locked']);
    const [row] = await db.query(`SELECT checkpoint FROM ${S}.checkpoints WHERE job_id = $1`, [locked]);
    expect(row).toEqual({ checkpoint: { of: 'locked' } });
  });

  it('R23 what is saved while the handler had it locked itself is there when the run ends', async () => {
    work = async (_job, lease) => {
      await dataSource.transaction(async (manager) => {
        await lease.checkpointIn(manager, 1);
        lease.log('inside');
        void lease.checkpoint('beside').catch(() => undefined);
        await sleep(400);
      });
      lease.log('after');
      throw new Error('ends');
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(Locked, null);
    const { saved } = await untilState(jobs, id, 'failed');
    expect(saved).toMatchObject({ checkpoint: 'beside', log: [{ line: 'inside' }, { line: 'after' }] });
  });

  it('R23 a run that ends meanwhile gives its notes up rather than its outcome', async () => {
    const go = gate();
    work = async ({ payload }, lease) => {
      await go.promise;
      if (payload === 'locked') lease.progress(1);
      return payload;
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(Locked, 'locked');
    await untilState(jobs, id, 'running');
    const held = await lockLease(id);
    go.open();
    await held.untilWaiting();
    await held.release();
    expect(await untilState(jobs, id, 'completed')).toMatchObject({ result: 'locked' });
  });
});

describe('R20 after a completion in a transaction of the handler’s', () => {
  const rolledBack = (lease: Lease) =>
    dataSource
      .transaction(async (manager) => {
        await lease.completeIn(manager, 'never');
        throw new Error('rolled back');
      })
      .catch(() => undefined);

  it('R20 that was rolled back, everything goes on as before it', async () => {
    work = async (_job, lease) => {
      await rolledBack(lease);
      await lease.checkpoint({ step: 1 });
      await rolledBack(lease);
      await Promise.all([lease.checkpoint({ step: 1 }), lease.extend('9m'), lease.extend('10m')]);
      await rolledBack(lease);
      await lease.extend('10m');
      await rolledBack(lease);
      await lease.transaction((manager) => lease.checkpointIn(manager, { step: 2 }));
      await rolledBack(lease);
      await dataSource.transaction((manager) => lease.completeIn(manager, 'at last'));
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(Locked, null);
    expect(await untilState(jobs, id, 'completed')).toMatchObject({ result: 'at last', runs: [] });
    const [row] = await db.query(`SELECT checkpoint FROM ${S}.checkpoints WHERE job_id = $1`, [id]);
    expect(row).toEqual({ checkpoint: { step: 2 } });
  });

  it('R20 that is open, or was committed, nothing more is written about the job', async () => {
    const errors: unknown[] = [];
    work = async (_job, lease) => {
      await dataSource.transaction(async (manager) => {
        await lease.completeIn(manager, 'done');
        await lease.checkpoint(1).catch((error: unknown) => errors.push(error));
        await lease.completeIn(manager, 2).catch((error: unknown) => errors.push(error));
      });
      await lease.extend('1m').catch((error: unknown) => errors.push(error));
      await lease.transaction(() => Promise.resolve()).catch((error: unknown) => errors.push(error));
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(Locked, null);
    expect(await untilState(jobs, id, 'completed')).toMatchObject({ result: 'done' });
    await eventually(() => errors.length === 4);
    for (const error of errors) expect(error).toBeInstanceOf(LeaseLostError);
  });

  it('R20 R17 that was rolled back, a rescue in the meantime is not taken for it', async () => {
    let runs = 0;
    work = async ({ id }, lease) => {
      if (++runs === 1) {
        await rolledBack(lease);
        await db.query(
          `SELECT FROM (SELECT json_build_array(json_build_object('job', job_id, 'token', token, 'worker', worker_id, 'event', 'crash')) AS moves
             FROM ${S}.leases WHERE job_id = $1) l, ${S}.move_v1(l.moves, false)`,
          [id],
        );
      }
      return `run ${runs}`;
    };
    const worker = await start();
    const id = await worker.jobs.enqueue(Locked, null);
    expect(await untilState(worker.jobs, id, 'completed')).toMatchObject({
      result: 'run 2',
      runs: [{ outcome: 'dead' }],
    });
    await eventually(() => worker.events.some((event) => event.type === 'job.refused' && event.jobId === id));
    expect(worker.events.filter((event) => event.type === 'job.completed' && event.jobId === id)).toHaveLength(1);
  });

  it('R20 that was rolled back, a lease that is lost is told to the handler', async () => {
    const stolen = gate();
    const aborted = gate();
    let reason: unknown;
    work = async (_job, lease) => {
      await rolledBack(lease);
      lease.signal.addEventListener('abort', () => {
        reason = (lease.signal.reason as { reason: string }).reason;
        aborted.open();
      });
      stolen.open();
      await aborted.promise;
    };
    const { jobs, heartbeat } = await start();
    const id = await jobs.enqueue(Locked, null);
    await stolen.promise;
    await db.query(
      `UPDATE ${S}.leases SET token = nextval('${S}.tokens'), worker_id = 'somebody else' WHERE job_id = $1`,
      [id],
    );
    await heartbeat.renew();
    await aborted.promise;
    expect(reason).toBe('lease-lost');
    await jobs.forceCancel(id);
  });

  it('R20 a save that would wait for its own transaction is refused at once, by name; one beside it waits', async () => {
    const errors: Error[] = [];
    let beside: Promise<void> | undefined;
    let after: Promise<void> | undefined;
    const left = gate();
    work = async (_job, lease) => {
      const inside = gate();
      const parallel = inside.promise.then(() => lease.checkpoint({ beside: true }));
      beside = parallel;
      await lease.transaction(async (manager) => {
        await lease.checkpoint({ before: true });
        await lease.checkpointIn(manager, { inside: true });
        await lease.checkpoint({ never: true }).catch((error: Error) => errors.push(error));
        await lease.extend('1m').catch((error: Error) => errors.push(error));
        await lease.transaction(() => Promise.resolve()).catch((error: Error) => errors.push(error));
        inside.open();
        after = left.promise.then(() => lease.checkpoint({ after: true }));
      });
      await parallel;
      left.open();
      await after;
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(Locked, null);
    await untilState(jobs, id, 'completed');
    await beside;
    expect(errors.map((error) => error.message)).toEqual([
      expect.stringMatching(/^checkpoint\(\) inside lease\.transaction\(\)/),
      expect.stringMatching(/^extend\(\) inside lease\.transaction\(\)/),
      expect.stringMatching(/^transaction\(\) inside lease\.transaction\(\)/),
    ]);
    for (const error of errors) expect(error).toBeInstanceOf(LeaseSetupError);
    const [row] = await db.query(`SELECT checkpoint FROM ${S}.checkpoints WHERE job_id = $1`, [id]);
    expect(row).toEqual({ checkpoint: { after: true } });
  });
});
