import { setTimeout as sleep } from 'node:timers/promises';
import {
  type BatchEnd,
  type BatchMember,
  EmptyBatchError,
  type Handler,
  InvalidBatchError,
  type Job,
  JobHandler,
  NonRetryableError,
  UnknownBatchError,
} from '@leasehold/nestjs';
import { DataSource } from 'typeorm';
import {
  type LeaseApp,
  type TestDatabase,
  createTestDatabase,
  eventually,
  startHandWorker,
  startLeaseApp,
} from './support';
import { Part, part, parts } from './support/batch-parts';
import { untilState } from './support/job-states';

const S = '"leasehold"';
let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'batches' });
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

describe('R28 creating a batch', () => {
  it('R28 makes batch, members and edges at once; without dependencies ready, else blocked', async () => {
    const { batches, jobs } = await startHandWorker(db, []);
    const { id, jobIds } = await batches.create('import', [
      part('last', null, { dependsOn: ['first', 'second'] }),
      part('first', null, { priority: 3, tags: ['x'] }),
      part('second', null, { delay: '1h' }),
    ]);
    const [last, first, second] = await Promise.all(jobIds.map((jobId) => jobs.get(jobId)));
    expect(last).toMatchObject({ state: 'blocked', blockedOn: 'jobs', batchId: id, member: 'last' });
    expect(first).toMatchObject({ state: 'ready', priority: 3, tags: ['x'], batchId: id, member: 'first' });
    expect(second).toMatchObject({ state: 'scheduled', member: 'second' });
    // Ids rise along the edges.
    expect(Number(jobIds[0])).toBeGreaterThan(Math.max(Number(jobIds[1]), Number(jobIds[2])));
    expect(await batches.get(id)).toMatchObject({
      name: 'import',
      status: 'running',
      members: 3,
      sealed: true,
      generation: 1,
      counts: { ready: 1, blocked: 1, scheduled: 1, completed: 0 },
      done: 0,
      failing: false,
    });
    expect((await jobs.find({ batchId: id })).jobs).toHaveLength(3);
    await batches.cancel(id);
  });

  it.each<[string, BatchMember[], string, string[], RegExp]>([
    ['a name twice', [part('a'), part('b'), part('a')], 'name', ['a'], /given twice: "a"/],
    [
      'an unknown dependency',
      [part('abcd'), part('b', 1, { dependsOn: ['abce'] })],
      'dependsOn',
      ['abce'],
      /no member "abce".*did you mean 'abcd'/i,
    ],
    ['itself', [part('a', 1, { dependsOn: ['a'] })], '[0].dependsOn', ['a'], /depends on itself/],
    [
      'a circle',
      [
        part('a', 1, { dependsOn: ['c'] }),
        part('b', 1, { dependsOn: ['a'] }),
        part('c', 1, { dependsOn: ['b'] }),
        part('d', 1, { dependsOn: ['c'] }),
        part('e'),
      ],
      'dependsOn',
      ['a', 'c', 'b'],
      /in a circle: "a" → "c" → "b" → "a"/,
    ],
    [
      'both ways',
      [part('a'), part('b', 1, { dependsOn: ['a', { name: 'a', on: 'finished' }] })],
      '[1].dependsOn',
      ['a'],
      /both/,
    ],
    ['what is no name', [part('', 1)], '[0].name', [], /1 to 200 bytes/],
    ['what is no dependency', [part('a', 1, { dependsOn: [7 as never] })], '[0].dependsOn', ['a'], /must be a name/],
    ['a key', [part('a', 1, { key: 'k' } as never)], '[0].key', ['a'], /unique by its name/],
    ['a transaction of its own', [part('a', 1, { manager: {} } as never)], '[0].manager', ['a'], /to the call/],
    ['an option that is not', [part('a', 1, { prio: 1 } as never)], '[0].prio', ['a'], /no option 'prio'/],
    ['a payload that is none', [part('a', 1n)], '[0].payload', ['a'], /BigInt/],
    ['no handler', [{ handler: class Nobody {} as never, payload: 1 }], '[0].handler', [], /Nobody/],
    ['nothing', [null as never], 'members', [], /must be/],
    ['none at all', [], 'members', [], /ifEmpty/],
  ])('R28 refuses %s, by name, before any write', async (_what, members, field, names, message) => {
    const { batches } = await startHandWorker(db, []);
    const before = await db.one(`SELECT count(*)::int FROM ${S}.batches`);
    const error = await batches.create('wrong', members).catch((thrown: unknown) => thrown as InvalidBatchError);
    expect(error).toBeInstanceOf(InvalidBatchError);
    expect(error).toMatchObject({ code: 'INVALID_BATCH', field, names, message: expect.stringMatching(message) });
    expect(await db.one(`SELECT count(*)::int FROM ${S}.batches`)).toEqual(before);
  });

  it.each([
    ['', {}, 'name'],
    ['ok', { opened: true }, 'opened'],
    ['ok', { onFinished: { handler: Closing, payload: [] } }, 'onFinished.payload'],
    ['ok', { onFinished: { handler: Closing, payload: { batch: 1 } } }, 'onFinished.payload'],
    ['ok', { onFinished: { handler: Closing, payload: new URL('http://localhost') } }, 'onFinished.payload'],
    ['ok', { onFinished: { handler: Closing, payload: { toJSON: () => ({ batch: 1 }) } } }, 'onFinished.payload'],
    ['ok', { onFinished: { handler: Closing, payload: { n: 1n } } }, 'onFinished.payload'],
    ['ok', { onFailed: { handler: Closing, key: 'k' } }, 'onFailed.key'],
    ['ok', { onCompleted: { handler: Closing, priority: 1e9 } }, 'onCompleted.priority'],
    ['ok', { onCompleted: 7 }, 'onCompleted'],
  ])('R28 refuses the name %j and the options %j: %s', async (name, options, field) => {
    const { batches } = await startHandWorker(db, []);
    await expect(batches.create(name, [part('a')], options as never)).rejects.toMatchObject({
      code: 'INVALID_BATCH',
      field,
    });
  });

  it('R28 in the caller’s transaction: there at its commit, gone with its rollback', async () => {
    const worker = await start();
    const source = await new DataSource({ type: 'postgres', url: db.url }).initialize();
    let rolledBack = '';
    await source
      .transaction(async (manager) => {
        rolledBack = (await worker.batches.create('never', parts(1, 2), { manager })).id;
        throw new Error('no');
      })
      .catch(() => undefined);
    await expect(worker.batches.get(rolledBack)).rejects.toThrow(UnknownBatchError);
    const { id } = await source.transaction((manager) => worker.batches.create('there', parts(1, 2), { manager }));
    expect(await worker.batches.waitFor(id)).toMatchObject({ status: 'completed' });
    await source.destroy();
  });

  it('R28 100 000 members in one call', async () => {
    const { batches, jobs } = await startHandWorker(db, []);
    const { id, jobIds } = await batches.create(
      'many',
      Array.from({ length: 100_000 }, (_, i) => part(`m${i}`, { i })),
    );
    expect(new Set(jobIds).size).toBe(100_000);
    expect(await jobs.get(jobIds[99_999]!)).toMatchObject({ member: 'm99999', payload: { i: 99_999 } });
    expect(await batches.get(id)).toMatchObject({ members: 100_000, counts: { ready: 100_000 } });
    await db.query(`DELETE FROM ${S}.ready WHERE batch_id = $1`, [id]);
    await db.query(`UPDATE ${S}.batches SET status = 'cancelled', finished_at = clock_timestamp() WHERE id = $1`, [id]);
    expect(await batches.delete(id)).toBe(100_000);
  });
});

