import { createHash } from 'node:crypto';
import { Injectable } from '@nestjs/common';
import { SchedulerRegistry } from '@nestjs/schedule';
import { LeaderCron, RescueService, StoreNotExclusiveError } from '@leasehold/nestjs';
import {
  type LeaseApp,
  TcpProxy,
  type TestDatabase,
  createTestDatabase,
  eventually,
  startLeaseApp,
  startWorkerProcess,
} from './support';

let db: TestDatabase;
const S = '"leasehold"';

beforeAll(async () => {
  db = await createTestDatabase({ name: 'leader' });
});
afterAll(() => db.drop());

const leaderOf = (apps: LeaseApp[]): Promise<LeaseApp> => eventually(() => apps.find(({ leader }) => leader.isLeader));
const lockHolders = async (): Promise<number> =>
  (
    await db.one<{ n: number }>(
      `SELECT count(*)::int AS n FROM pg_locks l JOIN pg_stat_activity a USING (pid)
     WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted AND l.mode = 'ExclusiveLock' AND a.application_name = 'leasehold main'`,
    )
  ).n;

describe('the leader', () => {
  it('R36 is one of many; another follows within moments when it stops, and each reign has a larger epoch', async () => {
    const apps = await Promise.all([1, 2, 3].map(() => startLeaseApp(db)));
    const first = await leaderOf(apps);
    expect(apps.filter(({ leader }) => leader.isLeader)).toHaveLength(1);
    expect(await lockHolders()).toBe(1);
    const reign = await first.leader.current();
    expect(reign.workerId).toBe(first.workers.currentId);
    await first.close();
    const second = await leaderOf(apps.filter((app) => app !== first));
    expect(BigInt((await second.leader.current()).epoch)).toBeGreaterThan(BigInt(reign.epoch));
  });

  it('R36 killed: another leads', async () => {
    const doomed = await startWorkerProcess(db.url);
    await doomed.event('leader.acquired');
    const app = await startLeaseApp(db);
    doomed.process.kill('SIGKILL');
    await leaderOf([app]);
  });

  it('F:G6 F:G4 loses its session: it steps down at once, leaks no lock, and one of them leads again', async () => {
    const apps = [await startLeaseApp(db), await startLeaseApp(db)];
    const first = await leaderOf(apps);
    await db.query(
      `SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
       WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND l.locktype = 'advisory' AND l.objsubid = 1 AND l.mode = 'ExclusiveLock' AND a.application_name = 'leasehold main'`,
    );
    await eventually(() => first.events.some(({ type }) => type === 'leader.lost'));
    await leaderOf(apps);
    expect(await lockHolders()).toBe(1);
  });

  it('F:G3 a lock query that is slower than its limit drops the connection; there is a leader when the line is back', async () => {
    const proxy = await TcpProxy.start(db.url);
    const app = await startLeaseApp(db, { url: proxy.url(db.url) });
    await leaderOf([app]);
    proxy.delay(2000, { applicationName: 'leasehold main' });
    await eventually(() => app.events.some(({ type }) => type === 'leader.lost'));
    proxy.delay(0, { applicationName: 'leasehold main' });
    await leaderOf([app]);
    expect(await lockHolders()).toBe(1);
    await app.close();
    await proxy.close();
  });

  it('F:G1 a reign that was taken over does not stamp, and steps down', async () => {
    const app = await startLeaseApp(db, { options: { rescue: { every: '1h' } } });
    await leaderOf([app]);
    await db.query(`UPDATE ${S}.leader SET worker_id = 'another', epoch = epoch + 1`);
    await app.leader.stamp();
    expect(app.events.at(-1)).toMatchObject({ type: 'leader.lost', message: 'another reign has begun' });
  });

  it('R36 @LeaderCron runs on the leader only, and is to be found in the SchedulerRegistry', async () => {
    @Injectable()
    class Ticks {
      count = 0;
      @LeaderCron('* * * * * *', { name: 'ticks' })
      tick(): void {
        this.count++;
      }
    }
    const apps = [await startLeaseApp(db, { handlers: [Ticks] }), await startLeaseApp(db, { handlers: [Ticks] })];
    const first = await leaderOf(apps);
    const other = apps.find((app) => app !== first)!;
    await eventually(() => first.app.get(Ticks).count >= 2);
    expect(other.app.get(Ticks).count).toBe(0);
    expect([...first.app.get(SchedulerRegistry).getCronJobs().keys()]).toContain('ticks');
    await first.close();
    await eventually(() => other.app.get(Ticks).count >= 1);
  });

  it('F:G7 one way of rescue that fails leaves the others at work', async () => {
    const app = await startLeaseApp(db);
    await leaderOf([app]);
    const rescue = app.app.get(RescueService);
    const failing = jest.spyOn(rescue, 'rescueExpired').mockRejectedValue(new Error('injected'));
    const overdue = jest.spyOn(rescue, 'rescueOverdue');
    const vanished = jest.spyOn(rescue, 'rescueVanished');
    await eventually(
      () => failing.mock.calls.length > 1 && overdue.mock.calls.length > 1 && vanished.mock.calls.length > 1,
    );
    jest.restoreAllMocks();
  });

  it('R15 without any pass for a TTL, a worker that is not the leader does ways 2 and 3', async () => {
    const app = await startLeaseApp(db, { options: { leader: { retry: '1h' } } });
    // It can never lead: the lock is held by somebody who does nothing.
    const lock = await db.client();
    await lock.query('SELECT pg_advisory_lock($1::bigint)', [
      createHash('sha256').update('leasehold:leader:leasehold').digest().readBigInt64BE(0).toString(),
    ]);
    await db.query(
      `UPDATE ${S}.leader SET worker_id = 'idle', epoch = epoch + 1, beat_at = clock_timestamp() - interval '1 h'`,
    );
    const id = await app.jobs.enqueue('foreign', {});
    await db.query(
      `INSERT INTO ${S}.workers (id, name, host, pid, version, state, kinds, concurrency, ttl_ms, incarnation, expires_at)
       VALUES ('silent', 's', 'h', 1, '0', 'live', '{foreign}', 1, 3000, 'earlier', clock_timestamp() + interval '1 h')`,
    );
    await db.query(`SELECT ${S}.step_v1('silent', '{}', '{}', null, 1, 1, '{default}', '{foreign}', '{1}', 0, 1000)`);
    await db.query(`UPDATE ${S}.workers SET expires_at = clock_timestamp() - interval '1 s' WHERE id = 'silent'`);
    await eventually(async () => (await app.jobs.get(id)).state === 'ready', { state: () => app.jobs.get(id) });
    expect(app.leader.isLeader).toBe(false);
    await lock.end();
  });
});

