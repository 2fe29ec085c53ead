import { type Handler, type Job, JobHandler, QueuesService } from '@leasehold/nestjs';
import { Injectable, type OnApplicationBootstrap } from '@nestjs/common';
import { type TestDatabase, createTestDatabase, startLeaseApp } from '../support';
import { untilState } from '../support/job-states';
import { expectPageShowsSpec } from '../support/page-examples';

// #region handler
interface Sync {
  tenant: string;
}

@JobHandler('tenant.sync', {
  queue: 'sync',
  concurrency: 10, // in this process
  fleetConcurrency: 30, // in all processes together
  concurrencyKey: ({ tenant }: Sync) => tenant,
  concurrencyPerKey: 2, // of each tenant, in all processes together
})
export class SyncTenant implements Handler<Sync, string> {
  handle({ payload }: Job<Sync>): string {
    return payload.tenant;
  }
}
// #endregion

// #region queues
@Injectable()
export class QueueLimits implements OnApplicationBootstrap {
  constructor(private readonly queues: QueuesService) {}

  async onApplicationBootstrap(): Promise<void> {
    await this.queues.configure('sync', { maxRunning: 40, rate: { limit: 100, per: '1m' } });
    await this.queues.configure('mail', { weight: 3 });
    await this.queues.configure('reports', { weight: 1, ageing: '15m' });
  }
}
// #endregion

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'guide-limits' });
});
afterAll(() => db.drop());

it('docs/guide/limits.md: limits by code and by configuration', async () => {
  const { app, jobs } = await startLeaseApp(db, { handlers: [SyncTenant, QueueLimits] });
  expect(await app.get(QueuesService).list()).toMatchObject([
    { name: 'mail', weight: 3 },
    { name: 'reports', weight: 1, ageingMs: 900_000 },
    { name: 'sync', maxRunning: 40, rateLimit: 100, rateMs: 60_000 },
  ]);
  const id = await jobs.enqueue(SyncTenant, { tenant: 't1' });
  expect(await untilState(jobs, id, 'completed')).toMatchObject({ concurrencyKey: 't1', result: 't1' });
});

it('docs/guide/limits.md shows the code of this file', () =>
  expectPageShowsSpec('docs/guide/limits.md', 'test/guide/limits.spec.ts'));
