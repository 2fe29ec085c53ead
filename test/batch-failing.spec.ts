import { type BatchEnd, type Handler, type Job, JobHandler, NonRetryableError } from '@leasehold/nestjs';
import { BatchSweep } from '@leasehold/nestjs/dist/batches/batch-sweep';
import { Database } from '@leasehold/nestjs/dist/storage/database';
import {
  type LeaseApp,
  RowGate,
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
  db = await createTestDatabase({ name: 'batch-failing' });
});
afterAll(() => db.drop());
beforeEach(() => Part.reset());

const closings: BatchEnd[] = [];
@JobHandler('closing')
class Closing implements Handler<{ batch: BatchEnd }> {
  handle({ payload }: Job<{ batch: BatchEnd }>): void {
    closings.push(payload.batch);
  }
}
const start = (): Promise<LeaseApp> => startLeaseApp(db, { handlers: [Part, Closing] });

describe('failFast', () => {
  it('the first failure cancels the rest', async () => {
    const { batches } = await start();
    const open = await batches.create('fast and open', [part('bad', 'fails'), part('b', 1, { delay: '1h' })], {
      failFast: true,
      open: true,
    });
    expect(await batches.waitFor(open.id)).toMatchObject({ status: 'failed', sealed: true });
    const { id } = await batches.create(
      'fast',
      [part('bad', 'fails'), part('b', 1, { delay: '1h' }), part('c', 1, { dependsOn: ['b'] })],
      { failFast: true },
    );
    expect(await batches.waitFor(id)).toMatchObject({ status: 'failed', counts: { failed: 1, cancelled: 2 } });
  });

  it('R31 retryFailed runs again what failed and what it took with it, not what a user had cancelled; one old failure stops no new generation', async () => {
    let broken = ['bad', 'worse'];
    const go = gate();
    Part.work = async ({ payload }, lease) => {
      const name = payload as string;
      if (name === 'runs') {
        lease.signal.addEventListener('abort', () => go.open());
        await go.promise;
        lease.assertHeld();
      }
      if (broken.includes(name)) throw new NonRetryableError('broken');
    };
    const { batches, jobs, events } = await start();
    const { id, jobIds } = await batches.create(
      'fast again',
      [
        part('given up', 1, { delay: '1h' }),
        part('runs'),
        part('later', 1, { delay: '1h' }),
        part('bad', 'bad', { delay: '1h' }),
        part('b', 'b', { dependsOn: ['bad'] }),
        part('c', 'c', { dependsOn: ['b'] }),
      ],
      { failFast: true },
    );
    await jobs.cancel(jobIds[0]!);
    await eventually(async () => (await batches.get(id)).counts.running === 1);
    await jobs.runNow(jobIds[3]!);
    expect(await batches.waitFor(id)).toMatchObject({ status: 'failed', counts: { failed: 1, cancelled: 5 } });
    // In whatever layer they were: cancelled, and not told of as failed.
    expect(events.filter(({ type }) => type === 'job.finally-failed')).toMatchObject([{ jobId: jobIds[3] }]);
    broken = [];
    expect(await batches.retryFailed(id)).toMatchObject({ changed: 5, skipped: 0 });
    await jobs.runNow(jobIds[2]!).catch(() => undefined);
    expect(await batches.waitFor(id)).toMatchObject({
      status: 'completed',
      generation: 2,
      counts: { completed: 5, cancelled: 1 },
    });
  });

  it('R30 a failure of the generation before cancels nothing of this one, a new one does', async () => {
    let broken = true;
    Part.work = ({ payload }) => {
      if (broken || (payload as unknown) === 'bad') throw new NonRetryableError('broken');
    };
    const { app, batches, jobs } = await start();
    const { id, jobIds } = await batches.create('old failure', [part('a'), part('bad')]);
    expect(await batches.waitFor(id)).toMatchObject({ counts: { failed: 2 } });
    await db.query(`UPDATE ${S}.batches SET fail_fast = true WHERE id = $1`, [id]);
    await db.query(`UPDATE ${S}.finished SET finished_at = finished_at - interval '1 min' WHERE batch_id = $1`, [id]);
    broken = false;
    await jobs.pause(jobIds[0]!).catch(() => undefined);
    const go = gate();
    Part.work = () => go.promise;
    await jobs.retry(jobIds[0]!);
    await eventually(async () => (await batches.get(id)).counts.running === 1);
    await app.get(BatchSweep).sweep(0);
    expect(await batches.get(id)).toMatchObject({ stopping: false, generation: 2, estimatedEnd: null });
    go.open();
    expect(await batches.waitFor(id)).toMatchObject({ status: 'failed', counts: { completed: 1, failed: 1 } });
  });
});

