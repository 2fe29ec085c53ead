import { type BatchMember, RetentionService } from '@leasehold/nestjs';
import { BatchSweep } from '@leasehold/nestjs/dist/batches/batch-sweep';
import type { Client } from 'pg';
import {
  type LeaseApp,
  RowGate,
  TcpProxy,
  type TestDatabase,
  createTestDatabase,
  eventually,
  startHandWorker,
  startLeaseApp,
} from './support';
import { untilState } from './support/job-states';

const S = '"leasehold"';
let db: TestDatabase;
let hand: LeaseApp;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'batch-races' });
});
beforeEach(async () => {
  await db
    .query(
      `TRUNCATE ${S}.jobs, ${S}.ready, ${S}.waiting, ${S}.leases, ${S}.finished, ${S}.batches, ${S}.job_dependencies, ${S}.workers`,
    )
    .catch(() => undefined);
  hand = await startHandWorker(db, ['part']);
});
afterAll(() => db.drop());

const part = (
  name: string,
  dependsOn: BatchMember['dependsOn'] = [],
  more: Partial<BatchMember> = {},
): BatchMember => ({
  handler: 'part',
  payload: name,
  name,
  dependsOn,
  ...more,
});

/** Ends a running or ready member as its worker would, without the look that follows: as if the process had died between. */
async function endQuietly(jobId: string, event: 'complete' | 'fatal' = 'complete'): Promise<void> {
  const worker = hand.workers.currentId;
  await db.query(
    `WITH r AS (DELETE FROM ${S}.ready WHERE job_id = $1 RETURNING *)
     INSERT INTO ${S}.leases (job_id, token, claim_no, claimed_at, attempt, crashes, releases, snoozes, priority, suspect, worker_id, queue, kind, batch_id)
     SELECT job_id, nextval('${S}.tokens'), 0, clock_timestamp(), attempt + 1, crashes, releases, snoozes, priority, suspect, $2, queue, kind, batch_id FROM r`,
    [jobId, worker],
  );
  await db.query(
    `SELECT FROM (SELECT json_build_array(json_build_object('job', job_id, 'token', token, 'worker', worker_id, 'event', '${event}',
       'error', CASE WHEN '${event}' = 'fatal' THEN json_build_object('message', 'broken') END)) AS moves
     FROM ${S}.leases WHERE job_id = $1) l, ${S}.move_v1(l.moves, false)`,
    [jobId],
  );
}

interface Look {
  busy: string[];
  again: string[];
  doomed: unknown[][];
  stop: string[];
  ended: [string, string, string, number][];
}
const LOOK = `SELECT ${S}.after_members_v1($1::bigint[], $2::bigint[]) AS answer`;
const look = async (batchId: string, jobIds: string[] = [], client?: Client): Promise<Look> => {
  const values = [[batchId], jobIds];
  if (!client) return (await db.one<{ answer: Look }>(LOOK, values)).answer;
  return (await client.query<{ answer: Look }>(LOOK, values)).rows[0]!.answer;
};
/** The form that reads and writes in one statement: what it read is from before it waited for the row. */
const NAIVE = `
  UPDATE ${S}.batches b SET status = CASE
    WHEN EXISTS (SELECT FROM ${S}.ready WHERE batch_id = b.id) OR EXISTS (SELECT FROM ${S}.leases WHERE batch_id = b.id) THEN 'running'
    WHEN EXISTS (SELECT FROM ${S}.finished WHERE batch_id = b.id AND state = 'failed') THEN 'failed' ELSE 'completed' END
  WHERE id = $1`;
const readCommitted = async (): Promise<Client> => {
  const client = await db.client();
  await client.query('SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED');
  return client;
};
const oneHook = async (id: string): Promise<void> => {
  const hooks = await db.query(`SELECT kind FROM ${S}.jobs WHERE payload->'batch'->>'id' = $1`, [id]);
  expect(hooks).toEqual([{ kind: 'hook' }]);
};
const statusOf = async (id: string): Promise<string> => (await hand.batches.get(id)).status;
const lockBatch = (id: string) => RowGate.hold(db, `SELECT FROM ${S}.batches WHERE id = $1 FOR NO KEY UPDATE`, [id]);

