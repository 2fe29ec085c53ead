import { setTimeout as sleep } from 'node:timers/promises';
import { type Handler, type Job, JobHandler, type Lease, LeaseLostError, NonRetryableError } from '@leasehold/nestjs';
import { Client, type ClientBase } from 'pg';
import { DataSource, type EntityManager } from 'typeorm';
import { TcpProxy, type TestDatabase, createTestDatabase, eventually, gate, startLeaseApp } from './support';
import { startWorkerProcess } from './support/fleet';
import { untilState } from './support/job-states';

const S = '"leasehold"';
let db: TestDatabase;
let dataSource: DataSource;

beforeAll(async () => {
  db = await createTestDatabase({ name: 'lease-transaction' });
  dataSource = await new DataSource({ type: 'postgres', url: db.url }).initialize();
  await db.query('CREATE TABLE effects (job bigint NOT NULL, what text NOT NULL)');
});
afterEach(() => db.query(`TRUNCATE effects`));
afterAll(async () => {
  await dataSource.destroy();
  await db.drop();
});

const effectsOf = async (id: string): Promise<string[]> =>
  (await db.query<{ what: string }>('SELECT what FROM effects WHERE job = $1 ORDER BY what', [id])).map(
    ({ what }) => what,
  );
const effect = (manager: EntityManager, id: string, what: string): Promise<unknown> =>
  manager.query('INSERT INTO effects VALUES ($1, $2)', [id, what]);

let work: (job: Job, lease: Lease) => unknown;
@JobHandler('tx.it', { backoff: 0 })
class InTransaction implements Handler {
  handle(job: Job, lease: Lease): unknown {
    return work(job, lease);
  }
}

const start = (options: object = {}, url?: string) =>
  startLeaseApp(db, {
    handlers: [InTransaction],
    options: { connection: { dataSource }, ...options },
    ...(url ? { url } : {}),
  });

/** The database gives the job to somebody else, behind its handler's back. */
const steal = (id: string) =>
  db.query(`UPDATE ${S}.leases SET token = nextval('${S}.tokens'), worker_id = 'somebody else' WHERE job_id = $1`, [
    id,
  ]);