describe('R30 the status', () => {
  it.each([
    [['a', 'b', 'c'], 'completed', 'completed'],
    [['a', 'fails', 'c'], 'failed', 'failed'],
    [['fails'], 'failed', 'failed'],
  ])('R30 of %j is %s', async (payloads, status, hook) => {
    const { batches } = await start();
    const { id } = await batches.create('status', parts(...payloads), {
      onCompleted: Closing,
      onFailed: Closing,
      onFinished: { handler: Closing, payload: { extra: 1 } },
    });
    const done = await batches.waitFor(id);
    expect(done).toMatchObject({ status, done: 1, members: payloads.length, generation: 1 });
    expect(await batches.status(id)).toBe(status);
    await eventually(() => closings.length === 2);
    const failed = payloads.filter((payload) => payload === 'fails').length;
    const end = {
      id,
      name: 'status',
      status: hook,
      generation: 1,
      completed: payloads.length - failed,
      failed,
      cancelled: 0,
    };
    expect(closings).toEqual([end, end]);
  });

  it('R30 cancelled members: all of them = cancelled, some of them = completed', async () => {
    const { batches, jobs } = await startHandWorker(db, ['part']);
    const all = await batches.create('all', parts(1, 2));
    await batches.cancel(all.id, { reason: 'not needed' });
    expect(await batches.waitFor(all.id)).toMatchObject({ status: 'cancelled', counts: { cancelled: 2 } });
    expect(await jobs.get(all.jobIds[0]!)).toMatchObject({ state: 'cancelled', reason: 'not needed' });
    const worker = await start();
    const some = await worker.batches.create('some', [part('kept'), part('not', 1, { delay: '1h' })]);
    await jobs.cancel(some.jobIds[1]!);
    expect(await worker.batches.waitFor(some.id)).toMatchObject({
      status: 'completed',
      counts: { cancelled: 1, completed: 1 },
    });
  });

  it('R30 anything unfinished is running, and says that it is failing', async () => {
    const { batches } = await start();
    const { id } = await batches.create('failing', [part('bad', 'fails'), part('later', 1, { delay: '1h' })]);
    await eventually(async () => (await batches.get(id)).failing);
    expect(await batches.get(id)).toMatchObject({ status: 'running', done: 0.5, estimatedEnd: expect.any(Date) });
    await batches.cancel(id);
    expect((await batches.waitFor(id)).status).toBe('failed');
  });

  it('R30 no members is untouched, with an error of its own; no batch is another', async () => {
    const { batches } = await startHandWorker(db, []);
    const { id } = await batches.create('empty', [], { open: true });
    expect(await batches.get(id)).toMatchObject({ status: 'untouched', members: 0, done: 0 });
    await expect(batches.status(id)).rejects.toThrow(EmptyBatchError);
    await expect(batches.seal(id)).rejects.toThrow(EmptyBatchError);
    expect((await batches.get(id)).sealed).toBe(false);
    expect(await batches.seal(id, { ifEmpty: 'complete' })).toBe('completed');
    expect(await batches.status(id)).toBe('completed');
    for (const call of [
      () => batches.get('999999'),
      () => batches.status('999999'),
      () => batches.seal('999999'),
      () => batches.cancel('999999'),
      () => batches.pause('999999'),
      () => batches.delete('999999'),
      () => batches.add('999999', parts(1)),
    ]) {
      await expect(call()).rejects.toThrow(UnknownBatchError);
    }
    await expect(batches.get('x')).rejects.toThrow(InvalidBatchError);
  });

  it('R31 an empty batch that may be: completed at once, with its hook', async () => {
    const { batches, events } = await start();
    const { id } = await batches.create('none', [], { ifEmpty: 'complete', onFinished: Closing });
    expect(await batches.get(id)).toMatchObject({ status: 'completed', done: 1 });
    await eventually(() => closings.length === 1);
    expect(closings[0]).toMatchObject({ id, status: 'completed', completed: 0 });
    expect(events.filter((event) => event.type === 'batch.finished')).toMatchObject([
      { batchId: id, status: 'completed' },
    ]);
  });
});