describe('R30 F:K1 two members finish at once', () => {
  it.each(['naive', 'ours'])(
    'R30 a look that is held between its read and its write cannot have the last word: %s',
    async (form) => {
      const { id, jobIds } = await hand.batches.create('two', [part('a'), part('b')]);
      const [a, b] = jobIds as [string, string];
      await endQuietly(a);
      const client = await readCommitted();
      // A's look reads while b is unfinished, and is held; b ends, is looked at, and its look is committed; then A's goes on.
      const gate = await lockBatch(id);
      const held = form === 'naive' ? client.query(NAIVE, [id]) : look(id, [a], client);
      if (form === 'naive') await gate.untilWaiting();
      else await held;
      await endQuietly(b);
      expect((await gate.query(LOOK, [[id], [b]]))[0]).toMatchObject({
        answer: { ended: [[id, 'completed', 'two', 1]] },
      });
      await gate.release();
      await held;
      await client.end();
      // On the naive form the batch is running for ever.
      const { status } = await db.one<{ status: string }>(`SELECT status FROM ${S}.batches WHERE id = $1`, [id]);
      expect(status).toBe(form === 'naive' ? 'running' : 'completed');
    },
  );

  it.each([
    [0, 1],
    [1, 0],
  ])(
    'R30 R31 both have committed, and both looks stand at the row: %i first, then %i; one ends it, with one hook',
    async (first, second) => {
      // With an edge, so that a look waits for the row.
      const members = [part('root'), part('a', ['root']), part('b', ['root'])];
      const { id, jobIds } = await hand.batches.create('two', members, { onFinished: { handler: 'hook' } });
      await endQuietly(jobIds[0]!);
      await look(id, jobIds);
      for (const jobId of jobIds.slice(1)) await endQuietly(jobId);
      const gate = await lockBatch(id);
      const clients = await Promise.all([readCommitted(), readCommitted()]);
      const looks: Promise<Look>[] = [];
      for (const [n, i] of [first, second].entries()) {
        looks[i] = look(id, [jobIds[i + 1]!], clients[i]);
        await gate.untilWaiting(n + 1);
      }
      await gate.release();
      const answers = await Promise.all(looks);
      for (const client of clients) await client.end();
      // One that has waited for too long comes again.
      if (answers.some(({ busy }) => busy.length > 0)) answers.push(await look(id));
      expect(answers.flatMap(({ ended }) => ended)).toEqual([[id, 'completed', 'two', 1]]);
      await oneHook(id);
    },
  );

  it('R30 R31 without edges nobody waits: who finds the row locked comes again, and one ends it', async () => {
    for (let round = 0; round < 20; round++) {
      const { id, jobIds } = await hand.batches.create('two', [part('a'), part('b')], {
        onFinished: { handler: 'hook' },
      });
      const ends = jobIds.map(async (jobId) => {
        await endQuietly(jobId);
        for (let answer = await look(id, [jobId]); ; answer = await look(id, [jobId])) {
          if (answer.busy.length === 0) return answer.ended;
        }
      });
      expect((await Promise.all(ends)).flat()).toEqual([[id, 'completed', 'two', 1]]);
      await oneHook(id);
    }
  });

  it('R29 two that one member needs: it is freed once, by the second', async () => {
    const { id, jobIds } = await hand.batches.create('join', [part('a'), part('b'), part('c', ['a', 'b'])]);
    const [a, b, c] = jobIds as [string, string, string];
    await endQuietly(a);
    await endQuietly(b);
    const gate = await RowGate.hold(db, `SELECT FROM ${S}.waiting WHERE job_id = $1 FOR UPDATE`, [c]);
    const answers = await Promise.all([look(id, [a]), look(id, [b])]);
    // Neither waits for long behind a row that somebody keeps.
    expect(answers.map(({ busy }) => busy)).toEqual([[id], [id]]);
    await gate.release();
    await Promise.all([look(id, [a]), look(id, [b])]);
    const again = await Promise.all([look(id, [a]), look(id, [b])]);
    expect(again.map(({ busy }) => busy)).toEqual([[], []]);
    expect((await hand.jobs.get(c)).state).toBe('ready');
    expect(await db.query(`SELECT FROM ${S}.ready WHERE job_id = $1`, [c])).toHaveLength(1);
  });
});

