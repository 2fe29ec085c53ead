import { setTimeout as sleep } from 'node:timers/promises';
import { type Handler, IllegalTransitionError, type Job, JobHandler, type Lease } from '@leasehold/nestjs';
import { type TestDatabase, createTestDatabase, startLeaseApp } from '../support';
import { untilState } from '../support/job-states';
import { expectPageShowsSpec } from '../support/page-examples';

// #region handler
@JobHandler('export.build')
export class BuildExport implements Handler<{ rows: number }, number> {
  async handle({ payload, checkpoint }: Job<{ rows: number }>, lease: Lease): Promise<number> {
    let done = (checkpoint as number | null) ?? 0;
    for (; done < payload.rows; done += 10) {
      await sleep(20, undefined, { signal: lease.signal }); // Whatever takes a signal stops at once …
      await lease.checkpoint(done + 10); // … and this is a boundary: it saves, then throws if the job is to stop.
    }
    return done;
  }
}
// #endregion

let db: TestDatabase;
beforeAll(async () => {
  db = await createTestDatabase({ name: 'guide-stopping' });
});
afterAll(() => db.drop());

it('docs/guide/stopping.md: cancel, pause, resume, many', async () => {
  const { jobs } = await startLeaseApp(db, { handlers: [BuildExport] });
  const id = await jobs.enqueue(BuildExport, { rows: 1_000_000 });
  await untilState(jobs, id, 'running');
  // #region cancel
  const { requested } = await jobs.cancel(id, { reason: 'the customer closed the page' });
  // true: it runs, and has been told. What came of it:
  const { state, reason } = await jobs.waitFor(id); // 'cancelled', or 'completed' if that came first
  // #endregion
  expect([requested, state, reason]).toEqual([true, 'cancelled', 'the customer closed the page']);

  const other = await jobs.enqueue(BuildExport, { rows: 50 });
  await untilState(jobs, other, 'running');
  // #region pause
  await jobs.pause(other);
  await jobs.resume(other); // From its last checkpoint.
  // #endregion
  expect(await jobs.waitFor(other)).toMatchObject({ state: 'completed', result: 50 });

  // #region illegal
  const error = await jobs.cancel(other).catch((e: unknown) => e);
  if (error instanceof IllegalTransitionError) console.log(error.state); // completed
  // #endregion
  expect(error).toMatchObject({ state: 'completed' });

  await jobs.enqueueMany(BuildExport, Array(20).fill({ rows: 10 }), { delay: '1h', tags: ['nightly'] });
  // #region many
  const filter = { kind: 'export.build', tag: 'nightly' };
  console.log(await jobs.countFor('cancel', filter)); // 20
  const summary = await jobs.steerMany('cancel', filter, { limit: 500, reason: 'not tonight' });
  console.log(summary); // { changed: 20, requested: 0, unchanged: 0, skipped: 0, next: null }
  // #endregion
  expect(summary).toMatchObject({ changed: 20, next: null });
});

it('docs/guide/stopping.md shows the code of this file', () =>
  expectPageShowsSpec('docs/guide/stopping.md', 'test/guide/stopping.spec.ts'));
