import {
  type BatchEnd,
  type Handler,
  IllegalBatchStateError,
  type Job,
  JobHandler,
  NonRetryableError,
  UnknownBatchError,
} from '@leasehold/nestjs';
import { BatchSweep } from '@leasehold/nestjs/dist/batches/batch-sweep';
import {
  type LeaseApp,
  type TestDatabase,
  createTestDatabase,
  eventually,
  gate,
  startHandWorker,
  startLeaseApp,
} from './support';
import { Part, part } from './support/batch-parts';

const S = '"leasehold"';
let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'batch-steering' });
});
afterAll(() => db.drop());

const closings: BatchEnd[] = [];
@JobHandler('closing')
class Closing implements Handler<{ batch: BatchEnd }> {
  handle({ payload }: Job<{ batch: BatchEnd }>): void {
    closings.push(payload.batch);
  }
}
const start = (options: object = {}): Promise<LeaseApp> => startLeaseApp(db, { handlers: [Part, Closing], options });
beforeEach(() => {
  closings.length = 0;
  Part.reset();
});

describe('steering a batch', () => {
  it('cancel: nothing is added, everything unfinished is cancelled, whoever waits behind it too', async () => {
    const go = gate();
    Part.work = async (_job, lease) => {
      lease.signal.addEventListener('abort', () => go.open());
      await go.promise;
      lease.assertHeld();
    };
    const { batches } = await start();
    const { id } = await batches.create(
      'cancel',
      [part('a'), part('b', 1, { dependsOn: ['a'] }), part('c', 1, { delay: '1h' })],
      { open: true },
    );
    await eventually(async () => (await batches.get(id)).counts.running === 1);
    expect(await batches.cancel(id, { reason: 'enough' })).toEqual({
      changed: 2,
      requested: 1,
      unchanged: 0,
      skipped: 0,
    });
    await expect(batches.add(id, [part('d')])).rejects.toThrow(/being cancelled/);
    await eventually(async () => (await batches.get(id)).counts.cancelled === 3);
    expect(await batches.waitFor(id)).toMatchObject({ status: 'cancelled', sealed: true, counts: { cancelled: 3 } });
    const empty = await batches.create('empty', [], { open: true });
    await batches.cancel(empty.id);
    expect(await batches.waitFor(empty.id)).toMatchObject({ status: 'cancelled', members: 0 });
  });

  it('pause and resume', async () => {
    const { batches } = await startHandWorker(db, ['part']);
    const { id } = await batches.create('pause', [
      part('a'),
      part('b', 1, { dependsOn: ['a'] }),
      part('c', 1, { delay: '1h' }),
    ]);
    expect(await batches.pause(id)).toMatchObject({ changed: 3 });
    expect((await batches.get(id)).counts).toMatchObject({ paused: 3 });
    expect(await batches.resume(id)).toMatchObject({ changed: 3 });
    expect((await batches.get(id)).counts).toMatchObject({ ready: 1, blocked: 1, scheduled: 1 });
    await batches.cancel(id);
  });

  it('R31 retryFailed: the next generation, with one end and one hook of its own', async () => {
    let broken = true;
    const ran: string[] = [];
    Part.work = ({ payload }) => {
      ran.push(payload);
      if (broken && (payload as string) === 'a') throw new NonRetryableError('broken');
    };
    const { batches, jobs } = await start();
    const { id, jobIds } = await batches.create(
      'again',
      [part('a'), part('b', 'b', { dependsOn: ['a'] }), part('c', 'c', { dependsOn: ['b'] }), part('d')],
      { onFinished: Closing },
    );
    expect(await batches.waitFor(id)).toMatchObject({ status: 'failed', generation: 1 });
    await expect(jobs.retry(jobIds[1]!)).rejects.toThrow(
      new RegExp(`needs job ${jobIds[0]}, which failed or was cancelled: retry that first`),
    );
    expect(await batches.get(id)).toMatchObject({ status: 'failed', generation: 1 });
    broken = false;
    expect(await batches.retryFailed(id)).toMatchObject({ changed: 3 });
    expect(await batches.waitFor(id)).toMatchObject({ status: 'completed', generation: 2, counts: { completed: 4 } });
    await eventually(() => closings.length === 2);
    expect(closings.map(({ generation, status }) => [generation, status])).toEqual([
      [1, 'failed'],
      [2, 'completed'],
    ]);
    expect(ran).toEqual(expect.arrayContaining(['a', 'a', 'b', 'c', 'd']));
    expect(ran).toHaveLength(5);
  });

  it('deletion only as a whole, and not before it has ended', async () => {
    const { batches, jobs } = await startHandWorker(db, ['part']);
    const { id, jobIds } = await batches.create('delete', [part('a'), part('b', 1, { dependsOn: ['a'] })]);
    await expect(batches.delete(id)).rejects.toThrow(IllegalBatchStateError);
    await expect(jobs.delete(jobIds[0]!)).rejects.toThrow(new RegExp(`member of batch ${id}: delete that as a whole`));
    await batches.cancel(id);
    await batches.waitFor(id);
    await expect(jobs.delete(jobIds[0]!)).rejects.toThrow(/member of batch/);
    await db.query(`CREATE TABLE holder (job bigint REFERENCES ${S}.jobs)`);
    await db.query(`INSERT INTO holder VALUES ($1)`, [jobIds[1]]);
    await expect(batches.delete(id)).rejects.toThrow(/foreign key/);
    expect((await batches.get(id)).members).toBe(2);
    await db.query(`DROP TABLE holder`);
    expect(await batches.delete(id)).toBe(2);
    await expect(batches.get(id)).rejects.toThrow(UnknownBatchError);
    for (const table of ['jobs', 'finished', 'job_dependencies']) {
      const rows = await db.query(`SELECT FROM ${S}.${table} WHERE batch_id = $1`, [id]);
      expect([table, rows.length]).toEqual([table, 0]);
    }
  });

  it('a reason that is none is refused before anything is stopped', async () => {
    const { batches } = await startHandWorker(db, []);
    const { id } = await batches.create('reason', [part('a')], { open: true });
    await expect(batches.cancel(id, { reason: '' })).rejects.toMatchObject({ code: 'INVALID_JOB', field: 'reason' });
    expect(await batches.get(id)).toMatchObject({ stopping: false, sealed: false, counts: { ready: 1 } });
    await batches.cancel(id, { reason: 'first' });
  });

  it('R21 what a crash has left of a cancel is cancelled with the reason that was given', async () => {
    const { app, batches, jobs } = await startHandWorker(db, []);
    const { id, jobIds } = await batches.create('reason', [part('a'), part('b')]);
    await db.query(`UPDATE ${S}.batches SET stopping = true, stop_reason = 'too dear' WHERE id = $1`, [id]);
    await app.get(BatchSweep).sweep(0);
    expect(await jobs.get(jobIds[1]!)).toMatchObject({ state: 'cancelled', reason: 'too dear' });
    expect((await batches.get(id)).status).toBe('cancelled');
  });

  it('R22 a member of a batch that is being cancelled cannot be retried', async () => {
    const go = gate();
    Part.work = ({ payload }) => {
      if ((payload as unknown) === 'fails') throw new NonRetryableError('as told');
      return go.promise;
    };
    const { batches, jobs } = await start();
    const { id, jobIds } = await batches.create('stopping', [part('runs'), part('bad', 'fails')]);
    await eventually(async () => {
      const { counts } = await batches.get(id);
      return counts.running === 1 && counts.failed === 1;
    });
    await batches.cancel(id);
    await expect(jobs.retry(jobIds[1]!)).rejects.toMatchObject({
      code: 'ILLEGAL_TRANSITION',
      message: expect.stringMatching(`its batch ${id} is being cancelled`),
    });
    expect(await batches.retryFailed(id)).toEqual({ changed: 0, requested: 0, unchanged: 0, skipped: 1 });
    go.open();
    expect((await batches.waitFor(id)).status).toBe('failed');
  });
});
