import { type Handler, type Job, JobHandler } from '@leasehold/nestjs';
import { createTestDatabase, eventually, startLeaseApp } from './support';

@JobHandler('contended', { concurrency: 20, backoff: { base: '10ms', max: '50ms' } })
class Contended implements Handler<{ i: number }, number> {
  static readonly bodies = new Map<string, number>();
  async handle(job: Job<{ i: number }>): Promise<number> {
    Contended.bodies.set(job.id, (Contended.bodies.get(job.id) ?? 0) + 1);
    if (job.payload.i % 10 === 0 && job.attempt === 1) throw new Error('once');
    return job.payload.i;
  }
}

describe('a database with other defaults', () => {
  it.each(['serializable', 'repeatable read'])(
    'F:F3 %s: three workers, no job lost or run too often, and no write given up',
    async (isolation) => {
      const db = await createTestDatabase({ settings: { default_transaction_isolation: isolation } });
      const apps = await Promise.all([1, 2, 3].map(() => startLeaseApp(db, { handlers: [Contended] })));
      Contended.bodies.clear();
      const ids = await apps[0]!.jobs.enqueueMany(
        Contended,
        Array.from({ length: 600 }, (_, i) => ({ i })),
      );
      await eventually(async () => (await apps[0]!.jobs.counts()).completed === 600, {
        timeoutMs: 30_000,
        state: () => apps[0]!.jobs.counts(),
      });
      expect([...Contended.bodies.values()].reduce((a, b) => a + b)).toBe(660);
      expect(Contended.bodies.size).toBe(ids.length);
      expect(apps.flatMap(({ events }) => events).filter(({ type }) => type === 'job.refused')).toEqual([]);
      for (const app of apps) await app.close();
      await db.drop();
    },
  );
});
