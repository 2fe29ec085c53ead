import { type Handler, type Job, JobHandler, type Lease } from '@leasehold/nestjs';
import { type EmbeddedPostgres } from '@leasehold/embedded-postgres';
import {
  type LeaseApp,
  TcpProxy,
  caughtUp,
  eventually,
  onServer,
  promote,
  startLeaseApp,
  startServer,
  startStandby,
  stopServers,
} from './support';

const S = '"leasehold"';

@JobHandler('long', { concurrency: 50 })
class Long implements Handler {
  static readonly bodies = new Map<string, number>();
  static readonly leases = new Map<string, Lease>();
  static open = new Set<() => void>();
  static finishAll(): void {
    for (const open of Long.open) open();
    Long.open.clear();
  }
  async handle(job: Job, lease: Lease): Promise<string> {
    Long.bodies.set(job.id, (Long.bodies.get(job.id) ?? 0) + 1);
    Long.leases.set(job.id, lease);
    await new Promise<void>((resolve) => Long.open.add(resolve));
    return 'done';
  }
}

@JobHandler('short', { concurrency: 20, backoff: { base: '50ms', max: '200ms' } })
class Short implements Handler {
  async handle(): Promise<void> {
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}

let server: EmbeddedPostgres;
const problems: unknown[] = [];
const note = (error: unknown): void => {
  problems.push(error);
};

beforeAll(async () => {
  server = await startServer();
  process.on('unhandledRejection', note);
  process.on('uncaughtException', note);
});
afterAll(async () => {
  process.off('unhandledRejection', note);
  process.off('uncaughtException', note);
  await stopServers();
});
beforeEach(() => Long.bodies.clear()); // Ids begin anew on each server.
afterEach(() => {
  expect(problems).toEqual([]);
});

const OPTIONS = { connection: undefined as never, lease: { ttl: '6s', beat: '500ms' } } as const;
const app = (url = server.url, role: 'both' | 'producer' = 'both') =>
  startLeaseApp(
    { url },
    { handlers: [Long, Short], options: { lease: OPTIONS.lease, connection: { url, queryTimeout: '2s' }, role } },
  );

const running = async (on: LeaseApp, count: number): Promise<string[]> => {
  const ids = await on.jobs.enqueueMany(
    Long,
    Array.from({ length: count }, () => ({})),
  );
  await eventually(() => ids.every((id) => Long.bodies.has(id)), { state: () => on.jobs.counts() });
  return ids;
};

const completedOnce = async (on: LeaseApp, ids: string[]): Promise<void> => {
  for (const id of ids) {
    await eventually(async () => (await on.jobs.get(id)).state === 'completed', {
      timeoutMs: 30_000,
      state: () => on.jobs.get(id),
    });
    expect(await on.jobs.get(id)).toMatchObject({ attempt: 1, crashes: 0, runs: [] });
    expect(Long.bodies.get(id)).toBe(1);
  }
};

describe('the database goes away and comes back', () => {
  it.each(['fast', 'immediate'] as const)(
    'F:I8 a restarted server (%s): no live worker is taken, running jobs go on and end once',
    async (mode) => {
      const [one, two] = [await app(), await app()];
      const ids = await running(one, 10);
      await eventually(() => one.leader.isLeader || two.leader.isLeader);
      await server.restart(mode);
      // Both have beaten again on the new server, and a rescuer has looked more than twice.
      for (const it of [one, two]) await it.heartbeat.nextBeat();
      await eventually(() => one.leader.isLeader || two.leader.isLeader);
      await new Promise((resolve) => setTimeout(resolve, 1500));
      for (const it of [one, two])
        expect(it.events.filter(({ type }) => type === 'worker.died' || type === 'worker.fenced')).toEqual([]);
      Long.finishAll();
      await completedOnce(one, ids);
    },
  );

  it('F:I1 F:I6 all sessions ended again and again, in the roles producer and worker: the processes live, and all jobs end once', async () => {
    const [worker, producer] = [await app(), await app(server.url, 'producer')];
    const ids: string[] = [];
    for (let round = 0; round < 5; round++) {
      for (let i = 0; i < 20; i++) {
        await producer.jobs.enqueue(Short, {}).then(
          (id) => ids.push(id),
          () => undefined, // Told so: refused or uncertain.
        );
      }
      await onServer(server.url, (client) =>
        client.query(
          `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND application_name ~ '^(leasehold|lh:)'`,
        ),
      );
    }
    await eventually(
      async () => {
        const counts = await worker.jobs.counts();
        return counts.ready + counts.running + counts.scheduled === 0;
      },
      { timeoutMs: 30_000, state: () => worker.jobs.counts() },
    );
    for (const id of ids) expect(await worker.jobs.get(id)).toMatchObject({ state: 'completed' });
    expect(ids.length).toBeGreaterThan(50);
  });

  it('F:I3 a primary that turns read-only, and back: connections are replaced, nothing is lost or doubled', async () => {
    const it1 = await app();
    const held = await running(it1, 5);
    const readOnly = (on: boolean) =>
      onServer(server.url, async (client) => {
        await client.query(`SET default_transaction_read_only = off`);
        await client.query(`ALTER ROLE postgres SET default_transaction_read_only = ${on ? 'on' : 'off'}`);
        await client.query(
          `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND application_name ~ '^(leasehold|lh:)'`,
        );
      });
    await readOnly(true);
    await eventually(() =>
      it1.jobs.enqueue(Short, {}).then(
        () => false,
        (error: { code?: string; cause?: { code?: string } }) => (error.cause?.code ?? error.code) === '25006',
      ),
    );
    Long.finishAll(); // Their outcomes wait until they can be written.
    await new Promise((resolve) => setTimeout(resolve, 1000));
    await readOnly(false);
    await completedOnce(it1, held);
    const id = await eventually(() => it1.jobs.enqueue(Short, {}).catch(() => undefined));
    await eventually(async () => (await it1.jobs.get(id)).state === 'completed');
  });

  it('F:B7 F:G3 every connection black-holed in mid-flight: nothing waits for ever, and all is well when the line is back', async () => {
    const proxy = await TcpProxy.start(server.url);
    const it1 = await app(proxy.url(server.url));
    const ids = await it1.jobs.enqueueMany(
      Short,
      Array.from({ length: 300 }, () => ({})),
    );
    await eventually(
      async () =>
        (
          await onServer(server.url, (client) =>
            client.query(`SELECT FROM ${S}.finished WHERE job_id = ANY ($1)`, [ids]),
          )
        ).rowCount! > 20,
    );
    proxy.freeze();
    await expect(it1.jobs.enqueue(Short, {})).rejects.toThrow(/uncertain|may or may not|timeout/i); // Its own limit, not the line's.
    proxy.cut();
    proxy.thaw();
    await eventually(
      async () => {
        const { rows } = await onServer(server.url, (client) =>
          client.query<{ n: number }>(
            `SELECT count(*)::int AS n FROM ${S}.finished WHERE job_id = ANY ($1) AND state = 'completed'`,
            [ids],
          ),
        );
        return rows[0]!.n === 300;
      },
      { timeoutMs: 30_000, state: () => it1.jobs.counts() },
    );
    await it1.close();
    await proxy.close();
  });

  it('F:C3 the server goes down hard in mid-flight: every job ends, none is in no table or in two', async () => {
    const it1 = await app();
    const ids = await it1.jobs.enqueueMany(
      Short,
      Array.from({ length: 500 }, () => ({})),
    );
    await server.restart('immediate');
    await eventually(
      async () => {
        const { ready, running: leased, scheduled } = await it1.jobs.counts();
        return ready + leased + scheduled === 0;
      },
      { timeoutMs: 30_000, state: () => it1.jobs.counts() },
    );
    const { rows } = await onServer(server.url, (client) =>
      client.query(
        `SELECT id FROM ${S}.jobs WHERE id = ANY ($1) AND 1 <> (SELECT count(*) FROM (
           SELECT job_id FROM ${S}.ready UNION ALL SELECT job_id FROM ${S}.waiting UNION ALL SELECT job_id FROM ${S}.leases UNION ALL SELECT job_id FROM ${S}.finished
         ) p WHERE p.job_id = jobs.id)`,
        [ids],
      ),
    );
    expect(rows).toEqual([]);
  });

  it('a promoted standby: tokens jump past what the lost primary may have issued, and no live worker is taken', async () => {
    const primary = await startServer();
    const proxy = await TcpProxy.start(primary.url);
    const url = proxy.url(primary.url);
    const [one, two] = [await app(url), await app(url)];
    const ids = await running(one, 5);
    const before = await onServer(primary.url, (client) =>
      client.query<{ t: string }>(`SELECT max(token)::text AS t FROM ${S}.leases`),
    );
    const standby = await startStandby(primary);
    await caughtUp(primary, standby);
    await promote(standby);
    // The address moves to the new primary, as a virtual IP or a DNS name would.
    proxy.cut();
    proxy.retarget(standby.url);
    for (const it of [one, two]) await it.heartbeat.nextBeat();
    await new Promise((resolve) => setTimeout(resolve, 1500));
    for (const it of [one, two])
      expect(it.events.filter(({ type }) => type === 'worker.died' || type === 'worker.fenced')).toEqual([]);
    Long.finishAll();
    await completedOnce(one, ids);
    const next = await running(one, 1);
    expect(BigInt(Long.leases.get(next[0]!)!.token)).toBeGreaterThan(BigInt(before.rows[0]!.t) + 900_000n);
    Long.finishAll();
    await completedOnce(one, next);
    await one.close();
    await two.close();
    await proxy.close();
  });
});
