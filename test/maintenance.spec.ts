import { QueuesService, RetentionService } from '@leasehold/nestjs';
import { MaintenanceCrons } from '@leasehold/nestjs/dist/maintenance/maintenance-crons';
import { MaintenanceService } from '@leasehold/nestjs/dist/maintenance/maintenance.service';
import { Logger } from '@nestjs/common';
import { SchedulerRegistry } from '@nestjs/schedule';
import {
  type LeaseApp,
  type TestDatabase,
  createTestDatabase,
  eventually,
  gate,
  startHandWorker,
  startLeaseApp,
} from './support';

let db: TestDatabase;
const S = '"leasehold"';

beforeAll(async () => {
  db = await createTestDatabase();
});
afterAll(() => db.drop());
afterEach(() => jest.restoreAllMocks());

const maintenanceOf = ({ app }: LeaseApp): MaintenanceService => app.get(MaintenanceService);

describe('R3 ageing', () => {
  /** As if so long had passed for all that are ready. */
  const wait = (queue: string, time: string) =>
    db.query(`UPDATE ${S}.ready SET since = since - $2::interval WHERE queue = $1`, [queue, time]);
  const priorities = async (queue: string): Promise<Record<string, number>> =>
    Object.fromEntries(
      (
        await db.query<{ id: string; priority: number }>(
          `SELECT job_id::text AS id, priority FROM ${S}.ready WHERE queue = $1`,
          [queue],
        )
      ).map(({ id, priority }) => [id, priority]),
    );

  /** Two urgent jobs come for each one that is taken. @returns after how many of them the job that waits was taken, if ever */
  async function turnOf(hand: LeaseApp, queue: string, waiting: string): Promise<number | undefined> {
    for (let taken = 1; taken <= 40; taken++) {
      await hand.jobs.enqueueMany('work', [1, 2], { queue });
      const [claimed] = await hand.claims.claim({ kinds: ['work'], queues: [queue], limit: 1 });
      await hand.settle.complete(claimed!.job);
      if (claimed!.job.id === waiting) return taken;
      await wait(queue, '1 min');
      await maintenanceOf(hand).age();
    }
    return undefined;
  }

  it('R3 a job that is less urgent gets its turn under a steady stream of more urgent ones', async () => {
    const hand = await startHandWorker(db, ['work']);
    await hand.app.get(QueuesService).configure('aging', { ageing: '30s' });
    const low = await hand.jobs.enqueue('work', 'low', { queue: 'aging', priority: 5 });
    // Five steps up, then it stands behind the few that had come by then.
    expect(await turnOf(hand, 'aging', low)).toBeLessThan(20);
  });

  it('R3 never, where ageing is not asked for: it is off by default', async () => {
    const hand = await startHandWorker(db, ['work']);
    const low = await hand.jobs.enqueue('work', 'low', { queue: 'strict', priority: 5 });
    expect(await turnOf(hand, 'strict', low)).toBeUndefined();
    expect((await priorities('strict'))[low]).toBe(5);
  });

  it('R3 one step a time, when its time has come, and never above 0', async () => {
    const app = await startLeaseApp(db, { options: { role: 'producer' } });
    const maintenance = maintenanceOf(app);
    const queue = 'steps';
    await app.app.get(QueuesService).configure(queue, { ageing: '10m' });
    const [two, zero, above] = await Promise.all(
      [2, 0, -3].map((priority) => app.jobs.enqueue('work', priority, { queue, priority })),
    );
    const after = async (time: string) => {
      await wait(queue, time);
      const moved = await maintenance.age();
      const now = await priorities(queue);
      return [moved, now[two!], now[zero!], now[above!]];
    };
    expect(await after('9 min')).toEqual([0, 2, 0, -3]);
    expect(await after('2 min')).toEqual([1, 1, 0, -3]);
    expect(await after('2 min')).toEqual([0, 1, 0, -3]); // It counts anew from each step.
    expect(await after('1 h')).toEqual([1, 0, 0, -3]);
    for (let i = 0; i < 3; i++) expect(await after('1 h')).toEqual([0, 0, 0, -3]);
  });
});

describe('F:L5 the sweep of keys', () => {
  it('F:L5 goes through all of them, a bounded number at a time, and begins again; what it repairs is counted and told', async () => {
    const app = await startLeaseApp(db, { options: { role: 'producer' } });
    const maintenance = maintenanceOf(app);
    const warn = jest.spyOn(Logger.prototype, 'warn').mockImplementation(() => undefined);
    const id = await app.jobs.enqueue('keyed', 1, { key: 'mine' });
    const done = await app.jobs.enqueue('keyed', 2);
    await app.jobs.cancel(done);
    await db.query(
      `INSERT INTO ${S}.job_keys (key_space, key, job_id) SELECT 'a', lpad(i::text, 6, '0'), $1::bigint FROM generate_series(1, 6000) i`,
      [id],
    );
    expect(await maintenance.sweepKeys()).toBe(0);
    expect(await maintenance.sweepKeys()).toBe(0);
    expect(maintenance.keysRepaired).toBe(0);
    expect(warn).not.toHaveBeenCalled();

    // A key that a job which has finished still holds, at a place that has been passed.
    const space = `SELECT key_space FROM ${S}.job_keys WHERE key = 'mine'`;
    await db.query(`INSERT INTO ${S}.job_keys (key_space, key, job_id) SELECT (${space}), 'early', $1`, [done]);
    for (let i = 0; maintenance.keysRepaired === 0 && i < 4; i++) await maintenance.sweepKeys();
    expect(maintenance.keysRepaired).toBe(1);
    expect(warn.mock.calls).toEqual([[expect.stringContaining('1 unique keys')]]);
    const keys = await db.query<{ key: string }>(`SELECT key FROM ${S}.job_keys WHERE key_space <> 'a'`);
    expect(keys).toEqual([{ key: 'mine' }]);
    await db.query(`DELETE FROM ${S}.job_keys`);
  });
});