describe('an exclusive store', () => {
  it('R14 refuses to start beside another worker, and says what to do', async () => {
    const shared = await startLeaseApp(db);
    await expect(startLeaseApp(db, { options: { store: 'exclusive' } })).rejects.toThrow(StoreNotExclusiveError);
    await shared.close();
    const alone = await startLeaseApp(db, { options: { store: 'exclusive' } });
    await expect(startLeaseApp(db)).rejects.toThrow(/'exclusive' is up/);
    await alone.close();
    const { live } = await db.one<{ live: number }>(
      `SELECT count(*)::int AS live FROM ${S}.workers WHERE state IN ('live', 'draining')`,
    );
    expect(live).toBe(0); // Those that were refused have left no registration behind.
  });

  it('R14 re-queues every running job at once at its start; a shared store goes by lease only', async () => {
    const api = await startLeaseApp(db, { options: { role: 'producer' } });
    const defaults = { lease: {}, rescue: { session: false }, leader: {} };
    const victim = await startWorkerProcess(db.url, defaults);
    const id = await api.jobs.enqueue('scripted', { gate: true });
    await victim.started(id);
    victim.process.kill('SIGKILL');
    await victim.process.exited;
    const shared = await startLeaseApp(db, { options: { ...defaults, role: 'worker' } });
    expect(await api.jobs.get(id)).toMatchObject({ state: 'running' });
    await shared.close();
    await startLeaseApp(db, { options: { ...defaults, store: 'exclusive', role: 'worker' } });
    expect(await api.jobs.get(id)).toMatchObject({
      state: 'ready',
      attempt: 0,
      crashes: 1,
      runs: [{ outcome: 'dead', error: { message: 'session lost: worker process presumed dead' } }],
    });
  });
});
