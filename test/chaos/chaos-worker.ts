import 'reflect-metadata';
import { setTimeout as sleep } from 'node:timers/promises';
import {
  BatchesService,
  type Handler,
  type Job,
  JobHandler,
  type Lease,
  LeaderService,
  LeaseEvents,
  LeaseLostError,
  LeaseModule,
  NonRetryableError,
} from '@leasehold/nestjs';
import { Database } from '@leasehold/nestjs/dist/storage/database';
import { Module } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import { ScheduleModule } from '@nestjs/schedule';
import { Client, type ClientBase } from 'pg';
import type { ToWorker } from './fleet';
import { Ledger } from './ledger';
import { QUERY_TIMEOUT, SETTINGS } from './settings';
import { endThreads } from './threads';

/** What a job of the campaign does. */
export interface Work {
  ms: number;
  /** Fails so often before it succeeds. */
  failures?: number;
  /** Never succeeds. */
  fatal?: boolean;
  /** Writes its effect in the transaction that completes it. */
  effect?: boolean;
  /** Saves a checkpoint half-way. */
  checkpoint?: boolean;
  /** Ends its process, each time. */
  poison?: boolean;
}

const { CHAOS_URL: url = '', CHAOS_LEDGER: ledgerUrl = '', CHAOS_NAME: name = '', CHAOS_LACKS_KIND } = process.env;
const ledger = new Ledger(ledgerUrl, 'chaos worker ledger');
const POOL = 5;

@JobHandler('chaos.work', {
  concurrency: 20,
  backoff: { base: '50ms', max: '500ms' },
  maxAttempts: 8,
  deadline: '20s',
  maxCrashes: 4,
})
class ChaosWork implements Handler<Work, string> {
  async handle(job: Job<Work>, lease: Lease): Promise<string> {
    await ledger.write(`INSERT INTO ledger.starts (job, token, worker) VALUES ($1, $2, $3)`, [
      job.id,
      lease.token,
      name,
    ]);
    try {
      return await this.work(job, lease);
    } finally {
      await ledger.write(`INSERT INTO ledger.ends (job, token, worker) VALUES ($1, $2, $3)`, [
        job.id,
        lease.token,
        name,
      ]);
    }
  }

  private async work({ id, payload, attempt }: Job<Work>, lease: Lease): Promise<string> {
    if (payload.poison) process.kill(process.pid, 'SIGKILL');
    if (payload.fatal) throw new NonRetryableError('fatal, as told');
    if (attempt <= (payload.failures ?? 0)) throw new Error(`failure ${attempt}, as told`);
    await sleep(payload.ms / 2, undefined, { signal: lease.signal });
    if (payload.checkpoint) await lease.checkpoint({ token: lease.token });
    await sleep(payload.ms / 2, undefined, { signal: lease.signal });
    if (payload.effect) await this.effect(id, lease);
    return lease.token;
  }

  /** With a client of its own, as an application would. */
  private async effect(id: string, lease: Lease): Promise<void> {
    const client = new Client({
      connectionString: url,
      application_name: 'chaos effect',
      connectionTimeoutMillis: 5000,
      query_timeout: 5000,
    });
    client.on('error', () => undefined);
    await client.connect();
    try {
      await lease.transaction(
        async (tx: ClientBase) => {
          await tx.query(`INSERT INTO ledger.effects (job, token) VALUES ($1, $2)`, [id, lease.token]);
          await lease.completeIn(tx, lease.token);
        },
        { client },
      );
    } catch (error) {
      if (error instanceof LeaseLostError) await refused(id, lease.token);
      throw error;
    } finally {
      await Promise.race([client.end().catch(() => undefined), sleep(1000)]);
    }
  }
}

/** The one hook of each batch. */
@JobHandler('chaos.closing', { backoff: '50ms', maxCrashes: 1000, maxAttempts: 1000 })
class ChaosClosing implements Handler<{ batch: { id: string } }, number> {
  constructor(private readonly batches: BatchesService) {}

  async handle({ payload }: Job<{ batch: { id: string } }>): Promise<number> {
    let count = 0;
    for await (const _ of this.batches.results(payload.batch.id)) count++;
    return count;
  }
}

@Module({
  imports: [
    ScheduleModule.forRoot(),
    LeaseModule.forRoot({
      ...SETTINGS,
      role: 'worker',
      connection: { url, poolMax: POOL, queryTimeout: QUERY_TIMEOUT },
      concurrency: 30,
      workerName: name,
    }),
  ],
  providers: CHAOS_LACKS_KIND ? [ChaosClosing] : [ChaosWork, ChaosClosing],
})
class WorkerModule {}

const refused = (job: string, token: string): Promise<void> =>
  ledger.write(`INSERT INTO ledger.refused (job, token) VALUES ($1, $2)`, [job, token]);

/** All connections of the pool taken, as by a handler that forgot to give them back. */
async function hog(database: Database, ms: number): Promise<void> {
  await Promise.all(
    Array.from({ length: POOL }, () =>
      database.query(`SELECT pg_sleep($1::float8 / 1000)`, [ms]).catch(() => undefined),
    ),
  );
}

async function main(): Promise<void> {
  const app = await NestFactory.createApplicationContext(WorkerModule, { logger: ['fatal'], abortOnError: false });
  const writes = new Set<Promise<unknown>>();
  const keep = (write: Promise<unknown>): void => {
    const done: Promise<unknown> = write.catch(() => undefined).finally(() => writes.delete(done));
    writes.add(done);
  };
  const events = app.get(LeaseEvents);
  events.on('job.refused', ({ jobId, token }) => keep(refused(jobId, token)));
  events.on('job.completed', ({ jobId, token }) =>
    keep(ledger.write(`INSERT INTO ledger.completed (job, token) VALUES ($1, $2)`, [jobId, token])),
  );
  // Not Nest's hooks, which end the process at once: what it knows must be in the ledger before it is called ended in order.
  process.once('SIGTERM', () => {
    void app
      .close()
      .then(() => Promise.all(writes))
      .then(() => ledger.write(`INSERT INTO ledger.drained (worker) VALUES ($1)`, [name]))
      .finally(() => process.exit(0));
  });
  process.send?.({ ready: true });
  process.on('message', (message: ToWorker) => {
    if ('ask' in message) process.send?.({ leader: app.get(LeaderService).isLeader });
    if ('endBeat' in message) endThreads();
    if ('hog' in message) void hog(app.get(Database), message.hog);
    if ('block' in message) {
      // The event loop of a handler that computes: the beats have a thread of their own.
      const until = performance.now() + message.block;
      while (performance.now() < until);
    }
  });
}

process.on('disconnect', () => process.exit());
main().catch((error: unknown) => {
  process.stderr.write(`${String(error)}\n`);
  process.exit(1);
});