describe('what fails with what it needs', () => {
  it('F:K4 a chain of 3000 behind a failure: each layer is walked once', async () => {
    const { app, batches, claims, settle } = await startHandWorker(db, ['part']);
    const members = Array.from({ length: 3000 }, (_, i) =>
      part(`m${i}`, i, { dependsOn: i === 0 ? [] : [`m${i - 1}`] }),
    );
    const { id } = await batches.create('chain', members, { onFinished: Closing });
    const [claimed] = await claims.claim({ kinds: ['part'], limit: 1 });
    // The calls, by what each is given to look at: with the old ones in each, it was the square of it.
    const looked: number[] = [];
    const database = app.get(Database);
    const query = database.query.bind(database);
    jest.spyOn(database, 'query').mockImplementation((text: string, values: unknown[] = [], options = {}) => {
      if (text.includes('after_members_v1')) looked.push(String(values[1]).split(',').length);
      return query(text, values, options);
    });
    await settle.fail(claimed!.job, new NonRetryableError('first'));
    await eventually(async () => (await batches.get(id)).status === 'failed', { timeoutMs: 60_000 });
    expect(await batches.get(id)).toMatchObject({ counts: { failed: 3000 } });
    expect(looked.reduce((sum, n) => sum + n, 0)).toBeLessThan(3000);
  });

  it('F:K1 a resume while its need’s failure is followed: it fails in the same look', async () => {
    const { batches, jobs } = await startHandWorker(db, ['part']);
    const { id, jobIds } = await batches.create('resumed', [
      part('a', 1, { delay: '1h' }),
      part('b', 1, { dependsOn: ['a'] }),
    ]);
    const [a, b] = jobIds as [string, string];
    await jobs.pause(b);
    // A resume has taken the paused row out, put another in, and is not committed; the look finds the paused one, and waits.
    const gate = await RowGate.hold(db, `SELECT FROM ${S}.steer_v1('resume', $1::bigint[], NULL, 0)`, [[b]]);
    const cancel = jobs.cancel(a);
    await cancel;
    await gate.untilWaiting();
    await gate.release();
    await eventually(async () => (await batches.get(id)).status === 'failed');
    expect(await jobs.get(b)).toMatchObject({ state: 'failed', reason: 'needs "a", which was cancelled: cancelled' });
  });
});

describe('law 4: what the database refuses at an end', () => {
  afterEach(() => db.query(`ALTER TABLE ${S}.jobs DROP CONSTRAINT IF EXISTS no_hook`));

  it('F:E1 one batch whose hook is refused holds up no other, nor the sweep; it ends when the hook is possible', async () => {
    const { app, batches } = await start();
    const bad = await batches.create('bad', [part('a', 1, { delay: '1h' })], {
      onFinished: { handler: Closing, payload: { refused: true } },
    });
    const good = await batches.create('good', [part('a', 1, { delay: '1h' })], { onFinished: Closing });
    await db.query(`ALTER TABLE ${S}.jobs ADD CONSTRAINT no_hook CHECK (payload->>'refused' IS NULL)`);
    await Promise.all([batches.cancel(bad.id), batches.cancel(good.id)]);
    expect(await batches.waitFor(good.id)).toMatchObject({ status: 'cancelled' });
    await app.get(BatchSweep).sweep(0);
    expect(await batches.get(bad.id)).toMatchObject({ status: 'running', counts: { cancelled: 1 } });
    await db.query(`ALTER TABLE ${S}.jobs DROP CONSTRAINT no_hook`);
    await app.get(BatchSweep).sweep(0);
    expect(await batches.waitFor(bad.id)).toMatchObject({ status: 'cancelled' });
    const told = (id: string): number => closings.filter((end) => end.id === id).length;
    await eventually(() => told(bad.id) === 1 && told(good.id) === 1);
  });
});
