import 'reflect-metadata';
import { setTimeout as sleep } from 'node:timers/promises';
import {
  BatchesService,
  type Handler,
  type Job,
  JobHandler,
  type Lease,
  LeaseEvents,
  LeaseLostError,
  LeaseModule,
  NonRetryableError,
} from '@leasehold/nestjs';
import { Module } from '@nestjs/common';
import { NestFactory } from '@nestjs/core';
import { ScheduleModule } from '@nestjs/schedule';
import { Client, type ClientBase } from 'pg';
import { Ledger } from './ledger';
import { SETTINGS } from './settings';

/** What a job of the campaign does. */
export interface Work {
  ms: number;
  /** Fails so often before it succeeds. */
  failures?: number;
  /** Never succeeds. */
  fatal?: boolean;
  /** Writes its effect in the transaction that completes it. */
  effect?: boolean;
  /** Ends its process, each time. */
  poison?: boolean;
}

const url = process.env.CHAOS_URL ?? '';
const ledger = new Ledger(url, 'chaos worker ledger');

@JobHandler('chaos.work', {
  concurrency: 20,
  backoff: { base: '50ms', max: '500ms' },
  maxAttempts: 8,
  deadline: '20s',
  maxCrashes: 4,
})
class ChaosWork implements Handler<Work, string> {
  async handle({ id, payload, attempt }: Job<Work>, lease: Lease): Promise<string> {
    await ledger.write(`INSERT INTO ledger.starts (job, token, worker) VALUES ($1, $2, $3)`, [
      id,
      lease.token,
      `${process.pid}`,
    ]);
    if (payload.poison) process.kill(process.pid, 'SIGKILL');
    if (payload.fatal) throw new NonRetryableError('fatal, as told');
    if (attempt <= (payload.failures ?? 0)) throw new Error(`failure ${attempt}, as told`);
    await sleep(payload.ms, undefined, { signal: lease.signal });
    if (payload.effect) await this.effect(id, lease);
    return lease.token;
  }

  /** With a client of its own, as an application would. */
  private async effect(id: string, lease: Lease): Promise<void> {
    const client = new Client({
      connectionString: url,
      application_name: 'chaos effect',
      connectionTimeoutMillis: 5000,
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
      if (error instanceof LeaseLostError) {
        await ledger.write(`INSERT INTO ledger.refused (job, token) VALUES ($1, $2)`, [id, lease.token]);
      }
      throw error;
    } finally {
      await client.end().catch(() => undefined);
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
    LeaseModule.forRoot({ ...SETTINGS, role: 'worker', connection: { url }, concurrency: 30 }),
  ],
  providers: [ChaosWork, ChaosClosing],
})
class WorkerModule {}

async function main(): Promise<void> {
  const app = await NestFactory.createApplicationContext(WorkerModule, { logger: ['fatal'], abortOnError: false });
  app.enableShutdownHooks();
  app.get(LeaseEvents).on('job.refused', ({ jobId, token }) => {
    void ledger.write(`INSERT INTO ledger.refused (job, token) VALUES ($1, $2)`, [jobId, token]).catch(() => undefined);
  });
  process.send?.({ ready: true });
  process.on('message', (message: { block?: number }) => {
    if (message.block === undefined) return;
    // The event loop of a handler that computes: the beats have a thread of their own.
    const until = performance.now() + message.block;
    while (performance.now() < until);
  });
}

process.on('disconnect', () => process.exit());
main().catch((error: unknown) => {
  process.stderr.write(`${String(error)}\n`);
  process.exit(1);
});