describe('a batch changes while it is looked at', () => {
  it.each([
    ['with edges, where a look waits', [part('a'), part('b', ['a'])]],
    ['without, where it comes again', [part('a'), part('b')]],
  ])(
    'R31 a retry commits between the look’s beginning and its lock: it is seen, the batch goes on: %s',
    async (_what, members) => {
      const { id, jobIds } = await hand.batches.create('retry', members);
      const [a, b] = jobIds as [string, string];
      await endQuietly(a);
      await look(id, [a]);
      await endQuietly(b);
      const client = await readCommitted();
      const gate = await lockBatch(id);
      await gate.query(`SELECT FROM ${S}.steer_v1('retry', $1::bigint[], NULL, 0)`, [[a]]);
      const looking = look(id, jobIds, client);
      if (_what.startsWith('with edges')) await gate.untilWaiting();
      else expect((await looking).busy).toEqual([id]);
      await gate.release();
      expect((await looking).ended).toEqual([]);
      expect((await look(id)).ended).toEqual([]);
      expect(await hand.batches.get(id)).toMatchObject({
        status: 'running',
        generation: 1,
        counts: { ready: 1, completed: 1 },
      });
      await endQuietly(a);
      expect((await look(id)).ended).toEqual([[id, 'completed', 'retry', 1]]);
      // And after its end a retry begins the next generation.
      await hand.jobs.retry(b);
      expect(await hand.batches.get(id)).toMatchObject({ status: 'running', generation: 2, finishedAt: null });
      await client.end();
      await hand.batches.cancel(id);
    },
  );

  it('members that are being added keep it open to the end of that transaction, and their edges are seen', async () => {
    const { id, jobIds } = await hand.batches.create('add', [part('a')], { open: true });
    const client = await db.client();
    await client.query('BEGIN ISOLATION LEVEL READ COMMITTED');
    const added = await hand.batches.add(id, [part('b', ['a'])], { client });
    // The need ends while the edge is not committed: its look is told to come again, and waits for nobody meanwhile.
    await endQuietly(jobIds[0]!);
    expect(await look(id, jobIds)).toMatchObject({ busy: [id], ended: [] });
    await client.query('COMMIT');
    await client.end();
    expect(await look(id, jobIds)).toMatchObject({ busy: [] });
    expect((await hand.jobs.get(added.jobIds[0]!)).state).toBe('ready');
    await endQuietly(added.jobIds[0]!);
    expect(await hand.batches.seal(id)).toBe('completed');
  });

  it('F:K6 two that add the same names at once: each is there once', async () => {
    const { id } = await hand.batches.create('same', [], { open: true });
    const members = Array.from({ length: 50 }, (_, i) => part(`m${i}`));
    const calls = await Promise.all([1, 2, 3, 4].map(() => hand.batches.add(id, members)));
    expect(calls.map(({ added }) => added).sort()).toEqual([0, 0, 0, 50]);
    expect(new Set(calls.map(({ jobIds }) => jobIds.join())).size).toBe(1);
    expect((await hand.batches.get(id)).members).toBe(50);
    await hand.batches.cancel(id);
  });

  it('R29 a resume while its needs are being marked ends up where it belongs', async () => {
    for (let round = 0; round < 20; round++) {
      const { id, jobIds } = await hand.batches.create('resume', [part('a'), part('b', ['a'])]);
      const [a, b] = jobIds as [string, string];
      await hand.jobs.pause(b);
      await endQuietly(a);
      await Promise.all([hand.jobs.resume(b), look(id, [a])]);
      if ((await hand.jobs.get(b)).state === 'paused') await hand.jobs.resume(b);
      expect((await hand.jobs.get(b)).state).toBe('ready');
      await endQuietly(b);
      expect((await look(id, [b])).ended).toHaveLength(1);
    }
  });
});