describe('R29 dependencies', () => {
  it('R29 a member starts when all that it needs have completed', async () => {
    const order: string[] = [];
    Part.work = async ({ payload }) => {
      await sleep(Math.random() * 20);
      order.push(payload);
    };
    const { batches } = await start();
    const { id } = await batches.create('diamond', [
      part('end', 'end', { dependsOn: ['left', 'right'] }),
      part('left', 'left', { dependsOn: ['begin'] }),
      part('right', 'right', { dependsOn: ['begin'] }),
      part('begin'),
    ]);
    expect(await batches.waitFor(id)).toMatchObject({ status: 'completed' });
    expect(order[0]).toBe('begin');
    expect(order[3]).toBe('end');
  });

  it('R29 F:K4 a permanent failure fails those behind it, transitively, with a reason that names the first', async () => {
    const ran: string[] = [];
    Part.work = ({ payload }) => {
      ran.push(payload);
      if ((payload as string) === 'bad') throw new NonRetryableError('no such file');
    };
    const worker = await start();
    const { id, jobIds } = await worker.batches.create('chain', [
      part('bad'),
      part('b', 'b', { dependsOn: ['bad'] }),
      part('c', 'c', { dependsOn: ['b'] }),
      part('d', 'd', { dependsOn: ['c', 'good'] }),
      part('good'),
      part('whatever', 'whatever', { dependsOn: [{ name: 'c', on: 'finished' }] }),
    ]);
    expect(await worker.batches.waitFor(id)).toMatchObject({ status: 'failed', counts: { failed: 4, completed: 2 } });
    expect(ran.sort()).toEqual(['bad', 'good', 'whatever']);
    for (const jobId of jobIds.slice(1, 4)) {
      expect(await worker.jobs.get(jobId)).toMatchObject({
        state: 'failed',
        attempt: 0,
        reason: 'needs "bad", which failed: no such file',
        runs: [],
      });
    }
    await eventually(() => worker.events.filter(({ type }) => type === 'job.finally-failed').length === 4);
  });

  it('R29 F:K4 so does a cancelled member; one that is to be run whatever becomes of it is run', async () => {
    const { batches, jobs } = await start();
    const { id, jobIds } = await batches.create('cancel one', [
      part('a', 1, { delay: '1h' }),
      part('b', 1, { dependsOn: ['a'] }),
      part('c', 1, { dependsOn: [{ name: 'a', on: 'finished' }] }),
    ]);
    await jobs.cancel(jobIds[0]!, { reason: 'not today' });
    expect(await batches.waitFor(id)).toMatchObject({
      status: 'failed',
      counts: { cancelled: 1, failed: 1, completed: 1 },
    });
    expect((await jobs.get(jobIds[1]!)).reason).toBe('needs "a", which was cancelled: not today');
  });

  it('R29 F:K4 spent budgets: of crashes, of attempts by the deadline', async () => {
    const hand = await startHandWorker(db, ['part']);
    const { id, jobIds } = await hand.batches.create('spent', [
      part('poison', 1, { maxCrashes: 1 }),
      part('late', 1, { maxAttempts: 1 }),
      part('b', 1, { dependsOn: ['poison'] }),
      part('c', 1, { dependsOn: ['late'] }),
    ]);
    const take = async (event: string, alone = true) => {
      const [claimed] = await (await startHandWorker(db, ['part'])).claims.claim({ kinds: ['part'], limit: 1 });
      const { id: jobId, token, workerId } = claimed!.job;
      await db.query(`UPDATE ${S}.leases SET deadline_at = clock_timestamp() WHERE job_id = $1`, [jobId]);
      expect(await hand.rescue.take([{ jobId, token, workerId, move: { event, alone } }], 'session')).toBe(1);
    };
    // The suspect is claimed last, and alone.
    await take('deadline');
    await eventually(async () => (await hand.jobs.get(jobIds[3]!)).state === 'failed');
    await take('crash');
    await eventually(async () => (await hand.batches.get(id)).status === 'failed');
    expect((await hand.jobs.get(jobIds[2]!)).reason).toMatch(/^needs "poison", which failed: .*maxCrashes 1/);
    expect((await hand.jobs.get(jobIds[3]!)).reason).toMatch(/^needs "late", which failed: .*attempt 1 of 1/);
  });

  it('R29 a paused member recomputes what it waits for when it is resumed', async () => {
    const { batches, jobs, claims, settle } = await startHandWorker(db, ['part']);
    const { id, jobIds } = await batches.create('pause', [
      part('a'),
      part('b', 1, { dependsOn: ['a'] }),
      part('c', 1, { dependsOn: ['a'] }),
    ]);
    const [a, b, c] = jobIds as [string, string, string];
    await jobs.pause(b);
    await jobs.pause(c);
    await jobs.resume(c);
    expect(await jobs.get(c)).toMatchObject({ state: 'blocked', blockedOn: 'jobs' });
    const [claimed] = await claims.claim({ kinds: ['part'], limit: 5 });
    expect(claimed!.job.id).toBe(a);
    await settle.complete(claimed!.job);
    await untilState(jobs, c, 'ready');
    expect((await jobs.get(b)).state).toBe('paused');
    await jobs.resume(b);
    expect((await jobs.get(b)).state).toBe('ready');
    await batches.cancel(id);
    expect((await batches.waitFor(id)).status).toBe('completed');
  });
});

