import {
  type BatchEnd,
  EnqueueUncertainError,
  type Handler,
  IllegalBatchStateError,
  type Job,
  JobHandler,
} from '@leasehold/nestjs';
import { DataSource } from 'typeorm';
import {
  type LeaseApp,
  type TestDatabase,
  createTestDatabase,
  eventually,
  TcpProxy,
  gate,
  startHandWorker,
  startLeaseApp,
} from './support';
import { Part, part, parts } from './support/batch-parts';

const S = '"leasehold"';
let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'batch-open' });
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

describe('open batches', () => {
  it('members are added while it is open, and it ends only when it is sealed', async () => {
    const { batches } = await start();
    const { id } = await batches.create('open', [part('a')], { open: true, onFinished: Closing });
    await eventually(async () => (await batches.get(id)).counts.completed === 1);
    expect(await batches.get(id)).toMatchObject({ status: 'running', sealed: false, estimatedEnd: null });
    const added = await batches.add(id, [part('b', 'b', { dependsOn: ['a'] }), part('c', 'c', { dependsOn: ['b'] })]);
    expect(added).toMatchObject({ added: 2, existing: [] });
    await eventually(async () => (await batches.get(id)).counts.completed === 3);
    expect(closings).toEqual([]);
    expect(await batches.seal(id)).toBe('completed');
    expect(await batches.seal(id)).toBe('completed');
    await eventually(() => closings.length === 1);
    await expect(batches.add(id, [part('d')])).rejects.toThrow(IllegalBatchStateError);
    await expect(batches.add(id, [part('d')])).rejects.toThrow(/it has ended/);
  });

  it('sealed while members run: it ends with the last; adding meanwhile is an error', async () => {
    const go = gate();
    Part.work = () => go.promise;
    const { batches } = await start();
    const { id } = await batches.create('sealed', [part('a')], { open: true });
    expect(await batches.seal(id)).toBe('running');
    await expect(batches.add(id, [part('b')])).rejects.toThrow(/it is sealed/);
    go.open();
    expect((await batches.waitFor(id)).status).toBe('completed');
  });

  it('what is added behind a member that has failed has failed; unknown names are refused', async () => {
    const { batches, jobs } = await start();
    const { id } = await batches.create('behind', [part('bad', 'fails')], { open: true });
    await eventually(async () => (await batches.get(id)).counts.failed === 1);
    const { jobIds } = await batches.add(id, [
      part('b', 1, { dependsOn: ['bad'] }),
      part('c', 1, { dependsOn: ['b'] }),
    ]);
    for (const jobId of jobIds) {
      expect(await jobs.get(jobId)).toMatchObject({ state: 'failed', reason: 'needs "bad", which failed: as told' });
    }
    await expect(batches.add(id, [part('d', 1, { dependsOn: ['nobody'] })])).rejects.toMatchObject({
      names: ['nobody'],
      field: 'dependsOn',
    });
    expect(await batches.seal(id)).toBe('failed');
  });

  it('F:K6 a fan-out that broke off is repeated: the same names are added once', async () => {
    Part.work = async ({ payload, batchId, attempt }, lease) => {
      if ((payload as unknown) !== 'root') return;
      const { batches } = worker;
      const members = Array.from({ length: 1000 }, (_, i) => part(`child ${i}`, i));
      await batches.add(batchId!, members.slice(0, attempt === 1 ? 500 : 1000), { under: lease });
      if (attempt === 1) throw new Error('half-way');
    };
    const worker = await start();
    const { id } = await worker.batches.create('fan-out', [part('root')], { open: true });
    await eventually(async () => (await worker.batches.get(id)).members === 1001);
    await worker.batches.seal(id);
    expect(await worker.batches.waitFor(id)).toMatchObject({ status: 'completed', counts: { completed: 1001 } });
  });

  it('F:K6 R17 a zombie adds nothing', async () => {
    const errors: unknown[] = [];
    const done = gate();
    Part.work = async ({ id, batchId }, lease) => {
      await db.query(
        `UPDATE ${S}.leases SET token = nextval('${S}.tokens'), worker_id = 'somebody else' WHERE job_id = $1`,
        [id],
      );
      await worker.batches
        .add(batchId!, [part('child')], { under: lease })
        .catch((error: unknown) => errors.push(error));
      done.open();
    };
    const worker = await start();
    const { id, jobIds } = await worker.batches.create('zombie', [part('root')], { open: true });
    await done.promise;
    expect(errors).toMatchObject([{ code: 'LEASE_LOST' }]);
    expect((await worker.batches.get(id)).members).toBe(1);
    await worker.jobs.forceCancel(jobIds[0]!);
    expect(await worker.batches.seal(id)).toBe('cancelled');
  });

  it('F:K6 a fan-out that is done again after the batch was sealed, or has ended, finds what it has added', async () => {
    const { batches } = await start();
    const { id } = await batches.create('again', [part('root')], { open: true });
    const first = await batches.add(id, [part('a'), part('b')]);
    await batches.seal(id);
    await expect(batches.add(id, [part('a'), part('b')])).resolves.toEqual({
      ...first,
      added: 0,
      existing: ['a', 'b'],
    });
    await batches.waitFor(id);
    await expect(batches.add(id, [part('a')])).resolves.toMatchObject({ added: 0, existing: ['a'] });
    await expect(batches.add(id, [part('a'), part('c')])).rejects.toThrow(/it has ended/);
  });

  it('F:K6 R17 a zombie seals nothing', async () => {
    const errors: unknown[] = [];
    const done = gate();
    Part.work = async ({ id, batchId }, lease) => {
      await db.query(
        `UPDATE ${S}.leases SET token = nextval('${S}.tokens'), worker_id = 'somebody else' WHERE job_id = $1`,
        [id],
      );
      await batches.seal(batchId!, { under: lease }).catch((error: unknown) => errors.push(error));
      done.open();
    };
    const { batches, jobs } = await start();
    const { id, jobIds } = await batches.create('zombie', [part('root')], { open: true });
    await done.promise;
    expect(errors).toMatchObject([{ code: 'LEASE_LOST' }]);
    expect((await batches.get(id)).sealed).toBe(false);
    await jobs.forceCancel(jobIds[0]!);
    expect(await batches.seal(id)).toBe('cancelled');
  });

  it.each(['REPEATABLE READ', 'SERIALIZABLE'] as const)(
    'R30 in a transaction of the caller’s with a snapshot of its own (%s) neither is possible, and nothing is written',
    async (isolation) => {
      const { batches } = await startHandWorker(db, []);
      const source = await new DataSource({ type: 'postgres', url: db.url }).initialize();
      const { id } = await batches.create('stale', [part('a')], { open: true });
      for (const call of ['seal', 'add'] as const) {
        const work = source.transaction(isolation, async (manager) => {
          await manager.query(`SELECT count(*) FROM ${S}.jobs`);
          return call === 'add' ? batches.add(id, [part('b')], { manager }) : batches.seal(id, { manager });
        });
        await expect(work).rejects.toMatchObject({
          code: 'INVALID_BATCH',
          field: 'isolation',
          message: expect.stringMatching(new RegExp(`${call}.* READ COMMITTED, not ${isolation}`)),
        });
      }
      expect(await batches.get(id)).toMatchObject({ sealed: false, members: 1 });
      await source.transaction('READ COMMITTED', (manager) => batches.seal(id, { manager }));
      await source.destroy();
      await batches.cancel(id);
    },
  );

  it.each([
    ['all of which have names are added once', [part('a'), part('b')], undefined],
    ['one of which has none: EnqueueUncertainError', [...parts(1), part('b')], EnqueueUncertainError],
  ])('R28 the reply to the commit is lost of members %s', async (_what, members, error) => {
    const proxy = await TcpProxy.start(db.url);
    const worker = await startHandWorker(db, [], { url: proxy.url(db.url) });
    const { batches } = worker;
    const { id } = await batches.create('lost', [], { open: true });
    let inserted = false;
    // Of the commit that follows the insert: the leader commits too.
    const drop = proxy.dropRepliesAfter((request) => {
      inserted ||= request.includes('enqueue_v1');
      return inserted && request.lastIndexOf('COMMIT') > request.lastIndexOf('enqueue_v1');
    });
    const adding = batches.add(id, members);
    if (error) await expect(adding).rejects.toThrow(error);
    else expect((await adding).jobIds).toHaveLength(2);
    expect(drop.count).toBe(1);
    expect((await batches.get(id)).members).toBe(2);
    await batches.cancel(id);
    await worker.close();
    await proxy.close();
  });

  it('R26 members that are doomed when they are added are told of', async () => {
    const { batches, events } = await start();
    const { id } = await batches.create('told', [part('bad', 'fails')], { open: true });
    await eventually(async () => (await batches.get(id)).counts.failed === 1);
    const { jobIds } = await batches.add(id, [
      part('b', 1, { dependsOn: ['bad'] }),
      part('c', 1, { dependsOn: ['b'] }),
    ]);
    expect(events.filter(({ type }) => type === 'job.finally-failed').slice(1)).toMatchObject(
      jobIds.map((jobId) => ({ jobId, reason: 'needs "bad", which failed: as told' })),
    );
    await batches.seal(id);
  });
});