describe('F:K5 members count once', () => {
  it('F:K5 rescued, retried, snoozed, given back, settled twice', async () => {
    const { id, jobIds } = await hand.batches.create(
      'once',
      ['a', 'b', 'c', 'd', 'e'].map((name) => part(name, [], { backoff: '0s', maxCrashes: 9 })),
      {
        onFinished: { handler: 'hook' },
      },
    );
    for (let round = 0; ; round++) {
      const claimed = await hand.claims.claim({ kinds: ['part'], limit: 5 });
      if (claimed.length === 0 && (await statusOf(id)) !== 'running') break;
      for (const { job } of claimed) {
        const move = { jobId: job.id, token: job.token, workerId: job.workerId, move: { event: 'crash' as const } };
        switch (`${job.payload as string}${round}`) {
          case 'a0':
            await hand.settle.fail(job, new Error('again'));
            break;
          case 'b0':
            await hand.settle.snooze(job, 0);
            break;
          case 'c0':
            await hand.settle.release(job);
            break;
          case 'd0':
            await hand.rescue.take([move], 'lease');
            // It comes back to life, and reports what nobody wants to hear any more.
            await expect(hand.settle.complete(job)).rejects.toThrow();
            break;
          default:
            await hand.settle.complete(job);
            await expect(hand.settle.complete(job)).rejects.toThrow();
        }
      }
      await db.query(`UPDATE ${S}.waiting SET run_at = clock_timestamp() WHERE reason = 'scheduled'`);
      if (round > 200) throw new Error('it does not end');
    }
    expect(await hand.batches.get(id)).toMatchObject({
      status: 'completed',
      members: 5,
      counts: { completed: 5 },
      done: 1,
    });
    const [row] = await db.query(`SELECT completed, failed, cancelled FROM ${S}.batches WHERE id = $1`, [id]);
    expect(row).toEqual({ completed: 5, failed: 0, cancelled: 0 });
    expect(await db.query(`SELECT FROM ${S}.jobs WHERE kind = 'hook'`)).toHaveLength(1);
    expect(jobIds).toHaveLength(5);
  });
});

describe('F:K1 the sweep', () => {
  const sweep = (graceMs = 0): Promise<number> => hand.app.get(BatchSweep).sweep(graceMs);

  it('F:K1 ends what a crash between a commit and its look has left, and does nothing otherwise', async () => {
    const { id, jobIds } = await hand.batches.create('left', [
      part('a'),
      part('b', ['a']),
      part('c', ['b']),
      part('d'),
    ]);
    expect(await sweep()).toBe(0);
    await endQuietly(jobIds[0]!);
    await endQuietly(jobIds[3]!);
    expect(await sweep(60_000)).toBe(0); // Still on its way, for all that is known.
    expect(await sweep()).toBe(1);
    expect((await hand.jobs.get(jobIds[1]!)).state).toBe('ready');
    expect(await sweep()).toBe(0);
    await endQuietly(jobIds[1]!, 'fatal');
    expect(await sweep()).toBe(1);
    // What the repair has failed is followed up like anything else.
    await untilState(hand.jobs, jobIds[2]!, 'failed');
    expect(await statusOf(id)).toBe('failed');
    expect(await sweep()).toBe(0);
    expect(hand.app.get(BatchSweep).repaired).toBe(2);
  });

  it('F:K1 ends a batch without edges, begins to cancel one that fails fast, goes on with one that is being cancelled', async () => {
    const plain = await hand.batches.create('plain', [part('a')]);
    await endQuietly(plain.jobIds[0]!);
    const fast = await hand.batches.create('fast', [part('a'), part('b', [], { delay: '1h' })], { failFast: true });
    await endQuietly(fast.jobIds[0]!, 'fatal');
    const stopping = await hand.batches.create('stopping', [part('a'), part('b', ['a'])]);
    await db.query(`UPDATE ${S}.batches SET stopping = true WHERE id = $1`, [stopping.id]);
    expect(await sweep()).toBe(2);
    await eventually(async () => (await statusOf(plain.id)) === 'completed');
    await eventually(async () => (await statusOf(fast.id)) === 'failed');
    await eventually(async () => (await statusOf(stopping.id)) === 'cancelled');
  });
});

describe('retention', () => {
  it('F:K4 no member of an open batch is deleted; a finished batch goes as a whole', async () => {
    const app = await startLeaseApp(db, {
      options: { role: 'producer', retention: { completed: '10m', cancelled: '10m' } },
    });
    const retention = app.app.get(RetentionService);
    const open = await hand.batches.create('open', [part('a'), part('b', [], { delay: '1h' })]);
    const over = await hand.batches.create('over', [part('a')]);
    const fresh = await hand.batches.create('fresh', [part('a')]);
    for (const { id, jobIds } of [open, over, fresh]) {
      await endQuietly(jobIds[0]!);
      await look(id, jobIds);
    }
    await db.query(`UPDATE ${S}.batches SET finished_at = finished_at - interval '1 h' WHERE id = $1`, [over.id]);
    await db.query(`UPDATE ${S}.finished SET finished_at = finished_at - interval '1 h'`);
    await db.query(`UPDATE ${S}.jobs SET created_at = created_at - interval '2 h'`);
    expect(await retention.prune()).toEqual({ deleted: 1, held: 0 });
    await expect(hand.batches.get(over.id)).rejects.toThrow(/no batch/);
    expect(await hand.batches.get(open.id)).toMatchObject({ members: 2, counts: { completed: 1 } });
    expect(await hand.batches.get(fresh.id)).toMatchObject({ members: 1, status: 'completed' });
    expect((await hand.jobs.get(open.jobIds[0]!)).state).toBe('completed');
    expect(await db.query(`SELECT FROM ${S}.jobs WHERE batch_id = $1`, [over.id])).toEqual([]);
    await hand.batches.cancel(open.id);
  });
});