describe('reading', () => {
  it('results are streamed page by page, in the order of the ids', async () => {
    const { batches } = await start();
    const { id } = await batches.create(
      'results',
      Array.from({ length: 1200 }, (_, i) => part(`p${i}`, i === 7 ? 'fails' : i)),
    );
    await batches.waitFor(id);
    const seen: unknown[] = [];
    for await (const { name, state, result, reason } of batches.results<number>(id)) {
      seen.push(state === 'completed' ? [name, result] : [name, reason]);
    }
    expect(seen).toEqual(Array.from({ length: 1200 }, (_, i) => [`p${i}`, i === 7 ? 'as told' : i]));
  });

  it('find: newest first, by status and name, in pages', async () => {
    const { batches } = await startHandWorker(db, []);
    const ids: string[] = [];
    for (let i = 0; i < 5; i++) ids.unshift((await batches.create('found', parts(1))).id);
    const first = await batches.find({ name: 'found', limit: 3 });
    expect(first.batches.map(({ id }) => id)).toEqual(ids.slice(0, 3));
    const second = await batches.find({ name: 'found', limit: 3, after: first.next! });
    expect(second).toMatchObject({ batches: [{ id: ids[3] }, { id: ids[4] }], next: null });
    await batches.cancel(ids[0]!);
    await batches.waitFor(ids[0]!);
    expect((await batches.find({ name: 'found', status: 'cancelled' })).batches.map(({ id }) => id)).toEqual([ids[0]]);
    await expect(batches.find({ status: 'odd' as never })).rejects.toMatchObject({ field: 'status' });
    await expect(batches.find({ limit: 0 })).rejects.toMatchObject({ field: 'limit' });
    for (const id of ids) await batches.cancel(id);
  });

  it('the builder: fan-out, chain, and a closing job over the results', async () => {
    Part.work = ({ payload }) => (payload as number) * 2;
    let sum = 0;
    @JobHandler('reduce')
    class Reduce implements Handler<{ batch: BatchEnd }> {
      async handle({ payload }: Job<{ batch: BatchEnd }>): Promise<void> {
        let total = 0;
        for await (const { result } of worker.batches.results<number>(payload.batch.id)) total += result ?? 0;
        sum = total;
      }
    }
    const worker = await startLeaseApp(db, { handlers: [Part, Reduce] });
    const builder = worker.batches.build('map and reduce');
    const mapped = builder.fanOut('map', Part, [1, 2, 3]);
    const last = builder.chain(
      'then',
      [
        [Part, 10],
        [Part, 20],
      ],
      { dependsOn: mapped },
    );
    expect([mapped, last]).toEqual([['map[0]', 'map[1]', 'map[2]'], 'then[1]']);
    const { id } = await builder.closing(Reduce).create();
    await worker.batches.waitFor(id);
    await eventually(() => sum === 72);
  });
});