describe('R20 lease.transaction', () => {
  it('R20 commits effects and checkpoint together, or neither', async () => {
    const seen: unknown[] = [];
    work = async ({ id, checkpoint }, lease) => {
      seen.push(checkpoint);
      const step = ((checkpoint as { step: number } | null)?.step ?? 0) + 1;
      if (step > 3) return 'done';
      await lease.transaction(async (manager) => {
        await effect(manager, id, `step ${step}`);
        await lease.checkpointIn(manager, { step });
        if (step === 2 && seen.length === 2) throw new Error('in the middle');
      });
      throw new Error('after the commit');
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(InTransaction, null);
    await untilState(jobs, id, 'completed');
    expect(seen).toEqual([null, { step: 1 }, { step: 1 }, { step: 2 }, { step: 3 }]);
    expect(await effectsOf(id)).toEqual(['step 1', 'step 2', 'step 3']);
  });

  it('R20 completeIn: result, outcome and effects at once; what the handler says afterwards does not matter', async () => {
    work = async ({ id }, lease) => {
      const answer = await lease.transaction(async (manager) => {
        await effect(manager, id, 'once');
        await lease.completeIn(manager, { n: 7 });
        return 'of the work';
      });
      expect(answer).toBe('of the work');
      throw new Error('too late to matter');
    };
    const worker = await start();
    const id = await worker.jobs.enqueue(InTransaction, null);
    expect(await untilState(worker.jobs, id, 'completed')).toMatchObject({ result: { n: 7 }, attempt: 1, runs: [] });
    await eventually(() => worker.events.some((event) => event.type === 'job.completed' && event.jobId === id));
    expect(worker.events.some(({ type }) => type === 'job.refused' || type === 'job.failed')).toBe(false);
    expect(await effectsOf(id)).toEqual(['once']);
  });

  it('R20 a completion that is rolled back is none: the job fails, and is run again', async () => {
    work = async ({ id, attempt }, lease) => {
      await lease.transaction(async (manager) => {
        await effect(manager, id, `attempt ${attempt}`);
        await lease.completeIn(manager, attempt);
        if (attempt === 1) throw new Error('rolled back');
      });
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(InTransaction, null);
    expect(await untilState(jobs, id, 'completed')).toMatchObject({
      result: 2,
      runs: [{ error: { message: 'rolled back' } }],
    });
    expect(await effectsOf(id)).toEqual(['attempt 2']);
  });

  it('R20 completeIn in a transaction of one’s own: committed, rolled back, and never ended before the run has', async () => {
    work = async ({ id, payload, attempt }, lease) => {
      if (payload === 'committed') {
        await dataSource.transaction((manager) => lease.completeIn(manager, 'committed'));
        return 'ignored';
      }
      if (payload === 'rolled back' && attempt === 1) {
        await dataSource
          .transaction(async (manager) => {
            await effect(manager, id, 'never');
            await lease.completeIn(manager, 'never');
            throw new Error('rolled back');
          })
          .catch(() => undefined);
        return 'settled as usual';
      }
      // Left to itself, and committed when the handler has returned.
      const runner = dataSource.createQueryRunner();
      await runner.startTransaction();
      await lease.completeIn(runner, 'late');
      setTimeout(() => void runner.commitTransaction().then(() => runner.release()), 300);
    };
    const worker = await start();
    const [committed, back, late] = (await worker.jobs.enqueueMany(InTransaction, [
      'committed',
      'rolled back',
      'late',
    ])) as [string, string, string];
    expect(await worker.jobs.waitFor(committed)).toMatchObject({ state: 'completed', result: 'committed', attempt: 1 });
    expect(await worker.jobs.waitFor(back)).toMatchObject({ state: 'completed', result: 'settled as usual', runs: [] });
    expect(await worker.jobs.waitFor(late)).toMatchObject({ state: 'completed', result: 'late', runs: [] });
    expect(await effectsOf(back)).toEqual([]);
    await eventually(() => worker.events.filter(({ type }) => type === 'job.completed').length === 3);
    expect(worker.events.some(({ type }) => type === 'job.refused')).toBe(false);
    // Nothing is left that a drain would wait for.
    await worker.close();
  });

  it('R20 completeIn in a savepoint that is rolled back is none: the fence is asked again before the commit', async () => {
    const errors: unknown[] = [];
    work = async ({ id, payload }, lease) => {
      await lease
        .transaction(async (manager) => {
          await effect(manager, id, 'kept');
          await manager
            .transaction(async (inner) => {
              await lease.completeIn(inner, 'never');
              throw new Error('inner');
            })
            .catch(() => undefined);
          if (payload === 'stolen') await steal(id);
        })
        .catch((error: unknown) => errors.push(error));
      return 'settled as usual';
    };
    const { jobs } = await start();
    const held = await jobs.enqueue(InTransaction, 'held');
    expect(await jobs.waitFor(held)).toMatchObject({ state: 'completed', result: 'settled as usual' });
    expect(await effectsOf(held)).toEqual(['kept']);
    const stolen = await jobs.enqueue(InTransaction, 'stolen');
    await eventually(() => errors.length === 1);
    expect(errors[0]).toBeInstanceOf(LeaseLostError);
    expect(await effectsOf(stolen)).toEqual([]);
    await jobs.forceCancel(stolen);
  });

  it('R20 F:A10 a handler that hangs after a completion that was rolled back is still ended by its deadline', async () => {
    const go = gate();
    work = async (_job, lease) => {
      lease.progress(1, 2);
      await dataSource
        .transaction(async (manager) => {
          await lease.completeIn(manager, 'never');
          throw new Error('rolled back');
        })
        .catch(() => undefined);
      await go.promise;
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(InTransaction, null, { deadline: '400ms', maxAttempts: 1 });
    expect(await untilState(jobs, id, 'failed')).toMatchObject({
      reason: 'hard deadline exceeded (attempt 1 of 1)',
      saved: { progress: { current: 1 } },
    });
    go.open();
  });

  it('R20 with a bare pg client', async () => {
    work = async ({ id }, lease) => {
      const client = new Client({ connectionString: db.url });
      await client.connect();
      try {
        await lease.transaction(
          async (c: ClientBase) => {
            await c.query('INSERT INTO effects VALUES ($1, $2)', [id, 'by pg']);
            await lease.completeIn(c, 'pg');
          },
          { client },
        );
      } finally {
        await client.end();
      }
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(InTransaction, null);
    expect(await untilState(jobs, id, 'completed')).toMatchObject({ result: 'pg' });
    expect(await effectsOf(id)).toEqual(['by pg']);
  });

  it.each(['before it begins', 'while it works', 'while it completes'])(
    'R20 F:A8 a lease that is lost %s: everything is rolled back, and the run told',
    async (when) => {
      let error: unknown;
      const told = gate();
      work = async ({ id }, lease) => {
        if (when === 'before it begins') await steal(id);
        error = await lease
          .transaction(async (manager) => {
            await effect(manager, id, when);
            if (when !== 'before it begins') await steal(id);
            if (when === 'while it completes') await lease.completeIn(manager, 'mine');
          })
          .catch((e: unknown) => e);
        told.open();
      };
      const { jobs } = await start();
      const id = await jobs.enqueue(InTransaction, null);
      await told.promise;
      expect(error).toBeInstanceOf(LeaseLostError);
      expect(await effectsOf(id)).toEqual([]);
      expect(await jobs.get(id)).toMatchObject({ state: 'running', workerId: 'somebody else', result: null });
      await jobs.forceCancel(id);
    },
  );

  it('R20 the last statement before the commit locks the lease: a rescue in between waits for neither, and takes nothing', async () => {
    const locked = gate();
    const go = gate();
    work = async ({ id }, lease) =>
      lease.transaction(async (manager) => {
        await effect(manager, id, 'mine');
        await lease.checkpointIn(manager, { locks: true });
        locked.open();
        await go.promise;
      });
    const { jobs } = await start();
    const id = await jobs.enqueue(InTransaction, null);
    await locked.promise;
    const { token, worker_id } = await db.one<{ token: string; worker_id: string }>(
      `SELECT token::text, worker_id FROM ${S}.leases WHERE job_id = $1`,
      [id],
    );
    const crash = JSON.stringify([{ job: id, token, worker: worker_id, event: 'crash' }]);
    expect(await db.query(`SELECT FROM ${S}.move_v1($1::json, true)`, [crash])).toEqual([]);
    go.open();
    expect(await untilState(jobs, id, 'completed')).toMatchObject({ attempt: 1 });
    expect(await effectsOf(id)).toEqual(['mine']);
  });

  it('R20 F:B6 a process that freezes inside: the server ends its session after a TTL, others finish the job, and on waking it has done nothing', async () => {
    const worker = await startWorkerProcess(
      db.url,
      { connection: { url: db.url }, role: 'worker' },
      { LEASE_EFFECTS: '1' },
    );
    const watcher = await startLeaseApp(db, { options: { role: 'worker' } });
    const id = await watcher.jobs.enqueue('transactional', { hold: true });
    await worker.started(id);
    await eventually(
      async () =>
        (
          await db.query(
            `SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction' AND application_name = 'effects'`,
          )
        ).length,
    );
    worker.process.kill('SIGSTOP');
    // Cancel does not stand behind it, nor does rescue: neither lock is taken before the end.
    await untilState(watcher.jobs, id, 'ready', { timeoutMs: 25_000 });
    await eventually(
      async () =>
        (
          await db.query(
            `SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'effects'`,
          )
        ).length === 0,
    );
    const second = await startWorkerProcess(
      db.url,
      { connection: { url: db.url }, role: 'worker' },
      { LEASE_EFFECTS: '2' },
    );
    await untilState(watcher.jobs, id, 'completed', { timeoutMs: 20_000 });
    expect(await effectsOf(id)).toEqual([`by ${second.process.pid}`]);
    worker.process.kill('SIGCONT');
    const { message } = await worker.process.next<{ transactionFailed?: string; message: string }>(
      ({ transactionFailed }) => transactionFailed === id,
      20_000,
    );
    expect(message).toMatch(/terminated|terminating|Connection|lease/i);
    expect(await effectsOf(id)).toEqual([`by ${second.process.pid}`]);
  });

  it('R20 the answer to the COMMIT is lost: it is looked up, and a completed job is completed', async () => {
    const proxy = await TcpProxy.start(db.url);
    const proxied = await new DataSource({ type: 'postgres', url: proxy.url(db.url) }).initialize();
    work = async ({ id }, lease) => {
      await lease.transaction(
        async (manager) => {
          await effect(manager, id, 'once');
          await lease.completeIn(manager, 'committed');
          const commit = manager.queryRunner!.commitTransaction.bind(manager.queryRunner);
          manager.queryRunner!.commitTransaction = async () => {
            await commit();
            proxy.cut();
            throw Object.assign(new Error('Connection terminated unexpectedly'), {});
          };
        },
        { dataSource: proxied },
      );
    };
    const worker = await start();
    const id = await worker.jobs.enqueue(InTransaction, null);
    expect(await untilState(worker.jobs, id, 'completed')).toMatchObject({ result: 'committed', runs: [] });
    await eventually(() => worker.events.some((event) => event.type === 'job.completed' && event.jobId === id));
    expect(await effectsOf(id)).toEqual(['once']);
    await proxied.destroy().catch(() => undefined);
    await worker.close();
    await proxy.close();
  });

  it('R20 the COMMIT never arrived: looked up, not found, and the run fails as any', async () => {
    let times = 0;
    work = async ({ id, attempt }, lease) => {
      times++;
      await lease.transaction(async (manager) => {
        await effect(manager, id, `attempt ${attempt}`);
        await lease.completeIn(manager, attempt);
        if (attempt > 1) return;
        manager.queryRunner!.commitTransaction = () => {
          throw new Error('Connection terminated unexpectedly');
        };
      });
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(InTransaction, null);
    expect(await untilState(jobs, id, 'completed')).toMatchObject({ result: 2, runs: [{ outcome: 'failed' }] });
    expect(times).toBe(2);
    expect(await effectsOf(id)).toEqual(['attempt 2']);
  });

  it('R19 a write conflict repeats the work, once for each', async () => {
    let tries = 0;
    work = async ({ id }, lease) => {
      await lease.transaction(async (manager) => {
        await effect(manager, id, 'once');
        if (++tries < 3) await manager.query(`DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$`);
      });
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(InTransaction, null);
    expect(await untilState(jobs, id, 'completed')).toMatchObject({ attempt: 1 });
    expect(tries).toBe(3);
    expect(await effectsOf(id)).toEqual(['once']);
  });

  it('R20 a deadline that passes inside: the lease is gone, so is the work', async () => {
    work = async ({ id }, lease) =>
      lease.transaction(async (manager) => {
        await effect(manager, id, 'late');
        await sleep(700);
      });
    const worker = await start();
    const id = await worker.jobs.enqueue(InTransaction, null, { deadline: '300ms', maxAttempts: 1 });
    await untilState(worker.jobs, id, 'failed');
    await eventually(() => worker.events.some((event) => event.type === 'job.refused' && event.jobId === id));
    expect(await effectsOf(id)).toEqual([]);
  });

  it('what cannot be a transaction is refused: no DataSource, none open, a result that is no JSON', async () => {
    const errors: Error[] = [];
    work = async (_job, lease) => {
      await lease.transaction(() => Promise.resolve()).catch((error: Error) => errors.push(error));
      await lease.completeIn(dataSource.manager, 1).catch((error: Error) => errors.push(error));
      await lease.checkpointIn(undefined as never, 1).catch((error: Error) => errors.push(error));
      await dataSource
        .transaction((manager) => lease.completeIn(manager, 1n))
        .catch((error: Error) => errors.push(error));
      return 'and the lease is still held';
    };
    const { jobs } = await startLeaseApp(db, { handlers: [InTransaction] });
    const id = await jobs.enqueue(InTransaction, null);
    expect(await untilState(jobs, id, 'completed')).toMatchObject({ result: 'and the lease is still held' });
    expect(errors.map(({ name }) => name)).toEqual([
      'LeaseSetupError',
      'InvalidJobError',
      'InvalidJobError',
      NonRetryableError.name,
    ]);
    expect(errors[0]!.message).toMatch(/pass \{ dataSource \} or \{ client \}/);
  });

  it('F:F4 no transaction of Leasehold’s own is open while a handler runs', async () => {
    const began = gate();
    const go = gate();
    work = async () => {
      began.open();
      await go.promise;
    };
    const { jobs } = await start();
    const id = await jobs.enqueue(InTransaction, null);
    await began.promise;
    const open = await db.query(
      `SELECT query FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'`,
    );
    expect(open).toEqual([]);
    go.open();
    await jobs.waitFor(id);
  });

  it('a settle of others does not stand behind a transaction that has completed its job and is still open', async () => {
    const inside = gate();
    const go = gate();
    work = async ({ id, payload }, lease) => {
      if (payload !== 'open') return 'quick';
      await lease.transaction(async (manager) => {
        await lease.completeIn(manager, id);
        inside.open();
        await go.promise;
      });
    };
    const { jobs } = await start({ lease: { ttl: '5m', beat: '500ms' } });
    const slow = await jobs.enqueue(InTransaction, 'open', {
      key: 'shared',
      keyMode: 'serial',
      concurrencyKey: 'c',
      concurrencyPerKey: 2,
    });
    await inside.promise;
    const quick = await jobs.enqueue(InTransaction, 'quick', { concurrencyKey: 'c', concurrencyPerKey: 2 });
    const unrelated = await jobs.enqueue(InTransaction, 'quick');
    expect((await jobs.waitFor(unrelated)).state).toBe('completed');
    expect((await jobs.waitFor(quick)).state).toBe('completed');
    expect(await jobs.get(slow)).toMatchObject({ state: 'running' });
    go.open();
    expect(await jobs.waitFor(slow)).toMatchObject({ state: 'completed', attempt: 1, runs: [] });
  });
});
