import { setTimeout as sleep } from 'node:timers/promises';
import type { BatchMember, LeaseOptions } from '@leasehold/nestjs';
import {
  type LeaseApp,
  type TestDatabase,
  type WorkerProcess,
  createTestDatabase,
  eventually,
  killProcesses,
  startLeaseApp,
  startWorkerProcess,
} from './support';

const S = '"leasehold"';
const BATCHES = 200;
const MEMBERS = 50;
const WORKERS = 3;
const KILLS = 10;
/** On a busy machine the boot of a worker alone takes seconds. */
const TIMEOUT_MS = 240_000;

let db: TestDatabase;
let api: LeaseApp;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'batch-kill' });
  api = await startLeaseApp(db, { options: { role: 'producer' } });
});
afterAll(async () => {
  await killProcesses();
  await db.drop();
});

const OPTIONS: Partial<LeaseOptions> = { role: 'worker' };

/** Every fourth batch has edges: a chain of ten behind a fan-out, the rest side by side. */
const membersOf = (batch: number): BatchMember[] =>
  Array.from({ length: MEMBERS }, (_, i) => ({
    handler: 'scripted',
    payload: { sleepMs: (batch + i) % 2 },
    name: `m${i}`,
    // Killed again and again without being at fault.
    maxCrashes: 1000,
    ...(batch % 4 === 0 && i >= MEMBERS - 10 ? { dependsOn: [`m${i - 1}`, `m${i - 40}`] } : {}),
  }));

describe('F:K1 F:K2 R31 batches and killed workers', () => {
  it(
    'F:K1 F:K2 R31 200 batches of 50 members of 0 to 1 ms on 3 processes with kill -9: each ends once, with one hook, counts equal rows',
    async () => {
      const ids: string[] = [];
      for (let i = 0; i < BATCHES; i++) {
        ids.push(
          (await api.batches.create(`b${i}`, membersOf(i), { onFinished: { handler: 'scripted', payload: {} } })).id,
        );
      }
      const workers: WorkerProcess[] = await Promise.all(
        Array.from({ length: WORKERS }, () => startWorkerProcess(db.url, OPTIONS)),
      );
      for (let kills = 0; kills < KILLS; kills++) {
        await sleep(50 + Math.random() * 400);
        const victim = Math.floor(Math.random() * WORKERS);
        workers[victim]!.process.kill('SIGKILL');
        workers[victim] = await startWorkerProcess(db.url, OPTIONS);
      }
      const hooks = `SELECT payload->'batch'->>'id' AS batch, count(*)::int AS n FROM ${S}.jobs WHERE batch_id IS NULL GROUP BY 1`;
      await eventually(
        async () => {
          const { n } = await db.one<{ n: number }>(
            `SELECT count(*)::int AS n FROM ${S}.batches WHERE status = 'running'`,
          );
          return n === 0;
        },
        {
          timeoutMs: 120_000,
          everyMs: 200,
          state: async () => ({
            batches: await db.query(`SELECT * FROM ${S}.batches WHERE status = 'running' LIMIT 5`),
            waiting: await db.query(`SELECT * FROM ${S}.waiting LIMIT 5`),
            leases: await db.query(`SELECT * FROM ${S}.leases LIMIT 5`),
            ready: await db.query(`SELECT * FROM ${S}.ready LIMIT 5`),
          }),
        },
      );
      const ended = await db.query<{ id: string; status: string; generation: number; completed: number; rows: number }>(
        `SELECT b.id::text, b.status, b.generation, b.completed,
         (SELECT count(*)::int FROM ${S}.finished f WHERE f.batch_id = b.id AND f.state = 'completed') AS rows FROM ${S}.batches b ORDER BY b.id`,
      );
      expect(ended).toEqual(
        ids.map((id) => ({ id, status: 'completed', generation: 1, completed: MEMBERS, rows: MEMBERS })),
      );
      expect(await db.query(`${hooks} ORDER BY 1`)).toEqual([...ids].sort().map((batch) => ({ batch, n: 1 })));
    },
    TIMEOUT_MS,
  );
});