describe('R31 the size of a batch', () => {
  it('R29 a layered graph of 10 000 members with one that fails', async () => {
    const layers = 20;
    const width = 500;
    const members: BatchMember[] = [];
    for (let layer = 0; layer < layers; layer++) {
      for (let i = 0; i < width; i++) {
        const above = layer === 0 ? [] : [`${layer - 1}.${i}`, `${layer - 1}.${(i + 1) % width}`];
        members.push(part(`${layer}.${i}`, above));
      }
    }
    const { id, jobIds } = await hand.batches.create('layers', members);
    await hand.jobs.get(jobIds[0]!);
    const failing = jobIds[3 * width + 7]!;
    for (let ended = 0; ended < 10_000 && (await statusOf(id)) === 'running';) {
      const claimed = await hand.claims.claim({ kinds: ['part'], limit: 500 });
      await Promise.all(
        claimed.map(({ job }) =>
          job.id === failing ? hand.settle.fail(job, new Error('bad'), 0) : hand.settle.complete(job),
        ),
      );
      if (claimed.some(({ job }) => job.id === failing))
        await db.query(`UPDATE ${S}.waiting SET run_at = clock_timestamp() WHERE job_id = $1`, [failing]);
      ended += claimed.length;
      if (claimed.length === 0) await new Promise((resolve) => setTimeout(resolve, 20));
    }
    const { counts, status } = await hand.batches.get(id);
    // Of each layer below, one more.
    const failed = Array.from({ length: layers - 3 }, (_, n) => Math.min(width, n + 1)).reduce((sum, n) => sum + n, 0);
    expect([status, counts.failed, counts.completed]).toEqual(['failed', failed, 10_000 - failed]);
    const reasons = await db.query(
      `SELECT DISTINCT reason FROM ${S}.finished WHERE state = 'failed' AND token IS NULL`,
    );
    expect(reasons).toEqual([{ reason: expect.stringMatching(/^needs "3\.7", which failed: bad/) }]);
  });
});

describe('a lost reply', () => {
  it('R30 of a claim: a member that is given back when it is to be cancelled has ended, and its batch with it', async () => {
    const proxy = await TcpProxy.start(db.url);
    const worker = await startHandWorker(db, ['part'], { url: proxy.url(db.url) });
    // A beat may come before the request: then again.
    for (let requested = 0; requested === 0;) {
      const { id, jobIds } = await hand.batches.create('given back', [part('a')]);
      proxy.dropRepliesAfter(/leasehold_step/);
      await expect(worker.claims.claim({ kinds: ['part'], limit: 1 })).rejects.toThrow(/reply to the claim was lost/);
      requested = (
        await db.query(`UPDATE ${S}.leases SET cancel_requested = true WHERE job_id = $1 RETURNING 1`, [jobIds[0]])
      ).length;
      if (requested === 0) await hand.batches.cancel(id);
      else
        await eventually(async () => (await statusOf(id)) === 'cancelled', { state: () => hand.jobs.get(jobIds[0]!) });
    }
    await worker.close();
    await proxy.close();
  });

  it('R28 of the commit that made a batch: it is found, not made twice', async () => {
    const proxy = await TcpProxy.start(db.url);
    const worker = await startHandWorker(db, [], { url: proxy.url(db.url) });
    const drop = proxy.dropRepliesAfter(/COMMIT/);
    const { id, jobIds } = await worker.batches.create('lost', [part('b', ['a']), part('a')]);
    expect(drop.count).toBe(1);
    expect(await db.query(`SELECT id::text FROM ${S}.batches`)).toEqual([{ id }]);
    expect((await Promise.all(jobIds.map((jobId) => hand.jobs.get(jobId)))).map(({ member }) => member)).toEqual([
      'b',
      'a',
    ]);
    await worker.close();
    await proxy.close();
  });
});