describe('places that were missed', () => {
  it('F:L5 are given to those that wait, key by key, whatever no settle has told them', async () => {
    const hand = await startHandWorker(db, ['placed']);
    const options = { concurrencyKey: 'tenant', concurrencyPerKey: 1 };
    await hand.jobs.enqueueMany('placed', [1, 2], options);
    const [claimed] = await hand.claims.claim({ kinds: ['placed'], limit: 2 });
    const { n } = await db.one<{ n: number }>(
      `SELECT count(*)::int AS n FROM ${S}.waiting WHERE blocked_on = 'limit' AND concurrency_key LIKE '%tenant'`,
    );
    expect(n).toBe(1);
    expect(await maintenanceOf(hand).promoteWaiting()).toBe(0);
    // Its lease goes without a word, as no function of ours would do it.
    await db.query(`DELETE FROM ${S}.leases WHERE job_id = $1`, [claimed!.job.id]);
    expect(await maintenanceOf(hand).promoteWaiting()).toBe(1);
    const [next] = await hand.claims.claim({ kinds: ['placed'], limit: 2 });
    expect(next).toBeDefined();
    await hand.settle.complete(next!.job);
  });
});

describe('the leader’s passes', () => {
  const PASSES = ['keepPartitionsAhead', 'forgetEndedWorkers', 'age', 'sweepKeys', 'promoteWaiting'] as const;
  /** What their clocks will do when it is time. */
  const tick = ({ app }: LeaseApp): void => {
    for (const job of app.get(SchedulerRegistry).getCronJobs().values()) void job.fireOnTick();
  };
  const spies = ({ app }: LeaseApp) => ({
    ...Object.fromEntries(PASSES.map((pass) => [pass, jest.spyOn(app.get(MaintenanceService), pass)])),
    pruneFor: jest.spyOn(app.get(RetentionService), 'pruneFor'),
    dropEmptyDays: jest.spyOn(app.get(RetentionService), 'dropEmptyDays'),
  });

  it('F:G7 one that throws, and one that never ends, leave all the others at work; the first is tried again', async () => {
    const app = await startLeaseApp(db);
    await eventually(() => app.leader.isLeader);
    const warn = jest.spyOn(Logger.prototype, 'warn').mockImplementation(() => undefined);
    const error = jest.spyOn(Logger.prototype, 'error').mockImplementation(() => undefined);
    const all: Record<string, jest.SpyInstance> = spies(app);
    all.sweepKeys!.mockRejectedValue(new Error('injected'));
    const slow = gate();
    all.age!.mockReturnValue(slow.promise);

    tick(app);
    await eventually(() => Object.values(all).every((pass) => pass.mock.calls.length === 1));
    // Every one of them is over but the slow one.
    await Promise.allSettled(
      Object.entries(all).flatMap(([name, pass]) =>
        name === 'age' ? [] : (pass.mock.results[0]!.value as Promise<unknown>),
      ),
    );
    await eventually(() => warn.mock.calls.some(([text]) => /^Sweeping keys failed.*injected/.test(String(text))));
    tick(app);
    await eventually(() =>
      // The minute's own tick may have come in between.
      Object.entries(all).every(([name, { mock }]) =>
        name === 'age' ? mock.calls.length === 1 : mock.calls.length > 1,
      ),
    );
    slow.open();
    await eventually(() => {
      tick(app);
      return all.age!.mock.calls.length > 1;
    });
    expect(error).not.toHaveBeenCalled();
  });

  it('R36 they run on the leader only', async () => {
    const leader = await startLeaseApp(db);
    await eventually(() => leader.leader.isLeader);
    const other = await startLeaseApp(db);
    const all = Object.values(spies(other));
    tick(other);
    await new Promise((resolve) => setTimeout(resolve, 100));
    expect(all.filter((pass) => pass.mock.calls.length > 0)).toEqual([]);
  });

  it('R36 those of a named instance ask the leader of that instance', async () => {
    const app = await startLeaseApp(db, { options: { name: 'reports' } });
    await eventually(() => app.leader.isLeader);
    const { pruneFor } = spies(app);
    await app.app.get(MaintenanceCrons).prune();
    expect(pruneFor).toHaveBeenCalledTimes(1);
  });

  it('F:G6 a pass of retention ends with the reign', async () => {
    const app = await startLeaseApp(db);
    await eventually(() => app.leader.isLeader);
    const { pruneFor } = spies(app);
    await app.app.get(MaintenanceCrons).prune();
    const goesOn = pruneFor.mock.calls[0]![1]!;
    expect(goesOn()).toBe(true);
    await app.leader.stop();
    expect(goesOn()).toBe(false);
  });
});
